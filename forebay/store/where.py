"""A condition over the columns of a row table: `language in ("hi", "ta") and duration_s < 12 and not speaker is None`.

The text is a Python expression of few forms: `and`, `or`, `not`, comparisons (chained ones too), `in` and `not in` a
list of literals, `is None`, names of columns, texts, numbers, True and False. It is parsed and never executed.

A null is no value, as in SQL: a comparison with one is neither true nor false, `not` of it neither, and only `is None`
is true of it. So neither `snr > 10` nor `not snr > 10` holds where there is no snr. NaN compares as in Python.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.errors import ConfigError
from forebay.store.layout import Array
from forebay.visible import did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

_SIGNS = {"==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}
"""Functions of arrow and of numpy."""


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


Truth = tuple[Array, Array]
"""For which rows a condition is true, and for which it is false, bool [rows]; it is neither where it is unknown."""
Condition = Callable[["ConditionRows"], Truth]


def _joined(parts: Sequence[Condition], *, is_any: bool) -> Condition:
    """Returns all of some conditions, true of none at all; or any of them, false of none at all."""

    def truth(rows: ConditionRows) -> Truth:
        is_true = np.full(len(rows), not is_any)
        is_false = ~is_true
        for part in parts:
            found, missed = part(rows)
            is_true = is_true | found if is_any else is_true & found
            is_false = is_false & missed if is_any else is_false | missed
        return is_true, is_false

    return truth


def _negated(part: Condition) -> Condition:
    return lambda rows: part(rows)[::-1]


class ConditionRows:
    """The rows of a table, asked for conditions."""

    def __init__(self, table: pa.Table, setting: str) -> None:
        self._table, self._setting = table, setting

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def is_null(self, column: Column) -> Truth:
        """Returns for which rows a column has no value."""
        found: Array = self._column(column).is_null().to_numpy()
        return found, ~found

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

    def one_of(self, column: Column, values: Sequence[Value]) -> Truth:
        """Returns for which rows a column has one of some values."""
        import pyarrow as pa
        import pyarrow.compute as pc

        kind = self._comparable(column)
        for value in values:
            self._require(column, value)
        plain = [value.value for value in values]
        if kind == "text":
            found = pc.is_in(self._texts(column), value_set=pa.array(plain, pa.large_string())).to_numpy()
        elif kind == "number":
            found = np.isin(self._numbers(column)[0], np.array(plain, np.float64))
        else:
            found = np.isin(self._truths(column), np.array(plain, bool))
        return _where_known(np.asarray(found), self._column(column).is_valid().to_numpy())

    def _truths(self, column: Column) -> Array:
        return np.asarray(self._column(column).fill_null(fill_value=False).to_numpy())

    def compared(self, column: Column, sign: str, other: Column | Value) -> Truth:
        """Returns for which rows a column compares so with a value, or another column. sign: a key of `_SIGNS`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        kind = self._require(column, other)
        if kind == "text":
            texts = self._texts(other) if isinstance(other, Column) else pa.scalar(other.value, pa.large_string())
            found = getattr(pc, _SIGNS[sign])(self._texts(column), texts)
            return _where_known(found.fill_null(fill_value=False).to_numpy(), found.is_valid().to_numpy())
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
        return _where_known(np.asarray(getattr(np, _SIGNS[sign])(left, right)), is_valid)

    def _plain(self, column: Column, kind: str) -> tuple[Array, Array]:
        if kind == "number":
            return self._numbers(column)
        return self._truths(column), self._column(column).is_valid().to_numpy()


def _where_known(found: Array, is_valid: Array) -> Truth:
    return found & is_valid, ~found & is_valid


_PLURAL = {"text": "texts", "number": "numbers", "truth value": "truth values"}


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "truth value"
    return "text" if isinstance(value, str) else "number"


def _shown(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return repr(int(value) if is_whole else value)


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

_TURNED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


@dataclass(frozen=True, slots=True)
class WhereClause:
    """A condition that was parsed. text: as it was written. columns: those that it names, each once."""

    text: str
    columns: tuple[str, ...]
    _setting: str = field(repr=False)
    _condition: Condition = field(repr=False, compare=False)
    _places: Mapping[str, int] = field(repr=False, compare=False)

    def require_columns(self, names: Collection[str]) -> None:
        """Raises ConfigError, with the nearest name and all of them, for a column that is none of these."""
        for name in self.columns:
            if name not in names:
                raise ConfigError(
                    f"{self._setting}: {name!r} at character {self._places[name]} {is_no_column(name, names)}",
                    code="FB113",
                )

    def parts(self) -> list[WhereClause]:
        """Returns the conditions that the outermost `and` joins; without one, this condition alone."""
        parser = _Parser(self.text, self._setting)
        tree = parser.tree()
        if not (isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And)):
            return [self]
        texts = [parser.written(value) for value in tree.values]
        return [parse_where(text, setting=self._setting) for text in texts]

    def mask(self, table: pa.Table) -> Array:
        """Returns for which rows it holds, bool [rows]. table: has its columns; others are not looked at.

        Raises ConfigError for an unknown column, or one that is compared with a value of another kind.
        """
        self.require_columns(table.column_names)
        return self._condition(ConditionRows(table, self._setting))[0]


def is_no_column(name: str, names: Collection[str]) -> str:
    """Returns what to say of a name that is none of these columns: the nearest one, and all of them."""
    return f"is no column{did_you_mean(name, names)}; the columns are {', '.join(names)}"


def parse_where(text: str, *, setting: str = "where") -> WhereClause:
    """Returns the condition of a text, called `setting` in messages; ConfigError, with the place, where it is none."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{setting} has {len(text)} characters, at most {MAX_CHARACTERS} are read", code="FB113")
    parser = _Parser(text, setting)
    condition = parser.condition(parser.tree(), 0)
    return WhereClause(text.strip(), tuple(parser.places), setting, condition, parser.places)


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
        try:
            with warnings.catch_warnings():  # of the parser, about escapes and the like
                warnings.simplefilter("ignore")
                body = ast.parse(self._parsed, mode="eval").body
        except SyntaxError as err:
            place = self._place(err.lineno or 1, self._bytes_before(err)) if self._parsed else 1
            raise ConfigError(f"{self.setting}: {err.msg} at character {place}; {_FORMS}", code="FB113") from err
        except (ValueError, RecursionError, MemoryError, OverflowError) as err:
            what = str(err) or type(err).__name__
            raise ConfigError(f"{self.setting} cannot be read ({what}); {_FORMS}", code="FB113") from err
        if self._added and (body.lineno, body.col_offset) == (1, 0):  # what was added is closed by the text itself
            raise self._error(body, "a bracket is closed that is not open")
        return body

    def written(self, node: ast.expr) -> str:
        return ast.get_source_segment(self._parsed, node) or self._text

    def condition(self, node: ast.expr, depth: int) -> Condition:
        if depth > MAX_DEPTH:
            raise self._error(node, f"more than {MAX_DEPTH} conditions stand inside of each other")
        match node:
            case ast.BoolOp(op=op, values=values):
                return _joined([self.condition(value, depth + 1) for value in values], is_any=isinstance(op, ast.Or))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return _negated(self.condition(operand, depth + 1))
            case ast.Compare(left=left, ops=ops, comparators=others):
                lefts = [left, *others[:-1]]
                pairs = [self._pair(*pair) for pair in zip(lefts, ops, others, strict=True)]
                return pairs[0] if len(pairs) == 1 else _joined(pairs, is_any=False)
            case ast.Name():
                column = self._column(node)
                return partial(ConditionRows.compared, column=column, sign="==", other=Value(value=True, at=column.at))
            case ast.Constant(value=bool() as value):
                return _joined((), is_any=not value)
        raise self._error(node, "this is no condition")

    def _pair(self, left: ast.expr, sign: ast.cmpop, right: ast.expr) -> Condition:
        if isinstance(sign, (ast.In, ast.NotIn)):
            found = partial(ConditionRows.one_of, column=self._named(left), values=self._values(right))
            return _negated(found) if isinstance(sign, ast.NotIn) else found
        if isinstance(sign, (ast.Is, ast.IsNot)):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise self._error(right, "`is` goes with None alone; write ==")
            found = partial(ConditionRows.is_null, column=self._named(left))
            return _negated(found) if isinstance(sign, ast.IsNot) else found
        one, two, written = self._operand(left), self._operand(right), _ORDER[type(sign)]
        if isinstance(one, Value):
            one, two, written = two, one, _TURNED[written]
        if isinstance(one, Value):
            raise self._error(left, "a comparison names a column on one side at least")
        if isinstance(two, Value) and two.value is None:
            raise self._error(right, "nothing compares with None; write `is None` or `is not None`")
        return partial(ConditionRows.compared, column=one, sign=written, other=two)

    def _named(self, node: ast.expr) -> Column:
        if not isinstance(node, ast.Name):
            raise self._error(node, "here stands the name of a column")
        return self._column(node)

    def _column(self, node: ast.Name) -> Column:
        column = Column(node.id, self._at(node))
        self.places.setdefault(column.name, column.at)
        return column

    def _operand(self, node: ast.expr) -> Column | Value:
        return self._column(node) if isinstance(node, ast.Name) else self._value(node)

    def _values(self, node: ast.expr) -> tuple[Value, ...]:
        if not isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            raise self._error(node, 'behind `in` stands a list of values, for example ("hi", "ta")')
        values = tuple(self._value(element) for element in node.elts)
        for value, element in zip(values, node.elts, strict=True):
            if value.value is None:
                raise self._error(element, "None is in no list; write `is None`")
        return values

    def _value(self, node: ast.expr) -> Value:
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
        return Value(value, self._at(node))

    def _error(self, node: ast.expr, what: str) -> ConfigError:
        place = self._at(node)
        found = self._text[place - 1 : place - 1 + _SHOWN]
        return ConfigError(f"{self.setting}: {what}, at character {place}: {found!r}; {_FORMS}", code="FB113")

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
