"""Damage on disk: a flipped byte anywhere, and shards that are cut, gone, empty, longer or another's."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import CacheError
from forebay.store.cache import open_cache
from forebay.store.seal import quick_problems, verify_folder
from forebay.store.shard import shard_name
from tests.faults.row import Row, dice
from tests.golden import make_v4_patches as golden
from tests.store.trees import tree
from tests.store_factory import make_cache

GROUPS = ("audio", "text")
Sample = dict[str, Any]
_KINDS = ("truncated", "missing", "empty", "longer", "swapped", "of another cache")


@dataclass(frozen=True)
class Shelf:
    """A cache of 5 samples and a failed row in two shards a group, 30 kB; its samples; another cache of its shape."""

    cache: Path
    other: Path
    samples: list[Sample]


@contextlib.contextmanager
def shelf(folder: Path) -> Iterator[Shelf]:
    """Prepares the caches."""
    caches = [
        make_cache(folder / str(seed), num_samples=5, failed_rows=[1], rows_per_shard=3, max_duration_s=0.1, seed=seed)
        for seed in (0, 1)
    ]
    opened = open_cache(caches[0])
    samples = [{name: value.copy() for name, value in opened.read(i).items()} for i in range(len(opened))]
    yield Shelf(caches[0], caches[1], samples)


@contextlib.contextmanager
def vision_shelf(folder: Path) -> Iterator[list[Shelf]]:
    """Prepares copies of the golden caches of images, one a codec."""
    caches = [Path(shutil.copytree(golden.FOLDER / golden.name(codec), folder / codec)) for codec in golden.CODECS]
    right = [open_cache(golden.FOLDER / golden.name(codec)) for codec in golden.CODECS]
    samples = [[cache.read(index) for index in range(len(cache))] for cache in right]
    yield [Shelf(path, path, part) for path, part in zip(caches, samples, strict=True)]


def flipped(place: Shelf, number: int, folder: Path) -> str:
    chance = dice("flip", number)
    files = sorted(path for path in place.cache.rglob("*") if path.is_file() and path.stat().st_size)
    path = chance.choices(files, [path.stat().st_size for path in files])[0] if number % 2 else chance.choice(files)
    position, mask = chance.randrange(path.stat().st_size), chance.randrange(1, 256)
    _flip(path, position, mask)
    try:
        before = tree(place.cache)
        problems = verify_folder(place.cache).problems
        assert len(problems) == 1, problems
        assert path.name in problems[0], problems
        outcome = read_everything(place.cache, place.samples)
        assert tree(place.cache) == before
    finally:
        _flip(path, position, mask)
    return f"found by verify; {outcome}"


def vision_flipped(places: list[Shelf], number: int, folder: Path) -> str:
    return flipped(places[number // 2 % len(places)], number, folder)


def damaged(place: Shelf, number: int, folder: Path) -> str:
    chance = dice("shard", number)
    kind = _KINDS[number % len(_KINDS)]
    cache = Path(shutil.copytree(place.cache, folder / place.cache.name))
    group = "audio" if kind == "of another cache" else chance.choice(GROUPS)  # text is the same in both
    path, second = (cache / shard_name(group, index) for index in chance.sample([0, 1], 2))
    data = path.read_bytes()
    path.unlink()
    if kind == "truncated":
        path.write_bytes(data[: chance.randrange(1, len(data))])
    elif kind == "empty":
        path.touch()
    elif kind == "longer":
        path.write_bytes(data + chance.randbytes(chance.randrange(1, 100)))
    elif kind == "swapped":
        os.rename(second, path)
        second.write_bytes(data)
    elif kind == "of another cache":
        shutil.copyfile(place.other / path.relative_to(cache), path)
    before = tree(cache)
    problems = verify_folder(cache).problems
    assert any(str(path) in problem for problem in problems), problems
    if kind in ("truncated", "missing", "empty", "longer"):
        assert any(str(path) in problem for problem in quick_problems(cache))
        assert read_everything(cache, place.samples) == "refused at reading"
    else:
        read_everything(cache, place.samples, may_be_whole=kind != "swapped")
    assert tree(cache) == before
    return f"{kind}: refused and named, disk unchanged"


def read_everything(cache: Path, samples: list[Sample], *, may_be_whole: bool = False) -> str:
    """Returns what came of opening a damaged cache and reading all samples; asserts that what is handed out is right.

    may_be_whole: what is read may be another cache's whole shard, which reading cannot tell and verifying can.
    """
    try:
        opened = open_cache(cache)
    except CacheError:
        return "refused at opening"
    outcome = "no sample touched it"
    for index, wanted in enumerate(samples):
        try:
            found = opened.read(index)
        except CacheError:
            outcome = "refused at reading"
            continue
        if not may_be_whole:
            assert all(_are_equal(found[name], wanted[name]) for name in wanted)
    return outcome


def _are_equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple):  # one array an image
        return len(found) == len(wanted) and all(map(np.array_equal, found, wanted))
    return np.array_equal(found, wanted)


def _flip(path: Path, position: int, mask: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.pwrite(descriptor, bytes([os.pread(descriptor, 1, position)[0] ^ mask]), position)
    finally:
        os.close(descriptor)


ROWS: list[Row[Any]] = [
    Row(
        name="flip",
        fault="one flipped byte anywhere in the cache",
        outcome="refused, named, disk unchanged; all found by verify",
        prepared=shelf,
        trial=flipped,
        short=200,
        long=10_000,
    ),
    Row(
        name="shard",
        fault="truncated, missing, empty, longer, swapped shard, and one of another cache",
        outcome="refused, named, disk unchanged",
        prepared=shelf,
        trial=damaged,
        short=24,
        long=600,
    ),
    Row(
        name="vision_flip",
        fault="one flipped byte anywhere in a cache of images, raw and zstd",
        outcome="refused, named, disk unchanged; all found by verify",
        prepared=vision_shelf,
        trial=vision_flipped,
        short=60,
        long=4000,
    ),
]


def test_a_flipped_byte_is_found_and_never_handed_out(tmp_path: Path) -> None:
    assert sum(ROWS[0].check(tmp_path).values()) == ROWS[0].short


def test_a_damaged_shard_is_refused_by_name(tmp_path: Path) -> None:
    assert sum(ROWS[1].check(tmp_path).values()) == ROWS[1].short


def test_a_flipped_byte_of_a_cache_of_images_is_found(tmp_path: Path) -> None:
    assert sum(ROWS[2].check(tmp_path).values()) == ROWS[2].short
