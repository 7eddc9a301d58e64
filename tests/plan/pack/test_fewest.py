"""The default packer needs no more packs than any other: buffers, best-fit-decreasing, and its kin of two budgets."""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import MixtureConfig, PackConfig
from forebay.plan.make import plan_of
from forebay.plan.pack.fewest import fewest
from forebay.plan.pack.pack_plan import PackPlan, pack_plan
from tests.flat_constants import flat
from tests.plan.packs import photos_and_text

Array = np.ndarray[Any, Any]


def similar(rng: np.random.Generator, count: int, seq_len: int) -> Array:
    low = int(rng.integers(seq_len // 12, seq_len // 2))
    return rng.integers(low, low + max(2, low // int(rng.integers(2, 30))), count)


def questions(rng: np.random.Generator, count: int, seq_len: int) -> Array:
    lengths = rng.integers(seq_len // 40, seq_len // 20, count)
    is_long = rng.random(count) < 0.02
    return np.where(is_long, rng.integers(seq_len // 20, seq_len + 1, count), lengths)


def heavy_tails(rng: np.random.Generator, count: int, seq_len: int) -> Array:
    return np.clip(np.exp(rng.normal(np.log(seq_len / 12), 1.0, count)), 1, seq_len).astype(np.int64)


LENGTHS = (similar, questions, heavy_tails)


def packs(tokens: Array, seq_len: int, patches: Array | None = None, **changes: Any) -> PackPlan:
    return pack_plan(tokens, patches=patches, settings=PackConfig(seq_len=seq_len, **changes))


def require_packs(plan: PackPlan, tokens: Array, seq_len: int) -> None:
    assert np.array_equal(np.sort(plan.members), np.arange(len(tokens)))
    assert np.add.reduceat(tokens[plan.members], plan.offsets[:-1]).max() <= seq_len


def best_fit_decreasing(sizes: Array, measure: Callable[[Array], Array]) -> int:
    """Packs of rooms of 2000, the plain way. sizes: integers [num_samples, budgets]."""
    rooms = np.ones((0, sizes.shape[1]), np.int64)
    for sample in np.argsort(-measure(sizes), kind="stable"):
        fits = np.flatnonzero((rooms >= sizes[sample]).all(axis=1))
        if len(fits):
            rooms[fits[np.argmin(measure(rooms[fits]))]] -= sizes[sample]
        else:
            rooms = np.vstack([rooms, 2000 - sizes[sample]])
    return len(rooms)


@given(st.sampled_from(LENGTHS), st.integers(1, 2500), st.sampled_from([256, 1000, 2048]), st.integers(0, 2**32))
def test_no_buffer_and_no_best_fit_decreasing_needs_fewer_packs(
    made: Callable[..., Array], count: int, seq_len: int, seed: int
) -> None:
    tokens = made(np.random.default_rng(seed), count, seq_len)
    plan = packs(tokens, seq_len)
    require_packs(plan, tokens, seq_len)
    others = [packs(tokens, seq_len, buffer_size=size).num_batches for size in (64, 256, 1024)]
    others.append(packs(tokens, seq_len, algorithm="best_fit_decreasing").num_batches)
    assert fewest(np.bincount(tokens, minlength=seq_len + 1), seq_len=seq_len) <= plan.num_batches <= min(others)


@pytest.mark.parametrize(
    ("low", "high", "seq_len"),
    [(300, 340, 1024), (95, 105, 1000), (200, 400, 2048), (900, 1100, 8192), (400, 700, 2048)],
)
@pytest.mark.few("300-340-1024", "95-105-1000", "200-400-2048")
def test_many_similar_lengths_fill_packs_as_a_buffer_does(low: int, high: int, seq_len: int) -> None:
    tokens = np.random.default_rng(1).integers(low, high + 1, 30_000)
    plan = packs(tokens, seq_len)
    require_packs(plan, tokens, seq_len)
    assert plan.num_batches <= packs(tokens, seq_len, buffer_size=64).num_batches


@given(st.sampled_from(LENGTHS), st.integers(1, 400), st.floats(0.3, 3.0), st.integers(0, 2**32), st.integers(2, 3))
def test_several_budgets_need_no_more_packs_than_best_fit_decreasing_of_vectors(
    made: Callable[..., Array], count: int, share: float, seed: int, num_budgets: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = made(rng, count, 1000)
    patches, frames = (
        np.minimum(times * (tokens * rng.random(count) * share / 2).astype(np.int64), most)
        for times, most in ((4, 2000), (1, 500))
    )
    settings = PackConfig(seq_len=1000, max_patches=2000, max_frames=500 if num_budgets == 3 else None)
    plan = pack_plan(tokens, patches=patches, frames=frames, settings=settings)
    require_packs(plan, tokens, 1000)
    sizes = np.stack([tokens * 2, patches, frames * 4][:num_budgets], axis=1)
    assert np.add.reduceat(sizes[plan.members], plan.offsets[:-1]).max() <= 2000
    measures: list[Callable[[Array], Array]] = [itemgetter((..., number)) for number in range(num_budgets)]
    measures += [lambda v: v.sum(-1), lambda v: v.max(-1)]
    assert plan.num_batches <= min(best_fit_decreasing(sizes, measure) for measure in measures)


TOKENS, PATCHES = photos_and_text(300, text_share=0.2)


class Source(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.slots)


SOURCE: Any = Source(
    constants=flat(features="patches"),
    key="cd" * 32,
    recipe_key="ef" * 32,
    filter_key=None,
    ids_digest=lambda: "01" * 32,
    lengths={"num_tokens": TOKENS, "num_patches": PATCHES, "num_images": (PATCHES > 0).astype(np.int32)},
    slots=(np.arange(300) // 50 << 32) + np.arange(300) % 50,
)


def config(root: Path, **plan: Any) -> Any:
    return SimpleNamespace(
        constants={},
        name="vqa",
        path="vqa.toml",
        cache_root=root,
        source=SimpleNamespace(constants={}, split="train"),
        plan=PackConfig(seq_len=2048, **plan),
        mixture=MixtureConfig(),
    )


@pytest.mark.parametrize("changes", [{}, {"max_patches": 6000, "buffer_size": 64}])
def test_a_plan_is_made_kept_and_told(tmp_path: Path, changes: dict[str, Any]) -> None:
    planned = plan_of(config(tmp_path, **changes), SOURCE)
    assert isinstance(planned.plan, PackPlan)
    assert planned.folder is not None
    statistics = json.loads((planned.folder / "packing_stats.json").read_bytes())
    assert statistics["images"]["max"] >= 1
    reasons = [f", {n} left out as {reason}" for reason, n in statistics["unplaced"].items() if n]
    assert len(reasons) == 1 + len(changes) // 2
    assert planned.summary() == (
        f"plan: {300 - statistics['dropped']} samples in {planned.plan.num_batches} packs{''.join(reasons)}, "
        f"{100 * statistics['fill']:.2f} % fill"
    )
    again = plan_of(config(tmp_path, **changes), SOURCE)
    assert isinstance(again.plan, PackPlan)
    assert again.plan.members.tolist() == planned.plan.members.tolist()
    assert again.key == planned.key


def test_a_plan_that_is_not_kept_is_the_same(tmp_path: Path) -> None:
    kept = plan_of(config(tmp_path / "a"), SOURCE)
    loose = plan_of(config(tmp_path / "b"), SOURCE, keep=False)
    assert isinstance(loose.plan, PackPlan)
    assert loose.folder is None
    assert not (tmp_path / "b").exists()
    assert loose.key == kept.key
    assert isinstance(loose.plan, PackPlan)
    assert isinstance(kept.plan, PackPlan)
    assert loose.plan.members.tolist() == kept.plan.members.tolist()
    assert "not kept on disk" in loose.summary()
