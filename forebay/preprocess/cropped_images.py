"""Images as an autoencoder is given them: each cropped to its target size, which the listing knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.errors import ConfigError, SampleError
from forebay.preprocess.group import Values, columns_digest, without
from forebay.preprocess.image_form import without_sizes
from forebay.preprocess.image_group import ImageItems
from forebay.preprocess.probe_inputs import probe_images
from forebay.preprocess.target_sizes import TargetSizes, best_sizes, cropped_share
from forebay.rows.manifest import LISTS, Manifest, flattened
from forebay.spans import FEATURES, span
from forebay.steps.form import BatchForm
from forebay.steps.image.cropped import Cropped
from forebay.steps.image.image_section import ImageGroup
from forebay.store.image.codec import decode_image
from forebay.store.image.stored_items import StoredFields
from forebay.store.layout import Array, FieldSpec, Group, variant_name


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
