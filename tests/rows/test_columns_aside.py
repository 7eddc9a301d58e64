from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pytest

from forebay.rows import columns_aside
from forebay.rows.columns_aside import bytes_aside, drop_pages, free_memory, one_heap, rows_aside


@pytest.fixture
def table() -> pa.Table:
    texts = pa.array([None if row % 7 == 0 else f"text {row} \u00e9" for row in range(1000)], pa.large_string())
    lists = pa.array([list(range(row % 4)) for row in range(1000)], pa.list_(pa.int32()))
    return pa.table({"row": np.arange(1000), "text": texts, "images": lists})


def test_rows_aside_are_the_same_and_no_file_is_left(
    table: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_aside, "HELD_BYTES", 64)
    monkeypatch.setattr(columns_aside, "BLOCK_ROWS", 300)
    with one_heap():
        before = pa.total_allocated_bytes()
        found = rows_aside(table.slice(10), str(tmp_path))
        held = pa.total_allocated_bytes() - before
    assert found.equals(table.slice(10))
    assert found["row"].num_chunks == 4
    assert held < table.nbytes
    assert os.listdir(tmp_path / ".building") == []
    drop_pages()
    free_memory()
    assert found.equals(table.slice(10))


@pytest.mark.parametrize("root", ["one", "file"])
def test_bytes_aside_are_the_same(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_bytes(b"")  # no folder can be made below it

    def write(file: BinaryIO) -> None:
        for each in (bytes(16), bytes(range(256))):
            file.write(each)
        file.seek(0)
        file.write(b"head")

    found = bytes_aside(write, tmp_path / root)
    drop_pages()
    assert (bytes(found), len(found)) == (b"head" + bytes(12) + bytes(range(256)), 272)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "file"]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space") as caught:
        bytes_aside(write, tmp_path / "root")
    assert caught.value.filename == str(tmp_path / "root")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_small_table_and_one_that_cannot_be_written_are_held(
    table: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows_aside(table, str(tmp_path)) is table
    monkeypatch.setattr(columns_aside, "HELD_BYTES", 64)
    (tmp_path / "file").write_bytes(b"")
    assert rows_aside(table, str(tmp_path / "file")) is table


def test_arrow_allocates_as_before_after_a_listing() -> None:
    before = pa.default_memory_pool().backend_name
    with one_heap(), one_heap():
        assert pa.default_memory_pool().backend_name == "system"
    assert pa.default_memory_pool().backend_name == before
