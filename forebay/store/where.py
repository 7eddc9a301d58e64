"""A condition over the columns of a row table: `language in ("hi", "ta") and duration_s < 12 and not speaker is None`.

The text is a Python expression of few forms: `and`, `or`, `not`, comparisons (chained ones too), `in` and `not in` a
list of literals, `is None`, names of columns, texts, numbers, True and False. It is parsed and never executed.

A null is no value: every comparison with one is false, `!=` and `not in` too, and only `is None` is true of it. `not`
turns a truth value round, so `not snr > 10` holds where there is no snr. NaN compares as in Python.
"""

from __future__ import annotations

import ast
import difflib
import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.errors import ConfigError
from forebay.store.layout import Array

if TYPE_CHECKING:
    import pyarrow as pa

MAX_CHARACTERS = 4_096
MAX_DEPTH = 48
"""Conditions inside of conditions."""
MAX_NUMBER = 2**53 - 1
"""Up to here every comparison with a number is exact, whatever the column's type."""

_FORMS = (
    "wanted and, or, not, comparisons, `in` a list of values, `is None`, names of columns, texts, numbers, True and "
    "False"
)
_SHOWN = 20

_ORDER: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ARROW = {"==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}
_TURNED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    at: int


@dataclass(frozen=True, slots=True)
class _Value:
    value: str | float | bool | None
    at: int


@dataclass(frozen=True, slots=True)
class _Comparison:
    column: _Column
    sign: str
    other: _Column | _Value


@dataclass(frozen=True, slots=True)
class _OneOf:
    column: _Column
    values: tuple[_Value, ...]
    is_negated: bool


@dataclass(frozen=True, slots=True)
class _IsNull:
    column: _Column
    is_negated: bool


@dataclass(frozen=True, slots=True)
class _All:
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Any:
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Not:
    part: Any


@dataclass(frozen=True, slots=True)
class Where:
    """A condition that was parsed. text: as it was written. columns: those that it names, each once."""

    text: str
    columns: tuple[str, ...]
    _setting: str = field(repr=False)
    _condition: Any = field(repr=False)
    _places: Mapping[str, int] = field(repr=False, compare=False)

    def require_columns(self, names: Collection[str]) -> None:
        """Raises ConfigError, with the nearest name and all of them, for a column that is none of these."""
        for name in self.columns:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(
                    f"{self._setting}: {name!r} at character {self._places[name]} is no column{hint}; the columns are "
                    f"{', '.join(names)}"
                )

    def mask(self, table: pa.Table) -> Array:
        """Returns for which rows it holds, bool [rows]. table: has its columns; others are not looked at.

        Raises ConfigError for an unknown column, or one that is compared with a value of another kind.
        """
        self.require_columns(table.column_names)
        return _Rows(table, self._setting).holds(self._condition)


def parse_where(text: str, *, setting: str = "where") -> Where:
    """Returns the condition of a text. setting: what to call the text in messages.

    Raises ConfigError, with the place, for anything that is no condition.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{setting} has {len(text)} characters, at most {MAX_CHARACTERS} are read")
    parser = _Parser(text, setting)
    condition = parser.condition(parser.tree(), 0)
    return Where(text.strip(), tuple(parser.places), setting, condition, parser.places)


class _Parser:
    """Turns the syntax tree of one text into a condition. places: where each column is named first."""

    def __init__(self, text: str, setting: str) -> None:
        self.setting = setting
        self.places: dict[str, int] = {}
        self._text = text.replace("\r\n", "\n").replace("\r", "\n")
        self._lead = len(self._text) - len(self._text.lstrip())
        stripped = self._text.strip()
        # Lines of a condition need no brackets of their own.
        self._parsed, self._added = (f"({stripped}\n)", 1) if "\n" in stripped else (stripped, 0)

    def tree(self) -> ast.expr:
        """Returns the syntax tree."""
        try:
            with warnings.catch_warnings():  # of the parser, about escapes and the like
                warnings.simplefilter("ignore")
                return ast.parse(self._parsed, mode="eval").body
        except SyntaxError as err:
            place = self._place(err.lineno or 1, self._bytes_before(err)) if self._parsed else 1
            raise ConfigError(f"{self.setting}: {err.msg} at character {place}; {_FORMS}") from err
        except (ValueError, RecursionError, MemoryError, OverflowError) as err:
            raise ConfigError(f"{self.setting} cannot be read ({err or type(err).__name__}); {_FORMS}") from err

    def condition(self, node: ast.expr, depth: int) -> Any:
        """Returns the condition of a node."""
        if depth > MAX_DEPTH:
            raise self._error(node, f"more than {MAX_DEPTH} conditions stand inside of each other")
        match node:
            case ast.BoolOp(op=ast.And(), values=values):
                return _All(tuple(self.condition(value, depth + 1) for value in values))
            case ast.BoolOp(values=values):
                return _Any(tuple(self.condition(value, depth + 1) for value in values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return _Not(self.condition(operand, depth + 1))
            case ast.Compare(left=left, ops=ops, comparators=others):
                lefts = [left, *others[:-1]]
                pairs = [self._pair(*pair) for pair in zip(lefts, ops, others, strict=True)]
                return pairs[0] if len(pairs) == 1 else _All(tuple(pairs))
            case ast.Name():
                column = self._column(node)
                return _Comparison(column, "==", _Value(value=True, at=column.at))
            case ast.Constant(value=bool() as value):
                return _All(()) if value else _Any(())
        raise self._error(node, "this is no condition")

    def _pair(self, left: ast.expr, sign: ast.cmpop, right: ast.expr) -> Any:
        if isinstance(sign, (ast.In, ast.NotIn)):
            return _OneOf(self._named(left), self._values(right), isinstance(sign, ast.NotIn))
        if isinstance(sign, (ast.Is, ast.IsNot)):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise self._error(right, "`is` goes with None alone; write ==")
            return _IsNull(self._named(left), isinstance(sign, ast.IsNot))
        one, two, written = self._operand(left), self._operand(right), _ORDER[type(sign)]
        if isinstance(one, _Value):
            one, two, written = two, one, _TURNED[written]
        if isinstance(one, _Value):
            raise self._error(left, "a comparison names a column on one side at least")
        if isinstance(two, _Value) and two.value is None:
            raise self._error(right, "nothing compares with None; write `is None` or `is not None`")
        return _Comparison(one, written, two)

    def _named(self, node: ast.expr) -> _Column:
        if not isinstance(node, ast.Name):
            raise self._error(node, "here stands the name of a column")
        return self._column(node)

    def _column(self, node: ast.Name) -> _Column:
        column = _Column(node.id, self._at(node))
        self.places.setdefault(column.name, column.at)
        return column

    def _operand(self, node: ast.expr) -> _Column | _Value:
        return self._column(node) if isinstance(node, ast.Name) else self._value(node)

    def _values(self, node: ast.expr) -> tuple[_Value, ...]:
        if not isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            raise self._error(node, 'behind `in` stands a list of values, for example ("hi", "ta")')
        values = tuple(self._value(element) for element in node.elts)
        for value, element in zip(values, node.elts, strict=True):
            if value.value is None:
                raise self._error(element, "None is in no list; write `is None`")
        return values

    def _value(self, node: ast.expr) -> _Value:
        """Returns a text, a number or a truth value; numbers as the floats that they are compared as."""
        match node:
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
                value: Any = number if isinstance(number, bool) or isinstance(sign, ast.UAdd) else -number
                is_sign_of_truth = isinstance(number, bool)
            case ast.Constant(value=str() | int() | float() | None as constant):
                value, is_sign_of_truth = constant, False
            case _:
                raise self._error(node, "this is no value")
        if is_sign_of_truth:
            raise self._error(node, "True and False have no sign")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not abs(value) <= MAX_NUMBER:
                raise self._error(node, f"numbers are at most {MAX_NUMBER:,}")
            value = float(value)
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise self._error(node, "a text holds half a character, which no UTF-8 has")
        return _Value(value, self._at(node))

    def _error(self, node: ast.expr, what: str) -> ConfigError:
        place = self._at(node)
        found = self._text[place - 1 : place - 1 + _SHOWN]
        return ConfigError(f"{self.setting}: {what}, at character {place}: {found!r}; {_FORMS}")

    def _at(self, node: ast.expr) -> int:
        return self._place(node.lineno, node.col_offset)

    def _place(self, line: int, num_bytes: int) -> int:
        """Returns the number of a character of the text, from 1. num_bytes: before it in its line, as UTF-8."""
        lines = self._parsed.split("\n")
        line = min(max(line, 1), len(lines))
        inside = len(lines[line - 1].encode("utf-8", "replace")[:num_bytes].decode("utf-8", "ignore"))
        before = sum(len(text) + 1 for text in lines[: line - 1])
        return min(max(1, self._lead + before + inside + 1 - self._added), max(1, len(self._text)))

    def _bytes_before(self, err: SyntaxError) -> int:
        """Returns where a syntax error stands in its line; the parser counts characters there."""
        lines = self._parsed.split("\n")
        line = lines[min(max(err.lineno or 1, 1), len(lines)) - 1]
        return len(line[: max(0, (err.offset or 1) - 1)].encode("utf-8", "replace"))


class _Rows:
    """The rows of a table, asked for conditions."""

    def __init__(self, table: pa.Table, setting: str) -> None:
        self._table, self._setting = table, setting

    def holds(self, condition: Any) -> Array:
        """Returns for which rows a condition holds, bool [rows]."""
        match condition:
            case _All(parts=parts):
                return self._folded(np.logical_and, parts, start=True)
            case _Any(parts=parts):
                return self._folded(np.logical_or, parts, start=False)
            case _Not(part=part):
                return np.logical_not(self.holds(part))
            case _IsNull(column=column, is_negated=is_negated):
                is_null: Array = self._column(column).is_null().to_numpy()
                return ~is_null if is_negated else is_null
            case _OneOf():
                return self._one_of(condition)
        return self._compared(condition)

    def _folded(self, function: Callable[[Array, Array], Array], parts: Sequence[Any], *, start: bool) -> Array:
        result = np.full(self._table.num_rows, start)
        for part in parts:
            result = function(result, self.holds(part))
        return result

    def _column(self, column: _Column) -> pa.ChunkedArray:
        return self._table[column.name]

    def _kind(self, column: _Column) -> str:
        import pyarrow as pa

        kind = self._column(column).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return "text"
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            return "number"
        return "truth value" if pa.types.is_boolean(kind) else str(kind)

    def _require(self, column: _Column, other: _Column | _Value) -> str:
        """Returns the kind of a column. Raises ConfigError where what it is compared with is of another one."""
        kind = self._kind(column)
        if kind not in ("text", "number", "truth value"):
            raise ConfigError(
                f"{self._setting}: column {column.name} at character {column.at} holds {kind}, which can only be asked "
                "whether it `is None`"
            )
        is_column = isinstance(other, _Column)
        found = self._kind(other) if isinstance(other, _Column) else _kind_of(other.value)
        if found != kind:
            shown = f"column {other.name}" if isinstance(other, _Column) else repr(other.value)
            raise ConfigError(
                f"{self._setting}: column {column.name} holds {_PLURAL[kind]}, and {shown} at character {other.at} "
                f"{'holds' if is_column else 'is a'} {_PLURAL.get(found, found) if is_column else found}; compare "
                f"{column.name} with a {kind}"
            )
        return kind

    def _numbers(self, column: _Column) -> tuple[Array, Array]:
        """Returns a column as float64, 0 where it is null, and where it is not."""
        import pyarrow as pa

        found = self._column(column)
        values = found.fill_null(0).cast(pa.float64(), safe=False).to_numpy()
        return values, found.is_valid().to_numpy()

    def _texts(self, column: _Column) -> pa.ChunkedArray:
        import pyarrow as pa

        return self._column(column).cast(pa.large_string())

    def _one_of(self, condition: _OneOf) -> Array:
        import pyarrow as pa
        import pyarrow.compute as pc

        kind = self._kind(condition.column)
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
        return np.asarray((~found if condition.is_negated else found) & is_valid)

    def _truths(self, column: _Column) -> Array:
        return np.asarray(self._column(column).fill_null(fill_value=False).to_numpy())

    def _compared(self, condition: _Comparison) -> Array:
        import pyarrow as pa
        import pyarrow.compute as pc

        column, sign, other = condition.column, condition.sign, condition.other
        kind = self._require(column, other)
        if kind == "text":
            texts = self._texts(other) if isinstance(other, _Column) else pa.scalar(other.value, pa.large_string())
            return np.asarray(
                getattr(pc, _ARROW[sign])(self._texts(column), texts).fill_null(fill_value=False).to_numpy()
            )
        if kind == "truth value" and sign not in ("==", "!="):
            raise ConfigError(
                f"{self._setting}: column {column.name} at character {column.at} holds truth values, which have no "
                f"order; write {column.name} or not {column.name}"
            )
        left, is_valid = self._plain(column, kind)
        if isinstance(other, _Column):
            right, other_is_valid = self._plain(other, kind)
            is_valid = is_valid & other_is_valid
        else:
            right = np.asarray(other.value)
        return np.asarray(_FUNCTIONS[sign](left, right) & is_valid)

    def _plain(self, column: _Column, kind: str) -> tuple[Array, Array]:
        if kind == "number":
            return self._numbers(column)
        return self._truths(column), self._column(column).is_valid().to_numpy()


_PLURAL = {"text": "texts", "number": "numbers", "truth value": "truth values"}


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "truth value"
    return "text" if isinstance(value, str) else "number"
