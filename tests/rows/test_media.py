"""Reads by offset through a bounded set of open files."""

from __future__ import annotations

import errno
import os
import threading
import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import SampleError, TarError
from forebay.rows.media_reader import MediaFiles


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    for number in range(20):
        (folder / f"{number}.bin").write_bytes(np.random.default_rng(number).bytes(5_000 + number))
    return folder


def num_descriptors(folder: Path) -> int:
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(link) and os.readlink(link).startswith(str(folder)) for link in links)


@given(
    reads=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 5_000), st.integers(-1, 5_000)), max_size=40),
    max_open=st.integers(1, 5),
)
def test_gives_the_bytes_of_the_file(folder: Path, reads: list[tuple[int, int, int]], max_open: int) -> None:
    with closing(MediaFiles(max_open)) as media:
        for number, offset, size in reads:
            path = folder / f"{number}.bin"
            data = path.read_bytes()
            if offset + size > len(data):
                with pytest.raises(
                    TarError, match=f"wanted {size} bytes at offset {offset}, got {len(data) - offset};"
                ):
                    media.read(path, offset, size)
            else:
                assert media.read(str(path), offset, size) == data[offset : offset + size if size >= 0 else None]
            assert len(media._open) <= max_open
            assert num_descriptors(folder) == len(media._open)
    assert num_descriptors(folder) == 0


def test_threads_read_right_bytes_while_files_are_closed_under_them(folder: Path) -> None:
    wanted = {number: (folder / f"{number}.bin").read_bytes() for number in range(20)}
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for number in rng.integers(0, 20, 400).tolist():
            if media.read(folder / f"{number}.bin", 100, 4_000) != wanted[number][100:4_100]:
                wrong.append(number)

    with closing(MediaFiles(max_open=2)) as media:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(media._open) == 2
    assert num_descriptors(folder) == 0


def test_a_file_closed_during_a_read_stays_open_until_it_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    media, read = MediaFiles(), os.pread

    def close_first(descriptor: int, size: int, offset: int) -> bytes:
        media.close()
        return read(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", close_first)
    assert media.read(folder / "3.bin") == (folder / "3.bin").read_bytes()
    assert num_descriptors(folder) == 0


def test_reads_in_parts_give_the_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: read(descriptor, min(size, 999), offset))
    with closing(MediaFiles()) as media:
        assert media.read(folder / "3.bin") == (folder / "3.bin").read_bytes()


def test_a_file_that_shrinks_after_it_was_opened_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"x" * 2_000)
    with closing(MediaFiles()) as media:
        assert media.read(path, 500, 1_000) == b"x" * 1_000
        os.truncate(path, 600)
        with pytest.raises(TarError, match=r"a\.tar: wanted 1000 bytes at offset 500, got 100; .*forebay index"):
            media.read(path, 500, 1_000)


def test_what_is_not_there_costs_the_sample_or_names_the_tar(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with closing(MediaFiles()) as media:
        for name in ["missing.wav", "", "pipe", "missing/deep.wav", "a\0b", "\ud800"]:
            path = str(tmp_path / name)
            with pytest.raises(SampleError, match=r"cannot read .*correct the manifest") as caught:
                media.read(path)
            assert caught.value.reason == "missing_file"
            with pytest.raises(TarError, match=r"cannot read .*check the path"):
                media.read(path, 0, 10)
    assert num_descriptors(tmp_path) == 0


def test_what_is_too_large_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    with open(path, "wb") as file:
        file.truncate(10 * 1024**3)
    tracemalloc.start()
    with closing(MediaFiles()) as media:
        with pytest.raises(SampleError, match=r"a\.wav: 10737418240 bytes at offset 0, allowed are 1000;") as caught:
            media.read(path, max_bytes=1000)
        with pytest.raises(TarError, match="wanted 1099511627776 bytes"):
            media.read(path, 0, 1024**4)
        assert media.read(path, 5, 1000, max_bytes=1000) == bytes(1000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.reason == "too_large"
    assert peak_bytes < 1024**2


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOMEM])
def test_errors_of_the_machine_come_through(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(descriptor: int, size: int, offset: int) -> bytes:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pread", fail)
    with closing(MediaFiles()) as media, pytest.raises(OSError, match=os.strerror(code)):
        media.read(folder / "1.bin")
    assert num_descriptors(folder) == 0


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_open is 0, wanted 1 or more"):
        MediaFiles(0)
