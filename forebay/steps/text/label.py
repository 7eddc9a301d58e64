"""`label`: the class of an image, or its classes, as numbers.

`none`: nothing is made of the text of a row, for what learns from its items alone.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from forebay.errors import TextError
from forebay.steps.form import BatchForm, FieldForm, Promise
from forebay.steps.step import TextStep
from forebay.steps.text.row_encoder import EncodedRow, EncodedRows, OneByOne, RowEncoder, Size
from forebay.store.key import digest
from forebay.store.layout import Array, FieldSpec
from forebay.store.texts import TextStore

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """The classes in the column of a source.

    names: all of its classes in the order of their numbers: as the source declares them, else sorted as Python sorts
    strings; None where classes are integers. count: one more than the largest number. is_multi: a row has a list.
    """

    names: tuple[str, ...] | None
    count: int
    is_multi: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the column as JSON values."""
        names = None if self.names is None else list(self.names)
        return {"names": names, "count": self.count, "is_multi": self.is_multi}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Returns the column that `to_json` wrote."""
        names = document["names"]
        return cls(
            names=None if names is None else tuple(names), count=document["count"], is_multi=document["is_multi"]
        )


LABELS_KEY = b"forebay.labels"
"""Where the schema of a listing's rows has the column of classes, as JSON."""
_LONGEST = 12
"""More digits than any number of a class has."""
_NOTHING = Labels(names=(), count=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Label(TextStep):
    """`labels` int64, the number of an image's class; float32 [classes] of 0 and 1 where a row has a list of classes.

    Classes that are integers in the source keep their numbers. Those that are names have the numbers of their places.
    An integer is a number in `classes`, unless all names there are integers: then it is one of these names.
    found: what the listing says of the source's classes. It is in no recipe key, because sources are; it is in the keys
    of shards, so that another class beside them never gives another number to rows that are stored.
    """

    name: ClassVar[str] = "label"
    given: ClassVar[frozenset[str]] = frozenset({"found"})
    needs_items: ClassVar[int | None] = 1

    classes: tuple[str, ...] | None = None
    """Names of the classes, in the order of their numbers; a row of another class fails as `unknown_label`. Left out:
    as the source declares them (a ClassLabel of `hf`), else all that the listed rows have, sorted. Give them where
    several sources, for example training and test data, are to have the same numbers."""
    version: int = 1
    found: Labels | None = None

    def __post_init__(self) -> None:
        if self.classes is None:
            return
        if not self.classes or not all(self.classes):
            raise ValueError(f"classes is {list(self.classes)}, wanted one name or more, and no empty one")
        if len({*self.classes}) < len(self.classes):
            twice = next(name for name in self.classes if self.classes.count(name) > 1)
            raise ValueError(f"classes names {twice!r} twice; name it once")

    def compared(self) -> dict[str, Any]:
        """Returns the settings, and of what was found that by which a row's values are decided."""
        document = {"classes": None if self.classes is None else list(self.classes), "version": self.version}
        if self.found is None:
            return document
        decides = self.classes is None
        return document | {
            "is_multi": self.found.is_multi,
            "of_names": _digest(self.found.names) if decides and self.found.names is not None else None,
            "of_integers": self.found.names is None,
            "width": self._width if self.found.is_multi else None,
        }

    def of_rows(self, rows: pa.Table, different: Callable[[str], list[str]]) -> Self:  # noqa: ARG002
        found = (rows.schema.metadata or {}).get(LABELS_KEY)
        return replace(self, found=None if found is None else Labels.from_json(json.loads(found)))

    @property
    def _width(self) -> int:
        return (self.found or _NOTHING).count if self.classes is None else len(self.classes)

    def form(self) -> BatchForm:  # type: ignore[override]
        if (self.found or _NOTHING).is_multi:
            # 0 and 1 are exact in half the bytes.
            field = FieldForm(name="labels", dtype="float32", shape=(self._width,), stored_dtype="float16")
        else:
            field = FieldForm(name="labels", dtype="int64", shape=(), stored_dtype="int64")
        return BatchForm(made_by=type(self).__name__, fields=(field,), promise=Promise(kind="exact"))

    def fields(self) -> tuple[FieldSpec, ...]:
        return self.form().specs("text")

    def opened(self, folder: Path, *, merge_size: int | None) -> LabelEncoder:  # noqa: ARG002
        return LabelEncoder(self)


@functools.lru_cache(maxsize=8)
def _digest(names: tuple[str, ...]) -> str:
    return digest({"names": list(names)})


class LabelEncoder(OneByOne):
    """Classes to numbers."""

    name, needs_items = Label.name, Label.needs_items

    def __init__(self, step: Label) -> None:
        self._step, self._found = step, step.found or _NOTHING
        self._form = step.form()
        self._names = self._found.names if step.classes is None else step.classes
        by_name = self._found.names is not None or (step.classes is not None and all(map(_is_integer, step.classes)))
        self._numbers = {name: number for number, name in enumerate(self._names or ())} if by_name else None
        self._count = len(self._names) if self._names is not None else self._found.count

    @property
    def constants(self) -> dict[str, Any]:
        """`prompt`, `classes` (names in the order of their numbers, None of integers), `num_classes`, the form."""
        return {
            "prompt": Label.name,
            "classes": None if self._names is None else list(self._names),
            "num_classes": self._count,
            "text_form": self._form.to_json(),
        }

    def encode(self, text: str, told: Sequence[Size], *, sample_id: str) -> dict[str, Array]:  # noqa: ARG002
        """Returns the fields of a row. text: its class, or a JSON list of classes. Raises TextError `unknown_label`."""
        (field,) = self._form.fields
        if not self._found.is_multi:
            return field.stored(np.array(self._number(text, sample_id), np.int64))
        places = [self._number(label, sample_id) for label in _several(text)]
        row = np.zeros(self._count, np.float32)
        row[places] = 1
        return field.stored(row)

    def _number(self, label: str, sample_id: str) -> int:
        if self._numbers is not None:
            found = self._numbers.get(label)
        else:
            found = int(label) if _is_integer(label) and int(label) < self._count else None
        if found is None:
            raise TextError("unknown_label", f"{sample_id}: {self._unknown(label)}")
        return found

    def _unknown(self, label: str) -> str:
        where = "text.classes" if self._step.classes is not None else "the classes that the source declares"
        if self._numbers is None:
            return f"label {label[:60]} is no number of {where}, from 0 to {self._count - 1}; add its class there"
        near = difflib.get_close_matches(label, self._numbers, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"label {label[:60]!r} is none of the {self._count} of {where}{hint}; add it there, or correct the row"


def _several(text: str) -> list[str]:
    """Returns the classes of a JSON list; of what is none, the text itself, which is no class."""
    try:
        found = json.loads(text)
    except ValueError:
        return [text]
    return [str(each) for each in found] if isinstance(found, list) else [text]


def _is_integer(name: str) -> bool:
    return len(name) < _LONGEST and name.isascii() and name.isdecimal() and str(int(name)) == name


@dataclass(frozen=True, kw_only=True, slots=True)
class NoText(TextStep):
    """No field of text; a batch holds images alone. The text of a row stays in the row table."""

    name: ClassVar[str] = "none"

    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        return ()

    def opened(self, folder: Path, *, merge_size: int | None) -> _Nothing:  # noqa: ARG002
        return _Nothing()


class _Nothing(RowEncoder):
    @property
    def constants(self) -> dict[str, Any]:
        return {"prompt": NoText.name}

    def encode_rows(self, rows: EncodedRows, *, store: TextStore | None = None) -> Iterator[EncodedRow]:  # noqa: ARG002
        return (EncodedRow() for _ in rows.ids)
