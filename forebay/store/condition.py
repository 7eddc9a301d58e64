"""Conditions over the columns of a table, as a tree, and the rows for which they hold.

A comparison with a null is neither true nor false, as in SQL. `is None` is true or false of every row. NaN compares as
in Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.errors import ConfigError
from forebay.store.layout import Array

if TYPE_CHECKING:
    import pyarrow as pa

_FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_Join = Callable[[Array, Array], Array]
_ARROW = {"==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column. at: the character of the text at which it is named."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Value:
    """A text, a number or a truth value; None is compared with nothing."""

    value: str | float | bool | None
    at: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """A column compared with a value or another column. sign: a key of `_FUNCTIONS`."""

    column: Column
    sign: str
    other: Column | Value


@dataclass(frozen=True, slots=True)
class OneOf:
    """Whether a column has one of some values, or none of them."""

    column: Column
    values: tuple[Value, ...]
    is_negated: bool


@dataclass(frozen=True, slots=True)
class IsNull:
    """Whether a column has no value, or one."""

    column: Column
    is_negated: bool


@dataclass(frozen=True, slots=True)
class AllOf:
    """All of some conditions; true of no condition at all."""

    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """One or more of some conditions; false of no condition at all."""

    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Negated:
    """The other truth value of a condition."""

    part: Any


class ConditionRows:
    """The rows of a table, asked for conditions."""

    def __init__(self, table: pa.Table, setting: str) -> None:
        self._table, self._setting = table, setting

    def holds(self, condition: Any) -> Array:
        """Returns for which rows a condition is true, bool [rows]."""
        return self._truth(condition)[0]

    def _truth(self, condition: Any) -> tuple[Array, Array]:
        """Returns for which rows a condition is true, and for which it is false; it is neither where it is unknown."""
        match condition:
            case AllOf(parts=parts):
                return self._folded(parts, true=np.logical_and, false=np.logical_or, of_none=True)
            case AnyOf(parts=parts):
                return self._folded(parts, true=np.logical_or, false=np.logical_and, of_none=False)
            case Negated(part=part):
                is_true, is_false = self._truth(part)
                return is_false, is_true
            case IsNull(column=column, is_negated=is_negated):
                is_null: Array = self._column(column).is_null().to_numpy()
                return (~is_null, is_null) if is_negated else (is_null, ~is_null)
            case OneOf():
                found, is_valid = self._one_of(condition)
                found = ~found if condition.is_negated else found
            case _:
                found, is_valid = self._compared(condition)
        return found & is_valid, ~found & is_valid

    def _folded(self, parts: Sequence[Any], *, true: _Join, false: _Join, of_none: bool) -> tuple[Array, Array]:
        is_true = np.full(self._table.num_rows, of_none)
        is_false = ~is_true
        for part in parts:
            found, missed = self._truth(part)
            is_true, is_false = true(is_true, found), false(is_false, missed)
        return is_true, is_false

    def _column(self, column: Column) -> pa.ChunkedArray:
        return self._table[column.name]

    def _kind(self, column: Column) -> str:
        import pyarrow as pa

        kind = self._column(column).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return "text"
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            return "number"
        return "truth value" if pa.types.is_boolean(kind) else str(kind)

    def _comparable(self, column: Column) -> str:
        """Returns the kind of a column. Raises ConfigError for one whose values are compared with nothing."""
        if (kind := self._kind(column)) not in _PLURAL:
            raise ConfigError(
                f"{self._setting}: column {column.name} at character {column.at} holds {kind}, which can only be asked "
                "whether it `is None`",
                code="FB113",
            )
        return kind

    def _require(self, column: Column, other: Column | Value) -> str:
        """Returns the kind of a column. Raises ConfigError where what it is compared with is of another one."""
        kind = self._comparable(column)
        is_column = isinstance(other, Column)
        found = self._kind(other) if isinstance(other, Column) else _kind_of(other.value)
        if found != kind:
            shown = f"column {other.name}" if isinstance(other, Column) else _shown(other.value)
            raise ConfigError(
                f"{self._setting}: column {column.name} holds {_PLURAL[kind]}, and {shown} at character {other.at} "
                f"{'holds' if is_column else 'is a'} {_PLURAL.get(found, found) if is_column else found}; compare "
                f"{column.name} with a {kind}",
                code="FB113",
            )
        return kind

    def _numbers(self, column: Column) -> tuple[Array, Array]:
        """Returns a column as float64, 0 where it is null, and where it is not."""
        import pyarrow as pa

        found = self._column(column)
        values = found.cast(pa.float64(), safe=False).fill_null(0.0).to_numpy()
        return values, found.is_valid().to_numpy()

    def _texts(self, column: Column) -> pa.ChunkedArray:
        import pyarrow as pa

        return self._column(column).cast(pa.large_string())

    def _one_of(self, condition: OneOf) -> tuple[Array, Array]:
        """Returns which rows have one of the values, and which have a value at all."""
        import pyarrow as pa
        import pyarrow.compute as pc

        kind = self._comparable(condition.column)
        for value in condition.values:
            self._require(condition.column, value)
        is_valid = self._column(condition.column).is_valid().to_numpy()
        values = [value.value for value in condition.values]
        if kind == "text":
            found = pc.is_in(self._texts(condition.column), value_set=pa.array(values, pa.large_string())).to_numpy()
        elif kind == "number":
            found = np.isin(self._numbers(condition.column)[0], np.array(values, np.float64))
        else:
            found = np.isin(self._truths(condition.column), np.array(values, bool))
        return np.asarray(found), is_valid

    def _truths(self, column: Column) -> Array:
        return np.asarray(self._column(column).fill_null(fill_value=False).to_numpy())

    def _compared(self, condition: Comparison) -> tuple[Array, Array]:
        """Returns for which rows a comparison is true, and which have values on both sides."""
        import pyarrow as pa
        import pyarrow.compute as pc

        column, sign, other = condition.column, condition.sign, condition.other
        kind = self._require(column, other)
        if kind == "text":
            texts = self._texts(other) if isinstance(other, Column) else pa.scalar(other.value, pa.large_string())
            found = getattr(pc, _ARROW[sign])(self._texts(column), texts)
            return found.fill_null(fill_value=False).to_numpy(), found.is_valid().to_numpy()
        if kind == "truth value" and sign not in ("==", "!="):
            raise ConfigError(
                f"{self._setting}: column {column.name} at character {column.at} holds truth values, which have no "
                f"order; write {column.name} or not {column.name}",
                code="FB113",
            )
        left, is_valid = self._plain(column, kind)
        if isinstance(other, Column):
            right, other_is_valid = self._plain(other, kind)
            is_valid = is_valid & other_is_valid
        else:
            right = np.asarray(other.value)
        return np.asarray(_FUNCTIONS[sign](left, right)), is_valid

    def _plain(self, column: Column, kind: str) -> tuple[Array, Array]:
        if kind == "number":
            return self._numbers(column)
        return self._truths(column), self._column(column).is_valid().to_numpy()


_PLURAL = {"text": "texts", "number": "numbers", "truth value": "truth values"}


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "truth value"
    return "text" if isinstance(value, str) else "number"


def _shown(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return repr(int(value) if is_whole else value)
