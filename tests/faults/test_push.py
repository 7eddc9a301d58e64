"""Pushes and pulls with a fault in them: two pushes at once, a store that goes wrong, an object that is replaced."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.objects.beside import Beside
from benchmarks.objects.faults import Fault, Replace, Rule
from benchmarks.objects.server import ACCESS_KEY, REGION, SECRET_KEY
from forebay.config.remote import RemoteConfig, Url, parse_url
from forebay.errors import CacheError, ForebayError, RemoteError, RemoteExistsError
from forebay.store.cache import open_cache
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.carry.transfer import pull, push
from tests.faults.children import Children, Ended
from tests.faults.row import Row, dice
from tests.faults.test_remote_store import FAULTS, check_kept, may_end
from tests.store_factory import make_cache

_CALLS = 16
"""Calls of a bucket in a whole push of these caches."""
_NEVER = 1 << 30
_TIMEOUT_S, _RETRIES = 0.5, 2
_SLACK_S = 5.0
"""Seconds that all else may take on a busy machine."""


@dataclass(frozen=True)
class Store:
    """A server, the children that push to it, and three caches.

    caches: the first; one of its key that another build has sealed; one of another key. num_requests: of a push of the
    first, and of a pull.
    """

    server: Beside
    children: Children
    caches: tuple[Path, Path, Path]
    num_requests: tuple[int, int]


@contextlib.contextmanager
def store(folder: Path) -> Iterator[Store]:
    """Prepares them."""
    first, twin = (make_cache(folder / name, num_samples=10, rows_per_shard=n) for name, n in (("a", 4), ("b", 5)))
    assert first.name == twin.name
    other = make_cache(folder / "c", num_samples=10, seed=1)
    with Beside() as server, Children("forebay.store.remote.carry.transfer", "obstore.store", __name__) as children:
        yield Store(server, children, (first, twin, other), counted_requests(server, first, folder))


def counted_requests(server: Beside, cache: Path, folder: Path) -> tuple[int, int]:
    """Returns how many requests a push and a pull make where nothing goes wrong."""
    url = parse_url(f"{server.make_bucket().url}/caches/x")
    with at(server.endpoint):
        server.clear()
        push(cache, url, patient(folder))
        pushed = len(server.traffic().exchanges)
        pull(url, folder / "counted", patient(folder))
        return pushed, len(server.traffic().exchanges) - pushed


def patient(folder: Path) -> RemoteConfig:
    """Returns the settings of a push or pull that makes one request at a time."""
    return RemoteConfig(shard_dir=str(folder / "node"), timeout_s=_TIMEOUT_S, retries=_RETRIES, max_concurrent=1)


def push_here(folder: Path, url: Url, endpoint: str, node: Path, kill_at: int) -> str:
    """Pushes in this process, which is killed at its `kill_at`-th call of the bucket; returns what came of it."""
    with at(endpoint) as patch:
        die_at(patch, ("put", "read", "info", "stream", "objects"), kill_at)
        try:
            report = push(folder, url, RemoteConfig(shard_dir=str(node)))
        except RemoteExistsError as err:
            return "refused" if str(url) in str(err) and "push to another URL" in str(err) else str(err)
    return "already there" if report.already_there else "pushed"


def die_at(patch: pytest.MonkeyPatch, methods: Sequence[str], kill_at: int) -> Iterator[int]:
    """Lets this process kill itself at its `kill_at`-th call of a bucket; returns what counts the calls."""
    calls, lock = itertools.count(), threading.Lock()

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                if next(calls) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in methods:
        patch.setattr(Bucket, name, counted(getattr(Bucket, name)))
    return calls


@contextlib.contextmanager
def at(endpoint: str) -> Iterator[pytest.MonkeyPatch]:
    """Lets a store answer at this endpoint."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("AWS_"):
                patch.delenv(name)
        found = {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": ACCESS_KEY, "SECRET_ACCESS_KEY": SECRET_KEY}
        for name, value in {**found, "REGION": REGION}.items():
            patch.setenv(f"AWS_{name}", value)
        yield patch


def two_pushes(place: Store, number: int, folder: Path) -> str:
    chance = dice("push-two", number)
    url = parse_url(f"{place.server.make_bucket().url}/caches/x")
    chosen = [place.caches[0], chance.choice(place.caches)]
    ends = chance.choice([(False, False), (False, False), (True, False), (True, True)])
    kills = [chance.randrange(_CALLS) if end else _NEVER for end in ends]
    ended = place.children.run_all(
        [_pushing(place, cache, url, folder / f"node-{i}", kills[i]) for i, cache in enumerate(chosen)]
    )
    is_one = chosen[0] == chosen[1]
    seen = sorted(map(_what, ended))
    if not any(end.signal for end in ended):
        assert seen in ([["already there", "pushed"], ["pushed", "pushed"]] if is_one else [["pushed", "refused"]])
    # Whoever comes later goes on with what is theirs, and is refused by what is not.
    again = [_what(place.children.run(*_pushing(place, cache, url, folder / "node", _NEVER))) for cache in chosen]
    assert again.count("refused") == (0 if is_one else 1)
    winner = chosen[1 if again[0] == "refused" else 0]
    with at(place.server.endpoint):
        pull(url, folder / "pulled", RemoteConfig(shard_dir=str(folder / "node")))
    assert files_of(folder / "pulled") == files_of(winner)
    return f"{'one cache' if is_one else 'two caches'}, {' and '.join(seen)}"


def _pushing(place: Store, cache: Path, url: Url, node: Path, kill_at: int) -> tuple[Any, ...]:
    return push_here, cache, url, place.server.endpoint, node, kill_at


def _what(ended: Ended) -> str:
    assert ended.error is None, ended.error
    return "killed" if ended.signal else str(ended.value)


def files_of(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of a folder's files by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def replaced(place: Store, number: int, folder: Path) -> str:
    """An object of a sealed cache is another one from some request on: its etag moved, its bytes are of somebody."""
    chance = dice("push-replaced", number)
    cache = place.caches[0]
    bucket = place.server.make_bucket()
    url, settings = parse_url(f"{bucket.url}/caches/x"), RemoteConfig(shard_dir=str(folder / "node"))
    name = chance.choice(sorted(name for name, data in files_of(cache).items() if data))
    place.server.clear()
    with at(place.server.endpoint):
        push(cache, url, settings)
        bucket.put("other", another(chance, (cache / name).read_bytes()))
        rule = Rule(fault=Replace(key="other"), method="GET", key=f"{url.key}/{name}", after=chance.randrange(2))
        place.server.add(rule)
        seen = {
            _of(lambda: pulled(url, folder, settings, cache), name),
            _of(lambda: read(url, settings, cache), name),
        }
        assert seen <= {"right", "refused"}, seen
        check_kept(folder / "node", cache)
        place.server.clear()
        pulled(url, folder, settings, cache)
    return " and ".join(sorted(seen))


@dataclass(frozen=True)
class Case:
    """A fault at one request of a push or a pull, at it alone or at all from then on."""

    is_pull: bool
    at: int
    fault: Fault
    stays: bool

    @property
    def must_pass(self) -> bool:
        """Whether the command has to end well: the fault comes once, and asking again helps."""
        return not self.stays and not may_end(self.fault)


def cases(place: Store) -> list[Case]:
    """Every fault at every request."""
    found = []
    for is_pull, count in enumerate(place.num_requests):
        for number, fault, stays in itertools.product(range(count), FAULTS, (False, True)):
            if not isinstance(fault, Replace):
                found.append(Case(bool(is_pull), number, fault, stays))
    return found


def goes_wrong(place: Store, number: int, folder: Path) -> str:
    """The store goes wrong during a push or a pull; when it is well again, the same command goes on."""
    case, cache = cases(place)[number], place.caches[0]
    url, settings = parse_url(f"{place.server.make_bucket().url}/caches/x"), patient(folder)
    place.server.clear()
    with at(place.server.endpoint) as patch:
        patch.setattr("forebay.store.remote.bucket.bucket._PAUSE_S", 0.02)
        if case.is_pull:
            push(cache, url, settings)
        place.server.add(Rule(fault=case.fault, after=case.at, times=None if case.stays else 1))
        start_s = time.monotonic()
        outcome = "done at once"
        try:
            pulled(url, folder, settings, cache) if case.is_pull else push(cache, url, settings)
        except (RemoteError, CacheError) as err:
            outcome = check_error(err, url, case)
        took_s = time.monotonic() - start_s
        assert took_s < (_RETRIES + 1) * 2 * _TIMEOUT_S + _SLACK_S, f"{case}: {took_s:.1f} s"
        assert outcome == "done at once" or not case.must_pass, case
        place.server.clear()
        push(cache, url, settings)
        pulled(url, folder, settings, cache)
    return f"{'pull' if case.is_pull else 'push'}: {outcome}"


def check_error(err: ForebayError, url: Url, case: Case) -> str:
    """The error names bucket and key, holds no secret, and ends with what to do."""
    text = str(err)
    assert str(url) in text, f"{case}: {text}"
    assert ";" in text, f"{case}: {text}"
    assert SECRET_KEY not in text.replace(str(url), ""), f"{case}: {text}"
    return "an error that names bucket and key, then done"


def another(chance: random.Random, data: bytes) -> bytes:
    """Returns other bytes: a bit of them flipped, the end cut off, more at the end, none."""
    place = chance.randrange(len(data))
    flipped = data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
    return chance.choice([flipped, data[: len(data) // 2], data + b"more", b""])


def pulled(url: Url, folder: Path, settings: RemoteConfig, cache: Path) -> None:
    """Pulls; what is there then is the cache, or nothing."""
    try:
        pull(url, folder / "pulled", settings)
    except ForebayError:
        assert not (folder / "pulled").exists()
        raise
    assert files_of(folder / "pulled") == files_of(cache)


def read(url: Url, settings: RemoteConfig, cache: Path) -> None:
    """Reads every sample from the store: each is the right one."""
    there, here = open_cache(str(url), remote=settings), open_cache(cache)
    for index in range(len(here)):
        found, wanted = there.read(index), here.read(index)
        assert all((found[field] == wanted[field]).all() for field in wanted)


def _of(action: Callable[[], None], name: str) -> str:
    """Runs it; returns whether it was right, or refused with an error that names the object."""
    try:
        action()
    except (RemoteError, CacheError) as err:
        return "refused" if Path(name).name in str(err) else str(err)
    return "right"


ROWS: list[Row[Any]] = [
    Row(
        name="push-two",
        fault="two pushes to one URL at once, of one cache or two, none, one or both killed",
        outcome="one cache, whole; the other push is refused, or finds it",
        prepared=store,
        trial=two_pushes,
        short=8,
        long=1000,
    ),
    Row(
        name="push-store",
        fault="a store that answers 500, 503, 403 or 404, resets, hangs, breaks off, flips a bit or has another clock, "
        "at every request of a push and of a pull, once or for good",
        outcome="done, or an error that names bucket and key, within the bound; the same command goes on afterwards",
        prepared=store,
        trial=goes_wrong,
        short=12,
        long=lambda place: len(cases(place)),
    ),
    Row(
        name="push-replaced",
        fault="an object of a cache is replaced under its name, before or while it is pulled and read",
        outcome="right bytes or an error, nothing half",
        prepared=store,
        trial=replaced,
        short=12,
        long=1000,
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_pushes(row: Row[Any], tmp_path: Path) -> None:
    assert sum(row.check(tmp_path).values()) == row.short
