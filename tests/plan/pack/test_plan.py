"""Pack plans: nothing lost or twice, no budget exceeded, and as full as the lengths allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import PackConfig
from forebay.errors import PlanError
from forebay.plan.cursor import next_position, num_steps, turn
from forebay.plan.pack.pack_plan import PackPlan, pack_plan
from tests.plan.packs import SEQ_LEN, lognormal, packs_of, photos_and_text, question_answers
from tests.strategies import pack_lengths

Array = np.ndarray[Any, Any]
Lengths = tuple[Array, Array, int, int]
BUFFERS = st.sampled_from([0, 1, 2, 7, 64])


def made(tokens: Array, patches: Array | None = None, **settings: Any) -> PackPlan:
    return pack_plan(tokens, patches=patches, settings=PackConfig(**{"seq_len": SEQ_LEN, **settings}))


def made_if_any_fits(lengths: Lengths, **settings: Any) -> PackPlan | None:
    tokens, patches, seq_len, max_patches = lengths
    try:
        return made(tokens, patches, seq_len=seq_len, max_patches=max_patches, **settings)
    except PlanError:
        assert not ((tokens <= seq_len) & (patches <= max_patches)).any()
        return None


def fill(plan: PackPlan, lengths: Array, room: int = SEQ_LEN) -> float:
    return float(lengths[plan.members].sum() / plan.num_batches / room)


# What holds for any lengths


@given(pack_lengths(), BUFFERS, st.integers(0, 3))
def test_every_sample_is_in_one_pack_or_named(lengths: Lengths, buffer_size: int, seed: int) -> None:
    tokens, patches, seq_len, max_patches = lengths
    plan = made_if_any_fits(lengths, buffer_size=buffer_size, pack_seed=seed)
    if plan is None:
        return
    packs = packs_of(plan)
    assert sorted([*plan.members.tolist(), *np.concatenate(list(plan.unplaced.values())).tolist()]) == list(
        range(len(tokens))
    )
    assert plan.num_samples == len(tokens)
    assert [len(pack) > 0 for pack in packs] == [True] * plan.num_batches
    assert max(tokens[pack].sum() for pack in packs) <= seq_len
    assert max(patches[pack].sum() for pack in packs) <= max_patches
    assert plan.unplaced["too_long"].tolist() == np.flatnonzero(tokens > seq_len).tolist()
    assert (
        plan.unplaced["too_many_patches"].tolist()
        == np.flatnonzero((patches > max_patches) & (tokens <= seq_len)).tolist()
    )
    assert {array.dtype for array in (plan.members, *plan.unplaced.values())} == {np.dtype(np.int32)}
    assert plan.offsets.dtype == np.int64


@given(pack_lengths(), BUFFERS)
def test_a_plan_is_a_function_of_lengths_and_settings(lengths: Lengths, buffer_size: int) -> None:
    first = made_if_any_fits(lengths, buffer_size=buffer_size)
    tokens, patches, seq_len, max_patches = lengths
    other_types = (tokens.astype(np.uint64), patches.astype(np.int16), seq_len, max_patches)
    second = made_if_any_fits(other_types, buffer_size=buffer_size)
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert first.members.tolist() == second.members.tolist()
        assert first.offsets.tolist() == second.offsets.tolist()


@given(pack_lengths(), st.randoms(use_true_random=False))
def test_samples_in_another_order_make_packs_of_the_same_lengths(lengths: Lengths, random: Any) -> None:
    tokens, _, seq_len, _ = lengths
    tokens = np.minimum(tokens, seq_len)
    other = np.array(random.sample(tokens.tolist(), len(tokens)))

    def shapes(lengths: Array) -> list[list[int]]:
        return [sorted(lengths[pack].tolist()) for pack in packs_of(made(lengths, seq_len=seq_len))]

    assert shapes(tokens) == shapes(other)


@given(pack_lengths())
def test_never_more_packs_than_best_fit_decreasing(lengths: Lengths) -> None:
    tokens, _, seq_len, _ = lengths
    tokens = np.minimum(tokens, seq_len)
    decreasing = made(tokens, seq_len=seq_len, algorithm="best_fit_decreasing")
    assert made(tokens, seq_len=seq_len).num_batches <= decreasing.num_batches


@given(pack_lengths(), BUFFERS.filter(bool), st.sampled_from([1, 2]))
def test_a_pack_holds_the_oldest_sample_and_others_in_sight(lengths: Lengths, buffer_size: int, budgets: int) -> None:
    tokens, _, seq_len, _ = lengths
    found = made_if_any_fits(lengths, buffer_size=buffer_size) if budgets == 2 else None
    plan = made(np.minimum(tokens, seq_len), seq_len=seq_len, buffer_size=buffer_size) if budgets == 1 else found
    if plan is None or buffer_size >= len(plan.members):
        return
    line = sorted(plan.members.tolist())
    seen_at = dict.fromkeys(line[:buffer_size], 0)
    for number, pack in enumerate(packs_of(plan)):
        assert min(pack) == line[0]
        # What is taken makes room for the next of the line, so that as many are in sight at any time.
        assert set(pack.tolist()) <= set(line[: buffer_size + len(pack) - 1])
        for sample in line[: buffer_size + len(pack)]:
            seen_at.setdefault(sample, number + 1)
        assert max(number - seen_at[sample] for sample in pack.tolist()) < buffer_size
        line = [sample for sample in line if sample not in set(pack.tolist())]
    assert line == []


@given(pack_lengths(), st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.data())
def test_seeking_in_an_epoch_equals_iterating(lengths: Lengths, seed: int, epoch: int, data: st.DataObject) -> None:
    plan = made_if_any_fits(lengths)
    if plan is None:
        return
    order = plan.order(seed, epoch)
    packs = [pack.tolist() for pack in order.batches(range(len(order)))]
    assert sorted(packs) == sorted(pack.tolist() for pack in packs_of(plan))
    for position in data.draw(st.lists(st.integers(0, len(order) - 1), max_size=4)):
        assert plan.order(seed, epoch).batch(position).tolist() == packs[position]
        assert order.bucket(position) == 0


@given(pack_lengths(), st.integers(1, 9), st.integers(1, 9), st.sampled_from(["short", "drop", "pad"]), st.data())
def test_a_run_goes_on_with_another_world_size(
    lengths: Lengths, before: int, after: int, tail: Any, data: st.DataObject
) -> None:
    plan = made_if_any_fits(lengths, tail=tail)
    if plan is None:
        return
    count, order = plan.num_batches, plan.order(3, 1)
    stop = data.draw(st.integers(0, num_steps(count, before, tail=plan.tail)))
    state = next_position(count, stop, dp_world_size=before)
    runs = [(before, 0, stop), (after, state, num_steps(count, after, tail=plan.tail, start=state))]
    turns = [
        turn(count, step, dp_rank=rank, dp_world_size=world, tail=plan.tail, start=start)
        for world, start, steps in runs
        for step in range(steps)
        for rank in range(world)
    ]
    own = [place.position for place in turns if not place.repeated]
    assert own == list(range(len(own)))
    assert count - len(own) < (after if tail == "drop" else 1)
    if tail != "drop":
        seen = [sample for position in own for sample in order.batch(position).tolist()]
        assert sorted(seen) == sorted(plan.members.tolist())


# How full, on lengths as they come


@pytest.mark.parametrize("lengths", [question_answers(50_000), lognormal(50_000)], ids=["vqa", "lognormal"])
@pytest.mark.parametrize("buffer_size", [0, 64, 4096])
@pytest.mark.few
def test_packs_are_full(lengths: Array, buffer_size: int) -> None:
    plan = made(lengths, buffer_size=buffer_size)
    assert fill(plan, lengths) >= 0.999
    assert plan.num_batches <= made(lengths, algorithm="best_fit_decreasing").num_batches


def test_best_fit_decreasing_is_what_it_is_known_for() -> None:
    lengths = question_answers(50_000)
    assert 0.992 <= fill(made(lengths, algorithm="best_fit_decreasing"), lengths) <= 0.995


@pytest.mark.parametrize("text_share", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("max_patches", [32_768, 26_000, 22_000, 16_384])
@pytest.mark.parametrize("buffer_size", [0, 64])
@pytest.mark.few
def test_the_tighter_of_two_budgets_is_full(text_share: float, max_patches: int, buffer_size: int) -> None:
    tokens, patches = photos_and_text(6000, text_share=text_share)
    plan = made(tokens, patches, max_patches=max_patches, buffer_size=buffer_size)
    assert max(fill(plan, tokens), fill(plan, patches, max_patches)) >= 0.97
    assert max(patches[pack].sum() for pack in packs_of(plan)) <= max_patches


# Chance


def test_packs_are_not_sorted_by_length() -> None:
    lengths = question_answers(20_000)
    packs = packs_of(made(lengths))
    rises = [(np.diff(lengths[pack]) > 0).mean() for pack in packs if len(pack) > 10]
    assert 0.45 < np.mean(rises) < 0.55
    first_is_longest = np.mean([lengths[pack].argmax() == 0 for pack in packs if len(pack) > 10])
    assert first_is_longest < 0.15


def test_which_samples_of_a_length_share_a_pack_is_drawn() -> None:
    lengths = np.full(8000, SEQ_LEN // 8)
    spreads = [np.ptp(pack) for pack in packs_of(made(lengths))]
    assert 0.7 < np.mean(spreads) / len(lengths) < 0.85  # 7/9 of the line, the mean range of eight uniform draws
    near = [np.ptp(pack) for pack in packs_of(made(lengths, buffer_size=64))]
    assert max(near) < 64


def test_seeds_draw_other_packs() -> None:
    lengths = question_answers(2000)
    plans = [made(lengths, pack_seed=seed, buffer_size=size) for size in (0, 64) for seed in (0, 1)]
    assert len({plan.members.tobytes() for plan in plans}) == 4
    assert plans[2].offsets.tolist() == plans[3].offsets.tolist()


def test_seeds_and_epochs_order_packs_anew() -> None:
    plan = made(question_answers(20_000))
    orders = [plan.order(seed, epoch).packs(range(plan.num_batches)).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(plan.num_batches)) for order in orders)


@pytest.mark.parametrize(
    ("settings", "digest"),
    [
        ({}, "2a640ccf0bf3ffd8"),
        ({"algorithm": "best_fit_decreasing"}, "2a640ccf0bf3ffd8"),
        ({"buffer_size": 64, "pack_seed": 3}, "1b02eca3f6078dce"),
        ({"max_patches": 16_384}, "a2a238fd2c29e29c"),
    ],
)
def test_packs_are_the_recorded_ones(settings: dict[str, Any], digest: str) -> None:
    """Where this fails on purpose, PACKER_VERSION in forebay/plan/names.py goes up."""
    tokens = np.arange(3000) * 7919 % 1500 + 1
    plan = made(tokens, tokens // 2 * 8, **settings)
    assert xxhash.xxh3_64_hexdigest(plan.members.tobytes() + plan.offsets.tobytes()) == digest


# What cannot be planned


@pytest.mark.parametrize(
    ("tokens", "patches", "settings", "message"),
    [
        ([], None, {}, "no samples to plan: the cache or the filters"),
        ([5, 0, 3], None, {}, "sample 1 has 0 tokens, wanted 1 or more"),
        ([5, 3], [4, -4], {}, "sample 1 has -4 patches, wanted 0 or more"),
        ([5, 3], [4], {}, r"patches are int64 \[1\], wanted integers \[2\]"),
        ([5, 3], None, {"max_patches": 8}, r"plan\.max_patches needs the patches of every sample"),
        ([5, 3], [4, 4], {"max_patches": 8, "max_frames": 9}, r"plan\.max_frames needs the frames of every sample"),
        (
            [9000, 10],
            [0, 40],
            {"max_patches": 8},
            r"none of 2 samples fits into a pack: 1 with more than plan\.seq_len = 8192 tokens, 1 with more than "
            r"plan\.max_patches = 8 patches",
        ),
        (
            [10, 9000, 9001],
            None,
            {"overlong": "error"},
            r"2 samples are too_long; the first is sample 1: 9000, plan\.seq_len is 8192; raise it, or set",
        ),
        (
            [10, 20],
            [4, 40],
            {"overlong": "error", "max_patches": 8},
            r"1 samples are too_many_patches; the first is sample 1: 40, plan\.max_patches is 8",
        ),
    ],
)
def test_impossible_plans_are_errors(tokens: Any, patches: Any, settings: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        made(np.array(tokens, dtype=np.int64), None if patches is None else np.array(patches), **settings)


def test_lengths_are_flat_integers() -> None:
    with pytest.raises(PlanError, match=r"tokens are float64 \[2\], wanted integers"):
        made(np.array([1.0, 2.0]))
    with pytest.raises(PlanError, match="epoch is -1, wanted 0 or more"):
        made(np.array([1])).order(0, -1)
    order = made(np.array([1])).order(0, 0)
    for position in (-1, 1):
        with pytest.raises(IndexError, match=f"position {position} is outside of the epoch's 1 micro-batches"):
            order.batch(position)
        with pytest.raises(IndexError, match=f"position {position} is outside"):
            order.bucket(position)
    assert order.batches([]) == []


# The settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_len": 0}, "seq_len is 0, wanted 1 to 2147483647"),
        ({"seq_len": 8, "max_patches": 0}, "max_patches is 0, wanted 1 to"),
        ({"seq_len": 8, "buffer_size": -1}, "buffer_size is -1, wanted 0 to"),
        ({"seq_len": 8, "buffer_size": 4, "algorithm": "best_fit_decreasing"}, "no buffer_size, max_patches"),
    ],
)
def test_impossible_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackConfig(**settings)
