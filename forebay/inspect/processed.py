"""What `inspect` says of a cache of images as their processor gives them: facts, and a sample with its images."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from forebay.config.tree import Config
from forebay.inspect.histogram import count_histogram
from forebay.inspect.sample import (
    Sample,
    image_counts,
    learnt_of,
    read_row,
    read_sample,
    read_tensors,
    told_conversation,
)
from forebay.inspect.seen import View, view_of
from forebay.inspect.sizes import size_facts
from forebay.steps.form import BatchForm
from forebay.store.cache import Cache
from forebay.store.image.arrays import FEATURES, StoredArrays, shape_name
from forebay.store.layout import Array
from forebay.store.shard import shard_fields

_FLOAT32_BYTES = 4
_FEW = 12
"""Values of a field that are shown as numbers."""


def is_of_processor(cache: Cache) -> bool:
    """Returns whether a cache holds images as their processor gives them."""
    return cache.constants.get("features") == FEATURES


@dataclass(frozen=True, kw_only=True)
class ProcessedImage:
    """One image of a sample. name: of the file or member. hash: xxh3-128 of the source's bytes.

    media_row: its row in the sample's shard. arrays: of each field of the form, as stored: codes where it has a table.
    float32_bytes: of the batch's floats. form: None where the metadata's form is none.
    """

    name: str
    hash: str
    media_row: int
    arrays: Mapping[str, Array]
    stored_bytes: int
    float32_bytes: int
    form: BatchForm | None

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Of each field of the form."""
        return {name: list(array.shape) for name, array in self.arrays.items()}

    @property
    def values(self) -> dict[str, Any]:
        """Fields of few numbers, for example `image_sizes` and `spatial_shapes`, by name."""
        return {name: array.tolist() for name, array in self.arrays.items() if array.size <= _FEW}

    def lines(self) -> list[str]:
        """Returns each field with its shape, or of few numbers with these."""
        values = self.values
        return [
            f"{name} = {values[name]}" if name in values else f"{name} {shape}" for name, shape in self.shapes.items()
        ]

    @cached_property
    def view(self) -> View | None:
        """The image as its model sees it; None where the order of its patches is not known."""
        return None if self.form is None else view_of(self.form, self.arrays)

    def to_json(self) -> dict[str, Any]:
        """Returns an entry of `images` in `forebay inspect --json`."""
        names = ("name", "hash", "media_row", "shapes", "values", "stored_bytes", "float32_bytes")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class ProcessedSample(Sample):
    """One sample as it is stored. tensors: those of the text, and of each field of the form all images' values.

    conversation: messages in canonical form; None where the text is none. labels: of `learnt_of`, where ids are learnt.
    """

    conversation: list[dict[str, Any]] | None
    images: tuple[ProcessedImage, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the `sample` part of `forebay inspect --json`."""
        images = [image.to_json() for image in self.images]
        return {**super().to_json(), "conversation": self.conversation, "images": images}


def read_any(cache: Cache, index: int, *, config: Config | None) -> Sample:
    """Returns one sample of any cache; see `read_sample`."""
    read = read_processed if is_of_processor(cache) else read_sample
    return read(cache, index, config=config)


def read_processed(cache: Cache, index: int, *, config: Config | None) -> ProcessedSample:
    """Returns one sample of such a cache; see `read_sample`."""
    stored = StoredArrays.of(cache.metadata, folder=cache.folder)
    tensors = read_tensors(cache, index)
    row = read_row(cache, index)
    joined = stored.joined(tensors)
    has_labels = "label_mask" in tensors and "input_ids" in tensors
    return ProcessedSample(
        index=index,
        row=row,
        tensors=joined,
        labels=learnt_of(cache, config, tensors) if has_labels else None,
        conversation=told_conversation(row["text"]),
        images=_images(cache, stored, row, tensors),
    )


def _images(
    cache: Cache, stored: StoredArrays, row: Mapping[str, Any], tensors: Mapping[str, tuple[Array, ...]]
) -> tuple[ProcessedImage, ...]:
    media = cache.shard("media", row["shard"])
    used = cache.shard("text", row["shard"]).row(row["shard_row"])[stored.rows_field].tolist()
    names = [str(name) for name in json.loads(row["images"])]
    floats, form = _floats(cache), _form_of(cache)
    return tuple(
        ProcessedImage(
            name=name,
            hash=media.string("image_hash", place),
            media_row=place,
            arrays={field.name: tensors[field.name][number] for field in stored.fields},
            stored_bytes=sum(value.nbytes for value in media.row(place).values()),
            float32_bytes=sum(tensors[field][number].size * _FLOAT32_BYTES for field in floats),
            form=form,
        )
        for number, (name, place) in enumerate(zip(names, used, strict=True))
    )


def _form_of(cache: Cache) -> BatchForm | None:
    """Returns the form that a cache declares; None for a foreign one, of which arrays are read nevertheless."""
    try:
        return BatchForm.from_json(cache.constants["form"])
    except ValueError:
        return None


def _floats(cache: Cache) -> list[str]:
    """Returns the fields of the form that are floats in a batch."""
    fields = cache.constants["form"]["fields"]
    return [field["name"] for field in fields if field["dtype"] == "float32" and not field.get("mask_of")]


def processed_facts(cache: Cache) -> dict[str, Any]:
    """Returns the part of `forebay inspect --json` that only such a cache has; see `image_facts`.

    processor: the class that made the images, and what is promised of its batches. form: the declared fields of
    batches, of a table how many values it has. image_sizes: see `size_facts`.
    """
    stored = StoredArrays.of(cache.metadata, folder=cache.folder)
    images = _num_stored(cache, stored)
    size_bytes = sum(
        _count(cache, spec.name) * spec.numpy_dtype.itemsize * math.prod(spec.shape)
        for spec in cache.fields.values()
        if (spec.group, spec.role) == ("media", "tensor")
    )
    as_float32 = _float32_bytes(cache, stored, images)
    form = cache.constants["form"]
    return {
        "codec": cache.metadata["codec"],
        "processor": {"made_by": form["made_by"], "promise": form["promise"]},
        "form": [
            _declared(field) for name in ("form", "text_form") for field in cache.constants.get(name, _NONE)["fields"]
        ],
        "image_sizes": size_facts(cache),
        "images": image_counts(cache, stored=images),
        "bytes_per_image": size_bytes / images if images else None,
        "float32_bytes_per_image": as_float32 / images if images and as_float32 is not None else None,
        "histograms": {
            name: count_histogram(cache.lengths[f"num_{name}"])
            for name in ("tokens", "images", "patches")
            if f"num_{name}" in cache.lengths and cache.lengths[f"num_{name}"].any()
        },
    }


_NONE: dict[str, Any] = {"fields": []}


def _declared(field: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a declared field without the values of its table."""
    table = field.get("table")
    shown = None if table is None else {"channels": len(table["values"]), "values": len(table["values"][0])}
    return {**field, **({} if shown is None else {"table": shown})}


def form_rows(facts: Mapping[str, Any]) -> list[list[str]]:
    """Returns a row a declared field: its name, dtype and shape in a batch, how it is stored, what else is declared."""
    return [
        [
            field["name"],
            field["dtype"],
            f"[{', '.join('n' if length is None else str(length) for length in field['shape'])}]",
            _as_stored(field),
            "; ".join(_rules(field)),
        ]
        for field in facts["form"]
    ]


def _as_stored(field: Mapping[str, Any]) -> str:
    if field.get("mask_of"):
        return "not stored"
    table = field.get("table")
    return str(field["stored_dtype"]) + (
        "" if table is None else f", a table of {table['channels']} x {table['values']}"
    )


def _rules(field: Mapping[str, Any]) -> Iterator[str]:
    if field.get("mask_of"):
        yield f"1 where {field['mask_of']} is, 0 in its padding"
    elif None in field["shape"] and field.get("join", "stack") != "cat":
        pad = field.get("pad", 0.0)
        yield "arrays of one shape alone" if pad is None else f"padded with {pad:g} on the {field.get('side', 'right')}"
        if field.get("length") is not None:
            yield f"to {field['length']}"
        elif field.get("multiple", 1) > 1:
            yield f"to a multiple of {field['multiple']}"
    if field.get("join") == "cat":
        yield "one behind the other"
    if field.get("join") == "nest":
        yield "those of a sample in a row"


def _num_stored(cache: Cache, stored: StoredArrays) -> int:
    """Returns how many images are stored: from the shard table, no shard is opened.

    Where the arrays of all fields grow, what failed cannot be told from what is stored, and counts too.
    """
    for field in stored.fields:
        if field.has_shape:
            return _count(cache, shape_name(field.name)) // len(field.shape)
        if not field.grows and not field.is_packed:
            return _count(cache, field.name) // ((field.shape or (1,))[0] or 1)
    return sum(entry.rows for _, entry in cache.shard_entries("media"))


def _float32_bytes(cache: Cache, stored: StoredArrays, images: int) -> int | None:
    """Returns what the float fields of all images take in a batch; None where only the shards know it."""
    total = 0
    for field in stored.fields:
        if field.name not in _floats(cache):
            continue
        if not field.grows:
            total += images * math.prod(length or 1 for length in field.shape)
        elif not field.is_packed:
            total += _count(cache, field.name) * math.prod(field.inner)
        elif cache.mirror is not None:
            return None  # shapes stand in the shards: facts download none
        else:
            shards = [cache.shard("media", i).column(shape_name(field.name))[0] for i in range(cache.num_shards)]
            total += sum(int(s.reshape(-1, len(field.shape)).astype(np.int64).prod(axis=1).sum()) for s in shards)
    return total * _FLOAT32_BYTES


def _count(cache: Cache, name: str) -> int:
    """Returns the values [n, *shape] of a media field in all shards."""
    place = [field.name for field in shard_fields(list(cache.fields.values()), "media")].index(name)
    return sum(entry.spans[place][1] for _, entry in cache.shard_entries("media"))
