"""Made the golden caches of declared forms: `python -m tests.golden.make_v4_declared`. They are kept, never made again.

One of audio whose two fields are float16 and have a mask, one of images: codes with a table, and fields that grow. The
values are made of integers, so that no library decides them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.preprocess.group import with_group
from forebay.steps.form import BatchForm, FieldForm, Promise, Table
from forebay.store.key import digest
from forebay.store.layout import Array, FieldSpec, Group, ListedItems
from forebay.store.seal import Contents, seal
from forebay.store.shard import ShardEntry, shard_fields, shard_name, write_shard

FOLDER = Path(__file__).parent / "v4_declared"
"""Holds the caches and `expected.json`."""
AUDIO, IMAGES = "golden-train-audio", "golden-train-images"
NAMES = (AUDIO, IMAGES)
FRAMES = (3, 1, 5)
AUDIO_FORM = BatchForm(
    made_by="GoldenFeatureExtractor",
    fields=(
        FieldForm(
            name="input_features", dtype="float32", shape=(None, 4), stored_dtype="float16", pad=-1.5, multiple=4
        ),
        FieldForm(name="attention_mask", dtype="int64", shape=(None,), stored_dtype="int64", mask_of="input_features"),
        FieldForm(name="energy", dtype="float32", shape=(2, None), stored_dtype="float16", pad=0.25, side="left"),
    ),
    promise=Promise(kind="within", limit=2e-6),
)

TABLE = np.array([[-1.5, -0.1, 0.3, 1.1, 2.0], [-2.0, -0.7, 0.0, 0.7, 1.5], [-1.0, 0.2, 0.4, 0.6, 3e-7]], np.float32)
SIZES = ((2, 3), (4, 2), (1, 1))
"""Height and width of each image."""
ROWS = ((0,), (0, 1), (), (2, 1))
"""Images of every sample; the third one is text alone."""
IMAGES_FORM = BatchForm(
    made_by="GoldenImageProcessor",
    fields=(
        FieldForm(
            name="pixel_values",
            dtype="float32",
            shape=(3, None, None),
            stored_dtype="uint8",
            table=Table(axis=0, values=TABLE),
        ),
        FieldForm(name="pixel_mask", dtype="int64", shape=(None, None), stored_dtype="int64", mask_of="pixel_values"),
        FieldForm(name="places", dtype="int64", shape=(None, 2), stored_dtype="int32", join="cat"),
    ),
    promise=Promise(kind="exact", why="but not of samples with several images: they are padded alone"),
)
TEXT_FORM = BatchForm(
    made_by="GoldenProcessor",
    fields=(
        FieldForm(name="input_ids", dtype="int64", shape=(None,), stored_dtype="int32", pad=1),
        FieldForm(name="attention_mask", dtype="int64", shape=(None,), stored_dtype="int64", mask_of="input_ids"),
    ),
    promise=Promise(kind="exact"),
)

_TEXT = FieldSpec(name="text", dtype="str", group="text", role="table")
AUDIO_FIELDS = (
    *with_group(AUDIO_FORM.specs(), "audio"),
    FieldSpec(name="num_audio_samples", dtype="int64", group="audio", role="table"),
    FieldSpec(name="sample_id", dtype="str", group="text", role="table"),
    _TEXT,
    FieldSpec(name="language", dtype="str", group="text", role="table"),
)
IMAGES_FIELDS = (
    *with_group(IMAGES_FORM.specs(), "image"),
    FieldSpec(name="image_hash", dtype="str", group="image", role="table"),
    *with_group(TEXT_FORM.specs(), "text"),
    FieldSpec(name="label_mask", dtype="uint8", group="text"),
    *(FieldSpec(name=name, dtype="str", group="text", role="table") for name in ("sample_id", "images", "source")),
    _TEXT,
)


def clip(row: int) -> dict[str, Array]:
    """Returns the arrays of a clip: halves, which float16 holds."""
    frames = FRAMES[row]
    return {
        "input_features": ((np.arange(frames * 4) * 37 + row) % 251 / 2 - 60).astype(np.float16).reshape(frames, 4),
        "energy": ((np.arange(frames * 2) * 11 + row) % 17 / 2).astype(np.float16).reshape(2, frames),
    }


def image(row: int) -> dict[str, Array]:
    """Returns the arrays of an image: codes, and as many places as it has rows."""
    height, width = SIZES[row]
    return {
        "pixel_values": ((np.arange(3 * height * width) * 7 + row) % 5).astype(np.uint8).reshape(3, height, width),
        "places": (np.arange(height * 2) * 3 - row).astype(np.int32).reshape(height, 2),
    }


def words(sample: int) -> dict[str, Array]:
    """Returns the text fields of a sample."""
    count = 3 + 2 * sample
    return {
        "input_ids": (np.arange(count) * 7 + sample).astype(np.int32),
        "label_mask": (np.arange(count) % 2).astype(np.uint8),
    }


def rows_of(name: str) -> dict[Group, list[dict[str, Any]]]:
    """Returns the rows of both groups of a cache as they are written."""
    if name == AUDIO:
        return {"audio": list(map(_clip_row, range(len(FRAMES)))), "text": list(map(_said_row, range(len(FRAMES))))}
    return {"image": list(map(_image_row, range(len(SIZES)))), "text": list(map(_talk_row, range(len(ROWS))))}


def _clip_row(row: int) -> dict[str, Any]:
    stored = [field.stored(clip(row)[field.name]) for field in AUDIO_FORM.stored]
    fields = {name: array for one in stored for name, array in one.items()}
    return {**fields, "num_audio_samples": np.int64(FRAMES[row] * 160)}


def _said_row(row: int) -> dict[str, Any]:
    return {"sample_id": f"clip-{row}", "text": f"text {row} ¿qué?", "language": "es"}


def _image_row(row: int) -> dict[str, Any]:
    stored = [field.stored(image(row)[field.name]) for field in IMAGES_FORM.stored]
    fields = {name: array for one in stored for name, array in one.items()}
    return {**fields, "image_hash": hashlib.md5(bytes([row])).hexdigest()}


def _talk_row(row: int) -> dict[str, Any]:
    images = json.dumps([f"{number}.png" for number in ROWS[row]])
    beside = {"sample_id": f"chat-{row}", "text": f"conversation {row} 你好", "images": images}
    return {**words(row), **beside, "source": "train.jsonl"}


def write_shards(name: str, scratch: Path) -> dict[Group, list[tuple[Path, ShardEntry]]]:
    """Writes the one shard of each group of a cache below a folder."""
    shards: dict[Group, list[tuple[Path, ShardEntry]]] = {}
    for group in rows_of(name):
        (scratch / group).mkdir(parents=True, exist_ok=True)
        path = scratch / shard_name(group, 0)
        fields = shard_fields(fields_of(name), group)
        shards[group] = [(path, write_shard(path, fields, rows_of(name)[group], key=digest(["v4", name, group])))]
    return shards


def fields_of(name: str) -> tuple[FieldSpec, ...]:
    """Returns the fields of a cache."""
    return AUDIO_FIELDS if name == AUDIO else IMAGES_FIELDS


def expected() -> dict[str, Any]:
    """Returns the samples and the batch of all of them that a reader has to find; made with no code of forms."""
    clips = [{name: array.tolist() for name, array in clip(row).items()} for row in range(len(FRAMES))]
    talks = [
        {
            "input_ids": words(row)["input_ids"].tolist(),
            "label_mask": words(row)["label_mask"].tolist(),
            **{name: [image(number)[name].tolist() for number in ROWS[row]] for name in ("pixel_values", "places")},
        }
        for row in range(len(ROWS))
    ]
    return {AUDIO: {"samples": clips, "batch": _audio_batch()}, IMAGES: {"samples": talks, "batch": _images_batch()}}


def _audio_batch() -> dict[str, Any]:
    room = 8  # 5 frames, to a multiple of 4
    features, mask = np.full((3, room, 4), -1.5, np.float32), np.zeros((3, room), np.int64)
    energy = np.full((3, 2, 5), 0.25, np.float32)
    for row, frames in enumerate(FRAMES):
        features[row, :frames] = clip(row)["input_features"]
        mask[row, :frames] = 1
        energy[row, :, 5 - frames :] = clip(row)["energy"]
    return _listed(input_features=features, attention_mask=mask, energy=energy)


def _images_batch() -> dict[str, Any]:
    shown = [number for numbers in ROWS for number in numbers]
    height, width = (max(SIZES[number][axis] for number in shown) for axis in (0, 1))
    pixels, mask = np.zeros((len(shown), 3, height, width), np.float32), np.zeros((len(shown), height, width), np.int64)
    for row, number in enumerate(shown):
        rows, columns = SIZES[number]
        codes = image(number)["pixel_values"]
        pixels[row, :, :rows, :columns] = np.stack([TABLE[channel][codes[channel]] for channel in range(3)])
        mask[row, :rows, :columns] = 1
    longest = max(len(words(row)["input_ids"]) for row in range(len(ROWS)))
    ids, labels = np.ones((len(ROWS), longest), np.int64), np.full((len(ROWS), longest), -100)
    seen = np.zeros((len(ROWS), longest), np.int64)
    for row in range(len(ROWS)):
        own, learnt = words(row)["input_ids"], words(row)["label_mask"] == 1
        ids[row, : len(own)], seen[row, : len(own)] = own, 1
        labels[row, : len(own)] = np.where(learnt, own, -100)
    places = np.concatenate([image(number)["places"] for number in shown]).astype(np.int64)
    return _listed(
        pixel_values=pixels, pixel_mask=mask, places=places, input_ids=ids, attention_mask=seen, labels=labels
    )


def _listed(**arrays: Array) -> dict[str, Any]:
    """Returns arrays as JSON values; of floats their bits."""
    return {name: [str(array.dtype), list(array.shape), _bits(array)] for name, array in arrays.items()}


def _bits(array: Array) -> list[int]:
    found: list[int] = (array.view(np.int32) if array.dtype == np.float32 else array).reshape(-1).tolist()
    return found


def contents(name: str, scratch: Path) -> Contents:
    """Returns what a golden cache is sealed from."""
    rows = rows_of(name)
    if name == AUDIO:
        items = {}
        lengths: Sequence[Sequence[int]] = [[frames * 160 for frames in FRAMES], FRAMES, [0] * len(FRAMES)]
    else:
        items = {"image": items_of(ROWS)}
        places = [sum(SIZES[number][0] for number in numbers) for numbers in ROWS]
        lengths = [[len(row["input_ids"]) for row in rows["text"]], [len(numbers) for numbers in ROWS], places]
    return Contents(
        fields=fields_of(name),
        shards=write_shards(name, scratch),
        items=items,
        arrays={
            "slots.npy": np.arange(len(rows["text"]), dtype="<i8"),
            "lengths.npy": np.array(lengths, "<i4"),
        },
        files={"rejected.jsonl": b""},
        document={
            **(_AUDIO_DOCUMENT if name == AUDIO else _IMAGES_DOCUMENT),
            "name": "golden",
            "split": "train",
            "key": digest(["v4", name]),
            "recipe_key": digest([name, "recipe"]),
            "num_samples": len(rows["text"]),
            "rows_per_shard": 4,
            "probe": dict.fromkeys(rows, "0" * 32),
            "excluded": {},
            "failed": {},
            "unused_fields": {},
            "clipped": 0,
            "longer": 0,
            "languages": {},
        },
    )


_AUDIO_DOCUMENT: dict[str, Any] = {
    "recipe": {"source": {"kind": "tar"}, "audio": {"features": "extractor"}, "text": None},
    "length_names": ["num_audio_samples", "num_frames", "num_tokens"],
    "constants": {
        "audio": {
            "features": "declared",
            "sample_rate_hz": 16_000,
            "n_mels": None,
            "form": AUDIO_FORM.to_json(),
        },
        "text": {},
    },
}
_IMAGES_DOCUMENT: dict[str, Any] = {
    "recipe": {"source": {"kind": "jsonl"}, "images": {"processor": ""}, "text": {"version": 1}},
    "length_names": ["num_tokens", "num_images", "num_patches"],
    "constants": {
        "image": {"features": "images", "form": IMAGES_FORM.to_json()},
        "text": {"prompt": "chat", "text_form": TEXT_FORM.to_json()},
    },
    "codec": "raw",
    "num_images": len(SIZES),
}


def items_of(listed: Sequence[Sequence[int]]) -> ListedItems:
    """Returns which rows of the one shard of images every sample lists."""
    counts = [len(rows) for rows in listed]
    return ListedItems(np.cumsum([0, *counts]), np.array([row for rows in listed for row in rows], np.int64))


def main() -> None:
    """Makes the golden caches beside this file. Raises FileExistsError where they are: they are never written again."""
    FOLDER.mkdir()
    for name in NAMES:
        scratch = FOLDER / "scratch"
        seal(FOLDER / name, contents(name, scratch), scratch=scratch)
        shutil.rmtree(scratch)
    (FOLDER / "expected.json").write_text(json.dumps(expected()), encoding="utf-8")


if __name__ == "__main__":
    main()
