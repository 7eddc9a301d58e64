"""Builds of a small corpus with a fault in them, in a forked child; and what is true of their folder at any time."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from forebay import load_config
from forebay.config import Config
from forebay.errors import CacheError
from forebay.preprocess import pool, worker
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import build
from forebay.preprocess.workspace import load_receipt
from forebay.store.cache import open_cache
from forebay.store.files import TEMPORARY_MARK
from forebay.store.seal import verify_folder
from tests.faults.children import Children
from tests.faults.shim import Fault, Shim
from tests.preprocess.corpus import Corpus, shard_bytes

NUM_WORKERS = 2


@dataclass(frozen=True)
class Site:
    """A corpus, the server of children, and the shards that an uninterrupted build of the corpus gives, by name."""

    config: Path
    children: Children
    wanted: dict[str, bytes]
    num_calls: dict[str, int]

    def build(self, root: Path, fault: Fault | None = None, **options: Any) -> Any:
        """Returns how a build ended."""
        return self.children.run(build_here, self.config, root, fault or Fault(), options)


@contextlib.contextmanager
def site(folder: Path) -> Iterator[Site]:
    """Prepares a corpus of 9 clips in two tars, which are 4 shards a group, and builds it once."""
    corpus = Corpus(folder)
    corpus.add_tar("a.tar", [f"a{i}" for i in range(6)])
    corpus.add_tar("b.tar", [f"b{i}" for i in range(3)])
    corpus.config()
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("rows_per_shard = 4", "rows_per_shard = 2"))
    with Children() as children:
        calls = {}
        for who in ("builder", "worker"):
            ended = children.run(build_here, config, folder / who, Fault(who=who), {})
            assert ended.error is None, ended.error
            calls[who] = ended.value["num_calls"]
        yield Site(config, children, shard_bytes(Path(ended.value["cache"])), calls)


def config_of(path: Path, root: Path, *more: str) -> Config:
    """Returns the config of a site with its caches under `root`."""
    return load_config(path, overrides=[f'run.cache_root="{root}"', f"run.num_workers={NUM_WORKERS}", *more])


def build_here(path: Path, root: Path, fault: Fault, options: dict[str, Any], *overrides: str) -> dict[str, Any]:
    """Builds in this process and in workers that are forked from it; returns the report and the number of calls seen.

    Those of the builder; of the busiest worker where the fault is for a worker.
    """
    counts = mmap.mmap(-1, 8)
    with pytest.MonkeyPatch.context() as patch:
        shim = Shim(patch, fault)
        patch.setattr(pool.Pool, "_start", forked_workers(shim, counts))
        report = build(config_of(path, root, *overrides), Options(progress=False, **options))
    calls = len(shim.seen) if fault.who == "builder" else int.from_bytes(counts[:8], "little")
    return {**report.to_json(), "num_calls": calls, "calls": list(shim.seen)}


def forked_workers(shim: Shim, counts: mmap.mmap | None = None) -> Callable[[pool.Pool], Any]:
    """Returns a way to start workers without loading Python again. Only the first one of a pool has the fault."""
    started: list[int] = []

    def start(_: pool.Pool) -> Any:
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("marks")
        os.ftruncate(memory, 8)
        marks, parent = mmap.mmap(memory, 8), os.getpid()
        process = os.fork()
        if not process:
            _close_all_but({0, 1, 2, theirs.fileno(), memory})
            shim.become("worker" if not started else "another worker")
            _work(theirs.detach(), memory, parent, shim, counts)
        started.append(process)
        theirs.close()
        os.close(memory)
        return pool._Worker(_Forked(process), Connection(ours.detach()), marks)  # type: ignore[arg-type]

    return start


def _close_all_but(kept: set[int]) -> None:
    """Closes descriptors as the start of another program does: an inherited one would keep the lock that it holds."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _work(connection: int, memory: int, parent: int, shim: Shim, counts: mmap.mmap | None) -> None:
    real = shim.hit

    def counted(name: str, path: object = None) -> None:
        if counts is not None:
            counts[:8] = max(len(shim.seen) + 1, int.from_bytes(counts[:8], "little")).to_bytes(8, "little")
        real(name, path)

    shim.hit = counted  # type: ignore[method-assign]
    try:
        worker.main(connection, memory, parent)
    finally:
        os._exit(0)


class _Forked:
    """A forked process with the face of a `subprocess.Popen`."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._status: int | None = None

    def kill(self) -> None:
        if self._status is None:
            os.kill(self._process, 9)

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
        return self._status


def finished_shards(root: Path) -> int:
    """Returns how many shards of builds in progress are whole and have their receipt."""
    return sum(load_receipt(path, path.stem) is not None for path in root.glob(".building/*/*/*.tdz"))


def check_caches(root: Path, wanted: dict[str, bytes]) -> int:
    """Returns how many caches there are; asserts that whatever opens is the right one, byte for byte."""
    count = 0
    for folder in _folders(root):
        try:
            open_cache(folder)
        except CacheError:
            continue
        assert ".building" not in folder.parts or (folder / "metadata.json").exists()
        assert verify_folder(folder).problems == []
        assert shard_bytes(folder) == wanted
        count += folder.parent == root and TEMPORARY_MARK not in folder.name
    return count


def check_settled(root: Path, wanted: dict[str, bytes]) -> None:
    """Asserts that one right cache is there, and nothing that a build leaves behind."""
    assert check_caches(root, wanted) == 1
    left = [str(path.relative_to(root)) for path in root.rglob("*") if TEMPORARY_MARK in path.name]
    assert left == [], left
    assert not (root / ".building").exists()


def _folders(root: Path) -> Sequence[Path]:
    return [path for path in (root, *root.rglob("*")) if path.is_dir()] if root.is_dir() else []
