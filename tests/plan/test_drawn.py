"""Which shape classes a run has drawn: counted from the order, against the batches that loaders really handed out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config import BucketConfig, PackConfig, WindowConfig
from forebay.plan.cursor import LoaderState
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.mixture.mixture_plan import mixture_plan
from forebay.plan.pack.pack_plan import pack_plan
from forebay.plan.plan_usage import Drawn, class_names, drawn_classes, drawn_lines
from forebay.plan.window import window_plan
from tests.plan.test_usage import NUM_SAMPLES, SOURCE, Run, make_loaders

DURATIONS_S = SOURCE.lengths["num_audio_samples"] / 16_000
NAMES = ["b_0_0.1", "b_0.1_0.2", "b_0.2_0.4"]


def drawn_by(loader: Any, *, start: LoaderState | None = None) -> dict[str, Drawn]:
    begin = LoaderState(plan_key=loader.plan_key, seed=loader.state.seed, epoch=0, position=0)
    return drawn_classes(
        loader.plan,
        start=start or begin,
        end=loader.state,
        dp_world_size=loader.dp_world_size,
        durations_s=DURATIONS_S,
    )


@settings(max_examples=20)
@given(
    world_size=st.integers(1, 5),
    steps=st.integers(1, 14),
    resumed=st.integers(0, 10),
    tail=st.sampled_from(["split", "short", "drop", "pad"]),
)
def test_what_was_drawn_is_what_all_ranks_were_handed(world_size: int, steps: int, resumed: int, tail: str) -> None:
    """Also of a run that was resumed: what came before counts too."""
    before = Run(make_loaders(world_size=world_size, tail=tail))
    for _ in range(resumed):
        before.step()
    after = Run(make_loaders(world_size=world_size, tail=tail), before.loaders[0].state_dict())
    for _ in range(steps):
        after.step()
    used = [*before.handed_out, *after.handed_out]
    found = drawn_by(after.loaders[0])
    assert sum(each.hours or 0 for each in found.values()) == pytest.approx(DURATIONS_S[used].sum() / 3600, abs=2e-6)
    of = np.digitize(SOURCE.lengths["num_audio_samples"], [1600, 3200])
    counts = Counter(of[used].tolist())
    samples = {name: counts[number] for number, name in enumerate(NAMES) if name in found}
    assert [bool(found[name].batches) for name in found] == [bool(samples[name]) for name in found]
    assert sum(each.share for each in found.values()) == pytest.approx(1, abs=1e-5)


def test_an_epoch_draws_the_expected_shares_and_no_bucket_is_left_out() -> None:
    (loader,) = make_loaders()
    none = drawn_by(loader)
    assert list(none) == NAMES
    assert {(each.batches, each.hours, each.share) for each in none.values()} == {(0, 0.0, 0.0)}
    for _ in loader:
        pass
    whole = drawn_by(loader)
    assert [each.batches for each in whole.values()] == loader.plan.batch_counts.tolist()  # type: ignore[attr-defined]
    assert all(each.share == each.expected for each in whole.values())
    assert sum(each.hours or 0 for each in whole.values()) == pytest.approx(DURATIONS_S.sum() / 3600, abs=2e-6)


def test_classes_of_every_kind_of_plan_have_names() -> None:
    lengths = SOURCE.lengths["num_audio_samples"]
    buckets = BucketConfig(edges_s=(0.1, 0.2, 0.4), batch_size=4, lockstep=1)
    plan = bucket_plan(lengths, sample_rate_hz=16_000, settings=buckets)
    assert class_names(plan) == NAMES
    mixture = mixture_plan(plan, np.arange(NUM_SAMPLES) % 2, names=["a", "b"], weights=[1, 1])
    assert class_names(mixture) == NAMES
    windows = window_plan(lengths, sample_rate_hz=16_000, settings=WindowConfig(window=3, batch_size=4, lockstep=1))
    assert class_names(windows) == ["place_0", "place_1", "place_2"]
    packs = pack_plan(np.arange(5, 20), settings=PackConfig(seq_len=32))
    assert class_names(packs) == ["packs"]
    for each in (mixture, windows, packs):
        state = LoaderState(plan_key="", seed=3, epoch=0, position=0)
        found = drawn_classes(each, start=state, end=state.next_epoch(), dp_world_size=1, durations_s=None)
        assert sum(one.batches for one in found.values()) == each.num_batches
        assert {one.hours for one in found.values()} == {None}
        assert all(one.share == one.expected for one in found.values())


def test_lines_name_batches_hours_and_shares() -> None:
    drawn = {f"b_{n}_{n + 1}": Drawn(batches=n, hours=0.25 * n, share=0.5, expected=0.4) for n in range(30)}
    lines = list(drawn_lines(drawn))
    assert lines[3] == "bucket b_3_4: 3 batches, 0.75 h, 50.0 %, expected 40.0 %"
    assert (len(lines), lines[-1]) == (25, "and 6 more buckets (--json lists them all)")
    assert list(drawn_lines({"packs": Drawn(batches=2, hours=None, share=1.0, expected=1.0)})) == [
        "bucket packs: 2 batches, 100.0 %, expected 100.0 %"
    ]
