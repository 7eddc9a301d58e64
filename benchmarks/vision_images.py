"""Measures what an image costs: `python -m benchmarks.vision_images [--tiny] [--json] [--rounds N]`.

One thread works on 24 images, in two settings. The first is the demo photos as they are, under the demo's processor (at
most 131,072 pixels). The second is JPEGs of the sizes of COCO, which VQA sets ask about, under Qwen3-VL's processor
(65,536 to 16,777,216 pixels: most sides stay). transformers' PIL processor gets a batch of 24, as a training step would
call it: encoded bytes, which the processor loads itself, or decoded images. forebay makes uint8 patches. Both results
are compared bit for bit, through the processor's table, before anything counts. "Bare" is Pillow alone: it decodes and
resizes to the same sides, which is the least that exact patches cost. Figures are CPU milliseconds an image. Every
round times all contestants in turn; figures are medians, and ratios are those within a round.

The table of codecs shows bytes an image, and CPU milliseconds to write an image and to have its patches in memory again
(`raw` and float32: a copy).
"""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import torch
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.report import arguments, machine, median, ratio, show, timed
from forebay.steps.image.qwen2_vl import expand, patch_table
from forebay.store.image.codec import FIELDS, decode, decode_image, encode, patchify, resized
from forebay.store.image.image_settings import ImageSettings

PHOTOS = sorted((Path(__file__).parents[1] / "demo" / "vision" / "photos").iterdir())
COCO_SIZES = ((640, 480), (640, 427), (480, 640), (640, 426), (640, 480), (500, 375))
MAX_PIXELS = 89_478_485
HALF = (0.5, 0.5, 0.5)
DEMO = ImageSettings(patch_size=16, min_pixels=16_384, max_pixels=131_072, image_mean=HALF, image_std=HALF)
QWEN3_VL = ImageSettings(patch_size=16, min_pixels=65_536, max_pixels=16_777_216, image_mean=HALF, image_std=HALF)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Images:
    """Encoded images and the settings that they are processed with."""

    name: str
    files: list[bytes]
    settings: ImageSettings

    @property
    def processor(self) -> Qwen2VLImageProcessorPil:
        s = self.settings
        size = {"shortest_edge": s.min_pixels, "longest_edge": s.max_pixels}
        return Qwen2VLImageProcessorPil(
            size=size, patch_size=s.patch_size, image_mean=list(s.image_mean), image_std=list(s.image_std)
        )


def image_sets(count: int) -> list[Images]:
    photos = [PHOTOS[i % len(PHOTOS)].read_bytes() for i in range(count)]
    coco = [_jpeg(data, COCO_SIZES[i % len(COCO_SIZES)]) for i, data in enumerate(photos)]
    return [Images("COCO sizes, Qwen3-VL", coco, QWEN3_VL), Images("demo photos, demo", photos, DEMO)]


def _jpeg(data: bytes, size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    decode_image(data, max_pixels=MAX_PIXELS, sample_id="photo").resize(size).save(file, "JPEG", quality=90)
    return file.getvalue()


def decoded(files: Sequence[bytes]) -> list[Image.Image]:
    return [decode_image(data, max_pixels=MAX_PIXELS, sample_id="photo") for data in files]


def patches_of(images: Sequence[Image.Image], settings: ImageSettings) -> list[Array]:
    return [patchify(resized(image, settings), settings) for image in images]


def verify(images: Images, loaded: Sequence[Image.Image]) -> None:
    """Stops the benchmark unless our patches, through the table, are the processor's values."""
    processor = images.processor
    table = patch_table(processor, images.settings)
    ours = expand(np.concatenate(patches_of(decoded(images.files), images.settings)), table, images.settings)
    if not np.array_equal(ours, processor(images=loaded, return_tensors="np")["pixel_values"]):
        raise SystemExit(f"{images.name}: our pixel values are not the processor's")


def processing(images: Images, *, rounds: int) -> list[dict[str, Any]]:
    """Returns two rows: from the file, and from decoded pixels."""
    settings, processor = images.settings, images.processor
    texts = [base64.b64encode(data).decode() for data in images.files]  # what `load_image` takes instead of a path
    loaded = [load_image(text) for text in texts]
    verify(images, loaded)
    sides = [resized(image, settings).shape[1::-1] for image in decoded(images.files)]
    contests: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]] = {
        "file to values": (
            lambda: patches_of(decoded(images.files), settings),
            lambda: processor(images=[load_image(text) for text in texts], return_tensors="np"),
            lambda: _bare([Image.open(io.BytesIO(data)) for data in images.files], sides),
        ),
        "pixels to values": (
            lambda: patches_of(loaded, settings),
            lambda: processor(images=loaded, return_tensors="np"),
            lambda: _bare(loaded, sides),
        ),
    }
    rows = []
    for work, contest in contests.items():
        mine, their, bare = zip(*([timed(each).cpu_s for each in contest] for _ in range(rounds)), strict=True)
        scale = 1e3 / len(images.files)
        rows.append(
            {
                "images": images.name,
                "work": work,
                "ours_ms": median(mine) * scale,
                "pil_processor_ms": median(their) * scale,
                "ratio": ratio(their, mine),
                "bare_ms": median(bare) * scale,
                "bare_over_ours": ratio(bare, mine),
            }
        )
    return rows


def _bare(images: Sequence[Image.Image], sides: Sequence[tuple[int, int]]) -> list[Array]:
    pairs = zip(images, sides, strict=True)
    return [np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC)) for image, size in pairs]


def codecs(images: Images, *, rounds: int) -> list[dict[str, Any]]:
    """Returns a row a codec, and float32 `pixel_values` as stored by others."""
    settings, count = images.settings, len(images.files)
    pixels = [resized(image, settings) for image in decoded(images.files)]
    patches = [patchify(part, settings) for part in pixels]
    grids = [(1, part.shape[0] // settings.patch_size, part.shape[1] // settings.patch_size) for part in pixels]
    table = patch_table(images.processor, settings)
    values = [expand(part, table, settings) for part in patches]
    value_bytes = sum(part.nbytes for part in values)
    reading = median(timed(lambda: [part.copy() for part in values]).cpu_s for _ in range(rounds))
    rows = [_codec_row("float32", value_bytes, value_bytes, None, reading, count)]
    for codec in FIELDS:

        def write(codec: Any = codec) -> list[Array]:
            parts = zip(images.files, pixels, patches, strict=True)
            return [encode(codec, data=data, pixels=shown, patches=rows)[1] for data, shown, rows in parts]

        stored = write()

        def read(codec: Any = codec, stored: list[Array] = stored) -> list[Array]:
            found = (
                decode(codec, part, grid=grid, settings=settings, max_pixels=MAX_PIXELS)
                for part, grid in zip(stored, grids, strict=True)
            )
            return [part.copy() if codec == "raw" else part for part in found]

        if not all(np.array_equal(a, b) for a, b in zip(read(), patches, strict=True)):
            raise SystemExit(f"{codec}: other patches than were stored")
        writing = median(timed(write).cpu_s for _ in range(rounds))
        reading = median(timed(read).cpu_s for _ in range(rounds))
        rows.append(_codec_row(codec, sum(part.nbytes for part in stored), value_bytes, writing, reading, count))
    return rows


def _codec_row(
    codec: str, size_bytes: int, value_bytes: int, write_s: float | None, read_s: float, count: int
) -> dict[str, Any]:
    return {
        "codec": codec,
        "kb_per_image": size_bytes / count / 1e3,
        "times_smaller": value_bytes / size_bytes,
        "write_ms": None if write_s is None else write_s / count * 1e3,
        "read_ms": read_s / count * 1e3,
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    rounds = options.rounds or (1 if options.tiny else 7)
    torch.set_num_threads(1)
    sets = image_sets(4 if options.tiny else 24)
    document = {
        "machine": machine("pillow", "numpy", "transformers", "pyarrow"),
        "processing": [row for images in sets for row in processing(images, rounds=rounds)],
        **{f"codecs: {images.name}": codecs(images, rounds=rounds) for images in sets},
    }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
