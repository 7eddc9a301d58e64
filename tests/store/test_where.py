"""Conditions over a row table: what they hold for, what is refused, and that nothing is ever executed."""

from __future__ import annotations

import ast
import builtins
import contextlib
import math
import operator
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.store.where import parse_where

TABLE = pa.table(
    {
        "language": pa.array(["hi", "ta", "", None, "hi"], pa.large_string()),
        "duration_s": [1.0, 12.0, float("nan"), None, 3.5],
        "num_tokens": pa.array([1, 2, 3, 4, None], pa.int32()),
        "clean": [True, False, None, True, False],
        "tags": [["a"], [], None, ["b"], ["c"]],
    }
)


def rows(text: str, table: pa.Table = TABLE) -> list[int]:
    mask = parse_where(text).mask(table)
    assert mask.dtype == np.bool_
    return [int(row) for row in np.flatnonzero(mask)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("language == 'hi'", [0, 4]),
        ('language in ("hi", "ta") and duration_s < 12', [0, 4]),
        ("language in ['hi'] or num_tokens == 3", [0, 2, 4]),
        ("language not in {'hi'}", [1, 2]),  # as in SQL: of a null neither this nor its contrary holds
        ("not language in ('hi',)", [1, 2]),
        ("language in ()", []),
        ("language != 'hi'", [1, 2]),
        ("language is None", [3]),
        ("language is not None", [0, 1, 2, 4]),
        ("'hi' < language", [1]),
        ("1 < num_tokens <= 3", [1, 2]),
        ("1 < num_tokens in (2, 4)", [1, 3]),
        ("num_tokens > 1.5", [1, 2, 3]),
        ("num_tokens == 2.0", [1]),
        ("num_tokens in (2, 2.5, -3)", [1]),
        ("num_tokens > -1", [0, 1, 2, 3]),
        ("duration_s != 1", [1, 2, 4]),  # NaN differs from every number
        ("not duration_s > 2", [0, 2]),
        ("duration_s < num_tokens", []),
        ("duration_s <= num_tokens", [0]),
        ("clean", [0, 3]),
        ("not clean", [1, 4]),
        ("clean == False", [1, 4]),
        ("clean in (True, False)", [0, 1, 3, 4]),
        ("tags is None", [2]),
        ("True", [0, 1, 2, 3, 4]),
        ("False or num_tokens == 1", [0]),
        ("  num_tokens == 1  ", [0]),
        ("num_tokens == 1\n  or num_tokens == 3  # the third\r\n", [0, 2]),
        ("(num_tokens == 1) or\n(num_tokens == 3)", [0, 2]),
    ],
)
def test_what_a_condition_holds_for(text: str, wanted: list[int]) -> None:
    assert rows(text) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "langage == 'hi'",
            r"'langage' at character 1 is no column; did you mean language\?; the columns are language, ",
        ),
        ("num_tokens == 1 and zzz > 2", r"'zzz' at character 21 is no column; the columns are"),
        (
            "language == 3",
            "column language holds texts, and 3 at character 13 is a number; compare language with a text",
        ),
        ("num_tokens > 'a'", "num_tokens holds numbers, and 'a' at character 14 is a text"),
        ("num_tokens == True", "num_tokens holds numbers, and True at character 15 is a truth value"),
        ("language", "language holds texts, and True at character 1 is a truth value"),
        ("clean < True", "clean at character 1 holds truth values, which have no order"),
        ("num_tokens in (1, 'a')", "num_tokens holds numbers, and 'a' at character 19 is a text"),
        ("language == num_tokens", "column num_tokens at character 13 holds numbers"),
        ("tags == 'a'", r"column tags at character 1 holds list<.*>, which can only be asked whether it `is None`"),
        ("tags in ()", r"column tags at character 1 holds list<"),
        ("num_tokens == None", "nothing compares with None; write `is None` or `is not None`, at character 15"),
        ("num_tokens in (None,)", "None is in no list; write `is None`, at character 16"),
        ("num_tokens is 3", "`is` goes with None alone; write ==, at character 15"),
        ("1 < 2", "a comparison names a column on one side at least, at character 1"),
        ("'a' in language", "here stands the name of a column, at character 1"),
        ("language in 'hi'", "behind `in` stands a list of values"),
        ("language in other", "behind `in` stands a list of values"),
        ("num_tokens == 9007199254740992", "numbers are at most 9,007,199,254,740,991, at character 15"),
        ("num_tokens == 1e999", "numbers are at most"),
        ("num_tokens == -True", "True and False have no sign, at character 15"),
        ("num_tokens == - -1", "this is no value, at character 15"),
        ("num_tokens == 1 + 1", "this is no value, at character 15"),
        ("num_tokens == 1j", "this is no value"),
        ("language == b'hi'", "this is no value"),
        ("language == f'{1}'", "this is no value"),
        ("language == ...", "this is no value"),
        ("language.x == 'hi'", r"this is no value, at character 1: .language\.x"),
        ("language[0] == 'h'", "this is no value"),
        ("len(language) == 2", "this is no value"),
        ("open('x')", r"this is no condition, at character 1: \"open\('x'\)\""),
        ("lambda: True", "this is no condition"),
        ("(x := True)", "this is no condition"),
        ("[True for _ in language]", "this is no condition"),
        ("True if clean else False", "this is no condition"),
        ("language == 'hi',", "this is no condition"),
        ("3", "this is no condition"),
        ("None", "this is no condition"),
        ("'a' 'b'", "this is no condition"),
        ("~clean", "this is no condition"),
        ("await clean", "this is no condition|syntax"),
        ("yield", "invalid syntax"),
        ("", "syntax"),
        ("   ", "syntax"),
        ("num_tokens ==", "invalid syntax at character"),
        ("num_tokens = 3", "at character"),
        ("import os", "invalid syntax at character 1"),
        ("clean; clean", "invalid syntax at character 6"),
        ("clean) or (clean\n and clean", "a bracket is closed that is not open, at character 1"),
        ("clean\x00", "null|source code"),
        ("language == '\ud800'", "half a character|surrogates|cannot be read"),
        ("language == '\\ud800'", "a text holds half a character"),
        ("not " * 60 + "clean", "more than 48 conditions stand inside of each other"),
        ("(" * 300 + "clean" + ")" * 300, "too many nested|cannot be read"),
        ("-" * 4_000 + "1", "."),
        ("not " * 1_000 + "clean", "."),
        ("clean and " * 500, "has 5000 characters, at most 4096 are read"),
        ("num_tokens == " + "9" * 4_000, "numbers are at most"),
    ],
)
def test_anything_else_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_where(text).mask(TABLE)


def test_places_are_characters_and_not_bytes() -> None:
    with pytest.raises(ConfigError, match="'zzz' at character 22 is no column"):
        parse_where("language == 'हि' and zzz").mask(TABLE)
    with pytest.raises(ConfigError, match="'zzz' at character 25 is no column"):
        parse_where("  language == 'हि'\n and zzz").mask(TABLE)


def test_the_columns_of_a_condition_are_known_before_a_table_is_read() -> None:
    where = parse_where(" a < 1 and (b == 'x' or a > 3 or c is None) ", setting="filter.where")
    assert (where.columns, where.text) == (("a", "b", "c"), "a < 1 and (b == 'x' or a > 3 or c is None)")
    with pytest.raises(ConfigError, match=r"filter\.where: 'c' at character 34 is no column; the columns are a, b"):
        where.require_columns(["a", "b"])


def test_a_table_without_rows() -> None:
    empty = TABLE.slice(0, 0)
    for text in ("language == 'hi'", "num_tokens in (1,)", "clean", "not duration_s < 3", "True", "tags is None"):
        assert rows(text, empty) == []
        assert rows(text, TABLE.schema.empty_table()) == []


def test_dictionaries_and_chunks_are_columns_like_others() -> None:
    texts = pa.chunked_array([pa.array(["a", None]).dictionary_encode(), pa.array(["b", "a"]).dictionary_encode()])
    table = pa.table(
        {"x": texts, "n": pa.chunked_array([pa.array([1, 2], pa.uint64()), pa.array([2**64 - 1, 0], pa.uint64())])}
    )
    assert rows("x == 'a'", table) == [0, 3]
    assert rows("x not in ('a',)", table) == [2]
    assert rows("n > 9007199254740991", table) == [2]


def test_parsing_loads_no_arrow() -> None:
    code = (
        "import sys; from forebay.store.where import parse_where; parse_where('a < 1'); "
        "sys.exit('pyarrow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


_FORMS = """
language num_tokens clean and or not in is None True False lambda : if else for await yield ( ) [ ] { } == != < <= := =
, . 1 -1 1e9 'hi' f'{x}' b'' * ** __import__ __class__ eval # \\
"""
_WORDS = [*_FORMS.split(), "\n"]


@given(
    st.one_of(
        st.text(max_size=80),
        st.text("()[]{}'\"\\ \n\r\t#,.:;=<>!~^&|@*/+-09aexXjJlLfbrué\x00\ud800", max_size=60),
        st.lists(
            st.sampled_from(_WORDS),
            max_size=24,
        ).map(" ".join),
    )
)
def test_any_text_is_a_condition_or_a_config_error(text: str) -> None:
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("eval", "exec"):
            patch.setattr(builtins, name, lambda *_: called.append("x"))
        with contextlib.suppress(ConfigError):
            mask = parse_where(text).mask(TABLE)
            assert mask.dtype == np.bool_
            assert mask.shape == (TABLE.num_rows,)
    assert not called


# Well-formed conditions beside Python's own answer, row by row. A null is handled as the module says: `_same` wraps it.

_TEXTS = st.sampled_from(["", "a", "b", "é", "हि", "zz", "'", '"', "\\", "a\nb"])
_NUMBERS = st.one_of(
    st.integers(-3, 3), st.sampled_from([-(2**53) + 1, 2**53 - 1, 0.5, -0.0, 2.5, 1e9]), st.floats(-1e6, 1e6)
)
_COLUMNS = {
    "text": ("t", "u"),
    "number": ("i", "f"),
    "truth": ("b",),
}
_LITERALS: dict[str, st.SearchStrategy[Any]] = {"text": _TEXTS, "number": _NUMBERS, "truth": st.booleans()}
_SIGNS = ("==", "!=", "<", "<=", ">", ">=")


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, Any]]:
    def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(st.none(), strategy)

    whole = st.one_of(st.integers(-4, 4), st.sampled_from([2**53 - 1, -(2**53), 2**62]))
    fraction = st.one_of(st.sampled_from([0.0, -0.0, 0.5, 1.0, math.inf, math.nan, 2.0**53]), st.floats())
    row = st.fixed_dictionaries(
        {"t": maybe(_TEXTS), "u": maybe(_TEXTS), "i": maybe(whole), "f": maybe(fraction), "b": maybe(st.booleans())}
    )
    return draw(st.lists(row, min_size=1, max_size=6))


@st.composite
def conditions(draw: st.DrawFn, depth: int = 3) -> str:
    """A condition."""
    if depth and draw(st.booleans()):
        form = draw(st.sampled_from(["and", "or", "not"]))
        if form == "not":
            return f"not ({draw(conditions(depth - 1))})"
        return f" {form} ".join(f"({text})" for text in draw(st.lists(conditions(depth - 1), min_size=2, max_size=3)))
    kind = draw(st.sampled_from(sorted(_COLUMNS)))
    column = draw(st.sampled_from(_COLUMNS[kind]))
    form = draw(st.sampled_from(["sign", "turned", "chain", "in", "not in", "is None", "is not None", "columns"]))
    literals = [draw(_LITERALS[kind]) for _ in range(draw(st.integers(0, 3)) if form in ("in", "not in") else 2)]
    signs = [draw(st.sampled_from(_SIGNS if kind != "truth" else _SIGNS[:2])) for _ in range(2)]
    if form in ("in", "not in"):
        return f"{column} {form} [{', '.join(map(repr, literals))}]"
    if form.startswith("is"):
        return f"{column} {form}"
    if form == "columns":
        return f"{column} {signs[0]} {draw(st.sampled_from(_COLUMNS[kind]))}"
    if form == "turned":
        return f"{literals[0]!r} {signs[0]} {column}"
    if form == "chain":
        return f"{literals[0]!r} {signs[0]} {column} {signs[1]} {literals[1]!r}"
    return f"{column} {signs[0]} {literals[0]!r}"


def _as_compared(value: Any) -> Any:
    """Two columns of numbers are compared as float64."""
    return float(value) if type(value) is int else value


# SQL's three truth values, beside an oracle that has None for "unknown".

_OPERATORS: dict[type[ast.cmpop], Any] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _truth(node: ast.expr, row: dict[str, Any]) -> bool | None:
    """The truth of a condition for one row, as SQL has it."""
    match node:
        case ast.BoolOp(op=kind, values=values):
            found = [_truth(value, row) for value in values]
            decisive = isinstance(kind, ast.Or)
            return decisive if decisive in found else None if None in found else not decisive
        case ast.UnaryOp(operand=operand):
            inner = _truth(operand, row)
            return None if inner is None else not inner
        case ast.Compare(left=left, ops=ops, comparators=others):
            lefts = [left, *others[:-1]]
            pairs = [_pair_truth(*pair, row=row) for pair in zip(lefts, ops, others, strict=True)]
            return False if False in pairs else None if None in pairs else True
    raise AssertionError(ast.dump(node))


def _pair_truth(left: ast.expr, sign: ast.cmpop, right: ast.expr, *, row: dict[str, Any]) -> bool | None:
    def value(node: ast.expr) -> Any:
        return row[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)

    one, two = value(left), value(right)
    if isinstance(sign, (ast.Is, ast.IsNot)):
        return (one is None) == isinstance(sign, ast.Is)
    if isinstance(sign, (ast.In, ast.NotIn)):
        return None if one is None else (one in two) == isinstance(sign, ast.In)
    if one is None or two is None:
        return None
    if isinstance(left, ast.Name) and isinstance(right, ast.Name):
        one, two = _as_compared(one), _as_compared(two)
    return bool(_OPERATORS[type(sign)](one, two))


@given(tables(), conditions())
def test_a_condition_is_what_sql_says_row_by_row(table: list[dict[str, Any]], text: str) -> None:
    types = {"t": pa.large_string(), "u": pa.string(), "i": pa.int64(), "f": pa.float64(), "b": pa.bool_()}
    columns = {name: pa.array([row[name] for row in table], kind) for name, kind in types.items()}
    tree = ast.parse(text, mode="eval").body
    wanted = [_truth(tree, row) is True for row in table]
    where = parse_where(text)
    assert where.mask(pa.table(columns)).tolist() == wanted, (text, table)
    parts = [part.mask(pa.table(columns)) for part in where.parts()]
    assert np.logical_and.reduce(parts).tolist() == wanted, "its parts, joined by and"


def test_the_parts_of_a_condition_are_those_of_its_outermost_and() -> None:
    where = parse_where("a < 1 and (b == 'é' or\n c > 3) and not (d and e)", setting="filter.where")
    assert [part.text for part in where.parts()] == ["a < 1", "b == 'é' or\n c > 3", "not (d and e)"]
    assert [part.columns for part in where.parts()] == [("a",), ("b", "c"), ("d", "e")]
    for text in ("a < 1", "a < 1 or b > 2", "1 < a < 3"):
        assert [part.text for part in parse_where(text).parts()] == [text]
