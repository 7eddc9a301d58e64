"""Images as an autoencoder is given them: each cropped to its target size, which the listing knows.

Target sizes are those by which a set of images is cropped least, of given areas, in steps. An image belongs to an area:
the largest that it has the pixels for, or the smallest. Of the sizes of that area it takes the one of the nearest
aspect ratio. Resized so that it covers a size, an image of aspect a keeps the share min(a, t) / max(a, t) of its pixels
at an aspect of t: the rest is cropped. The sizes are found exactly, by a dynamic programme along the aspects. No
logarithm: every machine finds the same sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.errors import ConfigError, SampleError
from forebay.plan.make_buckets import IMPOSSIBLE, cheapest
from forebay.preprocess.group import Values, columns_digest, without
from forebay.preprocess.image_form import without_sizes
from forebay.preprocess.image_group import ImageItems
from forebay.preprocess.probes import probe_images
from forebay.rows.manifest import LISTS, Manifest, flattened
from forebay.spans import FEATURES, span
from forebay.steps.form import BatchForm
from forebay.steps.image.cropped import Cropped
from forebay.steps.image.image_section import ImageGroup
from forebay.store.image.codec import decode_image
from forebay.store.image.stored_items import StoredFields
from forebay.store.layout import Array, FieldSpec, Group, Ints, variant_name

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


@dataclass(frozen=True, slots=True)
class CroppedForm:
    """Pixels of images for a model, which nothing stores. group: the model's, for names."""

    step: Cropped
    group: Group
    codec: ClassVar[str] = "raw"

    @property
    def columns(self) -> tuple[str, str]:
        """The columns of a listing that say the sides of an image's target, in pixels."""
        return f"{self.group}_target_width", f"{self.group}_target_height"

    @property
    def form(self) -> BatchForm:
        """How the model is given pixels."""
        return self.step.pixels_form

    def of_manifest(self, manifest: Manifest) -> Manifest:
        """Returns the manifest with `columns`, without rows that list an image below a step.

        Raises ConfigError where a row has several images and these have several sizes.
        """
        manifest = without_sizes(manifest)
        step, images = self.step, manifest.items["image"]
        widths, heights = (images[name].to_numpy().astype(np.int64) for name in ("width", "height"))
        small = np.minimum(widths, heights) < step.step
        sizes = np.tile(np.array(step.size, np.int64), (len(images), 1))
        if step.shapes is not None and not small.all():
            self._require_one_image(manifest)
            found = self._found(widths[~small], heights[~small])
            sizes[~small] = found.sizes[found.of_images(widths[~small], heights[~small])]
        for place, name in enumerate(self.columns):
            images = images.append_column(name, pa.array(sizes[:, place], pa.int32()))
        bad = {
            place: SampleError(
                "below_step",
                f"{widths[place]}x{heights[place]} pixels, and model.{self.group}.step is {step.step}: no latent "
                "would be its own",
            )
            for place in np.flatnonzero(small).tolist()
        }
        return without(replace(manifest, items={**manifest.items, "image": images}), "image", bad)

    def _found(self, widths: Array, heights: Array) -> TargetSizes:
        """Returns the targets of some images."""
        step, area = self.step, self.step.size[0] * self.step.size[1]
        areas = np.array(step.areas or (area,))
        if isinstance(step.shapes, tuple):
            return TargetSizes.given(np.array(step.shapes), areas)
        assert step.shapes is not None
        try:
            return best_sizes(widths, heights, areas=areas, step=step.step, shapes=step.shapes, least=step.least)
        except ConfigError as err:
            raise ConfigError(f"model.{self.group}: {err}", code="FB147") from err

    def _require_one_image(self, manifest: Manifest) -> None:
        offsets, _ = flattened(manifest.rows[LISTS["image"]])
        several = np.flatnonzero(np.diff(offsets) > 1)
        if len(several):
            name = manifest.rows["sample_id"][int(several[0])].as_py()
            raise ConfigError(
                f"model.{self.group}.shapes: sample {name!r} has {np.diff(offsets)[several[0]]} images, and images of "
                "several sizes stand in no batch with others; leave shapes out, or give each image a row",
                code="FB147",
            )

    def make(self, row: Mapping[str, Any], data: bytes) -> Values:
        """Returns the pixels of an image, and of its other windows, uint8 [3, height, width]; raises SampleError.

        row: with `columns`.
        """
        step, (width, height) = self.step, self.columns
        with span(FEATURES):
            image = decode_image(data, sample_id=row["sample_id"], **step.decoding)
            size, windows = (row[width], row[height]), step.windows.items()
            return {variant_name("x", name): step.pixels(image, size, begin) for name, begin in windows}

    def stored(self) -> StoredFields:
        """Returns how a sample is made of them."""
        return StoredFields((FieldSpec(name="x", dtype="uint8"),))

    def summary(self, images: pa.Table) -> dict[str, Any]:
        """Returns how many images each target has, by `WIDTHxHEIGHT`, and the mean share that is cropped.

        Where there are several windows, also how many images have no room for others than the first.
        """
        names = ("width", "height", *self.columns)
        widths, heights, *sides = (images[name].to_numpy().astype(np.int64) for name in names)
        sizes, counts = np.unique(np.stack(sides, axis=1), axis=0, return_counts=True)
        shares = cropped_share(np.stack(sides, axis=1), widths, heights)
        found = {f"{width}x{height}": int(n) for (width, height), n in zip(sizes.tolist(), counts, strict=True)}
        alike = {"crops_alike": int((shares == 0).sum())} if self.step.crops > 1 else {}
        return {"targets": found, "cropped": round(float(shares.mean()), 4) if len(shares) else 0.0, **alike}

    def sides(self, images: pa.Table, factor: int) -> Sequence[Array]:
        """Returns height and width of the latent of each image, int64. factor: pixels of a side to one of a latent."""
        width, height = (images[name].to_numpy().astype(np.int64) // factor for name in self.columns)
        return height, width


@dataclass(frozen=True, slots=True)
class CroppedImages(ImageItems):
    """Images of a config as a model is given them."""

    form: CroppedForm  # type: ignore[assignment]  # it has no fields on disk

    @classmethod
    def given(cls, config: Config, step: Cropped, group: Group) -> Self:
        """Returns the images for a model. group: the model's."""
        return cls(ImageGroup(step=step, folder=""), CroppedForm(step, group), config.source.columns.image)

    def content(self, items: pa.Table, hashes: Sequence[str]) -> dict[str, Any]:
        """Returns what the key of a shard says of its images: targets are found from all images of a listing."""
        own = ImageItems.content(self, items, hashes)
        return {**own, "targets": columns_digest(items.select(list(self.form.columns)))}

    def probed(self) -> Iterator[Values]:
        """Yields the pixels of built-in images at `size`."""
        sides = dict(zip(self.form.columns, self.form.step.size, strict=True))
        yield from (self.form.make({"sample_id": name, **sides}, data) for name, data in probe_images())
