"""A cache is read from a store through a proxy that goes wrong: every sample is right, or an error names the object."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.objects.faults import (
    CLOCK_SKEWED,
    FORBIDDEN,
    MISSING,
    SERVER_ERROR,
    SLOW_DOWN,
    ClockOff,
    Corrupt,
    Fault,
    Hang,
    Replace,
    Reset,
    Rule,
    Status,
    Truncate,
)
from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import ACCESS_KEY, REGION, SECRET_KEY, Bucket, ObjectServer
from forebay.config.remote import RemoteConfig
from forebay.errors import CacheCorruptError, CacheNotFoundError, ForebayError, RemoteError
from forebay.store.cache import Cache, open_cache
from forebay.store.remote.node.holdings import OWN_NAMES
from tests.faults.row import Row, dice
from tests.store_factory import make_cache

_TIMEOUT_S, _RETRIES = 0.5, 2
_SLACK_S = 5.0
"""Seconds that all else may take on a busy machine; undisturbed it is 0.1 s."""
_AT = 100
"""Byte of a body after which it breaks off."""
_NO_CACHE = " holds no sealed cache: it has no "
"""Words between the folder and the name of its metadata."""
_NUM_NAMES = 1_000_000
_MAX_LISTING_BYTES = 10**9

FAULTS: tuple[Fault, ...] = (
    SERVER_ERROR,
    SLOW_DOWN,
    FORBIDDEN,
    MISSING,
    CLOCK_SKEWED,
    Reset(),
    Reset(after_bytes=_AT),
    Truncate(after_bytes=_AT),
    Hang(seconds=60),
    Hang(seconds=60, after_bytes=_AT),
    ClockOff(),
    Corrupt(at=_AT),
    Replace(key=""),
)


@dataclass(frozen=True)
class Shared:
    """A cache in a bucket behind a proxy, the same cache on disk, and the keys that a reader asks for, in order."""

    bucket: Bucket
    proxy: Proxy
    local: Cache
    keys: tuple[str, ...]

    def open(self, folder: Path) -> Cache:
        """Opens the cache of the bucket."""
        settings = RemoteConfig(
            shard_dir=str(folder / "node"), timeout_s=_TIMEOUT_S, retries=_RETRIES, max_concurrent=1
        )
        return open_cache(f"{self.bucket.url}/caches/one", remote=settings)


@dataclass(frozen=True)
class Case:
    """A fault at one request, at it alone or at all from then on. is_late: the body breaks off first."""

    at: int
    fault: Fault
    stays: bool
    is_late: bool = False

    @property
    def rules(self) -> list[Rule]:
        """The rules for the proxy."""
        times = None if self.stays else 1
        if not self.is_late:
            return [Rule(fault=self.fault, method="GET", after=self.at, times=times)]
        broken = Rule(fault=Truncate(after_bytes=_AT), method="GET", after=self.at, times=1)
        return [broken, Rule(fault=self.fault, method="GET", after=self.at + 1, times=times)]


def cases(shared: Shared) -> list[Case]:
    """Every fault at every request; an object is replaced by the next one, before it is read or in the middle."""
    found = []
    for at, fault, stays in itertools.product(range(len(shared.keys)), FAULTS, (False, True)):
        if isinstance(fault, Replace):
            other = Replace(key=shared.keys[(at + 1) % len(shared.keys)])
            found += [Case(at, other, stays), Case(at, other, stays, is_late=True)]
        else:
            found.append(Case(at, fault, stays))
    return found


@contextlib.contextmanager
def prepared(folder: Path) -> Iterator[Shared]:
    """Puts a cache of 6 samples into a bucket."""
    cache = make_cache(folder / "made")
    with ObjectServer() as server, Proxy(server.address) as proxy, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        patch.setenv("AWS_REGION", REGION)
        patch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        patch.setattr("forebay.store.remote.bucket.bucket._PAUSE_S", 0.02)
        bucket = server.make_bucket()
        files = [path for path in sorted(cache.rglob("*")) if path.is_file()]
        bucket.put_all((f"caches/one/{path.relative_to(cache)}", path.read_bytes()) for path in files)
        shared = Shared(bucket, proxy, open_cache(cache), ())
        check_all(shared.open(folder), shared.local)
        keys = tuple(one.key for one in proxy.traffic().exchanges if one.method == "GET")
        yield Shared(bucket, proxy, shared.local, keys)


def check_all(found: Cache, wanted: Cache) -> None:
    """Every sample is bit by bit what it is on disk."""
    assert len(found) == len(wanted)
    for index in range(len(wanted)):
        here, there = found.read(index), wanted.read(index)
        assert here.keys() == there.keys()
        assert all(np.array_equal(here[name], there[name]) for name in there)


def goes_wrong(shared: Shared, number: int, folder: Path) -> str:
    case = cases(shared)[number]
    shared.proxy.clear()
    for rule in case.rules:
        shared.proxy.add(rule)
    start_s = time.monotonic()
    try:
        check_all(shared.open(folder), shared.local)
    except (RemoteError, CacheCorruptError, CacheNotFoundError) as err:
        outcome = check_error(err, case, shared)
    else:
        outcome = "every sample right"
    took_s = time.monotonic() - start_s
    check_kept(folder / "node", shared.local.folder)
    assert took_s < (_RETRIES + 1) * 2 * _TIMEOUT_S + _SLACK_S, f"{case}: {took_s:.1f} s"
    passes = not case.stays and not may_end(case.fault)
    assert outcome == "every sample right" or not passes, case
    shared.proxy.clear()
    check_all(shared.open(folder), shared.local)
    return outcome


def check_kept(node: Path, cache: Path) -> None:
    """The node's files of a cache are right under their names: its checksums are not the first to see what is wrong."""
    for wanted in cache.glob("*/*"):
        for found in node.glob(f"mirrors/*/{wanted.relative_to(cache)}"):
            assert found.read_bytes() == wanted.read_bytes(), f"{found} is another one"


def may_end(fault: Fault) -> bool:
    """Whether a fault that comes once may end a reader: asking again does not help, or nobody does."""
    return isinstance(fault, Corrupt | Replace) or (isinstance(fault, Status) and fault.status < 500)


def check_error(err: ForebayError, case: Case, shared: Shared) -> str:
    """The error names bucket and key, holds no secret, and ends with what to do."""
    named = re.search(rf"{shared.bucket.url}/(caches/one/[\w./-]+\w)", str(err).replace(_NO_CACHE, "/"))
    assert named is not None, f"{case}: {err}"
    assert named[1] in shared.keys, f"{case}: {err}"
    assert ";" in str(err), f"{case}: {err}"
    assert SECRET_KEY not in str(err).replace(shared.bucket.url, ""), f"{case}: {err}"
    if case.fault == FORBIDDEN:
        assert "denied, 403" in str(err)
    if case.fault == CLOCK_SKEWED:
        assert "the clock of this machine says" in str(err)
    return "an error that names bucket and key, then right"


def damaged_on_the_node(shared: Shared, number: int, folder: Path) -> str:
    chance = dice("node-damage", number)
    shared.proxy.clear()
    first = shared.open(folder)
    check_all(first, shared.local)
    files = (path for path in first.folder.rglob("*.*") if path.name not in OWN_NAMES and path.stat().st_size)
    path = chance.choice(sorted(files))
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data))
    for at in range(start, min(len(data), start + chance.choice([1, 64, len(data)]))):
        data[at] ^= chance.randrange(1, 256)
    path.write_bytes(data)  # in place, and of the same size
    assert first.mirror is not None
    before = first.mirror.counters.to_json()["damaged"]
    # One that has it open, and one that opens it now.
    opened = first if path.name == "metadata.json" else copy.copy(first)
    for cache in (opened, shared.open(folder)):
        check_all(cache, shared.local)
        assert cache.samples.equals(shared.local.samples)
        assert {name: found.tolist() for name, found in cache.lengths.items()} == {
            name: found.tolist() for name, found in shared.local.lengths.items()
        }
    count = first.mirror.counters.to_json()["damaged"] - before
    is_right = path.read_bytes() == shared.bucket.get(f"caches/one/{path.relative_to(first.folder)}")
    assert (is_right, count) in ((True, 1), (False, 0))
    return "fetched again, once" if is_right else "of bytes that nothing is read from"


@contextlib.contextmanager
def names(folder: Path) -> Iterator[str]:
    """Starts a store that lists so many names; where it answers."""
    code = (
        "import sys, time\n"
        "from tests.remote.fake_store import fake_store, listing\n"
        "with fake_store(listing(int(sys.argv[1]))) as store:\n"
        "    print(store.endpoint, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(_NUM_NAMES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.communicate("")


_LIST = """
import itertools, pathlib, re, sys
from forebay.config.remote import RemoteConfig
from forebay.config.remote import parse_url
from forebay.store.remote.bucket.bucket import Bucket
bucket = Bucket(parse_url("s3://bucket"), RemoteConfig(endpoint=sys.argv[1], anonymous=True))
found = list(itertools.islice(bucket.objects(), int(sys.argv[2])))
assert [one.name for one in found] == [f"data/{index:09}.tar" for index in range(len(found))]
# Not `ru_maxrss`, which begins with that of the parent.
print(len(found), int(re.search("VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024)
"""


def is_listed(endpoint: str, number: int, folder: Path) -> str:
    # The first trial is that of `make test`, and short.
    wanted = _NUM_NAMES if number else 20_000
    ended = subprocess.run(
        [sys.executable, "-c", _LIST, endpoint, str(wanted)], capture_output=True, text=True, timeout=300, check=True
    )
    count, peak_bytes = map(int, ended.stdout.split())
    assert count == wanted
    assert peak_bytes <= _MAX_LISTING_BYTES * wanted / _NUM_NAMES + 100_000_000, f"{peak_bytes} bytes"
    return f"{wanted:,} names listed and kept in {-(-peak_bytes // 10**8) / 10} GB"


ROWS: list[Row[Any]] = [
    Row(
        name="store",
        fault="a store that answers 500, 503, 403 or 404, resets, hangs, breaks off, has another clock, a flipped bit "
        "or another object, at every request of a reader, once or for good",
        outcome="every sample right, or an error that names bucket and key, within the bound; right afterwards",
        prepared=prepared,
        trial=goes_wrong,
        short=20,
        long=lambda shared: len(cases(shared)),
    ),
    Row(
        name="node-damage",
        fault="bytes of a file in the node's folder that change on its disk, and not its size",
        outcome="every sample and column right; the file is fetched again, once, counted and said",
        prepared=prepared,
        trial=damaged_on_the_node,
        short=10,
        long=300,
    ),
    Row(
        name="million",
        fault="a bucket of a million names",
        outcome="listed in at most 1 GB",
        prepared=names,
        trial=is_listed,
        short=1,
        long=3,
    ),
]


def test_a_store_that_goes_wrong_gives_right_samples_or_an_error_with_bucket_and_key(tmp_path: Path) -> None:
    assert sum(ROWS[0].check(tmp_path).values()) == ROWS[0].short


def test_a_file_that_the_disk_of_a_node_damages_is_fetched_again(tmp_path: Path) -> None:
    found = ROWS[1].check(tmp_path)
    assert sum(found.values()) == ROWS[1].short
    assert found["fetched again, once"] > ROWS[1].short // 2


def test_a_bucket_of_many_names_is_listed_in_little_memory(tmp_path: Path) -> None:
    assert sum(ROWS[2].check(tmp_path).values()) == ROWS[2].short
