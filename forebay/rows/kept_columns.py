"""Columns of a source that stay in the row table (`source.keep_columns`): their values, and the type that holds them.

A column is int64, float64 or text, whatever files and rows it comes from: the narrowest of these that holds every value
as it is. A list of texts is its JSON. Until all rows are known, each part of a column has a type of its own, see
`PART_TYPES`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import ConfigError
from forebay.rows.readers.json_lines import JsonError
from forebay.store.layout import FieldSpec
from forebay.visible import did_you_mean

logger = logging.getLogger(__name__)
PREFIX = "kept:"
"""Before the name of a kept column among the rows of a listing, where forebay's own columns stand too."""
UNTYPED = pa.large_binary()
TEXT, INTEGER, NUMBER, NOTHING = pa.large_string(), pa.int64(), pa.float64(), pa.null()
PART_TYPES = (UNTYPED, TEXT, INTEGER, NUMBER, NOTHING)
"""What a part of a column may be: `UNTYPED` is the text of a CSV, of which nobody has said what it stands for."""
STORED_TYPES = (TEXT, INTEGER, NUMBER)
_DTYPES = {TEXT: "str", INTEGER: "int64", NUMBER: "float64"}
_KEEPABLE = "texts, lists of texts, numbers and truth values"
_EXACT = (1 << 53) - 1
"""Integers up to here are floats too, and no float stands for two of them."""
_DECIMALS = 15
"""Digits of a decimal that a float64 gives back."""
_LONGEST = 18
"""Digits that every int64 can have."""
_INTEGERS = r"^(0|-?[1-9][0-9]*)$"
_NUMBERS = r"^-?(0|[1-9][0-9]*)?(\.[0-9]+|[0-9]\.?)([eE][+-]?[0-9]{1,3})?$"


def names_of(table: pa.Table) -> list[str]:
    """Returns the names of the kept columns of a listing's rows."""
    return [name.removeprefix(PREFIX) for name in table.column_names if name.startswith(PREFIX)]


def column_of(table: pa.Table, name: str) -> pa.ChunkedArray:
    """Returns a kept column of a listing's rows."""
    return table[PREFIX + name]


def fields_of(table: pa.Table) -> tuple[FieldSpec, ...]:
    """Returns the table fields that hold the kept columns of a listing's rows."""
    return tuple(
        FieldSpec(name=name, dtype=dtype, group="text", role="table", nullable=dtype == "str")
        for name in names_of(table)
        for dtype in [_DTYPES[column_of(table, name).type]]
    )


def values_of(rows: pa.Table) -> Iterator[dict[str, Any]]:
    """Yields the kept values of every row, as a shard's writer takes them: None for a null."""
    names = names_of(rows)
    if not names:
        yield from ({} for _ in range(len(rows)))
        return
    columns = []
    for name in names:
        column = column_of(rows, name)
        number = {INTEGER: np.int64, NUMBER: np.float64}.get(column.type)
        values = column.to_pylist()
        columns.append(values if number is None else [None if value is None else number(value) for value in values])
    yield from (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def part_of(column: pa.ChunkedArray, name: str, *, where: str) -> pa.ChunkedArray:
    """Returns a column of a typed table as a part. Raises ConfigError where it holds neither texts nor numbers."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return part_of(pc.cast(column, kind.value_type), name, where=where)
    if kind in PART_TYPES:
        return column
    if pa.types.is_boolean(kind) or (pa.types.is_integer(kind) and kind != pa.uint64()):
        return pc.cast(column, INTEGER)
    if pa.types.is_floating(kind) or (pa.types.is_decimal(kind) and kind.precision <= _DECIMALS):
        return pc.cast(column, NUMBER, safe=False)
    if _is_text(kind) or pa.types.is_temporal(kind):
        return pc.cast(column, TEXT)
    if kind == pa.uint64() or pa.types.is_decimal(kind):
        texts = pc.cast(column, TEXT)
        return pc.cast(texts, INTEGER) if _kind(pc.cast(texts, UNTYPED)) == INTEGER else texts
    if _is_text(getattr(kind, "value_type", NOTHING)):
        return pa.chunked_array([[value if value is None else _written(value) for value in column.to_pylist()]], TEXT)
    raise ConfigError(
        f"{where}: column {name} of source.keep_columns is {kind}, and {_KEEPABLE} can be kept; leave the column out, "
        "or write another one",
        code="FB203",
    )


def part_of_values(values: Sequence[Any]) -> pa.Array:
    """Returns JSON values, texts and numbers, as a part; values of bytes are texts of a CSV."""
    if any(isinstance(value, bytes) for value in values):
        return pa.array(values, UNTYPED)
    plain = [int(value) if isinstance(value, bool) else value for value in values]
    kinds = {type(value) for value in plain if value is not None}
    if kinds <= {int, float} and all(abs(value) < 1 << 63 for value in plain if type(value) is int):
        if float not in kinds:
            return pa.array(plain, INTEGER if kinds else NOTHING)
        if all(abs(value) <= _EXACT for value in plain if type(value) is int):
            return pa.array([value if value is None else float(value) for value in plain], NUMBER)
    return pa.array([value if value is None or isinstance(value, str) else _written(value) for value in plain], TEXT)


def values_in(fields: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    """Returns the values of kept fields of a JSON object. Raises JsonError for a value that cannot be kept."""
    values = tuple(fields.get(name) for name in names)
    for name, value in zip(names, values, strict=True):
        if not _is_keepable(value):
            raise JsonError(f"field {name} is {value!r:.60}, and {_KEEPABLE} can be kept")
    return values


def parts_of_rows(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> dict[str, pa.Array]:
    """Returns the kept values of JSON objects as parts by name."""
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    return {name: part_of_values(values) for name, values in zip(names, columns, strict=True)}


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_keepable(value: Any) -> bool:
    """Says whether a JSON value can be kept: a text that UTF-8 can hold, a list of such, a number, a truth value or
    null."""
    if isinstance(value, list):
        return all(each is None or (isinstance(each, str) and _is_keepable(each)) for each in value)
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    return value is None or isinstance(value, (bytes, bool, float)) or (isinstance(value, int) and abs(value) < 10**30)


def concatenated(tables: Sequence[pa.Table], *, is_last: bool = True) -> pa.Table:
    """Returns the rows of several parts of a listing, every kept column of one of the three types that are stored.

    is_last: these are all rows. Else texts of a CSV stay as they are: rows of another one may say what they are.
    """
    if not (names := names_of(tables[0])):
        return pa.concat_tables(tables, promote_options="default")
    own = [part.select([name for name in part.column_names if not name.startswith(PREFIX)]) for part in tables]
    table = pa.concat_tables(own, promote_options="default")
    for name in names:
        parts = [column_of(part, name) for part in tables]
        is_untyped = not is_last and all(part.type == UNTYPED for part in parts)
        column = pa.chunked_array([c for part in parts for c in part.chunks], UNTYPED) if is_untyped else None
        table = table.append_column(PREFIX + name, unified(parts, name) if column is None else column)
    return table


def require_columns(wanted: Collection[str], names: Collection[str], *, where: str) -> None:
    """Raises ConfigError, with the nearest name, where a table does not have a column that is to be kept."""
    for name in wanted:
        if name not in names:
            raise ConfigError(no_column(name, "keep_columns", names, where=where), code="FB202")


def no_column(name: str, setting: str, names: Collection[str], *, where: str) -> str:
    """Returns the message for a table without a column that a setting of `[source]` names."""
    has = ", ".join(names) or "none"
    return f"{where}: no column {name} (source.{setting}); it has {has}{did_you_mean(name, names)}"


def require_values(table: pa.Table, others: Collection[str], *, where: str) -> None:
    """Raises ConfigError, with the nearest name, for a kept field that no row has. others: fields that rows have."""
    for name in names_of(table):
        if len(table) and column_of(table, name).null_count == len(table):
            raise ConfigError(
                f"{where}: none of {len(table)} rows has a field {name} with a value (source.keep_columns)"
                f"{did_you_mean(name, others)}; correct the name, or leave it out",
                code="FB202",
            )


def unified(parts: Sequence[pa.ChunkedArray], name: str) -> pa.ChunkedArray:
    """Returns the parts of a column as one, of the narrowest type that holds all of its values."""
    parts = [part for part in parts if len(part)] or list(parts[:1])
    kinds = {_kind(part) for part in parts} - {NOTHING}
    wanted = TEXT
    if kinds and TEXT not in kinds:
        wanted = NUMBER if NUMBER in kinds else INTEGER
        if wanted == NUMBER and any(_kind(part) == INTEGER and not _are_floats(part) for part in parts):
            wanted = TEXT
    if wanted == TEXT and kinds - {TEXT} and any(part.type != UNTYPED for part in parts):
        logger.warning("source.keep_columns: %s holds texts and numbers, or numbers too large; kept as text", name)
    return pa.chunked_array([chunk for part in parts for chunk in _as(part, wanted).chunks], type=wanted)


def _kind(part: pa.ChunkedArray) -> pa.DataType:
    if part.null_count == len(part):
        return NOTHING
    if part.type != UNTYPED:
        return part.type
    texts = pc.cast(part, TEXT)
    if pc.all(pc.match_substring_regex(texts, _INTEGERS)).as_py():
        return INTEGER if pc.max(pc.utf8_length(texts)).as_py() <= _LONGEST else TEXT
    if not pc.all(pc.match_substring_regex(texts, _NUMBERS)).as_py():
        return TEXT
    values = pc.cast(texts, NUMBER)
    is_held = pc.or_(pc.less_equal(pc.abs(values), _EXACT), pc.invert(pc.match_substring_regex(texts, _INTEGERS)))
    return NUMBER if pc.all(pc.and_(pc.is_finite(values), is_held)).as_py() else TEXT


def _are_floats(part: pa.ChunkedArray) -> bool:
    """Says whether integers can be floats without another value."""
    return bool(pc.all(pc.less_equal(pc.abs(_as(part, INTEGER)), _EXACT)).as_py())


def _as(part: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    if part.type == UNTYPED:
        part = pc.cast(part, TEXT)
    if part.type == NUMBER and wanted == TEXT:
        return _texts_of_numbers(part)
    return pc.cast(part, wanted)


def _texts_of_numbers(part: pa.ChunkedArray) -> pa.ChunkedArray:
    """Numbers as they are written; a whole one as the integer that it may have been."""
    is_whole = pc.and_(pc.less_equal(pc.abs(part), _EXACT), pc.equal(pc.trunc(part), part))
    whole = pc.cast(pc.cast(pc.if_else(is_whole, part, 0.0), INTEGER), TEXT)
    return pc.if_else(is_whole, whole, pc.cast(part, TEXT))


def _written(value: float | list[str | None]) -> str:
    if isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int):
        return str(value)
    return str(_texts_of_numbers(pa.chunked_array([[value]], NUMBER))[0].as_py())


def with_kept(table: pa.Table, kept: Mapping[str, Any]) -> pa.Table:
    """Returns rows of a listing with kept columns, parts by name, in the order of their names."""
    for name in sorted(kept):
        table = table.append_column(PREFIX + name, kept[name])
    return table
