"""Forms in which images are stored: as patches that a Qwen-VL takes, or as the arrays that a processor gives."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from forebay.errors import BuildError, ConfigError, SampleError
from forebay.preprocess.group import Values, without
from forebay.preprocess.probes import probe_images
from forebay.preprocess.video_form import OF_VIDEO, ShownVideos
from forebay.rows.manifest import Manifest
from forebay.rows.named_files import require_processor
from forebay.spans import FEATURES, span
from forebay.steps.form import BatchForm
from forebay.steps.image.image_section import ImageGroup
from forebay.steps.image.processor.processor_step import OpenProcessor, Processed
from forebay.steps.image.qwen2_vl import OMNI_SECONDS, VIDEO_VALUES, Patches, PixelSteps, video_fields
from forebay.steps.image.still_settings import Still
from forebay.steps.image.video_frames import probed_frames, video_patches
from forebay.steps.image.video_settings import VideoSettings
from forebay.steps.text.row_encoder import ShownVideo, Size
from forebay.store.image.codec import (
    PATCHES,
    SECONDS,
    VIDEO_GRIDS,
    Codec,
    StoredImages,
    decode_image,
    encode,
    encode_video,
)
from forebay.store.image.image_settings import ImageSettings, image_settings
from forebay.store.image.stored_items import FEATURES as ARRAYS
from forebay.store.image.stored_items import ArrayField, StoredArrays, shape_name
from forebay.store.key import digest
from forebay.store.layout import Array, FieldSpec, variant_name
from forebay.store.shard import Shard


@dataclass(frozen=True, slots=True)
class PatchForm:
    """Patches of the Qwen2-VL family. This and `ArrayForm` are the forms in which images are stored."""

    step: Patches
    folder: str
    codec: Codec
    settings: ImageSettings
    length_names: ClassVar[tuple[str, ...]] = ("num_patches",)
    read_values: ClassVar[frozenset[str]] = frozenset({"image_grid_thw"})
    probe_values: ClassVar[tuple[tuple[int, ...], ...]] = ((4, 6, 84, 56), (8, 4, 56, 112))

    @property
    def merge_size(self) -> int:
        return self.settings.merge_size

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a listing that say what is known by a header: what prompts are told, and `make` wants."""
        return ("grid_h", "grid_w", "width", "height", *(OF_VIDEO if self.step.video else ()))

    def of_manifest(self, manifest: Manifest) -> Manifest:
        """Returns the manifest with `columns`, without rows whose images have no such."""
        images, bad = self._shows.with_grids(manifest.items["image"])
        return without(replace(manifest, items={**manifest.items, "image": images}), "image", bad)

    @property
    def _shows(self) -> ShownVideos:
        return ShownVideos(self.step, self.settings)

    def told(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what prompts are told of an image with these values of `columns`: its grid, its width and height.

        Of a video also what stands before its frames: (t, h, w, texts).
        """
        rows, columns, width, height, *video = values
        if not video or video[1] is None:
            return (1, rows, columns, width, height)
        t, asked, num_frames, fps, _ = video
        shows = self._shows
        _, rate = shows.asked(asked).timed(num_frames, fps)
        return (t, rows, columns, shows.video.seconds(shows.shown(asked, num_frames, fps), rate))

    def fields(self) -> tuple[FieldSpec, ...]:
        return self.step.fields(self.codec, patch_bytes=self.settings.patch_bytes)

    def make(self, row: Mapping[str, Any], data: bytes | Iterator[bytes]) -> Values:
        """Returns the fields of an image. Raises SampleError. row: `sample_id` and `columns`.

        data: of a video whose frames are images those of each of them.
        """
        if row.get("video") is not None:
            with span(FEATURES):
                patches, grid, seconds_of = self._shows.make(row, data)
            name, stored = encode_video(self.codec, patches)
            return {name: stored, "image_grid_thw": grid, SECONDS: seconds_of}
        assert isinstance(data, bytes)
        with span(FEATURES):
            windows = self.step.windows.stored(self.codec)
            image = self._opened().make(data, sample_id=row["sample_id"], still=row.get("still"), windows=windows)
        if image.grid != (1, row["grid_h"], row["grid_w"]):
            raise SampleError(
                "unreadable_image",
                f"{row['sample_id']}: its header gives a grid of (1, {row['grid_h']}, {row['grid_w']}), "
                f"its pixels one of {image.grid}; save the image again",
            )
        parts, values = {"": (image.pixels, image.patches), **image.windows}, {}
        for window, (pixels, patches) in parts.items():
            name, stored = encode(self.codec, data=data, pixels=pixels, patches=patches)
            values[variant_name(name, window)] = stored
        seconds = {SECONDS: np.zeros(1, np.float32)} if self.step.video else {}
        return {**values, "image_grid_thw": np.array([image.grid], np.int32), **seconds}

    def lengths(self, shard: Shard) -> Array:
        """See `ItemGroup`; of `length_names` behind `num_images`."""
        grids, offsets = shard.column("image_grid_thw")
        patches = np.zeros(shard.entry.rows, np.int64)
        present = np.diff(offsets) > 0
        patches[present] = grids[offsets[:-1][present]].astype(np.int64).prod(axis=1)
        return patches[None]

    def constants(self) -> dict[str, Any]:
        # `patch_table` [3][256]: the processor's float32 for each uint8 value, by channel.
        return {
            "features": PATCHES,
            "patch_size": self.settings.patch_size,
            "merge_size": self.settings.merge_size,
            "temporal_patch_size": self.settings.temporal_patch_size,
            "patch_table": self._opened().table.tolist(),
            "image": self.settings.to_json(),
            "max_pixels": self.step.max_pixels,
            "alpha": self.step.alpha,
            **({"more_images": list(self.step.more_images)} if self.step.more_images else {}),
            **(self.step.video.constants() if self.step.video else {}),
            **(self._of_windows() if self.step.crops else {}),
        }

    def _of_windows(self) -> dict[str, Any]:
        windows = self.step.windows
        return {"crops": [windows.count, windows.share], "variants": list(windows.names), "varied": [PATCHES]}

    def probed(self) -> Iterator[Mapping[str, Any]]:
        """Yields what is made of the built-in images, and what else decides values."""
        steps = self._opened()
        for name, data in probe_images():
            image = steps.make(data, sample_id=name, max_pixels=2**31)
            yield {PATCHES: image.patches, "grid": np.array(image.grid)}
        yield {"table": steps.table}
        if (video := self.step.video) is not None:
            frames = video_patches(probed_frames(), video.grid(3, 90, 60), video, self.settings)
            yield {PATCHES: frames, "table": video.table()}

    def listed_lengths(self, images: pa.Table) -> dict[str, Array]:
        """Returns those of `length_names` that are known before an image is decoded, integers [images]."""
        return {"num_patches": self._num_patches(images)}

    def _num_patches(self, images: pa.Table) -> Array:
        sides = ["grid_h", "grid_w", *(["grid_t"] if self.step.video else [])]
        return np.asarray(np.prod([images[name].to_numpy().astype(np.int64) for name in sides], axis=0))

    def raw_bytes(self, images: pa.Table) -> int:
        """Returns about what the values of images take."""
        copies = np.where(images["video"].is_valid(), self.settings.temporal_patch_size, 1) if self.step.video else 1
        parts = 1 + len(self.step.windows.stored(self.codec))
        return int((self._num_patches(images) * copies).sum()) * self.settings.patch_bytes * parts

    def stored(self) -> StoredImages:
        """Returns how a sample is made of them."""
        return StoredImages(
            self.codec,
            self.settings,
            self.step.max_pixels,
            self.step.alpha,
            self.step.more_images,
            self.step.video is not None,
            self.step.windows,
        )

    def _opened(self) -> PixelSteps:
        return _opened_patches(self.step, self.folder, self.settings)


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """Whatever an image processor gives. known: the form as JSON, where a worker found it; empty: it is found here."""

    step: Processed
    codec: Codec
    known: str = ""
    merge_size: ClassVar[int | None] = None
    probe_values: ClassVar[tuple[tuple[int, int], ...]] = ((96, 64), (300, 200))

    @property
    def columns(self) -> tuple[str, ...]:
        """See `PatchForm`."""
        return ("width", "height", *(("grid_h", "grid_w", *OF_VIDEO) if self.step.video else ()))

    @property
    def form(self) -> BatchForm:
        """The declared form of what the processor gives of an image, and of what its video processor would.

        An item has rows of one of them alone.
        """
        if self.known:
            return _known_form(self.known)
        return self._opened().form if self.step.video is None else _form_with_videos(self.step, self.step.video)

    @property
    def _shows(self) -> ShownVideos:
        return ShownVideos(self.step, _settings_of(self.step))

    @property
    def arrays(self) -> tuple[ArrayField, ...]:
        """How the fields of the form lie on disk. Under zstd the largest field is compressed."""
        form = self.form
        packed = {form.pixels.name, VIDEO_VALUES} if self.codec == "zstd" else set()
        return tuple(
            ArrayField(
                name=one.name,
                shape=one.shape,
                dtype=np.dtype(one.stored_dtype).newbyteorder("<"),
                is_packed=one.name in packed,
            )
            for one in form.stored
        )

    @property
    def counted(self) -> ArrayField | None:
        """The field whose first axis counts the patches or tiles of an image; None where images are not cut."""
        pixels = self.form.pixels
        if pixels.grows != (0,) or pixels.join == "stack":
            return None
        return next(one for one in self.arrays if one.name == pixels.name)

    @property
    def length_names(self) -> tuple[str, ...]:
        return () if self.counted is None else ("num_patches",)

    @property
    def read_values(self) -> frozenset[str]:
        counted = [self.counted, *(one for one in self.arrays if one.name == VIDEO_VALUES)]
        return frozenset(shape_name(one.name) for one in counted if one is not None and one.has_shape)

    def of_manifest(self, manifest: Manifest) -> Manifest:
        """Returns the manifest without rows that ask for the size of one image, of videos with `columns`."""
        manifest = without_sizes(manifest)
        if self.step.video is None:
            return manifest
        images, bad = self._shows.with_grids(manifest.items["image"])
        return without(replace(manifest, items={**manifest.items, "image": images}), "image", bad)

    def told(self, values: Sequence[Any]) -> Size | ShownVideo:
        row = dict(zip(self.columns, values, strict=False))  # of an image of a probe its size alone
        if row.get("video") is None:
            return (row["width"], row["height"])
        return ShownVideo(row["grid_t"], row["grid_h"], row["grid_w"], self._shows.seconds(row))

    def fields(self) -> tuple[FieldSpec, ...]:
        return tuple(spec for one in self.arrays for spec in one.specs())

    def make(self, row: Mapping[str, Any], data: bytes | Iterator[bytes]) -> Values:
        form = self.form
        if row.get("video") is not None:
            with span(FEATURES):
                return _stored(form, self.arrays, self._of_video(row, data))
        assert isinstance(data, bytes)
        try:
            with span(FEATURES):
                made = self._opened().make(data, sample_id=row["sample_id"], size=(row["width"], row["height"]))
            return _stored(form, self.arrays, made)
        except ValueError as err:
            raise BuildError(
                f"image {row['sample_id']!r}: {form.made_by} gives {err}, which its answers to small images did not "
                "show; leave the image out by [source] exclude, or tell the project which processor this is",
                code="FB125",
            ) from err

    def _of_video(self, row: Mapping[str, Any], data: bytes | Iterator[bytes]) -> dict[str, Array]:
        """Returns the arrays of a video, none of what images have. Rows of patches are (channel, time, y, x)."""
        shows = self._shows
        patches, grid, seconds = shows.make(row, data)
        rows = patches.reshape(-1, patches.shape[1] * shows.video.temporal_patch_size)
        found = {VIDEO_VALUES: rows, VIDEO_GRIDS: grid, OMNI_SECONDS: seconds}
        none = {f.name: np.zeros([n or 0 for n in f.shape], f.stored_dtype) for f in self.form.stored}
        return {**none, **found}

    def lengths(self, shard: Shard) -> Array:
        counted = [self.counted, *(one for one in self.arrays if one.name == VIDEO_VALUES)]
        if counted[0] is None:
            return np.zeros((0, shard.entry.rows), np.int64)
        patches: Array = np.sum([_rows_of(one, shard) for one in counted if one is not None], axis=0)
        return patches[None]

    def constants(self) -> dict[str, Any]:
        return {"features": ARRAYS, "form": self.form.to_json()}

    def probed(self) -> Iterator[Mapping[str, Any]]:
        yield from self._made()
        yield {"form": digest(self.form.to_json())}
        if (video := self.step.video) is not None:
            yield {PATCHES: video_patches(probed_frames(), video.grid(3, 90, 60), video, self._shows.settings)}

    def listed_lengths(self, images: pa.Table) -> dict[str, Array]:  # noqa: ARG002  only its processor knows
        return {}

    def raw_bytes(self, images: pa.Table) -> int:
        # Of arrays of one shape exact, of others as the built-in images are on average.
        made = [one for one in self._made() if "failure" not in one]
        whole: int = sum(array.nbytes for one in made for array in one.values())
        if self.step.video is None:
            return len(images) * whole // max(len(made), 1)
        shows, sides = self._shows, ("grid_t", "grid_h", "grid_w")
        patches = np.prod([images[name].to_numpy().astype(np.int64) for name in sides], axis=0)  # 0 of an image
        width = shows.settings.patch_bytes * shows.video.temporal_patch_size
        return int((patches == 0).sum()) * whole // max(len(made), 1) + int(patches.sum()) * width

    def stored(self) -> StoredArrays:
        return StoredArrays(self.arrays)

    def probed_stored(self) -> Iterator[Values]:
        """Yields the built-in images that the processor takes, as they are stored."""
        yield from (_stored(self.form, self.arrays, made) for made in self._made() if "failure" not in made)

    def _made(self) -> Iterator[dict[str, Any]]:
        """Yields what is made of the built-in images; of one that the processor refuses, why."""
        for name, data in probe_images():
            try:
                yield dict(self._opened().make(data, sample_id=name))
            except SampleError as err:
                yield {"failure": err.reason}

    def _opened(self) -> OpenProcessor:
        # By the form that stands in the cache, whatever this worker would find.
        return _opened_processor(self.step, self.form if self.known or self.step.video else None)


@dataclass(frozen=True, slots=True)
class DecodedForm(ArrayForm):
    """Images as they are decoded, `image` uint8 [height, width, 3], for a class of the user; nothing is stored."""

    def make(self, row: Mapping[str, Any], data: bytes | Iterator[bytes]) -> Values:
        assert isinstance(data, bytes)
        image = decode_image(data, sample_id=row["sample_id"], **self.step.decoding)
        return {"image": np.asarray(image)}

    def probed_stored(self) -> Iterator[Values]:
        return (self.make({"sample_id": name}, data) for name, data in probe_images())


def without_sizes(manifest: Manifest) -> Manifest:
    """Returns a manifest without rows that ask for the size of one image, for what makes all images in its own."""
    asked = manifest.items["image"]["still"]
    error = SampleError(
        "image_pixel_limits", "a size of one image alone is for patches of packs; remove it, or the row"
    )
    places = np.flatnonzero(asked.is_valid()).tolist()  # of millions of images hardly one is asked for
    sized = [n for n, each in zip(places, asked.drop_null().to_pylist(), strict=True) if Still.read(each).has_size]
    return without(manifest, "image", dict.fromkeys(sized, error))


def form_of(steps: ImageGroup, codec: Codec) -> PatchForm | ArrayForm:
    """Returns the form in which the steps of a recipe store images, by a codec."""
    match steps.step:
        case Patches() as step:
            settings = image_settings(Path(steps.folder))
            if step.crops and not settings.do_resize:
                raise ConfigError(
                    f"vision.crops is {step.crops}, and the processor of {steps.folder} resizes no image: a window "
                    "would have another size than its image; leave crops out",
                    code="FB107",
                )
            return PatchForm(step, steps.folder, codec, settings)
        case Processed() as processed:
            return ArrayForm(processed, codec)
    raise TypeError(f"{steps.step} stores no images")


def _rows_of(field: ArrayField, shard: Shard) -> Array:
    """Returns how many patches or tiles each item of a shard has in a field, int64 [rows]."""
    if not field.has_shape:
        return shard.lengths(field.name)
    values, offsets = shard.column(shape_name(field.name))
    patches = np.zeros(shard.entry.rows, np.int64)
    present = np.diff(offsets) > 0
    patches[present] = values[offsets[:-1][present]]
    return patches


def _stored(form: BatchForm, fields: Sequence[ArrayField], made: Mapping[str, Array]) -> dict[str, Array]:
    """Returns what is stored of one image. made: an array of each field; ValueError for one that does not fit."""
    values: dict[str, Array] = {}
    for one, stored in zip(form.stored, fields, strict=True):
        values |= stored.packed(one.stored(made[one.name]), made[one.name].shape)
    return values


@functools.lru_cache(maxsize=4)
def _settings_of(step: Processed) -> ImageSettings:
    """Returns the settings of its processor, which knows patches; the step holds the digest of its files."""
    return image_settings(Path(step.folder))


@functools.lru_cache(maxsize=4)
def _form_with_videos(step: Processed, video: VideoSettings) -> BatchForm:
    """Returns the form of items that are images or videos: what is of the others alone has no row of one."""
    form = step.opened().form
    behind = (replace(each, join="cat", shape=(None, *each.shape)) for each in form.fields if each.join == "stack")
    images = {each.name: each for each in (*form.fields, *behind)}
    return replace(form, fields=(*images.values(), *video_fields(video)))


@functools.lru_cache(maxsize=4)
def _known_form(text: str) -> BatchForm:
    return BatchForm.from_json(json.loads(text))


@functools.lru_cache(maxsize=1)
def _opened_patches(step: Patches, folder: str, settings: ImageSettings) -> PixelSteps:
    """Returns the steps of a processor's folder; a worker keeps the last ones.

    Raises BuildError where the folder is not what the step was made of any more.
    """
    steps = PixelSteps(step, Path(folder), settings)
    require_processor(Path(folder), step.processor)
    return steps


@functools.lru_cache(maxsize=1)
def _opened_processor(step: Processed, form: BatchForm | None) -> OpenProcessor:
    """Returns the processor of a step; a worker keeps the last one. form: what a probe found, None: probes itself.

    Raises BuildError where the folder is not what the step was made of any more.
    """
    opened = step.opened(form)
    require_processor(Path(step.folder), step.processor)
    return opened
