"""A cache is rebuilt or repaired while it is read."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.errors import CacheCorruptError, CacheError, CacheReplacedError
from forebay.store.cache import Cache, open_cache
from forebay.store.files import sweep
from forebay.store.layout import Group
from forebay.store.metadata import load_array
from forebay.store.seal import Contents, seal
from forebay.store.shard import ShardEntry, shard_name
from tests.faults.children import Children
from tests.faults.row import Row, dice, made
from tests.faults.shim import without_locks
from tests.store_factory import make_cache

GROUPS = ("audio", "text")
Sample = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Shelf:
    """A cache of 8 samples in 4 shards a group, its samples, the same in 3 shards, and the server of children."""

    children: Children
    cache: Path
    samples: list[Sample]
    other_layout: Path


@contextlib.contextmanager
def shelf(folder: Path) -> Iterator[Shelf]:
    """Prepares a cache."""
    cache = make_cache(folder, num_samples=8, rows_per_shard=2, max_duration_s=0.2)
    other = make_cache(folder / "other", num_samples=8, rows_per_shard=3, max_duration_s=0.2)
    opened = open_cache(cache)
    with Children() as children:
        yield Shelf(children, cache, [_copied(opened, i) for i in range(len(opened))], other)


def swapped(place: Shelf, number: int, folder: Path) -> str:
    chance = dice("swap", number)
    cache = Path(shutil.copytree(place.cache, folder / "root" / place.cache.name))
    reader = open_cache(cache, max_open_shards=chance.choice([1, 256]))
    is_repair = chance.random() < 0.5
    damaged = (chance.choice(GROUPS), chance.randrange(reader.num_shards)) if is_repair else None
    place.children.start([(_swap, place.cache, cache, made(folder / "scratch"), damaged)])
    refused = 0
    while True:
        is_last = not place.children.is_running()
        refused += _read_all(reader, place.samples, may_refuse=is_repair and not is_last)
        if is_last:
            break
    ended = place.children.collect()[0]
    assert ended.error is None, ended.error
    assert not ended.signal
    assert _read_all(open_cache(cache), place.samples, may_refuse=False) == 0
    return "repair: right data, or refused until it was mended" if is_repair else "rebuild: right data throughout"


def relaid(place: Shelf, number: int, folder: Path) -> str:
    """A reader with none, some or all shards mapped; locks that work, or a file system without."""
    chance = dice("swap_layout", number)
    has_locks = number % 2 == 0
    cache = Path(shutil.copytree(place.cache, folder / "root" / place.cache.name))
    reader = open_cache(cache, max_open_shards=chance.choice([1, 256]))
    mapped = chance.randrange(len(reader) + 1)
    _read_all(reader, place.samples[:mapped], may_refuse=False)
    pickled = pickle.dumps(reader)
    place.children.start([(_lay_out, place.other_layout, cache, made(folder / "scratch"), has_locks)])
    while is_running := place.children.is_running():
        _read_all(reader, place.samples, may_refuse=not has_locks, refusal=CacheReplacedError)
    assert not is_running
    ended = place.children.collect()[0]
    assert ended.error is None, ended.error
    refused = _read_all(reader, place.samples, may_refuse=not has_locks, refusal=CacheReplacedError)
    assert (reader.num_shards, open_cache(cache).num_shards) == (4, 3)
    assert _read_all(pickle.loads(pickled), place.samples, may_refuse=False) == 0  # noqa: S301  our own
    left = [path for path in cache.parent.iterdir() if path != cache]
    assert len(left) == has_locks
    assert sweep(cache.parent) == []  # by the child's number, which has ended: somebody still reads
    del reader
    assert sweep(cache.parent) == left
    if has_locks:
        return "right data throughout"
    return "without locks: right data, or refused as replaced" if refused else "without locks: all was mapped"


def _read_all(
    cache: Cache, samples: list[Sample], *, may_refuse: bool, refusal: type[CacheError] = CacheCorruptError
) -> int:
    refused = 0
    for index, wanted in enumerate(samples):
        try:
            found = cache.read(index)
        except refusal:
            if not may_refuse:
                raise
            refused += 1
            continue
        assert found.keys() == wanted.keys()
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    return refused


def _lay_out(source: Path, cache: Path, scratch: Path, has_locks: bool) -> None:  # noqa: FBT001 (a child takes a tuple)
    """Puts the same samples in other shards in the cache's place."""
    with pytest.MonkeyPatch.context() as patch:
        if not has_locks:
            without_locks(patch)
        _swap(source, cache, scratch, None)


def _swap(source: Path, cache: Path, scratch: Path, damaged: tuple[Group, int] | None) -> None:
    """Damages a shard, where one is named, and puts a new folder of the same shards in the cache's place."""
    if damaged is not None:
        path = cache / shard_name(*damaged)
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data[: len(data) // 2])
    opened = open_cache(source)
    shards: dict[Group, list[tuple[Path, ShardEntry]]] = {}
    for group in GROUPS:
        shards[group] = []
        for path, entry in opened.shard_entries(group):
            copy = made(scratch / group) / path.name
            shards[group].append((Path(shutil.copyfile(path, copy)), entry))
    files = dict(opened.metadata["files"])
    tables = {f"{group}.npy" for group in GROUPS}
    arrays = {n: np.asarray(load_array(source, n, e, verify=True)) for n, e in files.items() if n.endswith(".npy")}
    contents = Contents(
        fields=tuple(opened.fields.values()),
        shards=shards,
        items={},
        arrays={name: array for name, array in arrays.items() if name not in tables},
        files={name: (source / name).read_bytes() for name in files if not name.endswith(".npy")},
        document={k: v for k, v in opened.metadata.items() if k != "checksum"},
    )
    assert seal(cache, contents, scratch=scratch, replace=True)
    assert not os.path.samefile(cache / shard_name("audio", 0), source / shard_name("audio", 0))


def _copied(cache: Cache, index: int) -> Sample:
    return {name: value.copy() for name, value in cache.read(index).items()}


ROWS: list[Row[Any]] = [
    Row(
        name="swap",
        fault="--rebuild or repair while a reader reads",
        outcome="the reader goes on, with the right data",
        prepared=shelf,
        trial=swapped,
        short=10,
        long=1000,
    ),
    Row(
        name="swap_layout",
        fault="--rebuild in another layout under a reader that has some shards mapped; with locks and without",
        outcome="the reader goes on with what it opened; without locks it may be told that the cache was replaced",
        prepared=shelf,
        trial=relaid,
        short=8,
        long=1000,
    ),
]


def test_a_reader_goes_on_while_its_cache_is_replaced(tmp_path: Path) -> None:
    assert sum(ROWS[0].check(tmp_path).values()) == ROWS[0].short


def test_a_reader_goes_on_while_its_cache_is_laid_out_anew(tmp_path: Path) -> None:
    assert ROWS[1].check(tmp_path)["right data throughout"] == ROWS[1].short / 2
