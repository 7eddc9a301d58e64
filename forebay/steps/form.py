"""How what is stored of samples becomes a batch, declared: a cache says it in its metadata, and no code is needed.

A form says of each field how the arrays of a clip or an image lie on disk, which of their axes grow, what stands behind
(or before) the shorter ones in a batch, and which values a code stands for. `collate` is in `forebay.steps.form_batch`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from forebay.errors import FormError
from forebay.steps.step import Fields
from forebay.store.layout import Array, FieldSpec, Group

if TYPE_CHECKING:
    from forebay.store.source import Sample

Join = Literal["stack", "cat", "nest"]
Side = Literal["right", "left"]
PromiseKind = Literal["exact", "within", "alone"]

DTYPES = ("float32", "int64", "int32", "int16", "int8", "uint8", "bool")
"""Of fields of a batch. float32 becomes the dtype that a loader is asked for."""
_STORED_DTYPES = ("float16", "float32", "int64", "int32", "int16", "int8", "uint8", "uint16")
_CODES = {"uint8": 256, "uint16": 65_536}
"""Values that a code can stand for."""
_MAX_AXIS, _MAX_RANK, _MAX_FIELDS, _MAX_CHANNELS = 1 << 31, 8, 64, 1024
_MAX_TEXT = 4096


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Table:
    """The values of codes: `values[channel, code]`, float32 [channels, n].

    axis: of the array, along which channels lie: place i is of channel `i // inner % channels`. One channel is all.
    """

    axis: int
    values: npt.NDArray[np.float32]
    inner: int = 1

    def to_json(self) -> dict[str, Any]:
        """Returns the table as JSON values; a float32 comes back bit for bit."""
        return {"axis": self.axis, "inner": self.inner, "values": self.values.tolist()}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Returns the table that `to_json` wrote; ValueError for anything else."""
        _require(isinstance(document, dict) and set(document) == {"axis", "inner", "values"}, "a table", document)
        rows = document["values"]
        is_whole = isinstance(rows, list) and 0 < len(rows) <= _MAX_CHANNELS
        _require(is_whole and all(isinstance(row, list) and row for row in rows), "the values of a table", rows)
        _require(len({len(row) for row in rows}) == 1, "rows of one length in a table", [len(row) for row in rows])
        _require(all(_is_number(value) for row in rows for value in row), "numbers in a table", rows)
        return cls(
            axis=_integer(document["axis"], "the axis of a table", most=_MAX_RANK),
            values=np.array(rows, np.float32),
            inner=_integer(document["inner"], "the places of a channel in a table", least=1),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldForm:
    """How one field lies on disk and in a batch.

    An array is one clip's or one image's, as its extractor or processor gives it, without the axis of the batch. On
    disk an array with one axis that grows has that axis first. An array with several is flat, and its shape stands
    beside it in NAME_shape, int32 [rank].
    """

    name: str
    """Of the field, in the cache and in batches."""
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
    """Or always to this. Longer arrays stand in no batch."""
    join: Join = "stack"
    """`stack`: an array is a row of the batch. `cat`: the arrays stand one behind the other along the first axis that
    grows. `nest`: those of one sample do along axis 0, and a sample is a row."""
    mask_of: str | None = None
    """The field whose values this one marks: 1 where they are, 0 in the padding. `shape` says along which of its axes:
    it is the other's without some. Not stored."""
    table: Table | None = None
    grows: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The axes of an array whose length differs."""
    _row: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    """The shape of a value on disk."""

    def __post_init__(self) -> None:
        # Found once, because every sample asks for them.
        grows = tuple(axis for axis, length in enumerate(self.shape) if length is None)
        rest = () if len(grows) > 1 else (n for axis, n in enumerate(self.shape) if axis != (*grows, 0)[0])
        object.__setattr__(self, "grows", grows)
        object.__setattr__(self, "_row", tuple(rest))
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

    def specs(self, group: Group = "media") -> tuple[FieldSpec, ...]:
        """Returns the fields on disk; none for a mask."""
        if self.mask_of is not None:
            return ()
        main = FieldSpec(name=self.name, dtype=self.stored_dtype, shape=self._row, group=group)
        if len(self.grows) < 2:
            return (main,)
        return (main, FieldSpec(name=self._shape_name, dtype="int32", group=group))

    def stored(self, array: Array) -> Fields:
        """Returns an array as fields of `specs`. Raises ValueError for one of another rank, shape or range.

        array: values, or where there is a table codes.
        """
        if array.ndim != len(self.shape) or any(
            wanted not in (None, found) for wanted, found in zip(self.shape, array.shape, strict=True)
        ):
            raise ValueError(f"{self.name} is {list(array.shape)}, declared {_shown(self.shape)}")
        values = self._as_stored(array)
        if len(self.grows) > 1:
            shape = np.array(array.shape, np.int32)
            return {self.name: np.ascontiguousarray(values).reshape(-1), self._shape_name: shape}
        if self.grows and self.grows[0]:
            values = np.moveaxis(values, self.grows[0], 0)
        return {self.name: np.ascontiguousarray(values).reshape(-1, *self._row)}

    def array(self, sample: Sample | Mapping[str, Array]) -> Array:
        """Returns the array of what `stored` made, a view. Raises ValueError where the fields are of no such array."""
        values = sample[self.name]
        if len(self.grows) > 1:
            shape = sample[self._shape_name].tolist()
            fits = len(shape) == len(self.shape) and all(
                found >= 0 and wanted in (None, found) for wanted, found in zip(self.shape, shape, strict=True)
            )
            if not fits or math.prod(shape) != values.size:
                raise ValueError(f"{self.name} has {values.size} values and the shape {shape}, {_shown(self.shape)}")
            return values.reshape(shape)
        if self.grows:
            return np.moveaxis(values, 0, self.grows[0]) if self.grows[0] else values
        return values.reshape([length for length in self.shape if length is not None])

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
        names = {each.name for each in fields(cls) if each.init}
        is_form = isinstance(document, dict) and set(_NEEDED) <= set(document) <= names
        _require(is_form, f"a field's form of {', '.join(_NEEDED)}", document)
        shape = document["shape"]
        _require(isinstance(shape, list) and len(shape) <= _MAX_RANK, "the shape of a field", shape)
        values: dict[str, Any] = {
            "name": _text(document["name"], "the name of a field"),
            "dtype": _one_of(document["dtype"], DTYPES, "the dtype of a field"),
            "stored_dtype": _one_of(document["stored_dtype"], _STORED_DTYPES, "the stored dtype of a field"),
            "shape": tuple(None if n is None else _integer(n, "an axis of a field") for n in shape),
        }
        _require(values["name"].isidentifier(), "the name of a field", values["name"])
        if "pad" in document:
            pad = document["pad"]
            _require(pad is None or _is_number(pad), "a padding value", pad)
            values["pad"] = None if pad is None else float(pad)
        if "side" in document:
            values["side"] = _one_of(document["side"], get_args(Side), "the side of padding")
        if "join" in document:
            values["join"] = _one_of(document["join"], get_args(Join), "the join of a field")
        for name in ("multiple", "length"):
            if document.get(name) is not None:
                values[name] = _integer(document[name], f"the {name} of a field", least=1)
        if document.get("mask_of") is not None:
            values["mask_of"] = _text(document["mask_of"], "the field of a mask")
        if document.get("table") is not None:
            values["table"] = Table.from_json(document["table"])
        is_cast = "float" in values["dtype"] and "float" not in values["stored_dtype"]
        is_cut = "float" not in values["dtype"] and "float" in values["stored_dtype"]
        is_wrong = (is_cast and "table" not in values) or is_cut
        _require(not is_wrong, f"{values['dtype']} of {values['name']} stored so that its values are kept", document)
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
            raise ValueError(f"{self.name} {_shown(self.shape)} is no mask of {marked.name} {_shown(marked.shape)}")
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
        if not _is_kept(values, array):
            raise ValueError(f"{self.name} holds values of {array.dtype} that {self.stored_dtype} does not")
        return values


_NEEDED = ("name", "dtype", "shape", "stored_dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What batches are, compared with those that the extractor or processor itself makes of the same samples.

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "stored", tuple(each for each in self.fields if each.mask_of is None))
        by_name = {field.name: field for field in self.fields}
        on_disk = [spec.name for field in self.fields for spec in field.specs()]
        if len(by_name) != len(self.fields) or len(set(on_disk)) != len(on_disk):
            raise ValueError(f"the form of {self.made_by} names a field twice: {', '.join(by_name)}")
        for each in self.fields:
            if each.mask_of not in (None, *by_name):
                raise ValueError(f"{each.name} is the mask of {each.mask_of}, which is no field")
            if each.mask_of is not None:
                each.marked_axes(by_name[each.mask_of])

    @property
    def main(self) -> FieldForm:
        """The field by which samples are counted: the first that grows along one axis, else the first."""
        growing = (field for field in self.stored if len(field.grows) == 1)
        return next(growing, self.stored[0])

    @property
    def pixels(self) -> FieldForm:
        """The field that holds the pixels of images: one with a table if there is one, of these that of most axes."""
        return max(self.stored, key=lambda field: (field.table is not None, len(field.shape)))

    def specs(self, group: Group = "media") -> tuple[FieldSpec, ...]:
        """Returns the fields on disk."""
        return tuple(spec for field in self.fields for spec in field.specs(group))

    def arrays(self, sample: Sample | Mapping[str, Array]) -> dict[str, Array]:
        """Returns the arrays of a sample's fields by name, views."""
        return {field.name: field.array(sample) for field in self.stored}

    def to_json(self) -> dict[str, Any]:
        """Returns the form as JSON values."""
        promise = {"kind": self.promise.kind, "limit": self.promise.limit, "why": self.promise.why}
        return {
            "made_by": self.made_by,
            "promise": promise,
            "fields": [field.to_json() for field in self.fields],
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Returns the form that `to_json` wrote; ValueError for anything else."""
        is_form = isinstance(document, dict) and set(document) == {"made_by", "promise", "fields"}
        _require(is_form, "the form of a batch", document)
        promise, found = document["promise"], document["fields"]
        is_promise = isinstance(promise, dict) and set(promise) == {"kind", "limit", "why"}
        _require(is_promise, "the promise of a form", promise)
        _require(_is_number(promise["limit"]), "the limit of a promise", promise["limit"])
        _require(isinstance(found, list) and 0 < len(found) <= _MAX_FIELDS, "the fields of a form", found)
        return cls(
            made_by=_text(document["made_by"], "who made a form"),
            fields=tuple(map(FieldForm.from_json, found)),
            promise=Promise(
                kind=_one_of(promise["kind"], get_args(PromiseKind), "the kind of a promise"),
                limit=float(promise["limit"]),
                why=_text(promise["why"], "the reason of a promise", least=0),
            ),
        )


def promises(constants: Mapping[str, Any]) -> dict[Group, str]:
    """Returns what the declared forms of a cache with these constants promise of batches, by group, in words.

    `no promise: ...` where what stands there is no form.
    """
    found: dict[Group, str] = {}
    for group, name in _FORMS:
        if constants.get(name) is not None:
            try:
                form = BatchForm.from_json(constants[name])
                found[group] = f"{form.promise}, by {form.made_by}"
            except ValueError as err:
                found[group] = f"no promise: {err}"
    return found


_FORMS: tuple[tuple[Group, str], ...] = (("media", "form"), ("text", "text_form"))


def _is_kept(values: Array, array: Array) -> bool:
    """Returns whether a cast array holds the values of the one that was cast, rounded if they are floats."""
    if values.dtype.kind == "f":
        return bool(np.isfinite(values).all())
    if array.dtype.kind not in "iu" or not array.size:
        return np.array_equal(values, array)
    held = np.iinfo(values.dtype)  # two passes without a cast are faster than a comparison with one
    return bool(held.min <= array.min() and array.max() <= held.max)


def _shown(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('n' if length is None else str(length) for length in shape)}]"


def _require(is_right: Any, wanted: str, found: Any) -> None:
    if not is_right:
        raise FormError(f"wanted {wanted}, got {found!r:.80}")


def _integer(value: Any, what: str, *, least: int = 0, most: int = _MAX_AXIS) -> int:
    _require(type(value) is int and least <= value < most, what, value)
    return int(value)


def _text(value: Any, what: str, *, least: int = 1) -> str:
    _require(isinstance(value, str) and least <= len(value) <= _MAX_TEXT, what, value)
    return str(value)


def _one_of(value: Any, choices: Sequence[str], what: str) -> Any:
    _require(isinstance(value, str) and value in choices, f"{what}, one of {', '.join(choices)}", value)
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 3.5e38
