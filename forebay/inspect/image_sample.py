"""One sample of a cache of images: its conversation, its images, what is learnt of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.config import Config
from forebay.inspect.image_facts import float32_bytes, image_settings_of
from forebay.inspect.labels import learnt_of
from forebay.inspect.sample import check_index, summary
from forebay.store.cache import ROW_BITS, Cache
from forebay.store.image.codec import FIELDS
from forebay.store.image.patches import unpatchify
from forebay.store.schema import TEXT, list_of, record

Array = np.ndarray[Any, Any]

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


def _row(cache: Cache, index: int) -> dict[str, Any]:
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
