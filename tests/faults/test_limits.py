"""Few descriptors, few mappings, folders that may not be written."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from forebay.config import BucketConfig
from forebay.errors import BuildError
from forebay.plan.make import kept_plan, samples_of
from forebay.plan.names import plan_folder
from forebay.store.cache import open_cache
from forebay.store.seal import verify_folder
from tests.faults.building import Site, build_here, check_settled, site
from tests.faults.children import Children, limit, serving
from tests.faults.row import Row
from tests.faults.shim import Fault
from tests.store.trees import set_writable, tree
from tests.store_factory import make_cache

_NUM_SHARDS = 60
_DESCRIPTORS = 40
_MAPPINGS = 8


def few_files(children: Children, number: int, folder: Path) -> str:
    cache = make_cache(folder, num_samples=_NUM_SHARDS, rows_per_shard=1, max_duration_s=0.1, features="waveform")
    read = (_read_with_few_descriptors, _read_with_few_mappings)[number]
    ended = children.run(read, cache)
    assert not ended.signal
    assert ended.error is None, ended.error
    return str(ended.value)


def few_files_at_a_build(place: Site, number: int, folder: Path) -> str:
    ended = place.children.run(_build_with_few_descriptors, place.config, folder / "caches")
    assert ended.error is None, ended.error
    check_settled(folder / "caches", place.wanted)
    return "built with 40 descriptors"


def _read_with_few_descriptors(cache: Path) -> str:
    limit(resource.RLIMIT_NOFILE, _DESCRIPTORS)
    opened = open_cache(cache)
    before = len(os.listdir("/proc/self/fd"))
    for index in [*range(len(opened)), *reversed(range(len(opened)))]:
        opened.read(index)
    bounded = open_cache(cache, max_open_shards=4)
    for index in range(len(bounded)):
        bounded.read(index)
    assert len(bounded._open) <= 4
    assert len(os.listdir("/proc/self/fd")) - before <= _DESCRIPTORS
    assert verify_folder(cache).ok
    return f"{_NUM_SHARDS} shards a group read with {_DESCRIPTORS} descriptors"


def _read_with_few_mappings(cache: Path) -> str:
    opened = open_cache(cache, max_open_shards=_MAPPINGS)
    for index in range(len(opened)):
        opened.read(index)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".tdz")]
    assert len(mapped) <= _MAPPINGS
    return f"at most {_MAPPINGS} mappings"


def _build_with_few_descriptors(config: Path, root: Path) -> None:
    limit(resource.RLIMIT_NOFILE, _DESCRIPTORS)
    build_here(config, root, Fault(), {}, "run.max_open_tars=2")


def no_rights(place: Site, number: int, folder: Path) -> str:
    function = (_read_a_read_only_cache, _build_under_a_read_only_root)[number]
    root = folder / "caches"
    built = place.build(root).value["cache"]
    set_writable(root, is_writable=False)
    before = tree(root)
    try:
        ended = place.children.run(function, place.config, root, Path(built))
    finally:
        set_writable(root, is_writable=True)
        assert {name: part[0] for name, part in tree(root).items()} == {n: part[0] for n, part in before.items()}
    assert ended.error is None, ended.error
    return str(ended.value)


def _read_a_read_only_cache(config: Path, root: Path, cache: Path) -> str:
    _drop_capabilities()
    with pytest.raises(PermissionError, match="Permission denied"):
        (root / "file").touch()
    opened = open_cache(cache)
    for index in range(len(opened)):
        opened.read(index)
    assert build_here(config, root, Fault(), {})["already_sealed"]
    name: dict[str, Any] = {"cache_key": opened.key, "settings": BucketConfig(batch_size=4)}
    place = plan_folder(root, dataset="tones", split="train", **name)
    plan, folder = kept_plan(place, samples_of(opened), **name)
    assert folder is None
    assert plan.num_batches
    return "read from a read-only cache, its plan in memory"


def _build_under_a_read_only_root(config: Path, root: Path, cache: Path) -> str:
    _drop_capabilities()
    refused = rf"cannot write to run\.cache_root {root} \(Permission denied\); {root} is d\S+ of user .*; this runs as "
    with pytest.raises(BuildError, match=refused):
        build_here(config, root, Fault(), {"rebuild": True})
    return "a build names the folder that it may not write, and who may"


def _drop_capabilities() -> None:
    """The superuser is asked for rights like anybody else from here on (capset, version 3)."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()) == 0


ROWS: list[Row[Any]] = [
    Row(
        name="files",
        fault=f"ulimit -n {_DESCRIPTORS}, a budget of {_MAPPINGS} mappings: reading",
        outcome="bounded handles, works",
        prepared=serving,
        trial=few_files,
        short=2,
    ),
    Row(
        name="files_build",
        fault=f"ulimit -n {_DESCRIPTORS}: building",
        outcome="bounded handles, works",
        prepared=site,
        trial=few_files_at_a_build,
        short=1,
    ),
    Row(
        name="rights",
        fault="EACCES on the cache root, read-only cache",
        outcome="reads work, plans in memory; a build says what is missing; nothing is changed",
        prepared=site,
        trial=no_rights,
        short=2,
    ),
]


def test_few_descriptors_and_mappings_are_enough(tmp_path: Path) -> None:
    assert sum(ROWS[0].check(tmp_path).values()) == ROWS[0].short


def test_a_build_needs_few_descriptors(tmp_path: Path) -> None:
    assert sum(ROWS[1].check(tmp_path).values()) == ROWS[1].short


def test_a_read_only_root_is_read_and_left_alone(tmp_path: Path) -> None:
    assert sum(ROWS[2].check(tmp_path).values()) == ROWS[2].short
