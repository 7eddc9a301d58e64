"""One place of a store: what is put comes back whole, of one version, or with an error that names it."""

from __future__ import annotations

import functools
import hashlib
import pickle
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.objects.faults import (
    CLOCK_SKEWED,
    FORBIDDEN,
    MISSING,
    SERVER_ERROR,
    SLOW_DOWN,
    ClockOff,
    Fault,
    Hang,
    Replace,
    Reset,
    Rule,
    Truncate,
)
from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket as Bed
from forebay.config.remote import RemoteConfig, parse_url
from forebay.errors import (
    ConfigError,
    MissingExtraError,
    RemoteDeniedError,
    RemoteError,
    RemoteExistsError,
    RemoteMissingError,
    RemoteReplacedError,
)
from forebay.store.remote.bucket import bucket as bucket_module
from forebay.store.remote.bucket.bucket import PART, Bucket
from tests.remote.fake_store import MODIFIED, Answer, Asked, error, fake_store, listing

BIG = b"".join(hashlib.sha512(number.to_bytes(4, "big")).digest() for number in range(160_000))
"""10 MB of which no two parts are alike."""
TIMEOUT_S = 0.5


@pytest.fixture
def place(bucket: Bed, environment: None) -> Bucket:
    """`folder` of an empty bucket, behind the proxy."""
    return Bucket(parse_url(f"{bucket.url}/folder"), RemoteConfig(timeout_s=TIMEOUT_S, retries=2))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "_PAUSE_S", 0.01)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, environment: None) -> Callable[..., Bucket]:
    """Makes a bucket of an endpoint that the environment names then."""

    def made(endpoint: str, **settings: Any) -> Bucket:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        return Bucket(parse_url("s3://bucket"), RemoteConfig(**({"timeout_s": TIMEOUT_S, "retries": 1} | settings)))

    return made


def test_what_is_put_comes_back(place: Bucket, bucket: Bed, tmp_path: Path) -> None:
    for name, data in (("a", b""), ("b c/ü+%2F~.tar", b"some"), ("big", BIG)):
        file = tmp_path / "file"
        file.write_bytes(data)
        for form in (data, file):
            etag = place.put(name, form)
            found = place.info(name)
            assert (found.name, found.size_bytes, found.etag) == (name, len(data), etag)
            assert abs(found.modified_ns - time.time_ns()) < 120e9
            assert place.read(name) == bucket.get(f"folder/{name}") == data
    assert place.read_range("big", 5, 5_000_000) == BIG[5:5_000_000]
    assert place.read_range("big", 7, 7) == b""
    assert b"".join(place.stream("big", start=9_999_999)) == BIG[9_999_999:]
    assert [found.name for found in place.objects()] == ["a", "b c/ü+%2F~.tar", "big"]
    assert [found.name for found in place.objects("b c")] == [found.name for found in place.objects("b c/")]
    assert (place.level()[1], place.level("b c")[1]) == (["b c"], [])


def test_a_large_file_is_put_in_parts(place: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BIG)
    assert len(BIG) > PART
    assert place.put("big", tmp_path / "file").endswith('-2"')
    assert {one.received for one in proxy.traffic().exchanges if one.method == "PUT"} == {PART, len(BIG) - PART}


def test_a_store_copies_and_removes_by_itself(place: Bucket, bucket: Bed, proxy: Proxy) -> None:
    bucket.put("other/big", BIG)
    source = place.url.parent / "other/big"
    proxy.add(Rule(fault=SERVER_ERROR, method="PUT", times=1))
    made = place.copy(source, "big", size_bytes=len(BIG))
    assert (made.name, made.size_bytes) == ("big", len(BIG))
    assert hashlib.md5(BIG, usedforsecurity=False).hexdigest() in made.etag
    assert sum(n for (method, _), n in proxy.requests.items() if method == "GET") == 0
    assert bucket.get("folder/big") == BIG
    place.remove(["big", "never there"])
    place.remove([])
    assert bucket.names() == ["other/big"]
    with pytest.raises(RemoteMissingError, match=rf"{place.url.parent}/none is not there, .* copied to {place.url}/x"):
        place.copy(place.url.parent / "none", "x", size_bytes=1)


def test_a_second_creator_loses(place: Bucket, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"first")
    assert place.put("metadata.json", tmp_path / "file", create=True) == place.info("metadata.json").etag
    for data in (b"first", b"second"):
        with pytest.raises(RemoteExistsError, match=r"s3://bucket-\w+/folder/metadata.json is there already"):
            place.put("metadata.json", data, create=True)
    assert place.read("metadata.json") == b"first"


def test_a_creator_whose_answer_was_lost_has_created(place: Bucket, proxy: Proxy) -> None:
    proxy.add(Rule(fault=Hang(seconds=30), method="PUT", times=1))
    etag = place.put("metadata.json", b"first", create=True)
    assert etag == place.info("metadata.json").etag
    assert proxy.requests["PUT", "folder/metadata.json"] == 2


def test_a_creator_whose_request_was_lost_does_not_take_anothers(place: Bucket, bucket: Bed, proxy: Proxy) -> None:
    bucket.put("folder/metadata.json", b"of another")
    proxy.add(Rule(fault=Reset(), method="PUT", times=1))
    with pytest.raises(RemoteExistsError, match="made by somebody else"):
        place.put("metadata.json", b"first", create=True)


def test_a_put_that_did_not_hold_is_noticed(at: Callable[..., Bucket]) -> None:
    def short(asked: Asked) -> Answer:
        return Answer(body=b"sho" if asked.method == "HEAD" else b"")

    what = "s3://bucket/name has 3 bytes, 5 were put; put it again"
    with fake_store(short) as store, pytest.raises(RemoteError, match=what):
        at(store.endpoint).put("name", b"short")


PASSING: list[Fault] = [SERVER_ERROR, SLOW_DOWN, Reset(), Hang(seconds=30)]
BROKEN: list[Fault] = [
    Reset(after_bytes=5_000_000),
    Truncate(after_bytes=5_000_000),
    Hang(seconds=30, after_bytes=5_000_000),
]


@pytest.mark.parametrize("fault", PASSING, ids=repr)
def test_what_passes_is_asked_again(fault: Fault, place: Bucket, bucket: Bed, proxy: Proxy) -> None:
    bucket.put("folder/name", b"data")
    asks: dict[str, Callable[[], object]] = {
        "GET": functools.partial(place.read, "name"),
        "HEAD": lambda: place.info("name").etag,
        "LIST": lambda: [found.name for found in place.objects()],
        "PUT": functools.partial(place.put, "name", b"data"),
    }
    wanted = {method: ask() for method, ask in asks.items()}
    for method, ask in asks.items():
        proxy.clear()
        proxy.add(Rule(fault=fault, method=method, times=2))
        assert ask() == wanted[method]
        assert sum(count for (one, _), count in proxy.requests.items() if one == method) == 3


@pytest.mark.parametrize("fault", BROKEN, ids=repr)
def test_a_body_that_breaks_off_goes_on_where_it_stopped(
    fault: Fault, place: Bucket, bucket: Bed, proxy: Proxy
) -> None:
    bucket.put("folder/big", BIG)
    proxy.add(Rule(fault=fault, method="GET", times=2))
    assert place.read("big") == BIG
    ranges = [one.range for one in proxy.traffic().exchanges]
    assert ranges[0] is None
    if not isinstance(fault, Reset):  # a reset also drops what had come and was not yet read
        assert 4_000_000 < int(str(ranges[1]).removeprefix("bytes=").partition("-")[0]) <= 5_000_000
    proxy.clear()
    proxy.add(Rule(fault=fault, method="GET", times=2))
    assert place.read_range("big", 1_000, 9_000_000) == BIG[1_000:9_000_000]


@pytest.mark.parametrize(
    ("fault", "kind", "what"),
    [
        (SERVER_ERROR, RemoteError, r"500 .*InternalError.*asked 3 times.*set remote\.retries"),
        (SLOW_DOWN, RemoteError, r"503 .*SlowDown.*asked 3 times"),
        (Reset(), RemoteError, "Connection reset by peer; asked 3 times"),
        (Truncate(after_bytes=10), RemoteError, r"the body ended early, at byte \d+ of 1000; asked 3 times"),
        (Hang(seconds=30), RemoteError, r"not a byte for remote\.timeout_s = 0\.5 s; asked 3 times"),
        (Hang(seconds=30, after_bytes=10), RemoteError, r"remote\.timeout_s = 0\.5 s, at byte \d+ of 1000; asked"),
        (FORBIDDEN, RemoteDeniedError, r"denied, 403 .*AccessDenied.*as the environment; ask the bucket's owner"),
        (MISSING, RemoteMissingError, r"is not there \(404 .*name another URL"),
        (
            CLOCK_SKEWED,
            RemoteError,
            r"the clock of this machine says 20\d\d-.*, that of the store is not told; set the",
        ),
    ],
    ids=repr,
)
def test_what_stays_wrong_is_an_error_within_the_bound(
    fault: Fault, kind: type[RemoteError], what: str, place: Bucket, bucket: Bed, proxy: Proxy
) -> None:
    bucket.put("folder/name", b"x" * 1000)
    proxy.add(Rule(fault=fault, method="GET"))
    proxy.add(Rule(fault=fault, method="HEAD"))
    asks: list[Callable[[], object]] = [lambda: place.read("name")]
    if getattr(fault, "after_bytes", None) is None:  # the answer to HEAD has no body to break
        asks.append(lambda: place.info("name"))
    for ask in asks:
        start_s = time.monotonic()
        with pytest.raises(kind, match=rf"^{bucket.url}/folder/name.*{'' if ask is not asks[0] else what}"):
            ask()
        # Three times silence, and what else a busy machine takes.
        assert time.monotonic() - start_s < 3 * TIMEOUT_S + 3.0


def test_both_clocks_are_named(at: Callable[..., Bucket]) -> None:
    clocks = "<RequestTime>20260101T000000Z</RequestTime><ServerTime>2026-01-02T00:00:00Z</ServerTime>"
    what = (
        "of this machine says 20260101T000000Z, that of the store 2026-01-02T00:00:00Z; set the clock of this machine"
    )
    with fake_store(lambda asked: error(403, "RequestTimeTooSkewed", more=clocks)) as store:
        for ask in (at(store.endpoint).read, at(store.endpoint).info):
            with pytest.raises(RemoteError, match=f"s3://bucket/name: 403 .*RequestTimeTooSkewed.*{what}"):
                ask("name")


def test_the_stores_clock_is_asked_where_its_error_does_not_tell(place: Bucket, proxy: Proxy) -> None:
    proxy.add(Rule(fault=CLOCK_SKEWED, key="folder/name"))
    proxy.add(Rule(fault=ClockOff()))
    off = time.strftime("%a, %d %b %Y", time.gmtime(time.time() + 86_400))
    with pytest.raises(
        RemoteError, match=rf"says {time.strftime('%Y-%m-%d', time.gmtime())}T.*, that of the store {off}"
    ):
        place.read("name")


def test_a_clock_of_the_store_that_is_off_changes_no_byte(place: Bucket, bucket: Bed, proxy: Proxy) -> None:
    bucket.put("folder/big", BIG)
    proxy.add(Rule(fault=ClockOff(), after=1, times=1))
    proxy.add(Rule(fault=Truncate(after_bytes=5_000_000), times=1))
    assert place.read("big") == BIG


def test_an_object_that_is_replaced_in_the_middle_is_not_mixed(place: Bucket, bucket: Bed, proxy: Proxy) -> None:
    bucket.put("folder/big", BIG)
    first = place.info("big").etag
    proxy.add(Rule(fault=Truncate(after_bytes=5_000_000), method="GET", times=1))
    stream = place.stream("big")
    pieces = [next(stream)]
    bucket.put("folder/big", BIG[::-1])
    second = place.info("big").etag
    with pytest.raises(RemoteReplacedError, match=rf"folder/big was replaced: its etag is {second}, wanted {first}"):
        pieces += stream
    assert BIG.startswith(b"".join(pieces))


def test_the_version_that_is_asked_for_answers_or_none(place: Bucket, bucket: Bed) -> None:
    bucket.put("folder/name", b"one")
    etag = place.info("name").etag
    assert b"".join(place.stream("name", start=1, etag=etag)) == b"ne"
    bucket.put("folder/name", b"two")
    for ask in (
        lambda: list(place.stream("name", start=1, etag=etag)),
        lambda: place.read_range("name", 0, 2, etag=etag),
    ):
        with pytest.raises(RemoteReplacedError, match=f"its etag is {place.info('name').etag}, wanted {etag}"):
            ask()


def test_a_server_that_heeds_no_condition_is_noticed(at: Callable[..., Bucket]) -> None:
    what = 'its etag is "two", wanted "one"'
    with fake_store(lambda _: Answer(body=b"new", headers={"ETag": '"two"'})) as store:
        place = at(store.endpoint)
        with pytest.raises(RemoteReplacedError, match=what):
            list(place.stream("name", etag='"one"'))


def test_without_etags_size_and_date_tell_versions_apart(at: Callable[..., Bucket]) -> None:
    def answers(asked: Asked) -> Answer:
        start = int(asked.headers.get("range", "bytes=0-")[6:].partition("-")[0])
        moved = "Thu, 22 Oct 2015 07:28:00 GMT" if start else MODIFIED
        part = {"Content-Range": f"bytes {start}-{len(BIG) - 1}/{len(BIG)}"} if start else {}
        body = BIG[start:] if start else BIG[:6_000_000]
        length = {
            "Content-Length": str(len(BIG) - start),
            "Last-Modified": moved,
            "ETag": 'W/"same"',
            "Connection": "close",
        }
        return Answer(status=206 if start else 200, body=body, headers=part | length)

    with fake_store(answers) as store:
        found = b"".join(at(store.endpoint).stream("name"))
        assert found == BIG
        # A weak etag is not sent as a condition: it would never hold.
        assert all("if-match" not in asked.headers for asked in store.asked)


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda place: place.read_range("name", 2, 9), "folder/name has 4 bytes, and byte 9 was asked for"),
        (lambda place: place.read_range("name", 8, 9), "folder/name has 4 bytes, and those from 8 on were asked for"),
        (lambda place: list(place.stream("name", start=5)), "folder/name has 4 bytes, and those from 5 on were asked"),
    ],
)
def test_bytes_that_an_object_does_not_have(
    ask: Callable[[Bucket], object], what: str, place: Bucket, bucket: Bed
) -> None:
    bucket.put("folder/name", b"data")
    with pytest.raises(RemoteError, match=what):
        ask(place)


def test_names_stay_below_the_url(place: Bucket) -> None:
    for ask in (place.read, place.info, functools.partial(place.put, data=b""), lambda name: list(place.objects(name))):
        with pytest.raises(ConfigError, match=r"'\.\./other' is no name below s3://bucket-\w+/folder"):
            ask("../other")


def test_a_bucket_that_is_not_there_is_named(place: Bucket, environment: None) -> None:
    gone = Bucket(parse_url("s3://no-such-bucket/folder"), place.settings)
    for ask in (lambda: gone.read("name"), lambda: list(gone.objects())):
        with pytest.raises(RemoteMissingError, match=r"there is no bucket no-such-bucket .*NoSuchBucket"):
            ask()


def test_a_listing_goes_on_where_it_broke_off(at: Callable[..., Bucket]) -> None:
    pages = listing(20_000)
    broken = iter([7, 8, 12])
    next_break = [next(broken)]

    def answers(asked: Asked) -> Answer:
        if len(store.asked) == next_break[0]:
            next_break[0] = next(broken, -1)
            return error(503, "SlowDown")
        return pages(asked)

    with fake_store(answers) as store:
        found = list(at(store.endpoint, retries=2).objects())
        assert len(store.asked) == 23
    assert [one.name for one in found] == [f"data/{index:09}.tar" for index in range(20_000)]
    assert {(one.size_bytes, len(one.etag)) for one in found} == {(7, 34)}


@pytest.mark.parametrize(
    "call", [lambda place: list(place.objects()), lambda place: place.level("a")], ids=["objects", "level"]
)
def test_a_listing_of_empty_pages_ends(at: Callable[..., Bucket], call: Callable[[Bucket], object]) -> None:
    def empty_page(_: Asked) -> Answer:
        more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{len(store.asked)}</NextContinuationToken>"
        return Answer(body=f"<ListBucketResult>{more}</ListBucketResult>".encode())

    with fake_store(empty_page) as store:
        with pytest.raises(
            RemoteError, match=r"s3://bucket(/a)?: no name and no end of its listing in 0.5 s"
        ) as caught:
            call(at(store.endpoint, retries=0))
        asked = len(store.asked)
        assert asked > 2
        time.sleep(0.3)
        assert len(store.asked) <= asked + 1  # nothing goes on behind the error
    assert caught.value.code == "FB607"


def test_a_listing_is_not_kept(at: Callable[..., Bucket]) -> None:
    with fake_store(listing(20_000)) as store:
        listed = at(store.endpoint).objects()
        next(listed)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert sum(1 for _ in listed) == 19_999
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16_000


def test_threads_share_a_bucket_and_go_on_beside_it(place: Bucket, bucket: Bed, proxy: Proxy) -> None:
    bucket.put("folder/big", BIG)
    proxy.limit(bytes_per_s=10e6)
    counted = 0
    wrong: list[int] = []

    def download(number: int) -> None:
        if place.read("big") != BIG:
            wrong.append(number)

    threads = [threading.Thread(target=download, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        counted += 1
    for thread in threads:
        thread.join()
    assert not wrong
    # A wait that kept the interpreter would leave this thread a few thousand turns.
    assert counted > 100_000


def test_a_slow_link_is_no_silence(place: Bucket, bucket: Bed, proxy: Proxy, tmp_path: Path) -> None:
    patient = Bucket(place.url, RemoteConfig(timeout_s=1.5, retries=2))
    bucket.put("folder/big", BIG)
    (tmp_path / "file").write_bytes(BIG)
    proxy.limit(bytes_per_s=4e6)
    for ask, wanted in (
        (lambda: patient.read("big"), BIG),
        (lambda: patient.put("again", tmp_path / "file")[-2:], '2"'),
    ):
        start_s = time.monotonic()
        assert ask() == wanted
        assert time.monotonic() - start_s > 1.5
    assert [proxy.traffic().requests["GET", "folder/big"], proxy.traffic().requests["PUT", "folder/again"]] == [1, 2]


def test_a_pickle_connects_anew(place: Bucket) -> None:
    place.put("name", b"data")
    again = pickle.loads(pickle.dumps(place))  # noqa: S301
    assert (again.url, again.settings) == (place.url, place.settings)
    assert again.read("name") == b"data"


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, environment: None) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for ask in (lambda place: place.read("x"), lambda place: place.info("x"), lambda place: list(place.objects())):
        with pytest.raises(MissingExtraError, match=r"pip install 'forebay\[remote\]'"):
            ask(Bucket(parse_url("s3://bucket"), RemoteConfig()))


def test_other_bytes_under_a_name_are_not_cut_to_fit(place: Bucket, bucket: Bed, proxy: Proxy) -> None:
    bucket.put("folder/name", b"data")
    bucket.put("folder/other", b"others")
    proxy.add(Rule(fault=Replace(key="folder/other"), method="GET"))
    etag = place.info("name").etag
    with pytest.raises(RemoteReplacedError, match="was replaced"):
        list(place.stream("name", etag=etag))
