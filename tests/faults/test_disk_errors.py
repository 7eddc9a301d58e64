"""Every call that changes a file fails once, with a full disk or a bad one; a file system of 2 MB fills up for real."""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError
from tests.faults.building import Site, build_here, check_caches, check_settled, finished_shards, site
from tests.faults.children import limit
from tests.faults.row import Row, made
from tests.faults.shim import CODES, Fault

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_DISK_BYTES = 2 * 1024 * 1024
_STEP_BYTES = 4096


def cases(place: Site) -> list[Fault]:
    """Every call of the builder and of its first worker, with either error."""
    return [
        Fault(at=at, what=what, who=who)
        for who, what in itertools.product(("builder", "worker"), CODES)
        for at in range(place.num_calls[who])
    ]


def one_call_fails(place: Site, number: int, folder: Path) -> str:
    fault = cases(place)[number]
    root = folder / "caches"
    ended = place.build(root, fault)
    assert not ended.signal
    check_caches(root, place.wanted)
    if ended.error is not None:
        assert isinstance(ended.error, (OSError, ForebayError)), repr(ended.error)
        assert str(folder) in str(ended.error), f"{ended.error} names no path"
    finished = finished_shards(root)
    again = place.build(root)
    assert again.error is None, again.error
    assert again.value["already_sealed"] or again.value["shards_kept"] == finished
    check_settled(root, place.wanted)
    return "went on without it" if ended.error is None else "stopped with the path, then went on"


def fills_up(place: Site, number: int, folder: Path) -> str:
    ended = place.children.run(_on_a_full_disk, place.config, folder / "disk", number * _STEP_BYTES, place.wanted)
    assert not ended.signal
    assert ended.error is None, ended.error
    return str(ended.value)


def _on_a_full_disk(config: Path, root: Path, free_bytes: int, wanted: dict[str, bytes]) -> str:
    made(root)
    return (_on_tmpfs if _mount(root) else _under_a_limit)(config, root, free_bytes, wanted)


def _on_tmpfs(config: Path, root: Path, free_bytes: int, wanted: dict[str, bytes]) -> str:
    ballast = root / "ballast"
    ballast.write_bytes(bytes(_DISK_BYTES - free_bytes))
    stopped = _stops(config, root / "caches")
    check_caches(root / "caches", wanted)
    ballast.unlink()
    build_here(config, root / "caches", Fault(), {})
    check_settled(root / "caches", wanted)
    return "stopped with the path, then went on" if stopped else "there was room"


def _under_a_limit(config: Path, root: Path, free_bytes: int, wanted: dict[str, bytes]) -> str:
    """Where nothing may be mounted: no file may grow beyond the limit, which is told as a full disk is."""
    process = os.fork()
    if not process:
        limit(resource.RLIMIT_FSIZE, free_bytes)
        os._exit(_stops(config, root / "caches"))
    stopped = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert stopped in (0, 1)
    check_caches(root / "caches", wanted)
    build_here(config, root / "caches", Fault(), {})
    check_settled(root / "caches", wanted)
    return "stopped at a limit, then went on" if stopped else "there was room"


def _stops(config: Path, root: Path) -> bool:
    try:
        build_here(config, root, Fault(), {})
    except (OSError, ForebayError) as err:
        assert str(root) in str(err), f"{err} names no path"  # noqa: PT017
        return True
    return False


def _mount(folder: Path) -> bool:
    """Mounts an empty file system of 2 MB that this process and its children see; says whether that is allowed here."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError:
        return False
    size = f"size={_DISK_BYTES}".encode()
    return bool(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, size) == 0)


ROWS: list[Row[Any]] = [
    Row(
        name="call",
        fault="every write, fsync, rename, link, mkdir, unlink and lock failing once, with ENOSPC and EIO",
        outcome="clear error naming the path, no signal, resumes",
        prepared=site,
        trial=one_call_fails,
        short=8,
        long=lambda place: len(cases(place)),
    ),
    Row(
        name="full",
        fault="a tmpfs of 2 MB filling up, with 0 to 380 kB free",
        outcome="clear error naming the path, no signal, resumes",
        prepared=site,
        trial=fills_up,
        short=4,
        long=96,
    ),
]


def test_a_call_that_fails_stops_the_build_with_its_path(tmp_path: Path) -> None:
    assert sum(ROWS[0].check(tmp_path).values()) == ROWS[0].short


def test_a_full_disk_stops_the_build_with_its_path(tmp_path: Path) -> None:
    assert sum(ROWS[1].check(tmp_path).values()) == ROWS[1].short
