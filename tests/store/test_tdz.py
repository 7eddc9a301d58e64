from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from forebay.store.files import start_writeback
from forebay.store.tdz import ALIGNMENT, TORCH_DTYPES, Parts, crc32, stored_checksums, write_tdz
from tests.processes import ROOT
from tests.strategies import named_tensors, tensors

Array = np.ndarray[Any, Any]


def written(arrays: Mapping[str, Array | Parts]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.tdz"
        result = write_tdz(path, arrays)
        data = path.read_bytes()
    assert result.size_bytes == len(data)
    assert result.xxh3_128 == xxhash.xxh3_128_hexdigest(data)
    return data


def data_offset(archive: bytes, info: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin, by its local header (APPNOTE 4.3.7)."""
    name_size, extra_size = struct.unpack_from("<2H", archive, info.header_offset + 26)
    return int(info.header_offset + 30 + name_size + extra_size)


@given(named_tensors())
def test_the_zip_of_python_finds_the_same_bytes_aligned(arrays: dict[str, Array]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.tdz"
        result = write_tdz(path, arrays)
        data = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            infos = {info.filename: info for info in archive.infolist()}
            for name, array in arrays.items():
                member = f"{name}.memmap"
                assert archive.read(member) == array.tobytes()
                assert result.offsets[name] == data_offset(data, infos[member])
    assert {info.compress_type for info in infos.values()} == {zipfile.ZIP_STORED}
    assert [data_offset(data, info) % ALIGNMENT for info in infos.values()] == [0] * len(infos)
    assert stored_checksums(data) == {name: info.CRC for name, info in infos.items()}


@given(named_tensors())
def test_tensordict_loads_the_same_tensors(arrays: dict[str, Array]) -> None:
    from tensordict import TensorDict

    with tempfile.TemporaryDirectory() as folder:
        write_tdz(Path(folder) / "a.tdz", arrays)
        loaded = TensorDict.load_memmap(Path(folder) / "a.tdz", mode="r")
        keys = {
            "/".join(key) if isinstance(key, tuple) else key
            for key in loaded.keys(include_nested=True, leaves_only=True)
        }
        assert keys == set(arrays)
        for name, array in arrays.items():
            tensor = loaded[tuple(name.split("/"))]
            assert str(tensor.dtype) == TORCH_DTYPES[array.dtype.name]
            assert tuple(tensor.shape) == array.shape
            assert tensor.numpy().tobytes() == array.tobytes()
        del loaded, tensor


@given(tensors(max_dims=3), st.sampled_from("FATB"))
def test_the_bytes_know_values_and_not_how_they_lay_in_memory(array: Array, form: str) -> None:
    other: Array
    if array.ndim == 0:
        other = array.astype(array.dtype.newbyteorder(">"))
    elif form == "F":
        other = np.asfortranarray(array)
    elif form == "A":  # every second element of a larger array, in every axis
        wide = np.zeros([2 * n for n in array.shape], array.dtype)
        other = wide[tuple(slice(None, None, 2) for _ in array.shape)]
        other[...] = array
    elif form == "T":
        other = array.T.copy().T
    else:
        other = array.astype(array.dtype.newbyteorder(">"))
    assert written({"v/a": other, "b": array}) == written({"v/a": array, "b": array})


def test_the_bytes_do_not_know_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    before = written({"a": np.arange(3)})
    monkeypatch.setattr(time, "time", lambda: 4e9)
    monkeypatch.setattr(time, "time_ns", lambda: 4 * 10**18)
    assert written({"a": np.arange(3)}) == before
    assert before.count(b"\x00\x00\x21\x00") >= 4  # 00:00 on 1980-01-01, in every header


@given(named_tensors())
def test_the_root_and_the_directory_stand_last(arrays: dict[str, Array]) -> None:
    data = written(arrays)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        with zipfile.ZipFile(file) as archive:
            last = archive.infolist()[-1]
            assert last.filename == "meta.json"
            assert data_offset(data, last) + last.file_size == archive.start_dir


def test_names_order_and_shapes_are_in_the_bytes() -> None:
    one, two = np.arange(6, dtype=np.int32), np.arange(6, dtype=np.int16)
    variants: list[dict[str, Array]] = [
        {"a": one, "b": two},
        {"b": two, "a": one},
        {"a": one, "c": two},
        {"v/a": one, "b": two},
        {"a": one.reshape(2, 3), "b": two},
        {"a": one.view(np.float32), "b": two},
    ]
    assert len({written(arrays) for arrays in variants}) == len(variants)


@pytest.mark.parametrize("dtype", ["bool", "complex64", "uint32", "U3", "object"])
def test_a_dtype_that_is_not_stored_is_refused_by_name(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(TypeError, match=r"array values/x has dtype .*, wanted one of float16"):
        write_tdz(tmp_path / "a.tdz", {"values/x": np.zeros(2, dtype)})
    assert list(tmp_path.iterdir()) == []


@given(named_tensors(), st.data())
def test_the_checksums_of_a_damaged_directory_are_refused_or_read_as_they_are(
    arrays: dict[str, Array], draw: st.DataObject
) -> None:
    data = bytearray(written(arrays))
    position = draw.draw(st.integers(0, len(data) - 1))
    data[position] ^= draw.draw(st.integers(1, 255))
    checksums: dict[str, int] = {}
    with contextlib.suppress(ValueError):  # and nothing else
        checksums = stored_checksums(bytes(data))
    assert all(isinstance(name, str) and 0 <= crc < 2**32 for name, crc in checksums.items())


@given(named_tensors(), st.data())
def test_a_truncated_archive_has_no_directory(arrays: dict[str, Array], draw: st.DataObject) -> None:
    data = written(arrays)
    with pytest.raises(ValueError, match=r"begins with|ends early"):
        stored_checksums(data[: draw.draw(st.integers(0, len(data) - 1))])


def test_the_checksum_is_that_of_the_member() -> None:
    array = np.arange(100, dtype=np.float32)
    assert stored_checksums(written({"a": array}))["a.memmap"] == zlib.crc32(array.tobytes())


@given(pieces=st.lists(st.binary(max_size=300), max_size=5))
def test_the_checksum_is_zlibs(pieces: list[bytes]) -> None:
    checksum = 0
    for piece in pieces:
        checksum = crc32(piece, checksum)
    assert checksum == zlib.crc32(b"".join(pieces))


def test_shards_are_the_same_where_zlib_ng_is_missing(tmp_path: Path) -> None:
    lines = ["import sys, numpy as np; from pathlib import Path", "sys.modules['zlib_ng'] = None"]
    lines += ["from forebay.store import tdz", "assert tdz.crc32.__module__ == 'zlib'"]
    lines += [f"tdz.write_tdz(Path({str(tmp_path / 'a.tdz')!r}), {{'a': np.arange(99)}})"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=ROOT)
    assert (tmp_path / "a.tdz").read_bytes() == written({"a": np.arange(99)})


@given(tensors(), st.lists(st.integers(0, 20), max_size=4))
def test_parts_are_written_as_the_whole(array: Array, cuts: list[int]) -> None:
    whole = np.atleast_1d(array)
    parts = Parts(np.split(whole, sorted(min(cut, len(whole)) for cut in cuts)))
    assert (parts.shape, parts.dtype, len(parts)) == (whole.shape, whole.dtype, len(whole))
    assert written({"values/x": parts, "y": whole}) == written({"values/x": whole, "y": whole})


def test_the_disk_is_set_to_work_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def start(file: BinaryIO) -> None:
        begun.append(file.tell())
        start_writeback(file)

    monkeypatch.setattr("forebay.store.tdz._WRITEBACK_BYTES", 4096)
    monkeypatch.setattr("forebay.store.tdz.start_writeback", start)
    parts = Parts([np.full(3000, number, np.uint8) for number in range(5)])
    written_to = tmp_path / "a.tdz"
    size = write_tdz(written_to, {"x": parts}).size_bytes
    assert len(begun) == size // 4096
    assert begun == sorted(begun)
