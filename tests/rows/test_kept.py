"""`source.keep_columns`: one type that holds every value of a column, whatever rows and files the values come from."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError, ManifestError
from forebay.rows.kept_columns import (
    INTEGER,
    NUMBER,
    PREFIX,
    TEXT,
    UNTYPED,
    concatenated,
    fields_of,
    part_of,
    part_of_values,
    unified,
    values_of,
)
from forebay.rows.manifest import Manifest
from tests.rows.helpers import audio, described, ids, read, rejected, write_manifest, write_tar


def kept(manifest: Manifest, name: str) -> list[Any]:
    values: list[Any] = manifest.rows[PREFIX + name].to_pylist()
    return values


def of_texts(*texts: str | None) -> pa.ChunkedArray:
    """A column of a CSV."""
    return pa.chunked_array([pa.array([None if t is None else t.encode() for t in texts], UNTYPED)])


@pytest.mark.parametrize(
    ("texts", "kind", "values"),
    [
        (("1", "-2", None, "0"), INTEGER, [1, -2, None, 0]),
        (("1", "2.5", "1e3", "-.5", "3."), NUMBER, [1.0, 2.5, 1000.0, -0.5, 3.0]),
        (("007", "8"), TEXT, ["007", "8"]),
        (("-0", "1"), NUMBER, [-0.0, 1.0]),
        (("nan", "1"), TEXT, ["nan", "1"]),
        (("1e999", "1"), TEXT, ["1e999", "1"]),
        (("true", "false"), TEXT, ["true", "false"]),
        (("12345678901234567890",), TEXT, ["12345678901234567890"]),
        (("9007199254740993", "0.5"), TEXT, ["9007199254740993", "0.5"]),
        (("+1", " 2"), TEXT, ["+1", " 2"]),
        ((None, None), TEXT, [None, None]),
        ((), TEXT, []),
        (("a", ""), TEXT, ["a", ""]),
    ],
)
def test_texts_of_a_csv_are_the_narrowest_type_that_holds_them(
    texts: tuple[str | None, ...], kind: pa.DataType, values: list[Any]
) -> None:
    found = unified([of_texts(*texts)], "x")
    assert (found.type, found.to_pylist()) == (kind, values)


@pytest.mark.parametrize(
    ("parts", "kind", "values"),
    [
        (([1, True], [None]), INTEGER, [1, 1, None]),
        (([1], [2.5]), NUMBER, [1.0, 2.5]),
        (([1, 2.5], ["a"]), TEXT, ["1", "2.5", "a"]),
        (([1], [2.5], ["a"]), TEXT, ["1", "2.5", "a"]),
        (([2**53 + 1], [0.5]), TEXT, [str(2**53 + 1), "0.5"]),
        (([2**53 + 1, 0.5],), TEXT, [str(2**53 + 1), "0.5"]),
        (([2**70, 1],), TEXT, [str(2**70), "1"]),
        (([None], [None]), TEXT, [None, None]),
        (([], [1e300, -2.0]), NUMBER, [1e300, -2.0]),
        (([-2.0, 1e15], ["a"]), TEXT, ["-2", "1000000000000000", "a"]),
    ],
)
def test_values_of_json_lose_nothing(parts: tuple[list[Any], ...], kind: pa.DataType, values: list[Any]) -> None:
    found = unified([pa.chunked_array([part_of_values(part)]) for part in parts], "x")
    assert (found.type, found.to_pylist()) == (kind, values)


def test_texts_beside_numbers_are_said(caplog: pytest.LogCaptureFixture) -> None:
    unified([pa.chunked_array([part_of_values([1])]), pa.chunked_array([part_of_values(["a"])])], "speaker")
    assert "keep_columns: speaker holds texts and numbers, or numbers too large; kept as text" in caplog.text


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**66), 2**66),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=5),
)


@given(st.lists(_VALUES, max_size=9), st.lists(st.integers(0, 9), max_size=3))
def test_a_column_does_not_depend_on_how_it_is_cut(values: list[Any], cuts: list[int]) -> None:
    ends = sorted({*(min(cut, len(values)) for cut in cuts), 0, len(values)})
    parts = [values[a:b] for a, b in itertools.pairwise(ends)] or [values]
    whole = unified([pa.chunked_array([part_of_values(values)])], "x")
    cut = unified([pa.chunked_array([part_of_values(part)]) for part in parts], "x")
    assert (cut.type, cut.to_pylist()) == (whole.type, whole.to_pylist())
    for value, found in zip(values, whole.to_pylist(), strict=True):
        if value is None or isinstance(value, str):
            assert found == value
        elif whole.type == TEXT:
            assert math.isclose(float(found), float(value), rel_tol=1e-15)
        else:
            assert found == value


def test_types_of_tables_are_brought_to_three() -> None:
    columns = {
        "small": (pa.array([1, None], pa.int8()), [1, None]),
        "large": (pa.array([2**64 - 1, 1], pa.uint64()), [str(2**64 - 1), "1"]),
        "fits": (pa.array([5, None], pa.uint64()), [5, None]),
        "half": (pa.array([1.5, None], pa.float32()), [1.5, None]),
        "truth": (pa.array([True, None]), [1, None]),
        "coded": (pa.array(["a", None]).dictionary_encode(), ["a", None]),
        "exact": (pa.array(["1.10", None]).cast(pa.decimal128(5, 2)), [1.1, None]),
        "day": (pa.array([0, None], pa.date32()), ["1970-01-01", None]),
        "empty": (pa.nulls(2), [None, None]),
        "listed": (pa.array([["ä", None], None]), ['["ä", null]', None]),
    }
    for name, (column, values) in columns.items():
        found = unified([part_of(pa.chunked_array([column]), name, where="t.parquet")], name)
        assert (name, found.to_pylist()) == (name, values)
    with pytest.raises(
        ConfigError, match=r"t.parquet: column x of source.keep_columns is list<.*>, and texts, lists of texts, n"
    ):
        part_of(pa.chunked_array([pa.array([[1]])]), "x", where="t.parquet")


def test_rows_of_several_files_have_one_type() -> None:
    one = pa.table({"row": [0, 1], PREFIX + "a": pa.array([1, None], INTEGER), PREFIX + "b": pa.nulls(2)})
    two = pa.table({"row": [2], PREFIX + "a": pa.array([0.5], NUMBER), PREFIX + "b": pa.array(["x"], TEXT)})
    rows = concatenated([one, two])
    assert [(f.name, f.dtype, f.nullable) for f in fields_of(rows)] == [("a", "float64", False), ("b", "str", True)]
    assert list(values_of(rows)) == [{"a": 1.0, "b": None}, {"a": None, "b": None}, {"a": 0.5, "b": "x"}]


SIDE = {"speaker": "anna", "snr": 1.5, "takes": 3}


def test_a_tar_manifest_keeps_columns(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": audio(), "y.flac": audio(seed=1)})
    rows: list[dict[str, Any]] = [{"tar_member_name": "x.flac", **SIDE}, {"tar_member_name": "y.flac"}]
    path = write_manifest(tmp_path / "m.parquet", rows)
    manifest = read("tar", path, root=tmp_path, keep_columns=("snr", "speaker"))
    assert (kept(manifest, "snr"), kept(manifest, "speaker")) == ([1.5, None], ["anna", None])
    assert manifest.unused == {"takes": 2}
    with pytest.raises(ConfigError, match=r"no column speakr .*did you mean speaker\?"):
        read("tar", path, root=tmp_path, keep_columns=("speakr",))


def test_json_lines_keep_fields(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.flac").write_bytes(audio())
    lines = [{"audio": "a.flac", "text": "one", **SIDE}, {"audio": "b.flac", "text": "two", "takes": 2.5}]
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = read("jsonl", path, root=tmp_path, keep_columns=("takes", "speaker"))
    assert (kept(manifest, "takes"), kept(manifest, "speaker")) == ([3.0, 2.5], ["anna", None])
    assert manifest.unused == {"snr": 1}
    with pytest.raises(ConfigError, match=r"none of 2 rows has a field sn with a value .*; did you mean snr\?"):
        read("jsonl", path, root=tmp_path, keep_columns=("sn",))
    path.write_text(json.dumps({"audio": "a.flac", "text": "one", "words": ["one", None]}))
    assert kept(read("jsonl", path, root=tmp_path, keep_columns=("words",)), "words") == ['["one", null]']
    path.write_text(json.dumps({"audio": "a.flac", "text": "one", "words": ["one", 2]}))
    with pytest.raises(ManifestError, match=r"line 1: field words is \['one', 2\], and texts, lists of texts, numbers"):
        read("jsonl", path, root=tmp_path, keep_columns=("words",))


def test_a_webdataset_keeps_fields_of_the_json(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": audio(), "x.json": described(text="one", **SIDE), "y.flac": audio(seed=1)})
    other = described(text="three", speaker=7, snr=2)
    write_tar(tmp_path / "b.tar", {"z.flac": audio(seed=2), "z.json": other, "w.flac": audio(), "w.txt": b"four"})
    bad = described(text="five", speaker={"name": "x"})
    write_tar(tmp_path / "c.tar", {"v.flac": audio(seed=2), "v.json": bad})
    names = ("speaker", "snr")
    manifest = read("webdataset", tmp_path, root=tmp_path, keep_columns=names)
    assert ids(manifest) == ["x", "y", "z", "w"]
    assert (kept(manifest, "snr"), kept(manifest, "speaker")) == ([1.5, None, 2.0, None], ["anna", None, "7", None])
    assert manifest.unused == {"takes": 1}
    assert rejected(manifest) == [("v", "failed", "bad_metadata")]
    first = read("webdataset", tmp_path / "a.tar", root=tmp_path, keep_columns=names)
    assert (kept(first, "snr"), kept(first, "speaker")) == ([1.5, None], ["anna", None])
    with pytest.raises(ConfigError, match=r"none of 5 rows has a field take with a value .*; did you mean takes\?"):
        read("webdataset", tmp_path, root=tmp_path, keep_columns=("take",))


def test_texts_alone_keep_fields(tmp_path: Path) -> None:
    lines = [{"text": "one", "topic": "news", "score": 1}, {"text": "two", "score": 0.25}]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = read("text", path, root=tmp_path, keep_columns=("topic", "score"))
    assert (kept(manifest, "topic"), kept(manifest, "score")) == (["news", None], [1.0, 0.25])
    (tmp_path / "t.txt").write_text("one\n")
    with pytest.raises(ConfigError, match="is plain text, whose lines have no fields"):
        read("text", tmp_path / "t.txt", root=tmp_path, keep_columns=("topic",))


def test_an_hf_set_keeps_columns(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features = datasets.Features(
        {"audio": datasets.Audio(decode=False), "text": datasets.Value("string"), "snr": datasets.Value("float32")}
    )
    cells = pa.array([{"bytes": audio(), "path": "a.flac"}, {"bytes": audio(seed=1), "path": "b.flac"}], kind)
    table = pa.table({"audio": cells, "text": ["one", "two"], "snr": pa.array([0.5, None], pa.float32())})
    pq.write_table(table.cast(features.arrow_schema), tmp_path / "t.parquet")
    manifest = read("hf", tmp_path / "t.parquet", root=tmp_path, keep_columns=("snr",))
    assert kept(manifest, "snr") == [0.5, None]
    assert manifest.unused == {}
    assert pc.sum(manifest.rows["duration_s"]).as_py() == pytest.approx(0.2)
