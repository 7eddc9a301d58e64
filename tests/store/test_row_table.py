from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import CacheCorruptError
from forebay.store.cache import Cache, open_cache
from forebay.store.layout import ROW_BITS, Array
from forebay.store.open_shards import no_such_row
from forebay.store.row_table import SampleColumns, categories
from tests.store.trees import flip
from tests.store_factory import LANGUAGES, RATE_HZ, TEXTS, make_cache

TABLE = ["index", "sample_id", "num_audio_samples", "text", "language", "prompt", "source", "duration_s"]


def test_columns_and_their_types(tmp_path: Path) -> None:
    table = open_cache(make_cache(tmp_path)).samples
    assert table.column_names == [*TABLE, "num_frames", "num_tokens"]
    assert [table.schema.field(name).type for name in ("index", "text", "duration_s", "num_frames")] == [
        pa.int64(),
        pa.large_string(),
        pa.float64(),
        pa.int32(),
    ]
    table.validate(full=True)


@given(
    num_samples=st.integers(0, 12),
    rows_per_shard=st.integers(1, 7),
    failed=st.sets(st.integers(0, 11), max_size=5),
)
def test_rows_are_the_samples_in_their_order_without_those_that_failed(
    tmp_path_factory: pytest.TempPathFactory, num_samples: int, rows_per_shard: int, failed: set[int]
) -> None:
    total = num_samples + len(failed)
    failed_rows = sorted(row for row in failed if row < total)
    num_samples = total - len(failed_rows)
    root = tmp_path_factory.mktemp("caches")
    folder = make_cache(
        root, num_samples=num_samples, failed_rows=failed_rows, rows_per_shard=rows_per_shard, max_duration_s=0.2
    )
    cache = open_cache(folder)
    rows = [row for row in range(total) if row not in failed_rows]
    table = cache.samples.to_pydict()
    assert table["index"] == list(range(num_samples))
    assert table["sample_id"] == [f"clip-{row:04d}" for row in rows]
    assert table["text"] == [TEXTS[row % len(TEXTS)] for row in rows]
    assert table["language"] == [LANGUAGES[row % len(LANGUAGES)] for row in rows]
    for index in range(num_samples):
        sample = cache.read(index)
        assert table["num_frames"][index] == len(sample["input_features"])
        assert table["num_tokens"][index] == len(sample["input_ids"])
        assert table["duration_s"][index] == table["num_audio_samples"][index] / RATE_HZ
    assert np.array_equal(table["num_audio_samples"], cache.lengths["num_audio_samples"])


def test_it_is_built_once(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path))
    assert cache.samples is cache.samples


def test_bytes_that_are_no_utf8_become_escapes(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")  # as tarfile and os give the name of a member in Latin-1
    folder = make_cache(tmp_path, num_samples=3, sample_ids=["naïve", name, ""])
    table = open_cache(folder).samples
    table.validate(full=True)
    assert table["sample_id"].to_pylist() == ["naïve", "caf\\xe9", ""]


def test_a_damaged_text_is_found_though_no_sample_hash_covers_it(tmp_path: Path) -> None:
    folder = make_cache(tmp_path)
    path = folder / "text" / "00000.tdz"
    flip(path, path.read_bytes().index(TEXTS[0].encode()))
    cache = open_cache(folder)
    cache.read(0)
    with pytest.raises(CacheCorruptError, match=r"text/00000\.tdz values/text\.memmap: stored CRC-32 .* computed"):
        _ = cache.samples


def columns_at(cache: Cache, slots: Array) -> SampleColumns:
    return SampleColumns(
        fields={name: field for name, field in cache.fields.items() if field.role == "table"},
        num_shards=cache.num_shards,
        slots=slots,
        shard=cache.shard,
        no_such_row=lambda index, slot: no_such_row(cache.folder, index, slot),
    )


def test_samples_in_any_order_have_their_own_columns(tmp_path: Path) -> None:
    """Samples of a cache made of caches need not follow each other in their shards."""
    cache = open_cache(make_cache(tmp_path, num_samples=9, failed_rows=(2,), rows_per_shard=4))
    moved = np.array([7, 0, 3, 3, 5, 1])
    columns = columns_at(cache, cache.slots[moved])
    for name in ("sample_id", "text", "language", "source"):
        whole = cache.table([name])[name]
        assert columns.column(name).to_pylist() == whole.take(pa.array(moved)).to_pylist()
        assert columns.column(name).num_chunks == 1
        found = categories(columns, name)
        assert found is not None
        assert [found[0][code] for code in found[1]] == columns.column(name).to_pylist()
    assert len(columns_at(cache, cache.slots[:0]).column("text")) == 0
    assert categories(columns_at(cache, cache.slots[:0]), "language") is not None


@pytest.mark.parametrize("slot", [-1, 1 << ROW_BITS | 999, 77 << ROW_BITS])
def test_a_slot_that_leads_nowhere_is_named(slot: int, tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, num_samples=9, rows_per_shard=4))
    slots = np.append(cache.slots[:2], slot)
    with pytest.raises(CacheCorruptError, match=r"slots\.npy: sample 2 is said to lie in shard"):
        columns_at(cache, slots).column("text")
