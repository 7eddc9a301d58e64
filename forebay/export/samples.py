"""Which samples of a cache are exported, and what there is of them: rows of the table and tensors, shard by shard."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.errors import ConfigError
from forebay.store.cache import Cache
from forebay.store.chunked import no_such_row
from forebay.store.image.arrays import StoredItems, stored_items
from forebay.store.layout import ROW_BITS, ROW_MASK, FieldSpec, Group, Ints
from forebay.store.row_table import SampleColumns, rate_of, row_columns, row_table
from forebay.store.shard import Shard

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive samples of one shard. start: the place of the first among those that are exported.

    indices: int64, in the cache. table: their rows, as in `cache.samples`.
    """

    start: int
    indices: Ints
    table: pa.Table


@dataclass(frozen=True)
class Samples:
    """The samples of a cache that are exported. indices: int64, rising."""

    cache: Cache
    indices: Ints

    def __len__(self) -> int:
        return len(self.indices)

    def runs(self, start: int) -> Iterator[Run]:
        """Yields the samples from a place on, in runs of one shard."""
        numbers = self.cache.shards_of(self.indices[start:])
        edges = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1)).tolist()
        for first, stop in itertools.pairwise(edges):
            indices = self.indices[start + first : start + stop]
            table = self._table(indices, int(numbers[first]))
            yield Run(start=start + first, indices=indices, table=table)

    @cached_property
    def _stored(self) -> Mapping[Group, StoredItems]:
        return stored_items(self.cache.metadata, folder=self.cache.folder)

    @cached_property
    def tensors(self) -> list[FieldSpec]:
        """The fields of `read` in their order; `patches` of images are those of each image."""
        own = [s for s in self.cache.fields.values() if s.role == "tensor" and s.group not in self._stored]
        return own + [spec for stored in self._stored.values() for spec in stored.columns()]

    def read(self, index: int) -> dict[str, Any]:
        """Returns the fields of a sample; of images as their processor gives them one array a field."""
        sample = self.cache.read(index)
        for stored in self._stored.values():
            sample = stored.in_columns(sample)
        return sample

    def about(self) -> dict[str, Any]:
        """Returns what an export says of the cache: its keys, how its samples were made, what its fields are."""
        cache = self.cache
        fields = {spec.name: {"dtype": spec.dtype, "shape": ["n", *spec.shape]} for spec in self.tensors}
        return {
            "key": cache.key,
            "recipe_key": cache.recipe_key,
            "recipe": cache.metadata["recipe"],
            "constants": dict(cache.constants),
            "fields": fields,
            "num_samples": len(self),
        }

    def _table(self, indices: Ints, number: int) -> pa.Table:
        cache = self.cache

        def shard(group: Group, _: int) -> Shard:
            return cache.shard(group, number)

        columns = SampleColumns(
            fields={s.name: s for s in cache.fields.values() if s.role == "table" and s.group not in self._stored},
            num_shards=1,
            slots=cache.slots[indices] & ROW_MASK,
            shard=shard,
            no_such_row=lambda index, slot: no_such_row(cache.folder, int(indices[index]), number << ROW_BITS | slot),
        )
        lengths = dict(cache.lengths)
        rate_hz = rate_of(cache.folder, cache.constants, lengths) if "num_audio_samples" in lengths else None
        taken = {name: values[indices] for name, values in lengths.items()}
        table = row_table(row_columns(columns, taken, rate_hz=rate_hz))
        return table.set_column(0, "index", pa.array(indices))


def selected(cache: Cache, *, ids: Path | None, max_samples: int | None) -> Samples:
    """Returns the first `max_samples` samples of a cache, of those whose ids stand in a file if there is one.

    ids: an id a line, UTF-8, in any order. Raises ConfigError for an id that the cache does not have, and where no
    sample is left.
    """
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"--max-samples {max_samples}: wanted 1 or more")
    indices = np.arange(len(cache)) if ids is None else _of_ids(cache, ids)
    indices = indices[:max_samples]
    if not len(indices):
        raise ConfigError(f"{cache.place} has no samples, so there is nothing to export; name another cache")
    return Samples(cache, indices)


def _of_ids(cache: Cache, path: Path) -> Ints:
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as err:
        raise ConfigError(f"--ids {path}: {err.strerror}; name a file with an id a line", code="FB114") from err
    # Not `splitlines`: an id may hold what Unicode calls a line end.
    wanted = {line.removesuffix("\r") for line in text.split("\n")} - {""}
    if not wanted:
        raise ConfigError(f"--ids {path} names no id; write an id a line", code="FB114")
    found = np.array([i for i in range(len(cache)) if cache.sample_id(i) in wanted], np.int64)
    if len(found) < len(wanted):
        absent = sorted(wanted - {cache.sample_id(i) for i in found.tolist()})
        shown = ", ".join(map(repr, absent[:_SHOWN])) + (", ..." if len(absent) > _SHOWN else "")
        raise ConfigError(
            f"--ids {path}: {cache.place} has no sample with {len(absent)} of its {len(wanted)} ids ({shown}); every "
            f"id: forebay inspect {cache.place} --export FILE.parquet",
            code="FB114",
        )
    return found
