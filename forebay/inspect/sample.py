"""One sample of a cache: its row, tensors and labels; of a cache of images its conversation and images too."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.config.tree import Config
from forebay.errors import CacheError
from forebay.inspect.facts import float32_bytes, holds_images, image_settings_of
from forebay.inspect.labels import labels_of, learnt_of
from forebay.store.cache import Cache
from forebay.store.image.codec import FIELDS
from forebay.store.image.pixels import unpatchify
from forebay.store.layout import ROW_BITS, ROW_MASK, Array, FieldSpec
from forebay.store.schema import TEXT, list_of, record
from forebay.store.shard import Shard


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample as it is stored.

    row: table fields, `duration_s`, `shard` and `shard_row`. tensors: read-only views [n, *shape] by field name.
    labels: of `labels_of`.
    """

    index: int
    row: Mapping[str, Any]
    tensors: Mapping[str, Array]
    labels: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """Returns the `sample` part of `forebay inspect --json`; what is not a number in JSON (NaN) is null."""
        return {"index": self.index, "row": dict(self.row), "fields": _fields(self.tensors), "labels": self.labels}


def read_sample(cache: Cache, index: int, *, config: Config | None) -> Sample | ImageSample:
    """Returns one sample, its bytes checked against their hash; of a cache of images with its images rebuilt.

    config: names the tokenizer by which labels are decoded.
    Raises CacheError for an index that the cache does not have, CacheCorruptError where bytes are not those that were
    written.
    """
    if holds_images(cache):
        return read_image_sample(cache, index, config=config)
    tensors = _read(cache, index)
    return Sample(index=index, row=_row(cache, index), tensors=tensors, labels=labels_of(cache, config, tensors))


def _read(cache: Cache, index: int) -> dict[str, Any]:
    check_index(index, len(cache), what=f"{cache.folder} has {len(cache)} samples")
    return cache.read(index)


def check_index(index: int, count: int, *, what: str) -> None:
    """Raises CacheError where `--sample` names none of what is there; `what` says how many there are."""
    if not 0 <= index < count:
        span = f"0 to {count - 1}" if count else "none"
        raise CacheError(f"--sample {index}: {what} ({span}); name one of them")


def sample_index(cache: Cache, wanted: str) -> int:
    """Returns the index of the sample that `--sample` names: by its index, or by its id.

    A number without leading zeros that is an index of the cache is the index; all else is an id first.
    Raises CacheError where there is no such sample, and says so of a row that was left out.
    """
    number = number_of(wanted)
    if number is not None and 0 <= number < len(cache):
        return number
    found = _index_of_id(cache, wanted)
    if found is not None:
        return found
    if number is not None:
        check_index(number, len(cache), what=f"{cache.folder} has {len(cache)} samples")
    raise CacheError(
        f"--sample {wanted}: {cache.folder} has no sample with that id; what was left out: "
        f"{cache.folder / 'rejected.jsonl'}; every id: forebay inspect {cache.folder} --export FILE.parquet"
    )


def number_of(wanted: str) -> int | None:
    """Returns the number that a text is, written as Python would write it, else None: `007` is a name."""
    is_number = wanted.removeprefix("-").isdecimal() and len(wanted) < 20
    return int(wanted) if is_number and str(int(wanted)) == wanted else None


def _index_of_id(cache: Cache, sample_id: str) -> int | None:
    """Reads the ids alone, shard by shard."""
    if (spec := cache.fields.get("sample_id")) is None:
        return None
    for number in range(cache.num_shards):
        ids = cache.shard(spec.group, number).strings("sample_id")
        if sample_id not in ids:
            continue
        slot = number << ROW_BITS | ids.index(sample_id)
        places = np.flatnonzero(cache.slots == slot)
        if not len(places):
            raise CacheError(f"--sample {sample_id}: that row was left out; why: {cache.folder / 'rejected.jsonl'}")
        return int(places[0])
    return None


def _row(cache: Cache, index: int) -> dict[str, Any]:
    """Reads the columns of the sample's own shards: `cache.samples` would read those of all."""
    slot = int(cache.slots[index])
    number, position = slot >> ROW_BITS, slot & ROW_MASK
    shards = [cache.shard(group, number) for group in (("text",) if holds_images(cache) else cache.groups)]
    row = {
        spec.name: _cell(shard, spec, position)
        for shard in shards
        for spec in shard.fields
        if spec.role == "table" and spec.name != "failure"
    }
    if holds_images(cache):
        row |= {name: int(values[index]) for name, values in cache.lengths.items()}
    elif cache.constants["features"] != "none":
        row["duration_s"] = int(cache.lengths["num_audio_samples"][index]) / cache.constants["sample_rate_hz"]
    return {**row, "shard": number, "shard_row": position}


def _cell(shard: Shard, spec: FieldSpec, position: int) -> Any:
    values, offsets = shard.column(spec.name)
    value = values[offsets[position] : offsets[position + 1]]
    if spec.dtype == "str":
        return value.tobytes().decode("utf-8", "surrogateescape")
    return value[0].item() if len(value) else None


def summary(value: Array) -> dict[str, Any]:
    """Returns dtype, shape, min, max and mean of a tensor; None for the numbers of an empty one."""
    about: dict[str, Any] = {"dtype": value.dtype.name, "shape": list(value.shape)}
    if not value.size:
        return {**about, "min": None, "max": None, "mean": None}
    # float64: a float16 sum of a clip's frames overflows.
    return {**about, "min": value.min().item(), "max": value.max().item(), "mean": float(value.mean(dtype=np.float64))}


def _fields(tensors: Mapping[str, Array]) -> dict[str, Any]:
    return {name: {k: _finite(v) for k, v in summary(value).items()} for name, value in tensors.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_CONVERSATION = list_of(record({"role": TEXT, "content": list_of(record({"type": TEXT}, {"text": TEXT}))}))


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredImage:
    """One image of a sample. pixels: uint8 [height, width, 3], rebuilt from the patches that are stored.

    name: of the file or member, as the row calls it. hash: xxh3-128 of the source's bytes. media_row: its row in the
    sample's shard. stored_bytes: by the cache's codec; float32_bytes: of its `pixel_values`.
    """

    name: str
    hash: str
    media_row: int
    grid: tuple[int, int, int]
    pixels: Array
    stored_bytes: int
    float32_bytes: int

    @property
    def num_patches(self) -> int:
        """Rows of `pixel_values`."""
        return self.grid[1] * self.grid[2]

    @property
    def size(self) -> str:
        """Width and height in pixels: `320 x 256`."""
        return f"{self.pixels.shape[1]} x {self.pixels.shape[0]}"

    def to_json(self) -> dict[str, Any]:
        """Returns an entry of `images` in `forebay inspect --json`."""
        return {
            "name": self.name,
            "hash": self.hash,
            "media_row": self.media_row,
            "grid": list(self.grid),
            "width": self.pixels.shape[1],
            "height": self.pixels.shape[0],
            "num_patches": self.num_patches,
            "stored_bytes": self.stored_bytes,
            "float32_bytes": self.float32_bytes,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSample:
    """One sample of a cache of images as it is stored.

    row: table fields, lengths, `shard` and `shard_row`. conversation: messages in canonical form. tensors: input_ids
    int32 [n], label_mask uint8 [n], image_grid_thw int32 [k, 3], patches uint8 [all, 3 * patch_size^2]. labels: of
    `learnt_of`.
    """

    index: int
    row: Mapping[str, Any]
    conversation: list[dict[str, Any]]
    images: tuple[StoredImage, ...]
    tensors: Mapping[str, Array]
    labels: Mapping[str, Any]

    @property
    def num_learnt(self) -> int:
        """Tokens that are targets."""
        return int(np.count_nonzero(self.tensors["label_mask"]))

    def to_json(self) -> dict[str, Any]:
        """Returns the `sample` part of `forebay inspect --json`."""
        return {
            "index": self.index,
            "row": dict(self.row),
            "fields": _fields(self.tensors),
            "conversation": self.conversation,
            "images": [image.to_json() for image in self.images],
            "labels": self.labels,
        }


def read_image_sample(cache: Cache, index: int, *, config: Config | None) -> ImageSample:
    """Returns one sample of a cache of images; see `read_sample`."""
    tensors = _read(cache, index)
    row = _row(cache, index)
    conversation = json.loads(row["text"])
    _CONVERSATION(conversation, "the conversation")
    images = _images(cache, row, tensors)
    no_patches = np.zeros((0, image_settings_of(cache).patch_bytes), np.uint8)
    return ImageSample(
        index=index,
        row=row,
        conversation=conversation,
        images=images,
        tensors={**tensors, "patches": np.concatenate([no_patches, *tensors["patches"]])},
        labels=learnt_of(cache, config, tensors),
    )


def spoken(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns (role, text) of every message; an image stands there by its number in the conversation: `[image 0]`."""
    found, images = [], 0
    for message in messages:
        text = ""
        for part in message["content"]:
            if part["type"] == "image":
                text = f"{text.rstrip(' ')} [image {images}] "
                images += 1
            else:
                text += part["text"].lstrip(" ") if text.endswith(" ") else part["text"]
        found.append((message["role"], text.strip(" ")))
    return found


def _images(cache: Cache, row: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[StoredImage, ...]:
    settings, field = image_settings_of(cache), FIELDS[cache.metadata["codec"]]
    names = json.loads(row["images"])
    list_of(TEXT)(names, "the images")
    media = cache.shard("media", row["shard"])
    used = cache.shard("text", row["shard"]).row(row["shard_row"])[cache.metadata["media_rows"]].tolist()
    grids = [(int(t), int(h), int(w)) for t, h, w in tensors["image_grid_thw"]]
    return tuple(
        StoredImage(
            name=name,
            hash=media.string("image_hash", place),
            media_row=place,
            grid=grid,
            pixels=unpatchify(patches, grid, settings),
            stored_bytes=media.row(place)[field].nbytes,
            float32_bytes=int(float32_bytes(len(patches), settings)),
        )
        for name, place, grid, patches in zip(names, used, grids, tensors["patches"], strict=True)
    )
