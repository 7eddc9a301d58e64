"""One sample of a cache: its row, its tensors, its labels.

One sample of a cache of images: its conversation, its images, what is learnt of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.config.tree import Config
from forebay.errors import CacheError
from forebay.inspect.facts import float32_bytes, image_settings_of
from forebay.inspect.labels import labels_of, learnt_of
from forebay.inspect.terminal.layout import human_number, paragraph
from forebay.store.cache import Cache
from forebay.store.image.codec import FIELDS
from forebay.store.image.pixels import unpatchify
from forebay.store.layout import ROW_BITS, Array, FieldSpec
from forebay.store.schema import TEXT, list_of, record
from forebay.store.shard import Shard
from forebay.visible import printable

_SHOWN_IDS = 64


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample as it is stored.

    row: table fields, `duration_s` and `shard`. tensors: read-only views [n, *shape] by field name. labels: of `labels_of`.
    """

    index: int
    row: Mapping[str, Any]
    tensors: Mapping[str, Array]
    labels: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """Returns the `sample` part of `forebay inspect --json`; what is not a number in JSON (NaN) is null."""
        fields = {name: {k: _finite(v) for k, v in summary(value).items()} for name, value in self.tensors.items()}
        return {"index": self.index, "row": dict(self.row), "fields": fields, "labels": self.labels}


def read_sample(cache: Cache, index: int, *, config: Config | None) -> Sample:
    """Returns one sample, its bytes checked against their hash.

    config: names the tokenizer by which labels are decoded. Raises CacheError for an index that the cache does not have,
    CacheCorruptError where bytes are not those that were written.
    """
    check_index(index, len(cache), what=f"{cache.folder} has {len(cache)} samples")
    tensors = cache.read(index)
    return Sample(index=index, row=_row(cache, index), tensors=tensors, labels=labels_of(cache, config, tensors))


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


def sample_lines(sample: Sample) -> Iterator[str]:
    """Yields a sample for a terminal."""
    yield f"sample {sample.index}"
    yield from row_lines(sample.row)
    yield ""
    yield from tensor_lines(sample.tensors)
    if sample.labels is not None:
        yield ""
        yield from _label_lines(sample.labels)


def row_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields the cells of a row, one a line."""
    width = max(map(len, row))
    for name, value in row.items():
        yield from paragraph(f"  {name:<{width}}  ", printable(value) if isinstance(value, str) else json.dumps(value))


def tensor_lines(tensors: Mapping[str, Array]) -> Iterator[str]:
    """Yields dtype, shape and range of tensors as a table."""
    yield f"{'fields':<18}{'dtype':<10}{'shape':<16}{'min':>12}{'max':>12}{'mean':>12}"
    for name, value in tensors.items():
        about = summary(value)
        numbers = "".join(f"{human_number(about[key]):>12}" for key in ("min", "max", "mean"))
        yield f"  {name:<16}{about['dtype']:<10}{about['shape']!s:<16}{numbers}"


def shown_ids(ids: Sequence[object]) -> str:
    """Returns the first token ids, or groups of them."""
    return ", ".join(map(str, ids[:_SHOWN_IDS])) + (", ..." if len(ids) > _SHOWN_IDS else "")


def _label_lines(labels: Mapping[str, Any]) -> Iterator[str]:
    ids, prefix_len = labels["ids"], labels["prefix_len"]
    yield f"labels: {len(ids)} tokens, the first {prefix_len} are the prefix (not trained on)"
    yield from paragraph("  ids      ", shown_ids(ids))
    if labels["note"]:
        yield from paragraph("  text     ", printable(labels["note"]))
        return
    yield from paragraph("  text     ", printable(labels["text"]))
    yield from paragraph("  special  ", printable(labels["with_special_tokens"]))


def _row(cache: Cache, index: int) -> dict[str, Any]:
    """Reads the columns of the sample's own shards: `cache.samples` would read those of all."""
    slot = int(cache.slots[index])
    number, position = slot >> ROW_BITS, slot & ((1 << ROW_BITS) - 1)
    row: dict[str, Any] = {}
    for group in cache.groups:
        shard = cache.shard(group, number)
        for spec in shard.fields:
            if spec.role == "table" and spec.name != "failure":
                row[spec.name] = _cell(shard, spec, position)
    duration_s = int(cache.lengths["num_audio_samples"][index]) / cache.constants["sample_rate_hz"]
    heard = {} if cache.constants["features"] == "none" else {"duration_s": duration_s}
    return {**row, **heard, "shard": number, "shard_row": position}


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
    """One sample as it is stored.

    row: table fields, lengths, `shard` and `shard_row`. conversation: messages in canonical form. tensors: input_ids int32
    [n], label_mask uint8 [n], image_grid_thw int32 [k, 3], patches uint8 [all, 3 * patch_size^2]. labels: of `learnt_of`.
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
            "fields": {name: summary(value) for name, value in self.tensors.items()},
            "conversation": self.conversation,
            "images": [image.to_json() for image in self.images],
            "labels": self.labels,
        }


def read_image_sample(cache: Cache, index: int, *, config: Config | None) -> ImageSample:
    """Returns one sample, its bytes checked against their hashes and its images rebuilt.

    config: names the tokenizer by which labels are decoded. Raises CacheError for an index that the cache does not have,
    CacheCorruptError where bytes are not those that were written.
    """
    check_index(index, len(cache), what=f"{cache.folder} has {len(cache)} samples")
    tensors = cache.read(index)
    row = _image_row(cache, index)
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
    """Returns (role, text) of every message; where an image was shown stands its number in the conversation: `[image 0]`."""
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


def _image_row(cache: Cache, index: int) -> dict[str, Any]:
    number, position = _place(cache, index)
    text = cache.shard("text", number)
    table = [spec.name for spec in text.fields if spec.role == "table" and spec.name != "failure"]
    lengths = {name: int(values[index]) for name, values in cache.lengths.items()}
    return {**{name: text.string(name, position) for name in table}, **lengths, "shard": number, "shard_row": position}


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


def _place(cache: Cache, index: int) -> tuple[int, int]:
    slot = int(cache.slots[index])
    return slot >> ROW_BITS, slot & ((1 << ROW_BITS) - 1)
