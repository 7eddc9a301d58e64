"""Heads of tables, of any bytes: what is read is bounded, and what is no table is a ConfigError."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.init.folder_files import SAMPLE
from forebay.init.media_tables import tables_of
from forebay.init.table_head import read_table


@pytest.mark.parametrize(("delimiter", "suffix"), [(",", "csv"), (";", "csv"), ("\t", "tsv"), ("|", "csv")])
def test_columns_of_a_csv(delimiter: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    rows = [("path", "text"), ("a.wav", "one, two" if delimiter != "," else '"one, two"'), ("b.wav", "three")]
    path.write_text("\ufeff" + "".join(delimiter.join(row) + "\r\n" for row in rows))
    table = read_table(path)
    assert (table.names, table.num_rows, table.is_exact) == (("path", "text"), 2, True)
    assert [row["text"] for row in table.rows] == ["one, two", "three"]


def test_line_ends_in_quotes_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('path,text\n"a\nb.wav",one\n\nb.wav,two\n')
    assert (read_table(path).num_rows, read_table(path).is_exact) == (2, True)
    path.write_text("path,text\n" + '"a\nb.wav",one\n' * 10_000)
    assert not read_table(path).is_exact
    (lines := tmp_path / "x.jsonl").write_text('{"audio": "a.wav"}\n\n  \r\n{"audio": "b.wav"}\n\n')
    assert (read_table(lines).num_rows, read_table(lines).is_exact) == (2, True)


def test_quotation_marks_of_a_tsv_are_text(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text('path\tsentence\na.mp3\t"Well, he said\nb.mp3\t"yes" she said\n')
    assert [row["sentence"] for row in read_table(path).rows] == ['"Well, he said', '"yes" she said']


def test_rows_of_a_long_file_come_from_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("n,text\n" + "".join(f"{number},text number {number}\n" for number in range(100_000)))
    table = read_table(path)
    numbers = [int(row["n"]) for row in table.rows]
    assert table.num_rows == 100_000
    assert len(numbers) <= SAMPLE
    assert max(numbers) > 80_000
    assert numbers == sorted(numbers)


def test_json_lines_have_the_fields_of_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n{"b": [1, 2], "a": null}\n')
    table = read_table(path)
    assert table.names == ("a", "b")
    assert table.values("b") == [[1, 2]]
    path.write_text("[1]\n")
    with pytest.raises(ConfigError, match=r"no table of JSON lines: the line that begins with '\[1\]' is a list"):
        read_table(path)


def test_parquet_is_read_from_several_groups_without_its_media(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    audio = [{"bytes": bytes([number % 256]) * 10, "path": None} for number in range(1000)]
    table = pa.table({"audio": audio, "n": list(range(1000))})
    pq.write_table(table, path, row_group_size=100)
    head = read_table(path)
    assert (head.num_rows, head.blobs) == (1000, ("audio",))
    assert max(row["n"] for row in head.rows) >= 800
    assert all(set(row) == {"n"} for row in head.rows)
    assert next(head.encoded("audio")) == bytes(10)


ROWS = st.lists(st.dictionaries(st.text(max_size=8), st.none() | st.text(max_size=8) | st.integers()), max_size=5)
FILES = st.one_of(
    st.binary(max_size=400),
    st.text(max_size=400).map(lambda text: text.encode("utf-8", "surrogatepass")),
    ROWS.map(lambda rows: "\n".join(map(json.dumps, rows)).encode()),
)


@given(FILES, st.sampled_from([".csv", ".tsv", ".jsonl", ".parquet", ".arrow", ".json"]))
def test_any_bytes_are_a_table_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_bytes(data)
    problems: list[str] = []
    found = tables_of([path], None, problems)
    assert len(found) + len(problems) == 1
