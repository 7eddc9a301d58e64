"""One object: the bytes are those that zarr writes, and damage is found and named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import MissingExtraError
from forebay.store.cold import arrays as codec
from forebay.store.cold.arrays import CHUNK_BYTES, SHARD_BYTES, ColdArray, DamagedError, cold_array, decode, encode
from forebay.store.tdz import TORCH_DTYPES


def array_of(values: np.ndarray[Any, Any], *, chunk_rows: int, chunks: int) -> ColdArray:
    return ColdArray(
        path="x",
        dtype=values.dtype,
        shape=values.shape,
        dimensions=tuple(f"x_{axis}" for axis in range(values.ndim)),
        chunk_rows=chunk_rows,
        chunks=chunks,
    )


def by_zarr(array: ColdArray, values: np.ndarray[Any, Any], *, level: int) -> dict[str, bytes]:
    """The objects that zarr makes of the same values."""
    memory: dict[str, Any] = {}
    made = zarr.create_array(
        zarr.storage.MemoryStore(memory),
        name=array.path,
        shape=array.shape,
        dtype=array.dtype,
        chunks=(array.chunk_rows, *array.shape[1:]),
        shards=(array.shard_rows, *array.shape[1:]),
        compressors=[zarr.codecs.ZstdCodec(level=level, checksum=True)],
        fill_value=0,
        config={"write_empty_chunks": True},
    )
    made[:] = values
    return {name: data.to_bytes() for name, data in memory.items() if not name.endswith("zarr.json")}


@given(
    rows=st.integers(1, 60),
    width=st.sampled_from([(), (1,), (3,), (2, 2)]),
    dtype=st.sampled_from(sorted(TORCH_DTYPES)),
    chunk_rows=st.integers(1, 9),
    chunks=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_objects_are_those_of_zarr(
    rows: int, width: tuple[int, ...], dtype: str, chunk_rows: int, chunks: int, seed: int
) -> None:
    size = rows * int(np.prod(width, dtype=int)) * np.dtype(dtype).itemsize
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()
    values = np.frombuffer(data, dtype).reshape(rows, *width)
    array = array_of(values, chunk_rows=chunk_rows, chunks=chunks)
    made = {
        array.name(index): encode(array, values[slice(*array.rows(index))], level=1)
        for index in range(array.num_shards)
    }
    assert made == by_zarr(array, values, level=1)
    for index in range(array.num_shards):
        start, stop = array.rows(index)
        middle = start + (stop - start) // 2
        for low, high in ((start, stop), (start, middle), (middle, stop)):
            if low < high:
                found = decode(array, made[array.name(index)], index, start=low, stop=high)
                assert found.tobytes() == values[low:high].tobytes()


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (10, r"chunk 0 \(bytes 0 to \d+\): Zstd decompression error"),
        (-1, r"index: stored CRC-32C [0-9a-f]{8}, computed [0-9a-f]{8}"),
        (-20, r"index: stored CRC-32C"),
    ],
)
def test_a_flipped_bit_is_found(position: int, message: str) -> None:
    values = np.arange(1000, dtype="<i4")
    array = array_of(values, chunk_rows=100, chunks=20)
    data = bytearray(encode(array, values, level=3))
    data[position] ^= 1
    with pytest.raises(DamagedError, match=message):
        decode(array, bytes(data), 0, start=0, stop=1000)


@pytest.mark.parametrize("size", [0, 3, 100, -1])
def test_what_ends_early_is_found(size: int) -> None:
    values = np.arange(1000, dtype="<i4")
    array = array_of(values, chunk_rows=100, chunks=20)
    with pytest.raises(DamagedError, match=r"its index alone has 324|stored CRC-32C"):
        decode(array, encode(array, values, level=3)[:size], 0, start=0, stop=1000)


def test_a_chunk_that_is_not_there_is_damage() -> None:
    """zarr would give zeros."""
    values = np.arange(100, dtype="<i4")
    array = array_of(values, chunk_rows=100, chunks=2)
    longer = array_of(np.zeros(200, "<i4"), chunk_rows=100, chunks=2)
    with pytest.raises(DamagedError, match=r"chunk 1 is said to end at \d+, and there are \d+ bytes"):
        decode(longer, encode(array, values, level=3), 0, start=0, stop=200)


def test_sizes() -> None:
    clips = cold_array("x", "float16", (10_000_000, 80), ("n", "m"))
    assert CHUNK_BYTES - clips.row_bytes < clips.chunk_rows * clips.row_bytes <= CHUNK_BYTES
    assert SHARD_BYTES - CHUNK_BYTES < clips.shard_rows * clips.row_bytes <= SHARD_BYTES
    assert clips.rows(clips.num_shards - 1)[1] == 10_000_000
    assert cold_array("x", "int64", (3,), ("n",)).shard_rows == 3
    assert cold_array("x", "uint8", (0,), ("n",)).num_shards == 0
    huge = cold_array("x", "uint8", (3, 1 << 30), ("n", "m"))
    assert (huge.chunk_rows, huge.chunks) == (1, 1)


def test_without_zarr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zarr", None)
    with pytest.raises(
        MissingExtraError, match=r"needs zarr, which is not installed; run: pip install 'forebay\[zarr\]'"
    ):
        codec.zarr()
