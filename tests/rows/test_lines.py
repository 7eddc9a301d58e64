"""Lines of files as a plain split has them, whatever the blocks and the compression."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.errors import ManifestError
from forebay.rows.readers import line_blocks as lines
from forebay.rows.readers.json_lines import BOM
from forebay.rows.readers.line_blocks import CODECS, LineBlock, head_of, line_blocks, plain_name

ENDINGS = ("", *CODECS)
MOST = 12


def compressed(data: bytes, ending: str) -> bytes:
    return data if not ending else bytes(pa.Codec(CODECS[ending]).compress(data, asbytes=True))


def write(folder: Path, data: bytes, ending: str = "") -> Path:
    path = folder / f"t.txt{ending}"
    path.write_bytes(compressed(data, ending))
    return path


def plainly(data: bytes, max_bytes: int) -> list[tuple[int, bytes]]:
    """Number and bytes of the lines that are not blank."""
    parts = data.removeprefix(BOM).split(b"\n")
    ended = [part.removesuffix(b"\r")[: max_bytes + 1] for part in parts]
    return [(number, part) for number, part in enumerate(ended, 1) if part.strip()]


def found(blocks: Iterator[LineBlock], max_bytes: int) -> list[tuple[int, bytes]]:
    return [
        (block.place.line + line, block.data[block.starts[line] : block.stops[line]][: max_bytes + 1])
        for block in blocks
        for line in range(len(block.is_row))
        if block.is_row[line]
    ]


PIECES = st.sampled_from(
    [b"\n", b"\r\n", b"\r", b" ", b"\t", b"a", b"bc" * 3, b"x" * 11, b"y" * 40, BOM, "ह".encode(), b"\0"]
)
TEXTS = st.lists(PIECES, max_size=30).map(b"".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=TEXTS, mark=st.sampled_from([b"", BOM]), first=st.integers(1, 9), most=st.integers(1, 9))
def test_lines_are_those_of_a_plain_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, mark: bytes, first: int, most: int
) -> None:
    data = mark + data
    wanted = plainly(data, MOST)
    path = write(tmp_path, data)
    with monkeypatch.context() as patched:
        patched.setattr(lines, "_FIRST_BYTES", first)
        patched.setattr(lines, "_MOST_BYTES", most)
        blocks = list(line_blocks(path, max_bytes=MOST))
    assert found(iter(blocks), MOST) == wanted == found(line_blocks(path, max_bytes=MOST), MOST)
    # Any place that a block begins at can be gone on from, and says how many lines and rows are before it.
    for block in blocks:
        assert block.place.line == 1 + data[: block.place.offset].count(b"\n")
        later = found(line_blocks(path, max_bytes=MOST, place=block.place), MOST)
        assert later == [line for line in wanted if line[0] >= block.place.line]
        assert len(wanted) - len(later) == block.place.rows
        assert block.begins[0] == block.place.offset


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=TEXTS, ending=st.sampled_from([*CODECS]), cut=st.integers(0, 99))
def test_a_compressed_file_has_the_same_lines_or_is_refused(tmp_path: Path, data: bytes, ending: str, cut: int) -> None:
    path = write(tmp_path, data, ending)
    assert found(line_blocks(path, max_bytes=MOST), MOST) == plainly(data, MOST)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * cut // 100])
    with pytest.raises(ManifestError, match=rf"t\.txt\{ending} cannot be unpacked \(\w+\): .*truncated or damaged"):
        list(line_blocks(path, max_bytes=MOST))


@pytest.mark.parametrize("ending", [*CODECS])
def test_members_behind_each_other_are_one_text(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"t.txt{ending}"
    path.write_bytes(compressed(b"one\ntw", ending) + compressed(b"o\nthree", ending))
    assert found(line_blocks(path, max_bytes=MOST), MOST) == [(1, b"one"), (2, b"two"), (3, b"three")]
    path.write_bytes(compressed(b"one\n", ending) + b"no such frame")
    with pytest.raises(ManifestError, match=r"cannot be unpacked .* copy it again"):
        list(line_blocks(path, max_bytes=MOST))
    path.write_bytes(b"plain text\n")
    with pytest.raises(ManifestError, match=r"cannot be unpacked"):
        head_of(path)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_line_without_end_fills_no_memory(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"t.txt{ending}"
    if ending:
        block = compressed(b"x" * (1 << 24), ending)
        path.write_bytes(block * 4 + compressed(b"\nlast\n", ending))
    else:
        with open(path, "wb") as file:
            file.truncate(64 << 20)  # sparse
            file.seek(0, os.SEEK_END)
            file.write(b"\nlast\n")
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        blocks = list(line_blocks(path, max_bytes=1 << 20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [len(line) for _, line in found(iter(blocks), 1 << 20)] == [(1 << 20) + 1, 4]
    assert peak < 12 << 20
    assert pa.total_allocated_bytes() - before < 4 << 20
    assert int(blocks[-1].begins[-1]) == (64 << 20) + 6


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"cannot read manifest .*gone\.txt: No such file"):
        list(line_blocks(tmp_path / "gone.txt", max_bytes=9))
    with pytest.raises(ManifestError, match=r"cannot read manifest .*: Is a directory"):
        list(line_blocks(tmp_path, max_bytes=9))


def test_names() -> None:
    assert [plain_name(name) for name in ("a/t.txt.zst", "t.jsonl.gz", "t.txt", ".gz", "t.b.c")] == [
        "a/t.txt",
        "t.jsonl",
        "t.txt",
        ".gz",
        "t.b.c",
    ]
