"""`qwen2_vl`: images to the patches of a Qwen2-VL processor, by our own path or by transformers' processor itself.

Below the cut they are `pixel_values` by a table of values, which their form has.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from forebay.config.tree import Config
from forebay.errors import ConfigError, SampleError
from forebay.spans import DECODE, PATCHES, RESIZE, span
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.form import Table as FormTable
from forebay.steps.image.processor.processor_call import hide_torchvision, torchvision_problem
from forebay.steps.image.still_settings import Still
from forebay.steps.image.video_settings import VideoSettings
from forebay.steps.image.video_step import ShowsVideos
from forebay.steps.step import ImageStep, Stored
from forebay.store.image.codec import (
    FIELDS,
    SECONDS,
    VIDEO_GRIDS,
    VIDEO_PATCHES,
    Codec,
    Pixels,
    decode_image,
    patchify,
    resized,
    unpatchify,
)
from forebay.store.image.codec import Patches as PatchArray
from forebay.store.image.image_settings import ImageSettings, class_name, grid_thw, processor_document, settings_in
from forebay.store.image.image_windows import COUNTS, ImageWindows
from forebay.store.layout import FieldSpec, variant_name
from forebay.visible import an

if TYPE_CHECKING:
    from PIL.Image import Image

Table = npt.NDArray[np.float32]
"""[3, 256]: the float32 value in `pixel_values` of a channel's uint8 value."""
CODES, GRIDS = "patches", "image_grid_thw"
"""The fields of an image: its patches as they are stored, and how many they are."""
VIDEO_VALUES = "pixel_values_videos"
OMNI_SECONDS = "video_second_per_grid"
"""Seconds of a step of a video's grid in time, as models of the omni family take them, float32 [1] an item."""
_CHECKED_PIXELS = 1 << 21
"""Up to this `max_pixels` an image above it is checked too; it would cost seconds where it is tens of millions."""
Backend = Literal["pil", "torchvision"]
_ENDINGS: dict[Backend, str] = {"pil": "Pil", "torchvision": ""}
"""Of the names of transformers' classes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patches(ShowsVideos):
    """`patches` uint8 [n, 3 * patch_size^2] and `image_grid_thw` int32 [1, 3], as a Qwen2-VL processor cuts images.

    Decoded, turned as its EXIF says, made RGB as the processor makes an open image RGB (`alpha = "drop"`: as its
    loading of a path does), resized, cut into rows of (channel, y, x), one temporal copy; rows in merge order.
    `processor` is the digest of the processor's files, never their path.
    """

    name: ClassVar[str] = "patches"
    stands_in: ClassVar[str] = "pack"
    plan: ClassVar[str] = 'kind = "pack" and seq_len = 8192'
    axes: ClassVar[dict[str, str | int]] = {
        "image_grid_thw": 1,
        "patches_zstd": "bytes",
        "image_webp": "bytes",
        "image_file": "bytes",
    }
    later: ClassVar[frozenset[str]] = ImageStep.later | {"crops", "crop_share"}
    backend: Backend = "pil"
    """Of the processor. The two give different pixels for some images, so the backend is in the key."""
    crops: int = 0
    """Parts of each image, evenly spaced in rows and columns: 1, 4, 9 or 16. Resized as all of it is, they are its
    variants: the loader hands out one of them or the whole by (seed, epoch, sample id); an evaluation has the whole."""
    crop_share: float = 0.8
    """How much of each side a part has."""
    version: int = 2

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:
        """Returns the form of packs. Raises ConfigError for constants that are missing."""
        names = ("patch_size", "temporal_patch_size", "patch_table")
        return patch_form({name: stored.constant(name) for name in names})

    @classmethod
    def no_prompt(cls, prompt: str, prompts: Mapping[str, Any]) -> str:
        wanted = " or ".join(f'"{name}"' for name in prompts)
        return (
            f'text.prompt is "{prompt}", with patches of [vision] wanted {wanted}; or set vision.images = "processor"'
        )

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:
        """Returns what is not for patches: another backend than codec `source` has, plans without packs, recordings."""
        vision, found = config.vision, []
        if vision is not None and vision.codec == "source" and vision.settings.get("backend", "pil") != "pil":
            backend = vision.settings["backend"]
            found.append(f'vision: codec = "source" decodes at load with backend "pil"; backend is "{backend}"')
        if config.plan is not None and config.plan.kind != "pack":
            found.append(
                f'plan.kind is "{config.plan.kind}", wanted "pack": batches of patches are packs; or set vision.images '
                '= "processor" for batches of what the processor gives'
            )
        if config.audio is not None:
            found.append(
                "[audio] stands beside [vision], and patches stand in packs, which hold items of one group; a model "
                'that sees and hears (Qwen2.5-Omni) takes vision.images = "processor", with any other leave [audio] out'
            )
        return [*found, *_of_crops(config), *super(Patches, cls).contradictions(config)]

    @property
    def windows(self) -> ImageWindows:
        """The parts of an image that are stored beside it."""
        return ImageWindows(self.crops, self.crop_share)

    def fields(self, codec: Codec, *, patch_bytes: int) -> tuple[FieldSpec, ...]:
        """Returns the fields of an image. patch_bytes: of one patch, 3 * patch_size^2.

        Where there are videos, `second_per_grid_ts` float32 [1] is 0 of an image. A patch of a video has
        `temporal_patch_size` rows, which are one row (channel, time, y, x) cut into as many. Of `source` no window is
        stored.
        """
        values = FieldSpec(name=FIELDS[codec], dtype="uint8", shape=(patch_bytes,) if codec == "raw" else ())
        return (
            values,
            FieldSpec(name="image_grid_thw", dtype="int32", shape=(3,)),
            *((FieldSpec(name=SECONDS, dtype="float32"),) if self.fps else ()),
            *(replace(values, name=variant_name(values.name, name)) for name in self.windows.stored(codec)),
        )


def _of_crops(config: Config) -> list[str]:
    """Returns what windows are not for."""
    settings = {} if config.vision is None else config.vision.settings
    count, share = settings.get("crops") or 0, settings.get("crop_share")
    if not count:
        return [] if share is None else ["vision.crop_share is of the windows that vision.crops asks for; set it, too"]
    found = []
    if count not in COUNTS:
        found.append(f"vision.crops is {count}, wanted {', '.join(map(str, COUNTS))}, or 0 for none")
    if share is not None and not 0 < share < 1:
        found.append(f"vision.crop_share is {share}, wanted more than 0 and less than 1")
    if settings.get("backend", "pil") != "pil":
        found.append('vision.crops are cut with backend "pil"; leave vision.backend out, or crops')
    if settings.get("fps") is not None:
        found.append("vision.crops are of images alone, and vision.fps asks for videos; leave one of them out")
    if config.text is not None and config.text.settings.get("boxes") is not None:
        found.append("text.boxes is of boxes, and vision.crops cuts away what they are of; leave one of them out")
    return found


def patch_form(constants: Mapping[str, Any]) -> BatchForm:
    """Returns the form `image_grid_thw` int64 [k, 3] and `pixel_values` [patches, copies * w], one behind the other.

    A stored row is (channel, y, x), one temporal copy; a row of `pixel_values` is (channel, time, y, x), the copies
    equal. The table is the definition: what the processor makes of each value of each channel. constants: of the cache.
    """
    area, copies = int(constants["patch_size"]) ** 2, int(constants["temporal_patch_size"])
    table = FormTable(axis=1, values=np.array(constants["patch_table"], np.float32), inner=area, copies=copies)
    grids = FieldForm(name=GRIDS, dtype="int64", shape=(None, 3), stored_dtype="int32", join="cat")
    rows: dict[str, Any] = {"of": CODES, "shape": (None, 3 * area), "stored_dtype": "uint8", "join": "cat"}
    pixels = FieldForm(name="pixel_values", dtype="float32", table=table, **rows)
    return BatchForm.exact(Patches.name, grids, pixels)


def video_form(constants: Mapping[str, Any]) -> BatchForm | None:
    """Returns the form `video_grid_thw` int64 [k, 3] and `pixel_values_videos` [patches, copies * w].

    A row is (channel, time, y, x) as stored. None: the cache has no videos.
    """
    if "video_table" not in constants:
        return None
    width = int(constants["patch_size"]) ** 2 * int(constants["temporal_patch_size"])
    pixels, grids = _of_videos(np.array(constants["video_table"], np.float32), width)
    return BatchForm.exact(Patches.name, grids, replace(pixels, of=VIDEO_PATCHES))


def video_fields(video: VideoSettings) -> tuple[FieldForm, ...]:
    """Returns the forms of what a processor of the omni family hands on of videos, as images have them."""
    pixels, grids = _of_videos(video.table(), video.patch_size**2 * video.temporal_patch_size)
    seconds = FieldForm(name=OMNI_SECONDS, dtype="float32", shape=(None,), stored_dtype="float32", join="cat")
    return pixels, grids, replace(seconds, is_rounded=False)


def _of_videos(table: Table, width: int) -> tuple[FieldForm, FieldForm]:
    """Returns the forms of pixels and grids. width: values of a channel in a row."""
    values = FormTable(axis=1, values=table, inner=width)
    rows: dict[str, Any] = {"shape": (None, 3 * width), "stored_dtype": "uint8", "join": "cat"}
    grids = FieldForm(name=VIDEO_GRIDS, dtype="int64", shape=(None, 3), stored_dtype="int32", join="cat")
    return FieldForm(name=VIDEO_VALUES, dtype="float32", table=values, **rows), grids


@dataclass(frozen=True, slots=True)
class MadeImage:
    """One image. pixels: uint8 [H, W, 3], resized. patches: uint8 [n, 3 * patch_size^2]. grid: (1, h, w).

    windows: pixels and patches of its parts, by their names.
    """

    pixels: Pixels
    patches: PatchArray
    grid: tuple[int, int, int]
    windows: Mapping[str, tuple[Pixels, PatchArray]] = field(default_factory=dict)


class PixelSteps:
    """Decode, resize, cut into patches; table: float32 [3, 256], what the processor makes of each value by channel."""

    def __init__(self, step: Patches, folder: Path, settings: ImageSettings) -> None:
        """Loads the processor and, under backend "pil", compares our own steps with it.

        Raises ConfigError where it cannot be loaded, or gives what our steps and a table do not.
        """
        self._step, self._settings = step, settings
        path, document = processor_document(folder)
        if settings_in(path, document) != settings:
            raise ConfigError(f"vision.processor: {path} changed since the command began; run the command again")
        self._processor = make_processor(path, document, step.backend)
        self.table = patch_table(self._processor, settings)
        if step.backend == "pil":
            check_processor(self._processor, settings, self.table)

    def make(
        self,
        data: bytes,
        *,
        sample_id: str,
        max_pixels: int | None = None,
        still: Still | None = None,
        windows: Sequence[str] = (),
    ) -> MadeImage:
        """Returns what is stored of one image. max_pixels: None: of the step. still: what is asked of it.

        windows: the names of those that are made, too.
        Raises SampleError for one of no use.
        """
        limit = max_pixels or self._step.max_pixels
        with span(DECODE):
            image = decode_image(data, sample_id=sample_id, **{**self._step.decoding, "max_pixels": limit})
        settings, still = self._settings, still or Still()
        grid = still.grid(*image.size, settings, limit)
        if self._step.backend == "pil":
            with span(RESIZE):
                pixels = resized(image, settings, grid)
                parts = {name: resized(self._step.windows.part(image, name), settings, grid) for name in windows}
            with span(PATCHES):
                made = {name: (part, patchify(part, settings)) for name, part in parts.items()}
                return MadeImage(pixels, patchify(pixels, settings), grid, made)
        if still.has_size:
            said = 'vision.backend = "torchvision" has no size for one image alone; remove the fields'
            raise SampleError("image_pixel_limits", f"{sample_id}: {said}")
        with span(PATCHES):
            patches = processed_patches(self._processor, image, settings, self.table)
        return MadeImage(unpatchify(patches, grid, settings), patches, grid)


def load_processor(folder: Path, backend: Backend) -> Any:
    """Returns transformers' image processor of a folder with this backend: `make_processor` of its document."""
    return make_processor(*processor_document(folder), backend)


def make_processor(path: Path, document: Mapping[str, Any], backend: Backend) -> Any:
    """Returns transformers' image processor of a document with this backend, and no other.

    It is made of what was read and checked, without another look at the folder: transformers would ask other files
    there (a config.json of timm, an `auto_map` that names code) which class to take. `path`: for messages.

    A torchvision that is installed but does not load (built for another torch, as a rule) makes transformers fail for
    every backend, because it looks only whether torchvision is there. For "pil" it is hidden from this process, in
    which nothing could import it anyway, and a warning says so.

    Raises ConfigError where "torchvision" is not installed or does not load, or the document is none of the Qwen2-VL
    family or none that its class takes.
    """
    settings_in(path, document)
    if (problem := torchvision_problem()) is not None:
        if backend == "torchvision":
            raise ConfigError(
                f'vision.backend = "torchvision": torchvision is installed but does not load ({problem}); '
                'set vision.backend = "pil", or install the torchvision that belongs to this torch',
                code="FB107",
            )
        hide_torchvision(problem)
    if backend == "torchvision" and importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            'vision.backend = "torchvision": torchvision is not installed; install it, or set vision.backend = "pil"',
            code="FB107",
        )
    import transformers

    name = class_name(document) + _ENDINGS[backend]
    known = {field: value for field, value in document.items() if field != "auto_map"}
    try:
        return getattr(transformers, name).from_dict(known)
    except (AttributeError, KeyError, ValueError, TypeError) as err:
        raise ConfigError(f"vision.processor: {path} does not load as {an(name)}: {err!r}", code="FB107") from err


def patch_table(processor: Any, settings: ImageSettings) -> Table:
    """Returns the table [3, 256] by which the processor's `pixel_values` are made of uint8 patches: `expand` below.

    Read off the processor's own output for an image that holds every value in every channel. Raises ConfigError where
    the output is not of that form: another order in a row, copies that differ, values that depend on their place.
    """
    side = settings.factor * math.ceil(16 / settings.factor)
    # In no order, so that no other order of a row looks like a table.
    values = np.random.default_rng(0).permuted(np.resize(np.arange(256, dtype=np.uint8), (3, side * side)), axis=1)
    pixels = np.ascontiguousarray(values.T).reshape(side, side, 3)
    output = _processed(processor, _rgb(pixels), do_resize=False)
    patches = patchify(pixels, settings)
    wanted = (len(patches), settings.patch_bytes * settings.temporal_patch_size)
    if output.shape != wanted:
        raise _unlike(processor, f"pixel_values {list(output.shape)} for {side}x{side} pixels, wanted {list(wanted)}")
    rows = patches.reshape(len(patches), 3, -1)
    copies = output.reshape(len(patches), 3, settings.temporal_patch_size, -1)
    table = np.empty((3, 256), np.float32)
    for channel in range(3):
        table[channel, rows[:, channel]] = copies[:, channel, 0]
    if not np.array_equal(expand(patches, table, settings), output):
        raise _unlike(processor, "pixel_values that are no table of (channel, value) in rows of (channel, time, y, x)")
    return table


def expand(patches: PatchArray, table: Table, settings: ImageSettings) -> npt.NDArray[np.float32]:
    """Returns `pixel_values` float32 [n, 3 * temporal_patch_size * patch_size^2] of patches [n, 3 * patch_size^2]."""
    rows = patches.reshape(len(patches), 3, 1, -1)
    values = table[np.arange(3).reshape(1, 3, 1, 1), rows]
    shape = (len(patches), 3, settings.temporal_patch_size, rows.shape[-1])
    return np.broadcast_to(values, shape).reshape(len(patches), -1)


def processed_patches(processor: Any, image: Image, settings: ImageSettings, table: Table) -> PatchArray:
    """Returns the patches uint8 [n, 3 * patch_size^2] of an RGB image by the processor itself, backend "torchvision".

    Its float output is looked up in the table, exactly. The image is decoded by Pillow under both backends.

    Raises ConfigError where a value is not in the table; SampleError as `grid_thw` does.
    """
    grid = grid_thw(*image.size, settings)
    output = _processed(processor, image)
    if len(output) != grid[1] * grid[2]:
        raise _unlike(processor, f"{len(output)} patches for an image of {image.size}, wanted a grid of {grid}")
    values = output.reshape(len(output), 3, settings.temporal_patch_size, -1)[:, :, 0]
    patches = np.empty(values.shape, np.uint8)
    for channel in range(3):
        order = np.argsort(table[channel], kind="stable")
        place = np.searchsorted(table[channel][order], values[:, channel])
        patches[:, channel] = order[np.minimum(place, 255)]
    found = patches.reshape(len(output), -1)
    if not np.array_equal(expand(found, table, settings), output):
        raise _unlike(processor, "values that are of no uint8 pixel, so they cannot be stored as such")
    return found


def check_processor(processor: Any, settings: ImageSettings, table: Table) -> None:
    """Returns where our own path equals the processor bit for bit on small built-in images; backend "pil" only.

    Raises ConfigError, which names the processor and what differs.
    """
    factor, generator = settings.factor, np.random.default_rng(0)
    sizes = [(factor * 4 + 3, factor * 3 - 5), (7, 5), (factor * 3, factor * 2), (factor * 5 // 2, factor * 7 // 2)]
    if settings.max_pixels <= _CHECKED_PIXELS:
        sizes.append((math.isqrt(settings.max_pixels) + factor, math.isqrt(settings.max_pixels)))
    for width, height in sizes:
        if not settings.do_resize:
            width, height = factor * math.ceil(width / factor), factor * math.ceil(height / factor)
        image = _rgb(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
        ours = expand(patchify(resized(image, settings), settings), table, settings)
        theirs = _processed(processor, image)
        if ours.shape != theirs.shape:
            raise _unlike(
                processor, f"pixel_values {list(theirs.shape)} for {width}x{height} pixels, {list(ours.shape)} by us"
            )
        if not np.array_equal(ours, theirs):
            differing = int((ours != theirs).sum())
            raise _unlike(
                processor, f"other values for {differing} of {ours.size} of an image of {width}x{height} pixels"
            )


def _processed(processor: Any, image: Image, **options: Any) -> npt.NDArray[np.float32]:
    try:
        output = processor(images=[image], return_tensors="np", **options)["pixel_values"]
    except (ValueError, TypeError, KeyError) as err:
        raise _unlike(processor, f"{type(err).__name__}: {err}") from err
    return np.asarray(output, np.float32)


def _unlike(processor: Any, found: str) -> ConfigError:
    return ConfigError(
        f"vision.processor: {type(processor).__name__} gives {found}; only processors that cut patches as Qwen2-VL's "
        'can be stored as patches: point vision.processor at one, or set images = "processor" under [vision]',
        code="FB107",
    )


def _rgb(pixels: npt.NDArray[np.uint8]) -> Image:
    from PIL import Image

    return Image.fromarray(pixels)
