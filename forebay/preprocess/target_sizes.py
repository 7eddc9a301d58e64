"""The sizes that images are cropped to: those by which a set of images is cropped least, of given areas, in steps.

An image belongs to an area: the largest that it has the pixels for, or the smallest. Of the sizes of that area it takes
the one of the nearest aspect ratio. Resized so that it covers a size, an image of aspect a keeps the share
min(a, t) / max(a, t) of its pixels at an aspect of t: the rest is cropped. The sizes are found exactly, by a dynamic
programme along the aspects. No logarithm: every machine finds the same sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from forebay.errors import ConfigError
from forebay.plan.optimal_edges import IMPOSSIBLE, cheapest
from forebay.store.layout import Array, Ints

LONGEST = 4
"""No size is longer than so many times its other side."""
_UNIT = 1 << 24
"""Of an image's cropped share: costs are integers."""


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """Sizes, int64 [targets, 2] of (width, height), and the area of each, sorted by area and aspect.

    areas: of each size the one that it stands for, as a number.
    """

    sizes: Ints
    areas: Ints
    pixels: Ints
    """The areas, rising, int64."""

    @classmethod
    def possible(cls, areas: Array, *, step: int) -> Self:
        """Returns all sizes of some areas in steps of `step`: none is larger, and no side could be a step longer."""
        pixels, found = np.unique(np.asarray(areas, np.int64)), []
        for number, area in enumerate(pixels.tolist()):
            sides = ((one, area // one // step * step) for one in range(step, area // step + 1, step))
            fit = {(a, b) for a, b in sides if (a + step) * b > area and max(a, b) <= LONGEST * min(a, b)}
            own = sorted({*fit, *((b, a) for a, b in fit)}, key=lambda size: (size[0] / size[1], size))
            found += [(number, *size) for size in own]
        table = np.array(found, np.int64).reshape(-1, 3)
        return cls(table[:, 1:], table[:, 0], pixels)

    @classmethod
    def given(cls, sizes: Array, areas: Array) -> Self:
        """Returns these sizes, integers [targets, 2], each of the nearest of some areas."""
        pixels, held = np.unique(np.asarray(areas, np.int64)), sizes.astype(np.int64).prod(axis=1)[:, None]
        numbers = (np.maximum(held, pixels) / np.minimum(held, pixels)).argmin(axis=1)
        order = np.lexsort((_aspects(sizes), numbers))
        return cls(sizes[order].astype(np.int64), numbers[order], pixels)

    def taken(self, places: Array | list[int]) -> Self:
        """Returns some of the sizes."""
        return type(self)(self.sizes[places], self.areas[places], self.pixels)

    def of_images(self, widths: Array, heights: Array) -> Ints:
        """Returns the place of the size that each image takes."""
        held = np.unique(self.areas)
        fits = np.searchsorted(self.pixels[held], widths.astype(np.int64) * heights, side="right") - 1
        areas, found = held[np.maximum(fits, 0)], np.empty(len(widths), np.int64)
        own, aspects = _aspects(self.sizes), widths / heights
        for area in held.tolist():
            places = np.flatnonzero(self.areas == area)
            here = areas == area
            middles = np.sqrt(own[places][:-1] * own[places][1:])
            found[here] = places[np.searchsorted(middles, aspects[here], side="left")]
        return found


def best_sizes(widths: Array, heights: Array, *, areas: Array, step: int, shapes: int, least: int) -> TargetSizes:
    """Returns at most `shapes` sizes by which images are cropped least, none of fewer than `least` images if possible.

    widths, heights: integers [images], not empty. Raises ConfigError where areas have no size, or images have more
    areas than `shapes`.
    """
    possible = TargetSizes.possible(areas, step=step)
    if missing := sorted(set(range(len(possible.pixels))) - set(possible.areas.tolist())):
        raise ConfigError(
            f"an area of {possible.pixels[missing[0]]} pixels has no size in steps of {step}; lower step", code="FB147"
        )
    area_of = possible.areas[possible.of_images(widths, heights)]
    if (held := len(np.unique(area_of))) > shapes:
        raise ConfigError(f"shapes is {shapes}, and these images have {held} areas; raise it", code="FB147")
    found = possible.taken(_chosen(possible, widths / heights, area_of, shapes))
    while True:
        counts = np.bincount(found.of_images(widths, heights), minlength=len(found.sizes))
        if len(counts) == 1 or counts.min() >= least:
            return found
        found = found.taken(np.delete(np.arange(len(counts)), counts.argmin()))


def cropped_share(sizes: Array, widths: Array, heights: Array) -> Array:
    """Returns the share of each image that is cropped, float64. sizes: integers [images, 2]."""
    one, other = widths / heights, _aspects(sizes)
    found: Array = 1 - np.minimum(one, other) / np.maximum(one, other)
    return found


def _aspects(sizes: Array) -> Array:
    found: Array = sizes[:, 0] / sizes[:, 1]
    return found


def _chosen(possible: TargetSizes, aspects: Array, area_of: Array, shapes: int) -> list[int]:
    """Returns the places of the sizes of which the images are cropped least.

    Images and sizes stand along one line, by area and aspect. A stretch from one chosen size to the next costs what is
    cropped of the images between them; so the sizes are where the cheapest way along the line is cut.
    """
    order = np.lexsort((aspects, area_of))
    aspects, area_of = aspects[order], area_of[order]
    # Sums of the aspects, and of their inverses, of the images before a place of the line.
    total, inverse = (np.concatenate(([0.0], np.cumsum(each))) for each in (aspects, 1 / aspects))
    own, areas = _aspects(possible.sizes), possible.areas
    starts, ends = (np.searchsorted(area_of, areas, side=side) for side in ("left", "right"))

    def place(area: int, bounds: Array) -> Array:
        """Returns how many images of the line lie before bounds of aspect in an area."""
        first, last = np.searchsorted(area_of, [area, area + 1])
        found: Array = first + np.searchsorted(aspects[first:last], bounds, side="right")
        return found

    at = np.array([int(place(area, aspect)) for area, aspect in zip(areas.tolist(), own.tolist(), strict=True)])
    costs = np.full((len(own) + 1, len(own) + 1), np.inf)
    for number in range(len(own)):
        # The stretch up to this size alone, the one behind it, and those from it to a later one.
        if starts[number] == 0:
            costs[0, number] = at[number] - total[at[number]] / own[number]
        if ends[number] == len(aspects):
            costs[number + 1, -1] = len(aspects) - at[number] - own[number] * (inverse[-1] - inverse[at[number]])
        later = np.arange(number + 1, len(own))
        middle = np.where(
            areas[later] == areas[number], place(int(areas[number]), np.sqrt(own[number] * own[later])), ends[number]
        )
        before = middle - at[number] - own[number] * (inverse[middle] - inverse[at[number]])
        behind = at[later] - middle - (total[at[later]] - total[middle]) / own[later]
        is_next = (areas[later] == areas[number]) | (starts[later] == ends[number])
        costs[number + 1, later] = np.where(is_next, before + behind, np.inf)
    whole = np.where(np.isfinite(costs), np.rint(np.maximum(costs, 0) * _UNIT), IMPOSSIBLE).astype(np.int64)
    return [last for last, _ in cheapest(whole[None], k=shapes + 1)[:-1]]
