"""A fetch that is killed at any of its writes, or whose store goes wrong, and the same command afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.objects.beside import Beside
from forebay.config.remote import RemoteConfig, Url, parse_url
from forebay.store.remote.carry.fetch import fetch
from forebay.store.remote.carry.fetch_list import FetchOptions
from forebay.tar.index import check_members
from tests.faults.children import Children, Ended
from tests.faults.row import Row, dice
from tests.faults.test_push import at, files_of

_PIECE = 20_000
_FILES = {"hi.bin": bytes(range(251)) * 800, "bn.bin": b"bn" * 70_000, "more/deep/a": b"hello", "more/empty": b""}
_CALLS = ("pwrite", "ftruncate", "fsync", "rename", "mkdir", "open")
_NEVER = 1 << 30


@dataclass(frozen=True)
class Store:
    """A server with the files, the children that fetch them, and how many calls a fetch makes."""

    server: Beside
    url: Url
    children: Children
    num_calls: int


@contextlib.contextmanager
def store(folder: Path) -> Iterator[Store]:
    """Prepares them."""
    with Beside() as server, Children("forebay.store.remote.carry.fetch", "obstore.store", __name__) as children:
        bucket = server.make_bucket()
        bucket.put_all((f"set/{name}", data) for name, data in _FILES.items())
        url = parse_url(f"{bucket.url}/set")
        ended = children.run(fetch_here, url, folder / "counted", server.endpoint, _NEVER)
        yield Store(server, url, children, ended.value[1])


def fetch_here(url: Url, folder: Path, endpoint: str, kill_at: int) -> tuple[int, int]:
    """Fetches in this process, which is killed at its `kill_at`-th call; returns the bytes it went on with, its calls.

    The calls are those that change what is on the disk, and every file that is opened.
    """
    count, lock = [0], threading.Lock()

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                count[0] += 1
                if count[0] == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    with at(endpoint) as patch:
        patch.setattr("forebay.store.remote.bucket.bucket.CHUNK", _PIECE)
        for name in _CALLS:
            patch.setattr(os, name, counted(getattr(os, name)))
        options = FetchOptions(max_bytes=10**9, max_files=100)
        report = fetch(url, folder, RemoteConfig(max_concurrent=2), options, examine=check_members)
    assert not report.refused
    assert report.moved_files + report.kept_files == len(_FILES)
    return report.resumed_bytes, count[0]


def killed(place: Store, number: int, folder: Path) -> str:
    """One fetch or two at once, one or both killed; what has its name is whole, and the next one makes it all."""
    chance = dice("fetch", number)
    out = folder / "out"
    kills = [1 + chance.randrange(place.num_calls)]
    kills += [] if number % 3 else [chance.choice([_NEVER, 1 + chance.randrange(place.num_calls)])]
    ended = place.children.run_all([(fetch_here, place.url, out, place.server.endpoint, kill) for kill in kills])
    for one in ended:
        assert one.error is None, one.error
    there = files_of(out) if out.exists() else {}
    named = {name: data for name, data in there.items() if ".tmp-" not in name}
    assert named.items() <= _FILES.items()
    assert all("/" not in name for name in there.keys() - named.keys()), "what is not whole lies in the folder itself"
    again: Ended = place.children.run(fetch_here, place.url, out, place.server.endpoint, _NEVER)
    assert again.error is None, again.error
    assert files_of(out) == _FILES
    return ("goes on" if again.value[0] else "begins anew") if len(named) < len(_FILES) else "all was there"


ROW: Row[Any] = Row(
    name="fetch",
    fault="a fetch, or two into one folder, killed at any write, fsync, rename or open",
    outcome="what has its name is whole; the next one has all files, byte for byte, and leaves nothing else",
    prepared=store,
    trial=killed,
    short=10,
    long=2000,
)


def test_a_killed_fetch_goes_on(tmp_path: Path) -> None:
    assert sum(ROW.check(tmp_path).values()) == ROW.short


def test_a_fetch_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kills hit a fetch at every of its writes: without this a change of names would leave nothing to kill."""
    with store(tmp_path) as place:
        num_pieces = sum(len(data) // (2 * _PIECE) for data in _FILES.values())
        assert place.num_calls > num_pieces + 3 * len(_FILES)
