"""Text-only micro-batches among speech batches: two caches of the demo recordings, one without audio, into one loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from forebay import cli
from forebay.config import Config
from forebay.errors import CacheMismatchError, ConfigError
from forebay.plan.mixture.mixture_plan import MixturePlan
from forebay.plan.plan_usage import read_usage
from forebay.store.cache import open_cache
from forebay.store.source import SourceUnion, length_of, source_kind, without_audio
from forebay.train.collate.collator import Collator
from forebay.train.loader import Loader
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import dry_run, run
from forebay.train.select import make_loader, select
from tests.flat_constants import flat
from tests.preprocess.here_pool import build_here
from tests.store_factory import make_cache
from tests.text_corpus import demo_texts, mixed_config, speech_config, text_config

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
SPEECH_FIELDS = {"input_features", "input_features_mask", "input_ids", "attention_mask", "labels"}
TEXT_FIELDS = {"input_ids", "attention_mask", "labels"}
STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both caches of the demo recordings."""
    made = tmp_path_factory.mktemp("both")
    for config in (speech_config(made), text_config(made)):
        build_here(config)
    return made


def parts_handed_out(loader: Loader, epochs: int) -> np.ndarray[Any, Any]:
    """Which source each micro-batch is of; fails where one is of two."""
    assert isinstance(loader.source, SourceUnion)
    found = []
    for epoch in range(epochs):
        order = loader.plan.order(loader.state.seed, epoch)
        for batch in order.batches(range(len(order))):
            [part] = set(loader.source.source_of[batch].tolist())
            found.append(part)
    return np.array(found)


def test_every_batch_is_of_one_source_with_its_own_fields(folder: Path) -> None:
    loader = make_loader(mixed_config(folder))
    union = loader.source
    assert isinstance(union, SourceUnion)
    assert without_audio(union) is not None
    collators = [Collator(part) for part in union.sources]
    order = loader.plan.order(loader.state.seed, 0)
    kinds = set()
    for position, batch in enumerate(loader):
        indices = order.batch(position).tolist()
        part = union.part(indices[0])
        kinds.add(part)
        assert batch.keys() == (TEXT_FIELDS if part else SPEECH_FIELDS)
        wanted = collators[part]([union.read(index) for index in indices])
        assert all(torch.equal(batch[name], wanted[name]) for name in wanted)
        if part:
            assert torch.equal(batch["labels"] != -100, batch["attention_mask"].bool())
            assert torch.equal(batch["labels"][batch["labels"] != -100], batch["input_ids"][batch["labels"] != -100])
    assert kinds == {0, 1}
    with pytest.raises(ConfigError, match=r"stand in no common batch; make a Collator of each of `source.sources`"):
        Collator(union)


@pytest.mark.parametrize("ratio", [0.8, 0.37])
def test_the_ratio_holds_at_every_micro_batch(folder: Path, ratio: float) -> None:
    loader = make_loader(mixed_config(folder, text=f"asr_ratio = {ratio}\n"))
    assert isinstance(loader.plan, MixturePlan)
    assert loader.plan.shares == pytest.approx([ratio, 1 - ratio], abs=2**-16)
    parts = parts_handed_out(loader, epochs=40)
    places = np.arange(1, len(parts) + 1)
    assert np.abs(np.cumsum(parts == 0) - loader.plan.shares[0] * places).max() < 1
    weighted = mixed_config(folder, text="")
    entries = [f"mixture.source={_entries(weighted, (ratio, 1 - ratio))}"]
    assert make_loader(mixed_config(folder, *entries, text="")).plan_key == loader.plan_key


def _entries(config: Config, weights: tuple[float, ...]) -> str:
    rows = zip(config.mixture.source, weights, strict=True)
    return "[" + ", ".join(f'{{config = "{entry.config}", weight = {weight}}}' for entry, weight in rows) + "]"


def test_the_share_of_samples_is_what_batches_of_such_sizes_give(folder: Path) -> None:
    """Shares are of micro-batches, and a text batch holds more samples; over many epochs the expected share is met."""
    loader = make_loader(mixed_config(folder))
    assert isinstance(loader.plan, MixturePlan)
    assert isinstance(loader.source, SourceUnion)
    weights = loader.plan.sample_weights()
    assert weights.sum() == pytest.approx(1)
    orders = [loader.plan.order(0, epoch) for epoch in range(60)]
    used = np.concatenate([batch for order in orders for batch in order.batches(range(len(order)))])
    share = (loader.source.source_of[used] == 1).mean()
    assert share == pytest.approx(weights[loader.source.source_of == 1].sum(), abs=0.01)


def test_cached_equals_uncached(folder: Path) -> None:
    cached = select(text_config(folder))
    online = select(text_config(folder, 'loader.cache="off"'))
    assert (source_kind(cached), source_kind(online)) == ("cache", "uncached")
    assert (cached.fields, cached.constants) == (online.fields, online.constants)
    for index in range(len(cached)):
        wanted, made = cached.read(index), online.read(index)
        assert wanted.keys() == made.keys()
        assert all(np.array_equal(wanted[name], made[name]) for name in wanted)
    for name, lengths in cached.lengths.items():
        np.testing.assert_array_equal(lengths, online.lengths[name])
    loaders = make_loader(text_config(folder)), make_loader(text_config(folder, 'loader.cache="off"'))
    for one, two in zip(*loaders, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    report = loaders[0].report()
    assert report["frames"] == cached.lengths["num_tokens"].sum()


def test_a_loader_goes_on_at_another_world_size(folder: Path) -> None:
    config = mixed_config(folder)
    whole = list(make_loader(config))
    ranks = [make_loader(config, dp_rank=rank, dp_world_size=2) for rank in range(2)]
    running = [iter(loader) for loader in ranks]
    seen = [next(batches) for _ in range(2) for batches in running]
    state = ranks[0].state_dict()
    for batches in running:
        batches.close()  # type: ignore[attr-defined]
    alone = make_loader(config)
    alone.load_state_dict(state)
    seen += list(alone)
    assert len(seen) == len(whole)
    for one, two in zip(seen, whole, strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in two)


def test_the_loop_trains_on_both_and_resumes_exactly(folder: Path, tmp_path: Path) -> None:
    def losses(root: Path, steps: int, *, resume: bool = False) -> list[float]:
        lines: list[StepLog] = []
        settings = [
            f"train.max_steps={steps}",
            "train.log_every=1",
            f'train.output_dir="{root}"',
            "train.usage_every=5",
        ]
        # The learning rate of a shorter run falls faster; at a warm-up that long it rises alike.
        run(mixed_config(folder, *settings, "train.warmup_steps=20"), resume=resume, log=lines.append)
        AcceleratorState._reset_state(reset_partial_state=True)
        return [line.loss for line in lines]

    whole = losses(tmp_path / "whole", STEPS)
    assert len(whole) == STEPS
    assert np.mean(whole[-5:]) < np.mean(whole[:5])
    parts = losses(tmp_path / "parts", 7) + losses(tmp_path / "parts", STEPS, resume=True)
    assert parts == pytest.approx(whole, rel=1e-5)
    name = mixed_config(folder).name
    head, lines = read_usage(tmp_path / "parts" / name / "logs" / "data_usage.jsonl")
    _, once = read_usage(tmp_path / "whole" / name / "logs" / "data_usage.jsonl")
    loader = make_loader(mixed_config(folder))
    counts = np.bincount(parts_handed_out(loader, epochs=2)[:STEPS], minlength=2)
    assert abs(counts[0] - 0.8 * STEPS) < 1
    assert isinstance(loader.source, SourceUnion)
    drawn = np.concatenate(
        [b for e in range(2) for b in loader.plan.order(loader.state.seed, e).batches(range(len(loader)))][:STEPS]
    )
    samples = np.bincount(loader.source.source_of[drawn], minlength=2)
    assert [part["total"] for part in lines[-1]["parts"].values()] == samples.tolist()
    assert lines[-1]["parts"] == once[-1]["parts"]
    assert sum(part["expected"] for part in head["parts"].values()) == pytest.approx(1)


def test_a_dry_run_and_inspect_of_a_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = mixed_config(folder)
    report = dry_run(config, steps=30)
    assert report.steps == 30
    assert [row["samples"] > 0 for row in report.parts.values()] == [True, True]
    assert report.num_shards == report.shards_touched == 3 + 4
    alone = dry_run(text_config(folder), steps=5)
    assert (alone.steps, alone.source) == (5, "cache")
    assert cli.main(["inspect", str(folder / "texts.toml"), "--sample", "0", "--json"]) == 0
    sample = json.loads(capsys.readouterr().out)["sample"]
    assert sample["row"]["text"] == sample["labels"]["text"]
    assert cli.main(["inspect", str(folder / "texts.toml"), "--bucket-manifests", str(folder / "b")]) == 2
    assert "--bucket-manifests: buckets are ranges of seconds" in capsys.readouterr().err


def test_mixtures_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    mixed = mixed_config(folder, 'mixture.batches="mixed"', text="")
    with pytest.raises(CacheMismatchError, match=r"one has no audio, so no batch can hold both; set mixture.batches"):
        make_loader(mixed)
    with pytest.raises(
        ConfigError, match=r"texts.toml has no audio, so hours give it no weight; .* or mixture.asr_ratio"
    ):
        make_loader(mixed_config(folder, text=""))
    for caches, found in ((("waveform", "log_mel"), "0 of 2 have none"), (("none", "none"), "2 of 2 have none: ")):
        folders = [make_cache(tmp_path, features=kind, seed=seed) for seed, kind in enumerate(caches)]  # type: ignore[arg-type]
        entries = ", ".join(f'{{cache = "{cache}"}}' for cache in folders)
        with pytest.raises(ConfigError, match=rf"asr_ratio is the share of micro-batches .* {found}"):
            make_loader(mixed_config(folder, f"mixture.source=[{entries}]", "plan.batch_seconds=60"))


def test_batches_of_any_fields_mix_but_not_two_tokenizers_or_rates(tmp_path: Path) -> None:
    def union(*changes: dict[str, Any]) -> SourceUnion:
        folders = [make_cache(tmp_path, seed=seed, **change) for seed, change in enumerate(changes)]
        return SourceUnion([open_cache(one) for one in folders], ["one", "two", "three"], shares_batches=False)

    made = union({"features": "none"}, {"features": "waveform"}, {"features": "log_mel"})
    assert made.constants == {"sample_rate_hz": 16_000, "prompt": "plain"}
    assert set(made.fields) == {"sample_id", "input_ids", "prefix_len", "text", "language", "prompt", "source"}
    assert [made.part(index) for index in (0, 6, 17)] == [0, 1, 2]
    other_rate = {"constants": flat(features="waveform", sample_rate_hz=8000, prompt="plain").to_json()}
    with pytest.raises(CacheMismatchError, match=r"cannot mix two and three: text.tokenizer is 0{16} in the former"):
        union({"tokenizer": None}, {"features": "none"}, {"features": "none", "tokenizer": "1" * 64})
    with pytest.raises(
        CacheMismatchError, match=r"cannot mix two and three: sample_rate_hz is 16000 in the former and 8000"
    ):
        union({"features": "none"}, {"features": "waveform"}, {"features": "waveform", "metadata": other_rate})


def test_several_caches_with_audio_share_the_ratio_by_hours(tmp_path: Path, folder: Path) -> None:
    kinds = [("log_mel", 12), ("none", 8), ("log_mel", 5)]
    folders = [make_cache(tmp_path, features=kind, num_samples=count, seed=count) for kind, count in kinds]  # type: ignore[arg-type]
    entries = ", ".join(f'{{cache = "{cache}"}}' for cache in folders)
    overrides = (f"mixture.source=[{entries}]", "plan.edges_s=[3.0]", "plan.edges=[16]")
    for temperature in (1.0, 0.5):
        plan = make_loader(mixed_config(folder, *overrides, f"mixture.temperature={temperature}")).plan
        assert isinstance(plan, MixturePlan)
        audio = [length_of(open_cache(cache), "num_audio_samples").sum() for cache in folders]
        hours = np.array(audio, float) ** temperature
        hours[1] = 0
        wanted = 0.8 * hours / hours.sum() + [0, 0.2, 0]
        assert plan.shares == pytest.approx(wanted, abs=2e-5)


def test_plain_text_gives_the_batches_of_json_lines(tmp_path: Path) -> None:
    texts = [row["text"] for row in demo_texts()]
    assert not any("\n" in text for text in texts)
    (tmp_path / "texts.txt").write_text("".join(f"{text}\r\n\r\n" for text in texts), encoding="utf-8")
    lines, plain, uncached = (
        make_loader(text_config(tmp_path, *overrides, rows=[{"text": text} for text in texts]))
        for overrides in (
            _built(tmp_path, "source.max_samples=40"),
            _built(tmp_path, "source.max_samples=40", f"source.manifest={tmp_path / 'texts.txt'}"),
            ("source.max_samples=40", f"source.manifest={tmp_path / 'texts.txt'}", "loader.cache=off"),
        )
    )
    assert plain.source.sample_id(2) == "texts/5"
    assert len(plain.source) == len(lines.source) == 40
    for one, *others in zip(lines, plain, uncached, strict=True):
        for other in others:
            assert set(one) == set(other) == TEXT_FIELDS
            assert all(torch.equal(one[name], other[name]) for name in one)


def _built(folder: Path, *overrides: str) -> tuple[str, ...]:
    """Returns the overrides, whose cache there is then."""
    build_here(text_config(folder, *overrides, rows=[{"text": row["text"]} for row in demo_texts()]))
    return overrides
