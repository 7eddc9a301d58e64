"""A cache root on NFS: several machines, each with its own late view of it, and no locks between them."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import CacheReplacedError
from forebay.preprocess import pool
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import prepare
from forebay.store import files as temporary
from forebay.store import shared_disk
from forebay.store.cache import open_cache
from tests.faults.building import Site, build_here, check_caches, check_settled, config_of, forked_workers, site
from tests.faults.children import Children, Ended
from tests.faults.nfs_server import Client, mount, refused, unmount
from tests.faults.row import Row, dice, made
from tests.faults.shim import Fault, Shim

_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, 0)
_MACHINES = 3
_LATEST_S = 1.6
_DAY_S = 24 * 3600
_SWEEPS = 4


@dataclass(frozen=True)
class Nodes:
    """Machines that share a folder: what each one calls the cache root, and the root on the server's own disk."""

    place: Site
    children: Children
    disk: Path
    roots: tuple[Path, ...]

    def run(self, *calls: tuple[Any, ...]) -> list[Ended]:
        return self.children.run_all(calls)


@contextlib.contextmanager
def _shared_site(folder: Path) -> Iterator[tuple[Site, Children | None]]:
    with site(made(folder / "site")) as place:
        if reason := refused(folder / "check"):
            print(f"no FUSE mount can be made here: {reason}")
            yield place, None
            return
        with Children(program="tests.faults.nfs_server") as children:
            yield place, children


@contextlib.contextmanager
def _nodes(place: Site, children: Children, folder: Path, chance: random.Random) -> Iterator[Nodes]:
    disk = made(folder / "disk")
    places = [made(folder / f"node{number}") for number in range(_MACHINES)]
    late_s, lock_error = chance.choice([0.0, 0.5, _LATEST_S]), chance.choice(_LOCKS)
    clock_s, lost = chance.choice([0, -300, 300]), chance.choice([0, 0, 0.02])
    clients = [
        Client(late_s=late_s, lock_error=lock_error, clock_s=clock_s, lost=lost, seed=chance.randrange(2**30))
        for _ in places
    ]
    for each, client in zip(places, clients, strict=True):
        ended = children.run(mount, disk, each, client)
        assert ended.error is None, ended.error
    try:
        yield Nodes(place, children, disk / "caches", tuple(each / "caches" for each in places))
    finally:
        children.run(unmount, *places)


def on_nfs(shared: tuple[Site, Children | None], number: int, folder: Path) -> str:
    place, children = shared
    if children is None:
        return "no FUSE mount permitted here"
    chance = dice("nfs", number)
    case = _CASES[number % len(_CASES)]
    with _nodes(place, children, folder, chance) as nodes:
        what = case(nodes, chance)
        _check_end(nodes)
    return what


def _check_end(nodes: Nodes) -> None:
    """One right cache, and a day later a build leaves nothing over."""
    assert check_caches(nodes.disk, nodes.place.wanted) == 1
    for path in [path for path in nodes.disk.rglob("*.tmp-*") if path.parent in (nodes.disk, *nodes.disk.iterdir())]:
        os.utime(path, (time.time() - 2 * _DAY_S,) * 2)
    time.sleep(_LATEST_S)
    for _ in range(_SWEEPS):  # an answer that is lost ends a sweep, and the next run goes on
        _right(nodes.run((_build, nodes.place.config, nodes.roots[0], {})))
        if not any(nodes.disk.rglob("*.tmp-*")):
            break
    check_settled(nodes.disk, nodes.place.wanted)


def _on(root: Path) -> None:
    """Makes this process one of the machine that calls the cache root so."""
    temporary.this_place = lambda: f"{int(root.parent.name[-1]):08x}"  # type: ignore[assignment]
    shared_disk.LATE_S = 4 * _LATEST_S


def _build(config: Path, root: Path, options: dict[str, Any], fault: Fault | None = None) -> dict[str, Any]:
    _on(root)
    return build_here(config, root, fault or Fault(), options)


def _prepare(config: Path, root: Path) -> str:
    _on(root)
    with pytest.MonkeyPatch.context() as patch:
        shim = Shim(patch, Fault())
    with pytest.MonkeyPatch.context() as patch:  # the shim's files are none that pyarrow takes
        patch.setattr(pool.Pool, "_start", forked_workers(shim))
        return prepare(config_of(config, root), Options(progress=False)).key


def _right(ended: list[Ended]) -> list[Any]:
    for end in ended:
        assert end.error is None, end.error
        assert not end.signal, end.signal
    return [end.value for end in ended]


def _two_builders(nodes: Nodes, chance: random.Random) -> str:
    _right(nodes.run(*((_build, nodes.place.config, root, {}) for root in nodes.roots[:2])))
    assert check_caches(nodes.disk, nodes.place.wanted) == 1
    return "two builders, one result"


def _killed(nodes: Nodes, chance: random.Random) -> str:
    fault = Fault(at=chance.randrange(nodes.place.num_calls["builder"]), what="SIGKILL")
    nodes.run((_build, nodes.place.config, nodes.roots[0], {}, fault))
    check_caches(nodes.disk, nodes.place.wanted)
    _right(nodes.run((_build, nodes.place.config, nodes.roots[1], {})))
    return "another machine goes on"


def _parts(nodes: Nodes, chance: random.Random) -> str:
    keys = _right(nodes.run(*((_prepare, nodes.place.config, root) for root in nodes.roots)))
    assert len(set(keys)) == 1
    parts = [(_build, nodes.place.config, root, {"part": (i, _MACHINES)}) for i, root in enumerate(nodes.roots)]
    _right(nodes.run(*parts))
    root = chance.choice(nodes.roots)
    sealed = _right(nodes.run((_build, nodes.place.config, root, {"seal_only": True})))[0]
    assert sealed["sealed"]
    assert sealed["shards_written"] == 0, "a part's shard was made again"
    return "three parts, sealed"


def _rebuild(nodes: Nodes, chance: random.Random) -> str:
    _right(nodes.run((_build, nodes.place.config, nodes.roots[0], {})))
    reader = (_read_for, nodes.roots[1], nodes.place.wanted, 2.0)
    values = _right(nodes.run(reader, (_build, nodes.place.config, nodes.roots[2], {"rebuild": True})))
    assert values[0] > 0
    return "rebuilt under a reader"


def _read_for(root: Path, wanted: dict[str, bytes], seconds: float) -> int:
    """Reads all of a cache again and again, with few shards open; where it is replaced, opens it anew."""
    end, count = time.monotonic() + seconds, 0
    (folder,) = [path.parent for path in root.glob("*/metadata.json") if ".tmp-" not in str(path)]
    while time.monotonic() < end:
        cache = open_cache(folder, max_open_shards=1)
        try:
            while time.monotonic() < end:
                for index in range(len(cache)):
                    assert cache.read(index)
                count += 1
        except CacheReplacedError:
            continue
    return count


_CASES: tuple[Callable[[Nodes, random.Random], str], ...] = (_two_builders, _killed, _parts, _rebuild)

ROW: Row[Any] = Row(
    name="nfs",
    fault="three machines on a root without locks, with late attributes, silly renames and lost answers",
    outcome="one right result, nothing made twice after it was finished, nothing left over",
    prepared=_shared_site,
    trial=on_nfs,
    short=len(_CASES),
    long=404,  # a step of 101 in the short count: every case has its turn
)


def test_machines_that_share_a_root_by_nfs_make_one_cache(tmp_path: Path) -> None:
    if reason := refused(tmp_path / "check"):
        pytest.skip(f"no FUSE mount can be made here: {reason}")
    assert sum(ROW.check(tmp_path).values()) == ROW.short
