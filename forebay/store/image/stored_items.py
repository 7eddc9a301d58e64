"""Outputs of a processor for an image, as arrays of a cache: by shapes that the cache's metadata declares, no code.

The declared form (`constants["form"]`) is read here as far as bytes become arrays by it. What a batch is made of by
the rest of it, `forebay/steps/form.py` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from forebay.errors import CacheCorruptError
from forebay.store.image.codec import StoredImages, zstd
from forebay.store.layout import Array, FieldSpec, Group

FEATURES = "images"
"""What caches call the features of images as their processor gives them."""
MAX_BYTES = 1 << 31
"""Of one array of one image. A cache that says more is none that forebay writes."""
_MAX_RANK = 8
_GROUP: Group = "image"


def zstd_name(name: str) -> str:
    """Returns the field that holds a field's compressed bytes."""
    return f"{name}_zstd"


def shape_name(name: str) -> str:
    """Returns the field that holds the shape of a field's array, int32 [rank], where the values do not say it."""
    return f"{name}_shape"


class StoredItems(Protocol):
    """How the items that a sample lists become fields of the sample.

    is_as_stored: whether their fields are handed out as they lie on disk, so that a batch can be read together.
    """

    @property
    def is_as_stored(self) -> bool: ...

    def of_batch(self, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Returns the fields of several samples. columns: of each a tuple a sample, an array an item, as stored."""

    def sample(self, text: dict[str, Any], items: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
        """Returns the sample of its text and its items' rows, of a field a tuple; ValueError: a row holds no item."""

    def joined(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a sample whose fields of items are one array each."""

    def columns(self) -> list[FieldSpec]:
        """Returns the fields of items that `in_columns` has."""

    def in_columns(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Returns a sample as an export has it: a field of items is one array, or a tuple of one an item."""


def stored_items(metadata: Mapping[str, Any], *, folder: Path) -> dict[Group, StoredItems]:
    """Returns how a cache stores the items that samples list, by group; CacheCorruptError for foreign metadata."""
    found: dict[Group, StoredItems] = {}
    for group, shape in metadata["groups"].items():
        if shape["num_items"] is None:
            continue
        if group == _GROUP:
            are_arrays = metadata["constants"][group].get("features") == FEATURES
            found[group] = (StoredArrays if are_arrays else StoredImages).of(metadata, folder=folder)
        else:
            fields = [FieldSpec.from_json(field) for field in metadata["fields"]]
            found[group] = StoredFields(tuple(f for f in fields if f.group == group and f.role == "tensor"))
    return found


@dataclass(frozen=True)
class StoredFields:
    """Items whose fields are stored as they are handed out."""

    fields: tuple[FieldSpec, ...]
    is_as_stored: ClassVar[bool] = True

    def of_batch(self, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return columns

    def sample(self, text: dict[str, Any], items: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
        return {**text, **{field.name: tuple(item[field.name] for item in items) for field in self.fields}}

    def joined(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """See `StoredItems`: the values of all items one behind the other."""
        none = {field.name: np.zeros((0, *field.shape), field.numpy_dtype) for field in self.fields}
        return {**sample, **{name: np.concatenate([none[name], *sample[name]]) for name in none}}

    def columns(self) -> list[FieldSpec]:
        return list(self.fields)

    def in_columns(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


@dataclass(frozen=True)
class ArrayField:
    """One field of the form. shape: as the processor has its axes, None where one grows. is_packed: stored by zstd."""

    name: str
    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]
    is_packed: bool = False

    @cached_property
    def grows(self) -> list[int]:
        """The axes whose length differs from image to image."""
        return [axis for axis, length in enumerate(self.shape) if length is None]

    @cached_property
    def has_shape(self) -> bool:
        """Whether the array's shape stands beside its values."""
        return len(self.grows) > (0 if self.is_packed else 1)

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The axes behind the first of what lies on disk, before it is compressed."""
        if len(self.grows) > 1:
            return ()
        first = (self.grows or [0])[0]
        return tuple(length for axis, length in enumerate(self.shape) if axis != first and length is not None)

    def specs(self) -> tuple[FieldSpec, ...]:
        """Returns the fields on disk."""
        if self.is_packed:
            values = FieldSpec(name=zstd_name(self.name), dtype="uint8")
        else:
            values = FieldSpec(name=self.name, dtype=self.dtype.name, shape=self.inner)
        return (values, FieldSpec(name=shape_name(self.name), dtype="int32")) if self.has_shape else (values,)

    def packed(self, stored: Mapping[str, Array], shape: Sequence[int]) -> dict[str, Array]:
        """Returns the fields on disk of an array. stored: as `FieldForm.stored` gives it. shape: of the array."""
        if not self.is_packed:
            return dict(stored)
        values = np.frombuffer(zstd().compress(np.ascontiguousarray(stored[self.name])), np.uint8)
        packed: dict[str, Array] = {zstd_name(self.name): values}
        return {**packed, shape_name(self.name): np.array(shape, np.int32)} if self.has_shape else packed

    def array(self, row: Mapping[str, Array]) -> Array:
        """Returns the array of an image. Raises ValueError where the row holds none, whatever its checksum says."""
        shape = self._shape(row) if self.has_shape else None
        return self._shaped(self._unpacked(row, shape) if self.is_packed else row[self.name], shape)

    def _shaped(self, values: Array, shape: list[int] | None) -> Array:
        """Returns values as they lie on disk in the processor's order of axes."""
        grows = self.grows
        if not grows:
            return values.reshape([length for length in self.shape if length is not None])
        if len(grows) > 1:
            if values.size != math.prod(shape or ()):
                raise ValueError(f"{self.name} has {values.size} values, its shape is {shape}")
            return values.reshape(shape or ())
        return np.moveaxis(values, 0, grows[0]) if grows[0] else values

    def _shape(self, row: Mapping[str, Array]) -> list[int]:
        shape: list[int] = row[shape_name(self.name)].tolist()
        fits = len(shape) == len(self.shape) and all(
            found >= 0 and wanted in (None, found) for wanted, found in zip(self.shape, shape, strict=True)
        )
        if not fits or math.prod(shape) * self.dtype.itemsize > MAX_BYTES:
            raise ValueError(f"an image says that {self.name} is {shape}, declared {list(self.shape)}")
        return shape

    def _unpacked(self, row: Mapping[str, Array], shape: list[int] | None) -> Array:
        whole = shape or [length for length in self.shape if length is not None]
        size_bytes = math.prod(whole) * self.dtype.itemsize
        try:
            buffer = zstd().decompress(row[zstd_name(self.name)], decompressed_size=size_bytes)
        except (OSError, ValueError) as err:
            raise ValueError(f"the bytes of {self.name} do not decompress: {err}") from err
        values = np.frombuffer(buffer, self.dtype)
        if len(self.grows) > 1:
            return values
        return values.reshape(-1, *self.inner)


@dataclass(frozen=True)
class StoredArrays:
    """How a cache stores images as their processor gives them."""

    fields: tuple[ArrayField, ...]
    is_as_stored: ClassVar[bool] = False

    def of_batch(self, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """See `StoredItems`: these are decoded one by one."""
        raise NotImplementedError

    @classmethod
    def of(cls, metadata: Mapping[str, Any], *, folder: Path) -> Self:
        """Returns what a cache's metadata says. Raises CacheCorruptError where it says what no forebay writes."""
        try:
            specs = {field["name"]: FieldSpec.from_json(field) for field in metadata["fields"]}
            documents = metadata["constants"][_GROUP]["form"]["fields"]
            fields = tuple(_field(document, specs) for document in documents if not document.get("mask_of"))
            if not fields:
                raise ValueError("its form has no field")
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise CacheCorruptError(
                f"{folder}: its metadata.json is none that forebay writes: of its images it says {err!r:.120}; "
                "run: forebay preprocess CONFIG --rebuild"
            ) from err
        return cls(fields)

    def sample(self, text: dict[str, Any], images: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
        return {**text, **{field.name: tuple(map(field.array, images)) for field in self.fields}}

    def in_columns(self, sample: dict[str, Any]) -> dict[str, Any]:
        return self.joined(sample)

    def columns(self) -> list[FieldSpec]:
        """See `StoredItems`: an array a field, [images, ...] or, of a field that grows, flat."""
        specs: list[FieldSpec] = []
        for field in self.fields:
            if field.grows:
                rank = (len(field.shape),)
                specs.append(FieldSpec(name=field.name, dtype=field.dtype.name))
                specs.append(FieldSpec(name=shape_name(field.name), dtype="int32", shape=rank))
            else:
                shape = tuple(length or 0 for length in field.shape)
                specs.append(FieldSpec(name=field.name, dtype=field.dtype.name, shape=shape))
        return specs

    def joined(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a sample whose fields are one array each: [images, *shape] where the shape is the same for all.

        Else the values of all images one behind the other, and NAME_shape int32 [images, rank].
        """
        joined = dict(sample)
        for field in self.fields:
            arrays: tuple[Array, ...] = sample[field.name]
            if not field.grows:
                none = np.zeros((0, *(length or 0 for length in field.shape)), field.dtype)
                joined[field.name] = np.stack(arrays) if arrays else none
                continue
            flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
            joined[field.name] = np.concatenate([np.zeros(0, field.dtype), *flat])
            shapes = [array.shape for array in arrays]
            joined[shape_name(field.name)] = np.array(shapes, np.int32).reshape(-1, len(field.shape))
        return joined


def _field(document: Mapping[str, Any], specs: Mapping[str, FieldSpec]) -> ArrayField:
    """Returns a field of a form. Raises ValueError where the cache's fields are not those of the form."""
    name, shape = document["name"], document["shape"]
    if not isinstance(name, str) or not isinstance(shape, list) or len(shape) > _MAX_RANK:
        raise ValueError(f"a field of its form is {name!r:.40} {shape!r:.40}")
    if not all(n is None or (type(n) is int and 0 < n <= MAX_BYTES) for n in shape):
        raise ValueError(f"{name} is declared {shape!r:.60}")
    dtype = np.dtype(document["stored_dtype"])
    if dtype.kind not in "iuf":
        raise ValueError(f"{name} is stored as {dtype}")
    field = ArrayField(name, tuple(shape), dtype.newbyteorder("<"), zstd_name(name) in specs)
    if math.prod(n or 1 for n in shape) * dtype.itemsize > MAX_BYTES:
        raise ValueError(f"{name} is declared {shape!r:.60}")
    for wanted in (replace(spec, group=_GROUP) for spec in field.specs()):
        if specs.get(wanted.name) != wanted:
            raise ValueError(f"the field {wanted.name} is {specs.get(wanted.name)}, its form wants {wanted}")
    return field
