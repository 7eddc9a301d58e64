"""Made the golden caches of patches of format 4: `python -m tests.golden.make_v4_patches`. They are never made again.

One a codec that is read without decoding a photo: raw and zstd. The pixels are made of integers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.store.image.codec import FIELDS, Codec, encode, patchify
from forebay.store.image.image_settings import ImageSettings
from forebay.store.key import digest
from forebay.store.layout import FieldSpec, Group, ListedItems
from forebay.store.seal import Contents, seal
from forebay.store.shard import ShardEntry, shard_fields, shard_name, write_shard

FOLDER = Path(__file__).parent / "v4_patches"
"""Holds the caches and `expected.json`."""
CODECS: tuple[Codec, ...] = ("raw", "zstd")
SETTINGS = ImageSettings(patch_size=2, merge_size=2, min_pixels=16, max_pixels=1024)
GRIDS = ((1, 2, 4), (1, 4, 2), (1, 2, 2))
IMAGES = ((0,), (0, 1), (2, 2, 1), ())
"""Images of every sample; the last one is text alone."""
GROUPS = ("image", "text")


def fields_of(codec: Codec) -> tuple[FieldSpec, ...]:
    """Returns the fields of a codec's cache."""
    shape = (3 * SETTINGS.patch_size**2,) if codec == "raw" else ()
    return (
        FieldSpec(name=FIELDS[codec], dtype="uint8", shape=shape, group="image"),
        FieldSpec(name="image_grid_thw", dtype="int32", shape=(3,), group="image"),
        FieldSpec(name="image_hash", dtype="str", group="image", role="table"),
        FieldSpec(name="input_ids", dtype="int32", group="text"),
        FieldSpec(name="label_mask", dtype="uint8", group="text"),
        *(
            FieldSpec(name=n, dtype="str", group="text", role="table")
            for n in ("sample_id", "text", "images", "source")
        ),
    )


def items_of(listed: Sequence[Sequence[int]]) -> ListedItems:
    """Returns which rows of the one shard of images every sample lists."""
    counts = [len(rows) for rows in listed]
    return ListedItems(np.cumsum([0, *counts]), np.array([row for rows in listed for row in rows], np.int64))


def name(codec: Codec) -> str:
    """Returns the folder's name of a codec's cache."""
    return "golden-train-patches" + ("" if codec == "raw" else f".{codec}")


def pixels(image: int) -> np.ndarray[Any, Any]:
    """Returns the pixels uint8 [height, width, 3] of an image."""
    _, rows, columns = GRIDS[image]
    height, width = rows * SETTINGS.patch_size, columns * SETTINGS.patch_size
    return ((np.arange(height * width * 3) * 37 + image * 11) % 251).astype(np.uint8).reshape(height, width, 3)


def text_row(sample: int) -> dict[str, Any]:
    """Returns a sample's text fields."""
    count = 3 + 2 * sample
    return {
        "input_ids": (np.arange(count) * 7 + sample).astype(np.int32),
        "label_mask": (np.arange(count) % 2).astype(np.uint8),
        "sample_id": f"chat-{sample}",
        "text": f"conversation {sample} 你好",
        "images": json.dumps([f"{image}.jpg" for image in IMAGES[sample]]),
        "source": "train.jsonl",
    }


def image_row(image: int, codec: Codec) -> dict[str, Any]:
    """Returns an image's fields."""
    patches = patchify(pixels(image), SETTINGS)
    field, stored = encode(codec, data=b"", pixels=pixels(image), patches=patches)
    grid = np.array([GRIDS[image]], np.int32)
    return {field: stored, "image_grid_thw": grid, "image_hash": hashlib.md5(pixels(image).tobytes()).hexdigest()}


def write_shards(scratch: Path, codec: Codec) -> dict[Group, list[tuple[Path, ShardEntry]]]:
    """Writes the one shard of each group below a folder."""
    fields = fields_of(codec)
    rows: dict[Group, list[Any]] = {
        "image": [image_row(image, codec) for image in range(len(GRIDS))],
        "text": [text_row(sample) for sample in range(len(IMAGES))],
    }
    shards: dict[Group, list[tuple[Path, ShardEntry]]] = {}
    for group in GROUPS:
        (scratch / group).mkdir(parents=True, exist_ok=True)
        path = scratch / shard_name(group, 0)
        shards[group] = [
            (path, write_shard(path, shard_fields(fields, group), rows[group], key=digest([group, codec])))
        ]
    return shards


def expected() -> dict[str, Any]:
    """Returns what a reader has to find, in a form that needs no reader of ours."""
    samples = [
        {
            "input_ids": text_row(sample)["input_ids"].tolist(),
            "label_mask": text_row(sample)["label_mask"].tolist(),
            "image_grid_thw": [list(GRIDS[image]) for image in IMAGES[sample]],
            "patches": [patchify(pixels(image), SETTINGS).tolist() for image in IMAGES[sample]],
        }
        for sample in range(len(IMAGES))
    ]
    return {"key": digest("golden v4 patches"), "samples": samples}


def contents(scratch: Path, codec: Codec) -> Contents:
    """Returns what a golden cache is sealed from."""
    patches = [sum(int(np.prod(GRIDS[image])) for image in images) for images in IMAGES]
    lengths = [[3 + 2 * n for n in range(len(IMAGES))], patches, [len(images) for images in IMAGES]]
    return Contents(
        fields=fields_of(codec),
        shards=write_shards(scratch, codec),
        items={"image": items_of(IMAGES)},
        arrays={"slots.npy": np.arange(len(IMAGES), dtype="<i8"), "lengths.npy": np.array(lengths, "<i4")},
        files={"rejected.jsonl": b""},
        document={
            "name": "golden",
            "split": "train",
            "key": digest("golden v4 patches"),
            "recipe_key": digest("golden vision recipe"),
            "recipe": {"source": {"kind": "jsonl"}, "vision": {"backend": "pil"}, "text": {"version": 1}},
            "num_samples": len(IMAGES),
            "length_names": ["num_tokens", "num_patches", "num_images"],
            "rows_per_shard": 4,
            "probe": dict.fromkeys(GROUPS, "0" * 32),
            "constants": {
                "image": {"features": "patches", "image": SETTINGS.to_json(), "max_pixels": 4096, "alpha": "drop"},
                "text": {},
            },
            "excluded": {},
            "failed": {},
            "unused_fields": {},
            "clipped": 0,
            "longer": 0,
            "languages": {},
            "codec": codec,
            "num_images": len(GRIDS),
        },
    )


def main() -> None:
    """Makes the golden caches beside this file. Raises FileExistsError where they are: they are never written again."""
    FOLDER.mkdir()
    for codec in CODECS:
        scratch = FOLDER / "scratch"
        seal(FOLDER / name(codec), contents(scratch, codec), scratch=scratch)
        shutil.rmtree(scratch)
    (FOLDER / "expected.json").write_text(json.dumps(expected()), encoding="utf-8")


if __name__ == "__main__":
    main()
