"""The sizes that images are cropped to, held against every choice of sizes that there is."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.preprocess.cropped_images import LONGEST, TargetSizes, best_sizes, cropped_share

AREAS = (128 * 128, 256 * 256)
SIDES = st.lists(st.tuples(st.integers(64, 600), st.integers(64, 600)), min_size=1, max_size=12)


def cropped(sizes: Any, images: list[tuple[int, int]]) -> float:
    """The cropped shares of images together, each at the nearest size of its area: the rule in a plain loop."""
    total = 0.0
    held = {area: [size for size in sizes if area_of(size) == area] for area in AREAS}
    here = [area for area in AREAS if held[area]]
    for width, height in images:
        fits = [area for area in here if area <= width * height]
        own = held[fits[-1] if fits else here[0]]
        shares = [min(width / height, w / h) / max(width / height, w / h) for w, h in own]
        total += 1 - max(shares)
    return total


def area_of(size: Any) -> int:
    return next(area for area in AREAS if size[0] * size[1] <= area)


@given(images=SIDES, shapes=st.integers(2, 3))
def test_no_other_choice_of_sizes_crops_less(images: list[tuple[int, int]], shapes: int) -> None:
    widths, heights = np.array(images).T
    found = best_sizes(widths, heights, areas=np.array(AREAS), step=64, shapes=shapes, least=1)
    possible = [tuple(size) for size in TargetSizes.possible(np.array(AREAS), step=64).sizes.tolist()]
    fits = {min(AREAS, key=lambda area: (area > w * h, -area)) if w * h >= AREAS[0] else AREAS[0] for w, h in images}
    choices = itertools.chain.from_iterable(itertools.combinations(possible, n) for n in range(1, shapes + 1))
    least = min(cropped(c, images) for c in choices if fits <= {area_of(size) for size in c})
    chosen = [tuple(size) for size in found.sizes.tolist()]
    assert len(chosen) <= shapes
    assert cropped(chosen, images) == pytest.approx(least, abs=1e-5)
    taken = found.sizes[found.of_images(widths, heights)]
    assert cropped_share(taken, widths, heights).sum() == pytest.approx(cropped(chosen, images), abs=1e-9)


@given(side=st.integers(64, 1024), step=st.sampled_from((8, 16, 64)))
def test_possible_sizes_fill_their_area(side: int, step: int) -> None:
    sizes = TargetSizes.possible(np.array([side * side]), step=step).sizes
    assert not (sizes % step).any()
    assert (sizes.prod(axis=1) <= side * side).all()
    assert (sizes.max(axis=1) <= LONGEST * sizes.min(axis=1)).all()
    assert {(a, b) for a, b in sizes.tolist()} == {(b, a) for a, b in sizes.tolist()}
    longer = np.minimum((sizes[:, 0] + step) * sizes[:, 1], sizes[:, 0] * (sizes[:, 1] + step))
    assert (longer > side * side).all()


@given(images=SIDES, least=st.integers(1, 8))
def test_a_size_of_too_few_images_is_left_out(images: list[tuple[int, int]], least: int) -> None:
    widths, heights = np.array(images).T
    found = best_sizes(widths, heights, areas=np.array([256 * 256]), step=32, shapes=4, least=least)
    counts = np.bincount(found.of_images(widths, heights), minlength=len(found.sizes))
    assert counts.sum() == len(images)
    assert len(counts) == 1 or counts.min() >= least


def test_given_sizes_belong_to_the_nearest_area() -> None:
    found = TargetSizes.given(np.array([[512, 512], [64, 128], [128, 64], [1024, 256]]), np.array([8192, 1 << 18]))
    assert found.sizes.tolist() == [[64, 128], [128, 64], [512, 512], [1024, 256]]
    assert found.areas.tolist() == [0, 0, 1, 1]
    assert found.of_images(np.array([100, 600, 2000]), np.array([80, 700, 300])).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("areas", "shapes", "message"),
    [((32 * 32,), 2, "an area of 1024 pixels has no size in steps of 64"), (AREAS, 1, "have 2 areas; raise it")],
)
def test_what_cannot_be_is_refused(areas: tuple[int, ...], shapes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        best_sizes(np.array([100, 900]), np.array([200, 900]), areas=np.array(areas), step=64, shapes=shapes, least=1)
