from __future__ import annotations

import contextlib
import itertools
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import CacheCorruptError, CacheError
from forebay.store import shard as shard_module
from forebay.store.layout import FieldSpec
from forebay.store.shard import (
    Shard,
    ShardEntry,
    entry_from_json,
    entry_of,
    entry_to_json,
    failure_field,
    sample_hash,
    shard_fields,
    shard_name,
    table_dtype,
    to_table,
    write_shard,
)
from tests.strategies import STORED_FIELDS, stored_rows

KEY = "ab" * 32
TENSORS = STORED_FIELDS[:3]
Rows = list[dict[str, Any]]


@contextlib.contextmanager
def written(rows: Rows) -> Iterator[tuple[Path, ShardEntry]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "00000.tdz"
        yield path, write_shard(path, STORED_FIELDS, rows, key=KEY)


def flip(path: Path, position: int, mask: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def problems(shard: Shard) -> dict[int, str]:
    """The problem of each row that is not what was hashed."""
    found: dict[int, str] = {}
    for index in range(shard.entry.rows):
        try:
            shard.check_row(index, [*shard.row(index).values()])
        except CacheCorruptError as err:
            found[index] = str(err)
    return found


def expected(row: dict[str, Any], field: FieldSpec) -> np.ndarray[Any, Any]:
    return np.asarray(row.get(field.name, np.zeros((0, *field.shape), field.numpy_dtype)))


@given(stored_rows())
def test_rows_come_back_bit_for_bit(rows: Rows) -> None:
    with written(rows) as (path, entry):
        shard = Shard(path, entry, STORED_FIELDS)
        assert (entry.rows, entry.key, entry.size_bytes) == (len(rows), KEY, path.stat().st_size)
        for index, row in enumerate(rows):
            values = shard.row(index)
            shard.check_row(index, [*values.values()])
            assert list(values) == [field.name for field in TENSORS]
            for field in TENSORS:
                wanted = expected(row, field)
                assert values[field.name].dtype == field.numpy_dtype
                assert values[field.name].shape == (len(wanted), *field.shape)
                assert values[field.name].tobytes() == wanted.tobytes()


@given(stored_rows())
def test_the_row_table_comes_back_and_failed_rows_keep_their_places(rows: Rows) -> None:
    with written(rows) as (path, entry):
        shard = Shard(path, entry, STORED_FIELDS)
        assert shard.strings("sample_id") == [row["sample_id"] for row in rows]
        assert shard.strings("failure") == [row.get("failure", "") for row in rows]
        values, offsets = shard.column("num_audio_samples")
        assert values.tolist() == [int(row["num_audio_samples"]) for row in rows if "num_audio_samples" in row]
        assert np.diff(offsets).tolist() == [int("num_audio_samples" in row) for row in rows]
        assert shard.lengths("features").tolist() == [len(expected(row, TENSORS[0])) for row in rows]


@given(stored_rows())
def test_what_a_row_gives_is_read_only(rows: Rows) -> None:
    with written(rows) as (path, entry):
        shard = Shard(path, entry, STORED_FIELDS)
        for index, name in itertools.product(range(len(rows)), (field.name for field in TENSORS)):
            value = shard.row(index)[name]
            assert not value.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                value[...] = 0
            with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                value.flags.writeable = True


@settings(max_examples=150)
@given(stored_rows().filter(lambda rows: any("failure" not in row for row in rows)), st.data())
def test_every_flipped_byte_of_a_tensor_is_found(rows: Rows, draw: st.DataObject) -> None:
    with written(rows) as (path, entry):
        spans = [
            (values, count * int(np.prod(f.shape)) * f.numpy_dtype.itemsize)
            for f, (values, count, _) in zip(TENSORS, entry.spans, strict=False)
        ]
        positions = [start + i for start, size in spans for i in range(size)]
        flip(path, draw.draw(st.sampled_from(positions)), draw.draw(st.integers(1, 255)))
        found = problems(Shard(path, entry, STORED_FIELDS))
        (index,) = found
        assert f"row {index} (bytes from " in found[index]


@settings(max_examples=150)
@given(stored_rows().filter(len), st.data())
def test_every_flipped_byte_of_hashes_or_offsets_is_found(rows: Rows, draw: st.DataObject) -> None:
    with written(rows) as (path, entry):
        starts = [offsets for _, _, offsets in entry.spans[:3]]
        positions = [start + i for start in starts for i in range(8 * (len(rows) + 1))]
        positions += [entry.hash_offset + i for i in range(8 * len(rows))]
        flip(path, draw.draw(st.sampled_from(positions)), draw.draw(st.integers(1, 255)))
        shard = Shard(path, entry, STORED_FIELDS)
        lengths = [len(expected(row, field)) for row in rows for field in TENSORS]
        read = [len(value) for i in range(len(rows)) for value in shard.row(i).values()]
        # A border that no row's values lie behind can move without moving a value.
        assert problems(shard) or read == lengths


@given(stored_rows().filter(len), st.sampled_from(["sample_id", "num_audio_samples", "failure"]), st.data())
def test_every_flipped_byte_of_a_table_field_is_found(rows: Rows, name: str, draw: st.DataObject) -> None:
    with written(rows) as (path, entry):
        index = [field.name for field in STORED_FIELDS].index(name)
        values, count, offsets = entry.spans[index]
        positions = [values + i for i in range(count * STORED_FIELDS[index].numpy_dtype.itemsize)]
        positions += [offsets + i for i in range(8 * (len(rows) + 1))]
        flip(path, draw.draw(st.sampled_from(positions)), draw.draw(st.integers(1, 255)))
        with pytest.raises(CacheCorruptError, match=rf"00000.tdz (values|offsets)/{name}.memmap: stored CRC-32"):
            Shard(path, entry, STORED_FIELDS).column(name)


def test_a_damaged_directory_is_named_when_a_column_is_read(tmp_path: Path) -> None:
    entry = write_shard(tmp_path / "a.tdz", STORED_FIELDS, [{"sample_id": "x"}], key=KEY)
    with zipfile.ZipFile(tmp_path / "a.tdz") as archive:
        start = archive.start_dir
    flip(tmp_path / "a.tdz", start, 1)
    with pytest.raises(CacheCorruptError, match=r"a\.tdz: entry at \d+ begins with .*; run: forebay preprocess"):
        Shard(tmp_path / "a.tdz", entry, STORED_FIELDS).strings("sample_id")


def test_a_shard_truncated_at_any_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tdz"
    entry = write_shard(path, STORED_FIELDS, [{"sample_id": "x", "waveform": np.arange(9, dtype=np.int16)}], key=KEY)
    data = path.read_bytes()
    for size in (*range(0, len(data), 7), len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(CacheCorruptError, match=rf"a\.tdz has {size} bytes, its cache says {len(data)}"):
            Shard(path, entry, STORED_FIELDS)


def test_a_shard_that_lost_its_end_to_zeros_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tdz"
    entry = write_shard(path, STORED_FIELDS, [{"sample_id": "x"}], key=KEY)
    data = path.read_bytes()
    for size in (0, 3, len(data) // 2, len(data) - 22):
        path.write_bytes(data[:size] + bytes(len(data) - size))
        with pytest.raises(CacheCorruptError, match=r"does not begin and end like a \.tdz"):
            Shard(path, entry, STORED_FIELDS)


def test_a_missing_shard_and_one_that_cannot_be_opened_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.tdz"
    entry = write_shard(path, STORED_FIELDS, [], key=KEY)
    with pytest.raises(CacheCorruptError, match=r"b\.tdz is missing from its cache; run: forebay preprocess"):
        Shard(tmp_path / "b.tdz", entry, STORED_FIELDS)
    path.unlink()
    path.mkdir()
    with pytest.raises(CacheCorruptError, match=r"a\.tdz cannot be opened: Is a directory"):
        Shard(path, entry, STORED_FIELDS)


def test_too_many_open_files_is_no_corruption(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "a.tdz"
    entry = write_shard(path, STORED_FIELDS, [], key=KEY)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(CacheError, match=r"Too many open files; lower loader\.max_open_shards") as caught:
            Shard(path, entry, STORED_FIELDS)
    assert type(caught.value) is CacheError


@given(stored_rows(), st.randoms())
def test_the_bytes_know_values_and_not_where_they_came_from(rows: Rows, random: Any) -> None:
    others = []
    for row in rows:
        items = list(row.items())
        random.shuffle(items)
        others.append({name: np.asfortranarray(v) if isinstance(v, np.ndarray) else v for name, v in items})
    with written(rows) as (path, entry), written(others) as (other, same):
        assert path.read_bytes() == other.read_bytes()
        assert entry == same


def test_a_reason_alone_is_a_failed_row(tmp_path: Path) -> None:
    entry = write_shard(tmp_path / "a.tdz", STORED_FIELDS, ["corrupt_audio", {"sample_id": "x"}], key=KEY)
    shard = Shard(tmp_path / "a.tdz", entry, STORED_FIELDS)
    assert shard.strings("failure") == ["corrupt_audio", ""]
    assert shard.strings("sample_id") == ["", "x"]


def test_names_that_are_not_utf8_keep_their_bytes(tmp_path: Path) -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    entry = write_shard(tmp_path / "a.tdz", STORED_FIELDS, [{"sample_id": name}], key=KEY)
    assert Shard(tmp_path / "a.tdz", entry, STORED_FIELDS).strings("sample_id") == [name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("features", np.zeros((2, 3), np.float32)),
        ("features", np.zeros((2, 4), np.float16)),
        ("features", np.zeros(3, np.float16)),
        ("waveform", [1, 2]),
        ("num_audio_samples", 1.0),
        ("sample_id", b"x"),
    ],
)
def test_another_dtype_or_shape_is_refused_by_field(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"field {name} got .*, wanted "):
        write_shard(tmp_path / "a.tdz", STORED_FIELDS, [{name: value}], key=KEY)
    assert list(tmp_path.iterdir()) == []


def test_a_group_without_tensors_is_checked_by_its_hashes(tmp_path: Path) -> None:
    fields = (FieldSpec(name="text", dtype="str", group="text", role="table"), failure_field("text"))
    entry = write_shard(tmp_path / "a.tdz", fields, [{"text": "one"}, {"text": "two"}], key=KEY)
    shard = Shard(tmp_path / "a.tdz", entry, fields)
    assert shard.row(1) == {}
    shard.check_row(1, [])
    flip(tmp_path / "a.tdz", entry.hash_offset + 8, 1)
    with pytest.raises(CacheCorruptError, match=rf"row 1 \(bytes from {entry.hash_offset + 8}\)"):
        Shard(tmp_path / "a.tdz", entry, fields).check_row(1, [])


def test_fields_of_a_group_end_with_the_failure() -> None:
    text = FieldSpec(name="text", dtype="str", group="text", role="table")
    assert shard_fields([TENSORS[0], text, TENSORS[1]], "audio") == (TENSORS[0], TENSORS[1], failure_field("audio"))
    assert shard_fields([TENSORS[0], text], "text") == (text, failure_field("text"))
    assert FieldSpec.from_json(TENSORS[0].to_json()) == TENSORS[0]


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=4))
def test_the_sample_hash_knows_where_one_field_ends_and_the_next_begins(parts: list[bytes]) -> None:
    arrays = [np.frombuffer(part, np.uint8) for part in parts]
    joined = [np.frombuffer(b"".join(parts), np.uint8), *[np.zeros(0, np.uint8)] * (len(parts) - 1)]
    is_same = [a.tobytes() for a in arrays] == [a.tobytes() for a in joined]
    assert (sample_hash(arrays) == sample_hash(joined)) == is_same
    assert -(2**63) <= sample_hash(arrays) < 2**63


@given(stored_rows())
def test_entries_survive_the_table_and_the_receipt(rows: Rows) -> None:
    with written(rows) as (_, entry):
        table = to_table([entry, entry], len(STORED_FIELDS))
        assert table.dtype == table_dtype(len(STORED_FIELDS))
        assert [entry_of(table, 0), entry_of(table, 1)] == [entry, entry]
        assert entry_from_json(entry_to_json(entry)) == entry


@pytest.mark.parametrize("damage", ["spans", "rows", "key"])
def test_a_receipt_that_is_none_raises_what_its_reader_expects(tmp_path: Path, damage: str) -> None:
    document = entry_to_json(write_shard(tmp_path / "a.tdz", STORED_FIELDS, [], key=KEY))
    if damage == "key":
        del document["key"]
    else:
        document[damage] = {"spans": [[1, 2]], "rows": "x"}[damage]
    with pytest.raises((KeyError, ValueError), match=r"unpack|invalid literal|'key'"):
        entry_from_json(document)


def test_shards_are_named_by_group_and_number() -> None:
    assert [shard_name("audio", 0), shard_name("text", 123_456)] == ["audio/00000.tdz", "text/123456.tdz"]


def test_rows_written_one_by_one_make_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = shard_fields((FieldSpec(name="x", dtype="float32", shape=(3,)),), "audio")
    rows = [{"x": np.full((length, 3), length, np.float32)} for length in (2, 0, 900)] + ["too_long"]
    entries = []
    for name, least_bytes in (("joined", 10**9), ("streamed", 1)):
        monkeypatch.setattr(shard_module, "_STREAMED_BYTES", least_bytes)
        entries.append(write_shard(tmp_path / name, fields, rows, key="0" * 64))
    assert entries[0] == entries[1]
    assert (tmp_path / "joined").read_bytes() == (tmp_path / "streamed").read_bytes()
