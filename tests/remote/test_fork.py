"""A process that is forked after a request asks stores too: obstore's threads stay behind, a helper asks instead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.objects.faults import SLOW_DOWN, Rule
from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket as Bed
from forebay.config.remote import RemoteConfig, parse_url
from forebay.errors import RemoteError, RemoteMissingError
from forebay.store.remote.bucket import beside
from forebay.store.remote.bucket.bucket import Bucket
from tests.store_factory import make_cache

DATA = bytes(range(256)) * 40_000
LIMIT_S = 60


@pytest.fixture
def place(bucket: Bed, environment: None) -> Bucket:
    """A bucket with two objects, of which this process has asked already."""
    bucket.put("folder/big", DATA)
    bucket.put("folder/small", b"small")
    place = Bucket(parse_url(f"{bucket.url}/folder"), RemoteConfig(timeout_s=2.0, retries=1))
    assert place.read("small") == b"small"
    return place


def forked(body: Callable[[], Any]) -> str:
    """Returns what a fork of this process says of a function: its value, or its error. A hang is an AssertionError."""
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        try:
            said = repr(body())
        except Exception as err:
            said = f"{type(err).__name__}: {err}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status == 0, "the fork hung"
    return said


def test_a_fork_asks_for_everything(place: Bucket) -> None:
    def ask() -> list[object]:
        new = Bucket(place.url, place.settings)
        return [
            place.read("big") == DATA,
            place.read_range("big", 3, 9) == DATA[3:9],
            b"".join(new.stream("big", start=7)) == DATA[7:],
            [found.name for found in new.objects()],
            new.level()[1],
            place.info("small").size_bytes,
            bool(place.put("put", b"new")) and place.read("put"),
        ]

    assert forked(ask) == "[True, True, True, ['big', 'small'], [], 5, b'new']"


def test_a_fork_of_a_fork_and_threads_of_a_fork_ask_too(place: Bucket) -> None:
    def ask() -> list[object]:
        found: list[bytes] = []
        threads = [threading.Thread(target=lambda: found.append(place.read("big"))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found == [DATA] * 3, forked(lambda: place.read("small"))]

    assert forked(ask) == "[True, \"b'small'\"]"


def test_errors_come_from_the_helper_as_they_are(place: Bucket, proxy: Proxy) -> None:
    what = forked(lambda: place.read("missing"))
    with pytest.raises(RemoteMissingError, match="is not there") as caught:
        place.read("missing")
    assert what == f"RemoteMissingError: {caught.value}"
    proxy.add(Rule(fault=SLOW_DOWN, method="GET"))
    assert forked(lambda: place.read("small")).startswith(f"RemoteError: {place.url}/small: 503 Service Unavailable")


def test_a_helper_serves_one_request_after_the_other_and_goes_when_a_reader_stops(place: Bucket) -> None:
    def ask() -> list[object]:
        place.read("small")
        (first,) = beside._here.idle
        place.info("small")
        assert [first] == beside._here.idle
        stream = place.stream("big")
        next(stream)
        del stream
        return [first._process.returncode is not None, len(beside._here.idle), place.read("small")]

    assert forked(ask) == "[True, 0, b'small']"


def test_a_helper_that_is_killed_is_an_error_and_the_next_one_answers(place: Bucket) -> None:
    def ask() -> list[object]:
        place.read("small")
        os.kill(beside._here.idle[0]._process.pid, signal.SIGKILL)
        with pytest.raises(RemoteError, match=r"the process that asks stores for process \d+ died .*; try again"):
            place.read("small")
        return [place.read("small")]

    assert forked(ask) == "[b'small']"


def test_the_helper_ends_with_the_fork(place: Bucket) -> None:
    def ask() -> int:
        place.read("small")
        return beside._here.idle[0]._process.pid

    helper = int(forked(ask))
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{helper}").exists() and "Z" not in Path(f"/proc/{helper}/stat").read_text().split():
        assert time.monotonic() < deadline_s, "the helper lives on"
        time.sleep(0.01)


def test_a_fork_that_asks_nothing_ends_as_others_do(place: Bucket) -> None:
    place.read("small")
    process = os.fork()
    if not process:
        signal.alarm(LIMIT_S)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0


def test_a_process_that_forked_before_its_first_request_needs_no_helper(place: Bucket) -> None:
    code = (
        "import os, sys\n"
        "from forebay.config.remote import RemoteConfig\n"
        "from forebay.config.remote import parse_url\n"
        "from forebay.store.remote.bucket import beside\n"
        "from forebay.store.remote.bucket.bucket import Bucket\n"
        "place = Bucket(parse_url(sys.argv[1]), RemoteConfig())\n"
        "process = os.fork()\n"
        "assert place.read('small') == b'small' and not beside.is_cut_off()\n"
        "if process: assert os.waitpid(process, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code, str(place.url)], check=True, timeout=LIMIT_S)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_workers_of_a_data_loader_read_a_cache_of_a_store(bucket: Bed, environment: None, tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    import forebay

    folder = make_cache(tmp_path / "made")
    local = forebay.open_cache(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    bucket.put_all((str(path.relative_to(folder)), path.read_bytes()) for path in files)
    cache = forebay.open_cache(bucket.url, remote=RemoteConfig(shard_dir=str(tmp_path / "node")))
    loader: Any = DataLoader(
        range(len(cache)),  # type: ignore[arg-type]
        batch_size=None,
        num_workers=2,
        collate_fn=cache.__getitem__,  # type: ignore[arg-type]
    )
    for index, sample in enumerate(loader):
        wanted = local[index]
        assert sample.keys() == wanted.keys()
        assert all(sample[name].equal(wanted[name]) for name in wanted)
