"""Packs of fixed shapes hold every sample once, with room for their padding, and lose little."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from forebay.config import PackConfig
from forebay.errors import PlanError
from forebay.plan.pack.alike_packs import best_shapes, fits_a_shape, fixed_packs
from forebay.plan.pack.pack_plan import PackPlan, pack_plan
from tests.plan.packs import packs_of, photos_and_text

SEQ_LEN = 8192
Array = np.ndarray[Any, Any]


def plan_of(tokens: Array, images: Array, **settings: Any) -> PackPlan:
    """The plan of samples with so many tokens, those of their images among them."""
    found = PackConfig(**{"seq_len": SEQ_LEN, "shapes": "fixed", **settings})
    return pack_plan(tokens, patches=4 * images, merge_size=2, settings=found)


def loss_of(plan: PackPlan, tokens: Array) -> float:
    return 1 - int(tokens[plan.members].sum()) / (plan.num_batches * plan.settings.seq_len)


@given(
    hnp.arrays(np.int64, st.tuples(st.just(2), st.integers(1, 60)), elements=st.integers(0, 40)),
    st.integers(41, 90),
    st.sampled_from([0, 3, 20]),
)
def test_every_sample_is_in_one_pack_with_room_for_its_padding(sizes: Array, seq_len: int, seen: int) -> None:
    sizes[0] += 1
    tokens, images = sizes.sum(axis=0), sizes[1]
    most = 30
    fit = (tokens <= seq_len) & (images <= most)
    if not fit.any():
        return
    plan = plan_of(tokens, images, seq_len=seq_len, buffer_size=seen, max_patches=4 * most)
    shapes = [size // 4 for size in plan.patch_classes]
    assert shapes == sorted(set(shapes))
    assert len(shapes) <= 2
    assert shapes[0] >= 1
    assert shapes[-1] <= most
    found = [*plan.members.tolist(), *(n for own in plan.unplaced.values() for n in own.tolist())]
    assert sorted(found) == list(range(len(tokens)))
    for pack in packs_of(plan):
        held, shown = int(tokens[pack].sum()), int(images[pack].sum())
        assert any(shown <= size and held - shown + size <= seq_len for size in shapes)
    others = set(plan.unplaced["no_shape"].tolist())
    for number in np.flatnonzero(fit).tolist():
        fits = any(images[number] <= size and tokens[number] - images[number] + size <= seq_len for size in shapes)
        assert (number in others) is not fits


def mixes() -> dict[str, tuple[Array, Array]]:
    """Tokens and image tokens of VQA, of photos with text beside text alone, and of half text."""
    rng = np.random.default_rng(0)
    photos, patches = photos_and_text(4000, text_share=0.1)
    shown = rng.integers(160, 281, 4000)
    is_text = rng.random(4000) < 0.5
    images = np.where(is_text, 0, rng.integers(200, 1200, 4000))
    texts = np.where(is_text, np.clip(np.exp(rng.normal(7, 0.9, 4000)), 10, 8100), rng.integers(30, 200, 4000))
    return {
        "VQA": (shown + rng.integers(40, 121, 4000), shown),
        "photos": (photos, patches // 4),
        "half text": (texts.astype(np.int64) + images, images),
    }


@pytest.mark.parametrize("name", ["VQA", "photos", "half text"])
@pytest.mark.few("half text")
def test_at_most_four_percent_is_padding(name: str, caplog: pytest.LogCaptureFixture) -> None:
    tokens, images = mixes()[name]
    with caplog.at_level(logging.WARNING):
        plan = plan_of(tokens, images)
    assert not len(plan.unplaced["no_shape"])
    assert loss_of(plan, tokens) <= 0.04
    assert not caplog.records
    again = plan_of(tokens, images)
    assert np.array_equal(plan.members, again.members)
    assert plan.patch_classes == again.patch_classes


def test_a_plan_says_beforehand_what_it_loses(caplog: pytest.LogCaptureFixture) -> None:
    tokens = np.full(100, 6000)
    with caplog.at_level(logging.WARNING):
        plan = plan_of(tokens, np.full(100, 3000))
    assert plan.num_batches == 100
    assert 'plan.shapes = "fixed": 26.8 % of all tokens are padding' in caplog.text


def test_what_fits_in_no_shape_is_counted_or_stops_the_plan() -> None:
    tokens = np.array([8000, 8000, 8000, *[200] * 30])
    images = np.array([100, 4000, 7900, *[150] * 30])  # no two shapes have room for all of the first three
    plan = plan_of(tokens, images)
    assert len(plan.unplaced["no_shape"]) == 1
    assert "1 left out as no_shape" in plan.described()
    with pytest.raises(PlanError, match=r"1 samples are no_shape; the first is sample \d: 8000"):
        plan_of(tokens, images, overlong="error")
    with pytest.raises(ValueError, match='no shapes = "fixed"'):
        PackConfig(seq_len=100, algorithm="best_fit_decreasing", shapes="fixed")


def test_texts_that_fill_a_pack_leave_no_room_for_the_image_of_padding() -> None:
    with pytest.raises(PlanError, match=r"none of 3 samples fits .* plan.seq_len = 100; raise it"):
        plan_of(np.full(3, 100), np.zeros(3, np.int64), seq_len=100)


def test_texts_alone_have_a_shape_with_one_image_of_padding() -> None:
    plan = plan_of(np.full(50, 90), np.zeros(50, np.int64), seq_len=1000)
    assert plan.patch_classes == (4,)
    assert plan.num_batches == 5  # 11 texts of 90 and the image of padding are 991


def test_one_shape_is_taken_where_a_second_saves_nothing() -> None:
    sizes = np.stack([np.full(400, 100), np.full(400, 300)])
    shapes = best_shapes(sizes, seq_len=4000, most=4000)
    assert shapes == (3000,)
    assert fits_a_shape(sizes, seq_len=4000, shapes=shapes).all()
    assert len(fixed_packs(sizes, seq_len=4000, shapes=shapes)[1]) - 1 == 40
