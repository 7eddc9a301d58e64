"""One sample of a cache: its row, tensors and labels, which the tokenizer of a config turns into text again.

A sample of a cache of images has its conversation and images, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.digest import tokenizer_digest
from forebay.config.tree import Config
from forebay.errors import CacheError, ConfigError
from forebay.pretrained import from_folder
from forebay.store.cache import Cache
from forebay.store.image.codec import FIELDS
from forebay.store.image.pixels import unpatchify
from forebay.store.image.settings import ImageSettings
from forebay.store.layout import NULL_TEXT, ROW_BITS, ROW_MASK, Array, FieldSpec
from forebay.store.schema import TEXT, list_of, record
from forebay.store.shard import Shard
from forebay.store.source import has_audio

Sounds = Callable[[Config, Cache], Callable[[Mapping[str, Any]], Array | None]]
"""Of a config and its cache: gives the waveform of a row from its source, None where that is not there, or changed.

Only `preprocess` reads sources, which is not known here."""

_FLOAT32_BYTES = 4
_CONVERSATION = list_of(record({"role": TEXT, "content": list_of(record({"type": TEXT}, {"text": TEXT}))}))


def holds_images(cache: Cache) -> bool:
    """Whether a cache's media rows are images."""
    return "media_rows" in cache.metadata


def image_settings_of(cache: Cache) -> ImageSettings:
    """Returns the processor's settings that a cache of images was made with."""
    return ImageSettings.from_json(cache.constants["image"])


def float32_bytes(num_patches: float, settings: ImageSettings) -> float:
    """Returns the bytes of float32 `pixel_values` [num_patches, temporal_patch_size * 3 * patch_size^2]."""
    return num_patches * settings.temporal_patch_size * settings.patch_bytes * _FLOAT32_BYTES


def image_counts(cache: Cache, *, stored: int) -> dict[str, int]:
    """Returns how many images a cache has: `stored` (each once a shard), `distinct` (of the listed rows), `used`."""
    used = int(cache.lengths["num_images"].sum(dtype=np.int64))
    return {"stored": stored, "distinct": cache.metadata["num_images"], "used": used}


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


def read_sample(cache: Cache, index: int, *, config: Config | None) -> Sample:
    """Returns one sample, its bytes checked against their hash; of a cache of images with its images rebuilt.

    config: names the tokenizer by which labels are decoded.
    Raises CacheError for an index that the cache does not have, CacheCorruptError where bytes are not those that were
    written.
    """
    if holds_images(cache):
        return read_image_sample(cache, index, config=config)
    tensors = read_tensors(cache, index)
    return Sample(index=index, row=read_row(cache, index), tensors=tensors, labels=labels_of(cache, config, tensors))


def read_tensors(cache: Cache, index: int) -> dict[str, Any]:
    """Returns what `Cache.read` gives of a sample. Raises CacheError for an index that the cache does not have."""
    check_index(index, len(cache), what=f"{cache.place} has {len(cache)} samples")
    return cache.read(index)


def check_index(index: int, count: int, *, what: str) -> None:
    """Raises CacheError where `--sample` names none of what is there; `what` says how many there are."""
    if not 0 <= index < count:
        span = f"0 to {count - 1}" if count else "none"
        raise CacheError(f"--sample {index}: {what} ({span}); name one of them", code="FB421")


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
        check_index(number, len(cache), what=f"{cache.place} has {len(cache)} samples")
    raise CacheError(
        f"--sample {wanted}: {cache.place} has no sample with that id; what was left out: "
        f"{cache.folder / 'rejected.jsonl'}; every id: forebay inspect {cache.place} --export FILE.parquet",
        code="FB421",
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
            raise CacheError(
                f"--sample {sample_id}: that row was left out; why: {cache.folder / 'rejected.jsonl'}", code="FB421"
            )
        return int(places[0])
    return None


def read_row(cache: Cache, index: int) -> dict[str, Any]:
    """Returns a row of the row table, from the sample's own shards: `cache.samples` would read those of all."""
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
    elif has_audio(cache):
        row["duration_s"] = int(cache.lengths["num_audio_samples"][index]) / cache.constants["sample_rate_hz"]
    return {**row, "shard": number, "shard_row": position}


def _cell(shard: Shard, spec: FieldSpec, position: int) -> Any:
    values, offsets = shard.column(spec.name)
    value = values[offsets[position] : offsets[position + 1]]
    if spec.dtype == "str":
        if spec.nullable and value.tobytes() == NULL_TEXT:
            return None
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


@dataclass(frozen=True, kw_only=True)
class ImageSample(Sample):
    """One sample of a cache of images as it is stored.

    row: has lengths instead of `duration_s`. conversation: messages in canonical form. tensors: input_ids int32 [n],
    label_mask uint8 [n], image_grid_thw int32 [k, 3], patches uint8 [all, 3 * patch_size^2]. labels: of `learnt_of`.
    """

    conversation: list[dict[str, Any]]
    images: tuple[StoredImage, ...]
    labels: Mapping[str, Any]

    @property
    def num_learnt(self) -> int:
        """Tokens that are targets."""
        return int(np.count_nonzero(self.tensors["label_mask"]))

    def to_json(self) -> dict[str, Any]:
        """Returns the `sample` part of `forebay inspect --json`."""
        images = [image.to_json() for image in self.images]
        return {**super().to_json(), "conversation": self.conversation, "images": images}


def read_image_sample(cache: Cache, index: int, *, config: Config | None) -> ImageSample:
    """Returns one sample of a cache of images; see `read_sample`."""
    tensors = read_tensors(cache, index)
    row = read_row(cache, index)
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


def told_conversation(text: str) -> list[dict[str, Any]] | None:
    """Returns the messages of a row's text; None where it is no conversation: a caption, a label, nothing."""
    try:
        conversation: list[dict[str, Any]] = json.loads(text)
        _CONVERSATION(conversation, "the conversation")
    except (ValueError, RecursionError):
        return None
    return conversation


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


def labels_of(cache: Cache, config: Config | None, sample: Mapping[str, Array]) -> dict[str, Any] | None:
    """Returns a sample's ids and, where the recipe's tokenizer is at hand, their text; None for a recipe without text.

    `ids` and `prefix_len` are as stored; `text` is what follows the prefix, without special tokens;
    `with_special_tokens` is all of it. Where they are None, `note` says why.
    """
    if "input_ids" not in sample:
        return None
    ids, prefix_len = sample["input_ids"].tolist(), int(sample["prefix_len"][0])
    tokenizer, note = _tokenizer_of(cache, config)
    labels: dict[str, Any] = {"ids": ids, "prefix_len": prefix_len, "text": None, "with_special_tokens": None}
    if tokenizer is not None:
        labels["text"] = tokenizer.decode(ids[prefix_len:], skip_special_tokens=True)
        labels["with_special_tokens"] = tokenizer.decode(ids, skip_special_tokens=False)
    return {**labels, "note": note}


def learnt_of(cache: Cache, config: Config | None, sample: Mapping[str, Array]) -> dict[str, Any]:
    """Returns a conversation's ids and what is learnt of it, as text where the recipe's tokenizer is at hand.

    `ids` as stored; `learnt`: for every run of targets its `start`, `end` and `text`, control tokens shown;
    `with_special_tokens` is all of it. Where texts are None, `note` says why.
    """
    ids = sample["input_ids"].tolist()
    tokenizer, note = _tokenizer_of(cache, config)

    def text(start: int, end: int) -> str | None:
        return None if tokenizer is None else str(tokenizer.decode(ids[start:end], skip_special_tokens=False))

    # The places before the first and after the last value of every run of values that are not 0.
    edges = np.flatnonzero(np.diff(np.concatenate(([0], sample["label_mask"] != 0, [0])).astype(np.int8)))
    runs = edges.reshape(-1, 2).tolist()
    learnt = [{"start": start, "end": end, "text": text(start, end)} for start, end in runs]
    return {"ids": ids, "learnt": learnt, "with_special_tokens": text(0, len(ids)), "note": note}


def _tokenizer_of(cache: Cache, config: Config | None) -> tuple[Any, str | None]:
    """Returns the tokenizer that a cache was made with, where the config names it; else None, and a note that says why.

    Another tokenizer would give other text without a word.
    """
    if config is None or config.text is None:
        return None, "not decoded: a cache does not hold its tokenizer; run: forebay inspect CONFIG --sample I"
    folder = Path(config.text.tokenizer)
    found = tokenizer_digest(folder)
    if found == cache.tokenizer:
        return load_tokenizer(folder), None
    return None, (
        f"not decoded: text.tokenizer {folder} has digest {found[:16]}, the cache was made with "
        f"{str(cache.tokenizer)[:16]}; name the folder that the cache was made with"
    )


def load_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer in a model's folder. Raises ConfigError where transformers cannot load it."""
    from transformers import AutoTokenizer  # not at import: it takes seconds, and only this needs it

    try:
        tokenizer = from_folder(AutoTokenizer, folder)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as err:
        raise ConfigError(f"text.tokenizer: transformers cannot load {folder}: {err}") from err
    # The tokenizer itself, where there is one: Whisper's class drops time stamps and tidies spaces on its way.
    return getattr(tokenizer, "backend_tokenizer", None) or tokenizer
