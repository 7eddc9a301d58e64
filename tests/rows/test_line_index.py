"""The index of the lines of a file: right after growth, edits and damage, and never believed where it may be wrong."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.errors import ManifestError
from forebay.rows.readers import line_blocks as lines_module
from forebay.rows.readers.line_blocks import index_path, indexed_text, line_blocks, line_index
from forebay.store.layout import TEXT_INDEX

MOST = 1 << 20
LINES = 8


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LINES", LINES)
    monkeypatch.setattr(lines_module, "write_bytes", Path.write_bytes)  # without fsync


def texts(count: int, *, start: int = 0) -> bytes:
    """Some blank, none of one length."""
    return b"".join(b"%d %s\n" % (i, b"x" * (i % 5)) if i % 7 else b" \n" for i in range(start, start + count))


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    os.utime(path, ns=(0, 1_600_000_000_000_000_000 + len(data)))
    return path


def all_rows(path: Path) -> list[bytes]:
    blocks = list(line_blocks(path, max_bytes=MOST))
    return [b.data[b.starts[i] : b.stops[i]] for b in blocks for i in range(len(b.is_row)) if b.is_row[i]]


def row(path: Path, number: int, root: Path) -> bytes | None:
    """The row as it is read by the index: None where there is none."""
    index = line_index(path, number, max_bytes=MOST, cache_root=root)
    place, num_rows = index.mark_of(number), index.num_rows
    if num_rows is not None and number >= num_rows:
        return None
    blocks = line_blocks(path, max_bytes=MOST, place=place)
    for block in blocks:
        for line in range(len(block.is_row)):
            if block.is_row[line] and block.place.rows + int(block.is_row[:line].sum()) == number:
                assert block.place.offset - place.offset + line < 4 * LINES * 16
                return block.data[block.starts[line] : block.stops[line]]
    return None


def is_right(path: Path, root: Path) -> bool:
    rows = all_rows(path)
    for number in (0, len(rows) // 2, len(rows) - 1, len(rows)):
        assert row(path, number, root) == (rows[number] if 0 <= number < len(rows) else None)
    return line_index(path, max_bytes=MOST, cache_root=root).num_rows == len(rows)


class _Hashed:
    """Counts the bytes that are hashed for marks, and the lines that are looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = self.num_lines = 0
        chained, blocks = lines_module._chained, line_blocks

        def counted(file: Any, before: bytes, start: int, stop: int) -> bytes | None:
            self.num_bytes += stop - start
            return chained(file, before, start, stop)

        def read(*args: Any, **named: Any) -> Any:
            for block in blocks(*args, **named):
                self.num_lines += len(block.is_row)
                yield block

        monkeypatch.setattr(lines_module, "_chained", counted)
        monkeypatch.setattr(lines_module, "line_blocks", read)


def settle(path: Path, root: Path) -> None:
    """Makes the index one that was made long after its file: the time of a change cannot be set."""
    kept = index_path(path, cache_root=root)
    found = lines_module._read(kept)
    lines_module._keep(dataclasses.replace(found, seen_ns=max(found.stat[-2:]) + (10 << 30)), kept)


def test_an_index_is_used_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.txt", texts(400))
    assert is_right(path, tmp_path)
    settle(path, tmp_path)
    work = _Hashed(monkeypatch)
    assert is_right(path, tmp_path)
    assert (work.num_bytes, work.num_lines) == (0, 0)
    write(path, texts(400) + texts(40, start=400))
    assert is_right(path, tmp_path)
    assert work.num_lines <= 40 + 4 * LINES
    settle(path, tmp_path)
    before = (work.num_bytes, work.num_lines)
    assert is_right(path, tmp_path)
    assert (work.num_bytes, work.num_lines) == before


def test_an_edit_keeps_what_stands_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = texts(400)
    path = write(tmp_path / "t.txt", data)
    assert is_right(path, tmp_path)
    work = _Hashed(monkeypatch)
    at = data.index(b"300 ")
    write(path, data[:at] + b"\n\nnew lines\n" + data[at:])
    assert is_right(path, tmp_path)
    assert work.num_lines <= 103 + 2 * LINES


CHANGES = st.sampled_from(["grow", "cut", "edit", "same size", "other", "end"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.integers(0, 90), changes=st.lists(CHANGES, max_size=4), at=st.integers(0, 99))
def test_rows_are_right_whatever_becomes_of_the_file(tmp_path: Path, counts: int, changes: list[str], at: int) -> None:
    path, data = tmp_path / "t.txt", texts(counts)
    assert is_right(write(path, data), tmp_path)
    for change in changes:
        place = len(data) * at // 100
        data = {
            "grow": data + texts(20, start=1000),
            "cut": data[:place],
            "edit": data[:place] + b"\nedited\n" + data[place:],
            "same size": data[:place] + bytes(data[place:])[::-1],
            "other": texts(50, start=5),
            "end": data + b"no end",
        }[change]
        assert is_right(write(path, data), tmp_path)


def test_every_damaged_byte_of_an_index_is_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", texts(60))
    assert is_right(path, tmp_path)
    settle(path, tmp_path)
    kept = index_path(path, cache_root=tmp_path)
    whole, rows = kept.read_bytes(), all_rows(path)
    for at in range(0, len(whole), 7):
        kept.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        assert row(path, 45, tmp_path) == rows[45]
    for at in (0, 1, 20, len(whole) - 1):
        kept.write_bytes(whole[:at])
        assert row(path, 45, tmp_path) == rows[45]
    kept.write_bytes(whole[:-1])
    with pytest.raises(ManifestError, match=r"the index .* is damaged .* made again where it is needed"):
        indexed_text(kept)


def test_which_file_an_index_is_of(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", texts(60))
    assert is_right(path, tmp_path)
    kept = index_path(path, cache_root=tmp_path)
    assert indexed_text(kept) == (str(path), True)
    write(path, texts(61))
    assert indexed_text(kept) == (str(path), False)
    path.unlink()
    assert indexed_text(kept) == (str(path), False)
    other = kept.with_name("0" * 32 + ".lines")
    kept.rename(other)
    assert indexed_text(other) == (None, False)


def test_without_a_root_and_for_a_short_file_nothing_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", texts(60))
    assert line_index(path, max_bytes=MOST, cache_root=None).num_rows == len(all_rows(path))
    assert is_right(write(tmp_path / "s.txt", texts(LINES - 1)), tmp_path)
    assert not (tmp_path / TEXT_INDEX).exists()


def test_a_root_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file")
    assert is_right(write(tmp_path / "t.txt", texts(60)), tmp_path / "root")


def test_two_processes_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", texts(40_000))
    code = (
        "import sys; from pathlib import Path; from forebay.rows.readers.line_blocks import line_index\n"
        "path, most = Path(sys.argv[1]), {'max_bytes': 99, 'cache_root': Path(sys.argv[2])}\n"
        "for row in range(0, 34000, 3000): print(line_index(path, row, **most).mark_of(row).rows <= row)\n"
        "print(line_index(path, **most).num_rows)"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "root")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    wanted = ["True"] * 12 + [str(len(all_rows(path)))]
    assert [process.communicate()[0].split() for process in running] == [wanted, wanted]
    assert [kept.suffix for kept in (tmp_path / "root" / TEXT_INDEX).iterdir()] == [lines_module.ENDING]
