"""A mixture of packs: each pack of one source, shares exact at every prefix, in the unit that is asked for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import load_config
from forebay.config import PackConfig
from forebay.errors import ConfigError
from forebay.plan.mixture.mix_sources import PackMixture, pack_mixture
from forebay.plan.pack.pack_plan import PackPlan, pack_plan
from forebay.store.source import SourceUnion
from forebay.train import make_loader
from tests.train.tiny_vl import conversations
from tests.train.vl_cache import make_vl_cache

SETTINGS = PackConfig(seq_len=100)
WEIGHTED = '[[mixture.source]]\ncache = "{}"\nweight = {}\n'


def plan_of(seed: int, count: int) -> PackPlan:
    return pack_plan(np.random.default_rng(seed).integers(10, 120, count), settings=SETTINGS)


@given(st.lists(st.integers(3, 30), min_size=1, max_size=4), st.data())
def test_shares_are_exact_at_every_prefix_and_passes_are_whole(counts: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.05, 1), min_size=len(counts), max_size=len(counts)))
    plans = [plan_of(seed, count) for seed, count in enumerate(counts)]
    names = [f"s{number}" for number in range(len(plans))]
    mixture = pack_mixture(plans, names=names, weights=weights, exhausted="repeat")
    firsts = np.cumsum([0, *counts])
    batches = [batch for epoch in range(3) for batch in mixture.order(7, epoch).batches(range(mixture.num_batches))]
    own = [
        {tuple(sorted((p + first).tolist())) for p in packs(plan)} for plan, first in zip(plans, firsts, strict=False)
    ]
    drawn = np.zeros(len(plans))
    seen: list[Counter[Any]] = [Counter() for _ in plans]
    for number, batch in enumerate(batches, 1):
        (source,) = {int(np.searchsorted(firsts, sample, side="right")) - 1 for sample in batch.tolist()}
        drawn[source] += 1
        pack = tuple(sorted(batch.tolist()))
        assert pack in own[source]
        seen[source][pack] += 1
        assert np.abs(drawn - number * mixture.shares).max() < 1 + 1e-9
        assert max(seen[source].values()) - min(seen[source][each] for each in own[source]) <= 1
    assert mixture.sample_weights().sum() > 0
    assert len(mixture.sample_weights()) == sum(counts)


def packs(plan: PackPlan) -> list[Any]:
    return np.split(plan.members, plan.offsets[1:-1])


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("vl")
    return [make_vl_cache(root / name, conversations(seed, 40)) for seed, name in enumerate("ab")]


def config_of(tmp_path: Path, text: str, *overrides: str) -> Any:
    path = tmp_path / "mix.toml"
    path.write_text(
        f'name = "mix"\n[source]\nkind = "jsonl"\nmanifest = "none.jsonl"\n[vision]\nprocessor = "{tmp_path}"\n'
        f'[text]\ntokenizer = "{tmp_path}"\nprompt = "chat"\n[plan]\nkind = "pack"\nseq_len = 200\n{text}'
    )
    return load_config(str(path), overrides=overrides)


@pytest.mark.parametrize("unit", ["packs", "samples", "tokens", "patches"])
def test_shares_are_of_the_unit_that_is_asked_for(caches: list[Path], tmp_path: Path, unit: str) -> None:
    text = "".join(map(WEIGHTED.format, caches, (0.25, 0.75)))
    config = config_of(tmp_path, text, "mixture.batches=per_source", f"mixture.shares_of={unit}")
    loader = make_loader(config, dp_rank=0, dp_world_size=1)
    assert isinstance(loader.source, SourceUnion)
    assert isinstance(loader.plan, PackMixture)
    held = np.zeros(2)
    for epoch in range(60):
        for batch in loader.plan.order(0, epoch).batches(range(loader.plan.num_batches)):
            lengths = loader.source.lengths[f"num_{unit}"][batch] if unit in ("tokens", "patches") else batch
            amount = {"packs": 1, "samples": len(batch)}.get(unit, int(lengths.sum()))
            held[loader.source.part(int(batch[0]))] += amount
    assert held[1] / held.sum() == pytest.approx(0.75, abs=0.01)


def loaded(config: Any, rank: int = 0, world: int = 1) -> Any:
    return make_loader(config, dp_rank=rank, dp_world_size=world, with_ids=True)


def test_weights_change_over_the_run_and_ranks_take_packs_in_turn(caches: list[Path], tmp_path: Path) -> None:
    steps = ("[[0, 1.0], [2, 0.0]]", "[[0, 0.0], [2, 1.0]]")
    config = config_of(tmp_path, "".join(map(WEIGHTED.format, caches, steps)), "mixture.batches=per_source")
    whole = loaded(config)
    batches = whole.plan.order(0, 0).batches(range(4))
    assert [whole.source.part(int(batch[0])) for batch in batches] == [0, 0, 1, 1]
    ids = [ids for _, ids in whole]
    assert [whole.source.sample_id(int(index)) for index in batches[0]] == ids[0]
    ranks = [[ids for _, ids in loaded(config, rank, 2)] for rank in range(2)]
    assert [found for step in zip(*ranks, strict=True) for found in step][:2] == ids[:2]
    one, again = loaded(config), loaded(config)
    walk = iter(one)
    first = [next(walk)[1] for _ in range(3)]
    again.load_state_dict(one.state_dict())
    assert first + [ids for _, ids in again] == ids


def test_mixed_packs_hold_each_sample_once_and_take_no_weights(caches: list[Path], tmp_path: Path) -> None:
    plain = "".join(f'[[mixture.source]]\ncache = "{cache}"\n' for cache in caches)
    loader = make_loader(config_of(tmp_path, plain), dp_rank=0, dp_world_size=1)
    assert isinstance(loader.plan, PackPlan)
    members = [loader.plan.members, *loader.plan.unplaced.values()]
    assert sorted(np.concatenate(members).tolist()) == list(range(80))
    assert isinstance(loader.source, SourceUnion)
    source_of = loader.source.source_of
    assert any(len(set(source_of[batch].tolist())) == 2 for batch in packs(loader.plan))
    weighted = "".join(map(WEIGHTED.format, caches, (1, 2)))
    for text, override, message in (
        (weighted, "mixture.batches=mixed", r'for weights set mixture\.batches = "per_source"'),
        (plain, "mixture.temperature=0.5", r'for weights set mixture\.batches = "per_source"'),
        ("", "mixture.column=source", r"mixture\.column and mixture\.asr_ratio are of plans with buckets"),
        (plain, 'plan={kind="bucket", batch_size=2}', r"holds patches for packs, and this plan is of batches"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_loader(config_of(tmp_path, text, override), dp_rank=0, dp_world_size=1)


def test_the_key_of_a_mixture_holds_every_plan_and_weight(caches: list[Path], tmp_path: Path) -> None:
    def key(weights: tuple[float, float], *overrides: str) -> str:
        text = "".join(map(WEIGHTED.format, caches, weights))
        return str(loaded(config_of(tmp_path, text, "mixture.batches=per_source", *overrides)).cursor.key)

    same = key((1, 2))
    assert key((2, 4)) == same
    others = [key((1, 3)), key((1, 2), "plan.seq_len=180"), key((1, 2), "mixture.shares_of=packs")]
    assert len({same, *others}) == 4
