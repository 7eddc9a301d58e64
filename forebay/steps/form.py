"""How what is stored of samples becomes a batch, declared: a cache says it in its metadata, and no code is needed.

A form says of each field how the arrays of a clip or an image lie on disk, which of their axes grow, what stands behind
(or before) the shorter ones in a batch, and which values a code stands for. `collate` is in `forebay.steps.batch`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np

from forebay.steps.form_values import (
    FINISHES,
    MAX_RANK,
    Side,
    holds_values,
    identifier,
    integer,
    is_number,
    number,
    one_of,
    require,
    shown_shape,
    text,
)
from forebay.steps.form_values import Table as Table
from forebay.store.layout import Array, FieldSpec, Group
from forebay.store.source import column

if TYPE_CHECKING:
    from forebay.store.source import Sample

Join = Literal["stack", "cat", "nest"]
PromiseKind = Literal["exact", "within", "alone"]
DTYPES = ("float32", "int64", "int32", "int16", "int8", "uint8", "bool")
"""Of fields of a batch. float32 becomes the dtype that a loader is asked for."""
_STORED_DTYPES = ("float16", "float32", "int64", "int32", "int16", "int8", "uint8", "uint16")
_CODES = {"uint8": 256, "uint16": 65_536}
"""Values that a code can stand for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldForm:
    """How one field lies on disk and in a batch.

    An array is one clip's or one image's, as its extractor or processor gives it, without the axis of the batch. On
    disk an array with one axis that grows has that axis first. An array with several is flat, and its shape stands
    beside it in NAME_shape, int32 [rank].
    """

    name: str
    """Of the field in batches, and in the cache where `of` names no other."""
    dtype: str
    """In a batch, one of `DTYPES`."""
    shape: tuple[int | None, ...]
    """Of an array; None: an axis whose length differs from array to array."""
    stored_dtype: str
    """On disk. With a table, uint8 or uint16: codes."""
    pad: float | None = 0.0
    """What stands beside a shorter array in a batch, along every axis that grows. None: nothing does, so that only
    arrays of one shape stand in a batch together."""
    side: Side = "right"
    """Where the padding stands: behind the values, or before them."""
    multiple: int = 1
    """The axes that grow are padded to a multiple of this."""
    length: int | None = None
    """Or always to this. Longer arrays stand in no batch; of a sample that lists clips they are several, cut here."""
    join: Join = "stack"
    """`stack`: an array is a row of the batch. `cat`: the arrays stand one behind the other along the first axis that
    grows. `nest`: those of one sample do along axis 0, and a sample is a row."""
    mask_of: str | None = None
    """The field whose values this one marks: 1 where they are, 0 in the padding. `shape` says along which of its axes:
    it is the other's without some. Not stored."""
    lengths_of: str | None = None
    """The field whose arrays this one counts, int64, one number an array. Not stored."""
    table: Table | None = None
    of: str | None = None
    """The field in the cache that the values are made of. None: the one of this name."""
    used_of: str | None = None
    """The field in the cache that says how many rows of this one count, int32 [1]. None: all do."""
    pad_of: str | None = None
    """The field in the cache that stands in the padding in place of `pad`, float32 [1]."""
    scale: float | None = None
    """Integers on disk times this are the floats of a batch, in float32."""
    finish: str | None = None
    """The operation of `FINISHES` that makes the values of a batch of the rows on disk. With a `length` shorter arrays
    are padded to it before, else after it."""
    hop: int = 1
    """Audio samples that a row stands for, by which crops are cut."""
    holds_moments: bool = False
    """Whether the first half of axis 0 are means, and the second as many log-variances, of a normal distribution. A
    batch has the first half: the means, or what `[loader] latent` has drawn in their place."""
    is_rounded: bool = True
    """Whether float32 becomes the dtype that a loader is asked for."""
    on_disk: str = field(init=False, repr=False, compare=False)
    """The name of the field in the cache."""
    is_of_lines: bool = field(init=False, repr=False, compare=False)
    """Whether batches hold arrays as they lie on disk, the one axis that grows first: most of them."""
    grows: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The axes of an array whose length differs."""
    _row: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    """The shape of a value on disk."""
    _to_rows: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The axes of an array in their order on disk."""
    order: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Where each axis of an array lies on disk, where the one that grows is the first."""

    def __post_init__(self) -> None:
        # Found once, because every sample asks for them.
        grows = tuple(axis for axis, length in enumerate(self.shape) if length is None)
        object.__setattr__(self, "on_disk", self.of or self.name)
        is_first = self.join == "cat" and grows == (0,) and self.side == "right"
        object.__setattr__(self, "is_of_lines", (self.join == "stack" and len(grows) == 1) or is_first)
        rest = () if len(grows) > 1 else (n for axis, n in enumerate(self.shape) if axis != (*grows, 0)[0])
        object.__setattr__(self, "grows", grows)
        object.__setattr__(self, "_row", tuple(rest))
        axis, last = (*grows, 0)[0], len(self.shape)
        object.__setattr__(self, "_to_rows", (axis, *(each for each in range(last) if each != axis)))
        object.__setattr__(self, "order", (*range(1, axis + 1), 0, *range(axis + 1, last)))
        if self.table is None:
            return
        channels, count = self.table.values.shape
        axis, inner = self.table.axis, self.table.inner
        if self.dtype != "float32" or count > _CODES.get(self.stored_dtype, 0):
            raise ValueError(f"{self.name}: a table of {count} values makes float32 of uint8 or uint16, not {self}")
        length = self.shape[axis] if axis < len(self.shape) else None
        if channels > 1 and (length is None or length % (channels * inner)):
            raise ValueError(
                f"{self.name}: a table of {channels} channels of {inner} along axis {axis} of {list(self.shape)}"
            )

    @classmethod
    def frames(cls, spec: FieldSpec, *, name: str = "", is_moved: bool = False, **more: Any) -> Self:
        """Returns the form of rows that grow: floats in a batch. is_moved: frames are the last axis there."""
        name = name or spec.name
        shape = (*spec.shape, None) if is_moved else (None, *spec.shape)
        of = None if name == spec.name else spec.name
        return cls(name=name, of=of, dtype="float32", shape=shape, stored_dtype=spec.dtype, **more)

    def mask(self, name: str) -> Self:
        """Returns the form of a mask of this field along the axis that grows, int32 as transformers has it."""
        return type(self)(name=name, dtype="int32", shape=(None,), stored_dtype="uint8", mask_of=self.name)

    def lengths(self) -> Self:
        """Returns the form of the lengths of this field, NAME_lengths."""
        name = f"{self.name}_lengths"
        return type(self)(name=name, dtype="int64", shape=(), stored_dtype="int64", lengths_of=self.name)

    @property
    def is_stored(self) -> bool:
        """Whether the field lies on disk; masks and lengths are made of others."""
        return self.mask_of is None and self.lengths_of is None

    def specs(self, group: Group = "") -> tuple[FieldSpec, ...]:
        """Returns the fields on disk; none for a mask."""
        if not self.is_stored:
            return ()
        shape_name = self._shape_name if len(self.grows) > 1 else None
        beside = ((shape_name, "int32"), (self.used_of, "int32"), (self.pad_of, "float32"))
        main = FieldSpec(name=self.on_disk, dtype=self.stored_dtype, shape=self._row, group=group)
        return (main, *(FieldSpec(name=name, dtype=dtype, group=group) for name, dtype in beside if name))

    def stored(self, array: Array) -> dict[str, Array]:
        """Returns an array as fields of `specs`. Raises ValueError for one of another rank, shape or range.

        array: values, or where there is a table codes.
        """
        if not self.fits(array.shape):
            raise ValueError(f"{self.name} is {list(array.shape)}, declared {shown_shape(self.shape)}")
        values = self._as_stored(array)
        if len(self.grows) > 1:
            shape = np.array(array.shape, np.int32)
            return {self.on_disk: np.ascontiguousarray(values).reshape(-1), self._shape_name: shape}
        if self.grows:
            values = self.rows(values)
        return {self.on_disk: np.ascontiguousarray(values).reshape(-1, *self._row)}

    def array(self, sample: Sample | Mapping[str, Array]) -> Array:
        """Returns the array of what `stored` made, a view. Raises ValueError where the fields are of no such array."""
        values = sample[self.on_disk]
        if self.used_of is not None:
            values = values[: sample[self.used_of].item()]
        if len(self.grows) > 1:
            shape = sample[self._shape_name].tolist()
            if not self.fits(shape) or min(shape) < 0 or math.prod(shape) != values.size:
                raise ValueError(
                    f"{self.name} has {values.size} values and the shape {shape}, {shown_shape(self.shape)}"
                )
            return values.reshape(shape)
        if self.grows:
            return values.transpose(self.order) if self.grows[0] else values
        return values.reshape([length for length in self.shape if length is not None])

    def line(self, names: Sequence[str], values: Sequence[Array]) -> Array:
        """Returns the array as `BatchForm.columns` has it. names: of the fields on disk, and their values."""
        if self.is_of_lines and self.used_of is None:
            return values[0]
        row = dict(zip(names, values, strict=True))
        return values[0][: row[self.used_of].item()] if self.is_of_lines and self.used_of else self.array(row)

    def fits(self, shape: Sequence[int]) -> bool:
        """Returns whether an array of this shape is one of the field."""
        return len(shape) == len(self.shape) and all(
            wanted in (None, found) for wanted, found in zip(self.shape, shape, strict=True)
        )

    def windows(self, array: Array) -> list[Array]:
        """Returns an array as on disk as those of a batch, of a sample that lists clips: each is no longer than it."""
        if self.length is None or not self.is_of_lines or len(array) <= self.length:
            return [array]
        return [array[start : start + self.length] for start in range(0, len(array), self.length)]

    def rows(self, array: Array) -> Array:
        """Returns an array as it lies on disk, the one axis that grows first."""
        return array.transpose(self._to_rows) if self.grows[0] else array

    def room(self, longest: int) -> int:
        """Returns how long an axis that grows is in a batch whose longest array has `longest` along it."""
        if self.length is not None:
            if longest > self.length:
                raise ValueError(f"{self.name} has {longest}, a batch has {self.length}")
            return self.length
        return -(-longest // self.multiple) * self.multiple

    def to_json(self) -> dict[str, Any]:
        """Returns the form as JSON values, without what is as by default."""
        document: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.init and (each.name in _NEEDED or value != each.default):
                document[each.name] = value
        document["shape"] = list(self.shape)
        if self.table is not None:
            document["table"] = self.table.to_json()
        return document

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Returns the form that `to_json` wrote; ValueError for anything else."""
        is_form = isinstance(document, dict) and set(_NEEDED) <= set(document) <= set(_READ)
        require(is_form, f"a field's form of {', '.join(_NEEDED)}", document)
        given = {name: value for name, value in document.items() if value is not None or name in (*_NEEDED, "pad")}
        named = {name: f"the {name.replace('_', ' ')} of a field" for name in _READ if name in given}
        values = {name: _READ[name](given[name], what) for name, what in named.items()}
        is_cast = "float" in values["dtype"] and "float" not in values["stored_dtype"]
        is_cut = "float" not in values["dtype"] and "float" in values["stored_dtype"]
        is_wrong = (is_cast and not {"table", "scale"} & set(values)) or is_cut
        require(not is_wrong, f"{values['dtype']} of {values['name']} stored so that its values are kept", document)
        if values.get("holds_moments"):
            axis, grows = (*values["shape"], None)[0], values["shape"].count(None)
            is_halved = axis is not None and not axis % 2 and grows != 1 and {"table", "finish"}.isdisjoint(values)
            require(is_halved, f"two halves of {values['name']}, means and log-variances", document)
        return cls(**values)

    def marked_axes(self, marked: FieldForm) -> tuple[int, ...]:
        """Returns the axes of the field that this mask marks along which the mask goes.

        Raises ValueError where that is another mask, or its shape is not this one with more axes.
        """
        found: list[int] = []
        for axis, length in enumerate(marked.shape):
            if len(found) < len(self.shape) and self.shape[len(found)] == length:
                found.append(axis)
        if len(found) < len(self.shape) or marked.mask_of is not None:
            raise ValueError(
                f"{self.name} {shown_shape(self.shape)} is no mask of {marked.name} {shown_shape(marked.shape)}"
            )
        return tuple(found)

    @property
    def _shape_name(self) -> str:
        return f"{self.name}_shape"

    def _as_stored(self, array: Array) -> Array:
        if self.table is not None and array.dtype != self.stored_dtype:
            raise ValueError(f"{self.name} are codes of {array.dtype}, declared {self.stored_dtype}")
        if array.dtype == self.stored_dtype:
            return array
        with np.errstate(over="ignore"):
            values = array.astype(self.stored_dtype)
        if not holds_values(values, array):
            raise ValueError(f"{self.name} holds values of {array.dtype} that {self.stored_dtype} does not")
        return values


_NEEDED = ("name", "dtype", "shape", "stored_dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """The promise of batches, compared with those that the extractor or processor itself makes of the same samples.

    exact: bit for bit. within: by at most `limit` in any value. alone: only a batch of one sample is. All that before
    floats are rounded to what is stored. why: where the others hold, for example "where attention_mask is 1"; of alone,
    what differs.
    """

    kind: PromiseKind
    limit: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        if self.kind == "alone":
            return f"alone only: {self.why}"
        said = "exact" if self.kind == "exact" else f"within {self.limit:g}"
        if not self.why:
            return said
        return f"{said} {self.why}" if self.why.startswith(("where ", "but ")) else f"{said}, but {self.why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchForm:
    """The form of all fields. made_by: the class of the extractor, processor or step, for messages."""

    made_by: str
    fields: tuple[FieldForm, ...]
    promise: Promise
    stored: tuple[FieldForm, ...] = field(init=False, repr=False, compare=False)
    """The fields that are on disk."""
    read: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """What a batch is made of: the names of these, and of what says their padding."""
    is_listed: bool = field(default=False, repr=False, compare=False)
    """Whether a sample has any number of items as they lie on disk: of a field a tuple."""
    most: int | None = field(default=None, repr=False, compare=False)
    """Items of such a sample that stand in a batch, the first ones; None: all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stored", tuple(each for each in self.fields if each.is_stored))
        pads = (each.pad_of for each in self.stored if each.pad_of is not None)
        object.__setattr__(self, "read", (*(each.name for each in self.stored), *pads))
        by_name = {field.name: field for field in self.fields}
        on_disk = [spec.name for field in self.fields for spec in field.specs()]
        if len(by_name) != len(self.fields) or len(set(on_disk)) != len(on_disk):
            raise ValueError(f"the form of {self.made_by} names a field twice: {', '.join(by_name)}")
        for each in self.fields:
            if each.mask_of not in (None, *by_name):
                raise ValueError(f"{each.name} is the mask of {each.mask_of}, which is no field")
            if each.lengths_of not in (None, *by_name):
                raise ValueError(f"{each.name} is the lengths of {each.lengths_of}, which is no field")
            if each.mask_of is not None:
                each.marked_axes(by_name[each.mask_of])

    @classmethod
    def exact(cls, made_by: str, *forms: FieldForm) -> Self:
        """Returns the form of a step whose batches are those of the reference."""
        return cls(made_by=made_by, fields=forms, promise=Promise(kind="exact"))

    @property
    def main(self) -> FieldForm:
        """The field by which samples are counted: the first that grows along one axis, else the first."""
        growing = (field for field in self.stored if len(field.grows) == 1)
        return next(growing, self.stored[0])

    @property
    def units(self) -> FieldForm | None:
        """The field whose rows are the second budget of packs: that with a table, else the one that counts samples."""
        if not self.stored:
            return None
        return next((field for field in self.stored if field.table is not None), self.main)

    def packed(self) -> BatchForm:
        """Returns the form in which the arrays of a batch stand one behind the other, and their lengths beside.

        Raises ValueError where an array has several axes that grow, or belongs to others of its sample.
        """
        if all(field.join == "cat" for field in self.fields):
            return self
        kept, masks = [], [field for field in self.fields if field.mask_of is not None]
        for each in self.stored:
            if len(each.grows) != 1 or each.join != "stack" or each.table is not None:
                raise ValueError(
                    f"{each.name} {shown_shape(each.shape)} of {self.made_by} stands not one behind the other"
                )
            shape = tuple(each.shape[axis] for axis in each._to_rows)
            kept.append(replace(each, shape=shape, join="cat", pad_of=None, multiple=1, length=None, side="right"))
        lengths = [field for field in self.fields if field.lengths_of is not None]
        return replace(self, fields=(*kept, *masks, *(lengths or [self.main.lengths()])))

    @property
    def pixels(self) -> FieldForm:
        """The field that holds the pixels of images: one with a table if there is one, of these that of most axes."""
        return max(self.stored, key=lambda field: (field.table is not None, len(field.shape)))

    def specs(self, group: Group = "") -> tuple[FieldSpec, ...]:
        """Returns the fields on disk."""
        return tuple(spec for field in self.fields for spec in field.specs(group))

    def arrays(self, sample: Sample | Mapping[str, Array]) -> dict[str, Array]:
        """Returns the arrays of a sample's fields by name, views."""
        return {field.name: field.array(sample) for field in self.stored}

    def items(self, sample: Sample) -> dict[str, Sequence[Array]]:
        """Returns of each field the arrays of a sample's items: one of a clip, one an image of several images."""
        return {name: arrays[0] for name, arrays in self.columns([sample]).items()}

    def columns(self, samples: Sequence[Sample]) -> dict[str, list[Sequence[Array]]]:
        """Returns of each field the arrays of every sample's items.

        Arrays with one axis that grows are as on disk, where it is the first: `collate` takes them with `are_rows`.
        """
        if self.is_listed:
            return self._columns_of_lists(samples)
        found: dict[str, list[Sequence[Array]]] = {}
        for each in self.stored:
            values = column(samples, each.on_disk)
            if values and isinstance(values[0], (tuple, list)):
                is_moved = each.is_of_lines and each.grows[0]
                found[each.name] = [list(map(each.rows, items)) for items in values] if is_moved else values
            elif not each.is_of_lines:
                found[each.name] = [(each.array(sample),) for sample in samples]
            elif each.used_of is None:
                found[each.name] = [(array,) for array in values]
            else:
                used = column(samples, each.used_of)
                found[each.name] = [(array[: n.item()],) for array, n in zip(values, used, strict=True)]
            if each.pad_of is not None:
                found[each.pad_of] = [(pad,) for pad in column(samples, each.pad_of)]
        return found

    def _columns_of_lists(self, samples: Sequence[Sample]) -> dict[str, list[Sequence[Array]]]:
        found: dict[str, list[Sequence[Array]]] = {}
        for each in self.stored:
            names = [spec.name for spec in each.specs()]
            lists = {name: [own[: self.most] for own in column(samples, name)] for name in names}
            items = zip(*lists.values(), strict=True)
            cut = [[each.windows(each.line(names, item)) for item in zip(*own, strict=True)] for own in items]
            found[each.name] = [list(itertools.chain.from_iterable(windows)) for windows in cut]
            if each.pad_of is not None:
                pads = zip(lists[each.pad_of], cut, strict=True)
                found[each.pad_of] = [[p for p, of_one in zip(*both, strict=True) for _ in of_one] for both in pads]
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns the form as JSON values."""
        promise = {"kind": self.promise.kind, "limit": self.promise.limit, "why": self.promise.why}
        return {"made_by": self.made_by, "promise": promise, "fields": [field.to_json() for field in self.fields]}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Returns the form that `to_json` wrote; ValueError for anything else."""
        is_form = isinstance(document, dict) and set(document) == {"made_by", "promise", "fields"}
        require(is_form, "the form of a batch", document)
        promise, found = document["promise"], document["fields"]
        is_promise = isinstance(promise, dict) and set(promise) == {"kind", "limit", "why"}
        require(is_promise, "the promise of a form", promise)
        require(is_number(promise["limit"]), "the limit of a promise", promise["limit"])
        require(isinstance(found, list) and len(found) <= 64, "the fields of a form", found)
        return cls(
            made_by=text(document["made_by"], "who made a form"),
            fields=tuple(map(FieldForm.from_json, found)),
            promise=Promise(
                kind=one_of(promise["kind"], get_args(PromiseKind), "the kind of a promise"),
                limit=float(promise["limit"]),
                why=text(promise["why"], "the reason of a promise", least=0),
            ),
        )


def promises(constants: Mapping[Group, Mapping[str, Any]]) -> dict[Group, str]:
    """Returns what the declared forms of a cache with these constants promise of batches, by group, in words.

    Of what a model makes: how far its answer to a sample alone is from that in a batch. `no promise: ...` where what
    stands there is no form.
    """
    found: dict[Group, str] = {}
    for group, values in constants.items():
        declared = values.get("form", values.get("text_form"))
        if declared is not None:
            try:
                form = BatchForm.from_json(declared)
                found[group] = f"{values.get('model', form.promise)}, by {form.made_by}"
            except ValueError as err:
                found[group] = f"no promise: {err}"
    return found


def _shape(value: Any, what: str) -> tuple[int | None, ...]:
    require(isinstance(value, list) and len(value) <= MAX_RANK, what, value)
    return tuple(None if n is None else integer(n, "an axis of a field") for n in value)


_READ: dict[str, Callable[[Any, str], Any]] = {
    "name": identifier,
    "dtype": lambda value, what: one_of(value, DTYPES, what),
    "stored_dtype": lambda value, what: one_of(value, _STORED_DTYPES, what),
    "shape": _shape,
    "pad": lambda value, what: None if value is None else number(value, what),
    "side": lambda value, what: one_of(value, get_args(Side), what),
    "join": lambda value, what: one_of(value, get_args(Join), what),
    **dict.fromkeys(("multiple", "length", "hop"), partial(integer, least=1)),
    **dict.fromkeys(("mask_of", "lengths_of", "of", "used_of", "pad_of"), identifier),
    "scale": number,
    "table": lambda value, _: Table.from_json(value),
    "finish": lambda value, what: one_of(value, tuple(FINISHES), what),
    "holds_moments": lambda value, what: bool(integer(int(value is True), what, least=1)),
    "is_rounded": lambda value, what: bool(integer(int(value is False), what, least=1)) is False,
}
"""How what `FieldForm.to_json` wrote of a field is read."""
