"""Each fault of the proxy as obstore sees it without retries, and what the proxy's counters say about it."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError, PermissionDeniedError, PreconditionError

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
    Names,
    Replace,
    Reset,
    Rule,
    Rules,
    Truncate,
)
from benchmarks.objects.link import Link
from benchmarks.objects.listing import name
from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket, ObjectServer

DATA = bytes(range(251)) * 4096  # a mebibyte, and no power of two
BODY_ENDED = r"error decoding response body|request or response body error"


@pytest.fixture
def through(bucket: Bucket, proxy: Proxy) -> Bucket:
    """A bucket with one object, `shard`, reached through the proxy."""
    bucket.put("shard", DATA)
    return bucket.at(proxy.endpoint)


def wait_until_sent(proxy: Proxy, num_bytes: int) -> None:
    """Returns when the proxy has sent so many bytes of bodies."""
    deadline = time.monotonic() + 60
    while proxy.traffic().sent < num_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (SERVER_ERROR, GenericError, "InternalError"),
        (SLOW_DOWN, GenericError, "SlowDown"),
        (FORBIDDEN, PermissionDeniedError, "AccessDenied"),
        (CLOCK_SKEWED, PermissionDeniedError, "RequestTimeTooSkewed"),
        (MISSING, FileNotFoundError, "NoSuchKey"),
        (Reset(), GenericError, "error sending request"),
    ],
)
def test_an_error_instead_of_an_answer(
    through: Bucket, proxy: Proxy, fault: Fault, kind: type[Exception], text: str
) -> None:
    proxy.add(Rule(fault=fault, times=1))
    with pytest.raises(kind, match=text):
        through.get("shard")
    assert through.get("shard") == DATA
    proxy.clear()
    proxy.add(Rule(fault=fault, method="PUT", times=1))
    with pytest.raises(kind, match=text):
        through.put("new", DATA)
    assert through.names() == ["shard"]
    through.put("new", DATA)
    assert through.get("new") == DATA


@pytest.mark.parametrize("fault", [SLOW_DOWN, MISSING])
def test_an_error_of_head_has_no_body(through: Bucket, proxy: Proxy, fault: Fault) -> None:
    proxy.add(Rule(fault=fault, method="HEAD", times=1))
    with pytest.raises((BaseError, FileNotFoundError), match="shard"):
        obstore.head(through.store(), "shard")
    store = through.store()
    assert [obstore.head(store, "shard")["size"] for _ in range(2)] == [len(DATA)] * 2


@pytest.mark.parametrize("fault", [Reset(after_bytes=100_000), Truncate(after_bytes=100_000)])
def test_a_body_that_ends_early_is_an_error(through: Bucket, proxy: Proxy, fault: Fault) -> None:
    proxy.add(Rule(fault=fault, method="GET", key="shard", times=1))
    answer = obstore.get(through.store(), "shard")
    assert answer.meta["size"] == len(DATA)
    with pytest.raises(GenericError, match=BODY_ENDED):
        answer.bytes()
    (first,) = proxy.traffic().exchanges
    assert (first.fault, first.status, first.sent) == (fault, 200, 100_000)
    assert through.get("shard") == DATA


def test_a_truncated_body_yields_its_bytes_first(through: Bucket, proxy: Proxy) -> None:
    proxy.add(Rule(fault=Truncate(after_bytes=70_000), method="GET"))
    found: list[bytes] = []
    with pytest.raises(GenericError, match=BODY_ENDED):
        found.extend(bytes(part) for part in obstore.get(through.store(), "shard").stream(min_chunk_size=1))
    data = b"".join(found)
    assert len(data) <= 70_000
    assert data == DATA[: len(data)]


def test_a_retry_asks_for_the_rest_of_the_same_version(bucket: Bucket, through: Bucket, proxy: Proxy) -> None:
    """Retries of obstore go on where a body broke. obstore looks at the etag, so that no two versions are glued."""
    bucket.put("other", DATA[::-1])
    proxy.add(Rule(fault=Truncate(after_bytes=70_000), method="GET", times=1))
    assert bytes(obstore.get(through.store(retries=1), "shard").bytes()) == DATA
    assert [one.range for one in proxy.traffic().exchanges] == [None, f"bytes=70000-{len(DATA) - 1}"]
    proxy.clear()
    proxy.add(Rule(fault=Truncate(after_bytes=70_000), method="GET", times=1))
    proxy.add(Rule(fault=Replace(key="other"), after=1))
    with pytest.raises(GenericError, match=BODY_ENDED):
        obstore.get(through.store(retries=1), "shard").bytes()
    assert [one.status for one in proxy.traffic().exchanges] == [200, 206]


def test_an_upload_that_is_reset_leaves_no_object(bucket: Bucket, through: Bucket, proxy: Proxy) -> None:
    proxy.add(Rule(fault=Reset(after_bytes=100_000), method="PUT", times=1))
    with pytest.raises(GenericError, match="error sending request"):
        through.put("new", DATA)
    assert 100_000 <= proxy.traffic().received <= len(DATA)
    assert bucket.names() == ["shard"]


@pytest.mark.parametrize("after_bytes", [None, 100_000])
def test_a_hang_ends_with_the_client_timeout(through: Bucket, proxy: Proxy, after_bytes: int | None) -> None:
    proxy.add(Rule(fault=Hang(seconds=1000, after_bytes=after_bytes), method="GET", times=1))
    with pytest.raises(GenericError, match=rf"error sending request|{BODY_ENDED}"):
        obstore.get(through.store(timeout_s=0.3), "shard").bytes()
    assert proxy.traffic().sent <= (after_bytes or 0)
    assert through.get("shard") == DATA  # and the proxy ends although the first thread still hangs


def test_a_hang_goes_on(through: Bucket, proxy: Proxy) -> None:
    proxy.add(Rule(fault=Hang(seconds=0.01), key="shard", times=1))
    proxy.add(Rule(fault=Hang(seconds=0.01, after_bytes=9), key="shard"))
    assert [through.get("shard"), through.get("shard")] == [DATA, DATA]


def test_a_replaced_object_has_another_etag(bucket: Bucket, through: Bucket, proxy: Proxy) -> None:
    bucket.put("other/b c", b"other bytes")
    proxy.add(Rule(fault=Replace(key="other/b c"), key="shard", after=1))
    store = through.store()
    first = obstore.head(store, "shard")
    answer = obstore.get(store, "shard")
    assert bytes(answer.bytes()) == b"other bytes"
    assert answer.meta["e_tag"] != first["e_tag"]
    with pytest.raises(PreconditionError, match="412"):
        obstore.get(store, "shard", options={"if_match": first["e_tag"]})
    assert [one.if_match for one in proxy.traffic().exchanges] == [None, None, first["e_tag"]]
    assert proxy.requests == {("HEAD", "shard"): 1, ("GET", "shard"): 2}


def test_a_corrupt_body_has_the_same_etag(through: Bucket, proxy: Proxy) -> None:
    proxy.add(Rule(fault=Corrupt(at=1_000_000), method="GET", times=1))
    store = through.store()
    answers = [obstore.get(store, "shard") for _ in range(2)]
    bodies = [bytes(answer.bytes()) for answer in answers]
    assert [index for index in range(len(DATA)) if bodies[0][index] != DATA[index]] == [1_000_000]
    assert bodies[1] == DATA
    assert answers[0].meta["e_tag"] == answers[1].meta["e_tag"]


def test_a_clock_that_is_off(through: Bucket, proxy: Proxy) -> None:
    proxy.add(Rule(fault=ClockOff(), times=1))
    store = through.store()
    moved, right = obstore.head(store, "shard"), obstore.head(store, "shard")
    assert moved["last_modified"] - right["last_modified"] == timedelta(days=1)
    assert abs(right["last_modified"] - datetime.now(UTC)) < timedelta(hours=1)


def test_a_list_of_objects_that_nobody_put(through: Bucket, proxy: Proxy) -> None:
    proxy.add(Rule(fault=Names(count=2500, size=7), method="LIST", key="many/*"))
    found = [(meta["path"], meta["size"]) for page in obstore.list(through.store(), "many/") for meta in page]
    assert found == [(name("many/", index), 7) for index in range(2500)]
    assert proxy.requests == {("LIST", "many/"): 3}
    assert through.names() == ["shard"]


def test_of_many_creators_one_wins(bucket: Bucket, proxy: Proxy) -> None:
    store = bucket.at(proxy.endpoint).store()
    won: list[int] = []

    def create(index: int) -> None:
        try:
            obstore.put(store, "metadata.json", b"%d" % index, mode="create")
        except AlreadyExistsError:
            return
        won.append(index)

    threads = [threading.Thread(target=create, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [b"%d" % index for index in won] == [bucket.get("metadata.json")]


def test_rules_count_for_themselves_and_the_first_one_wins() -> None:
    rules = Rules()
    rules.add(Rule(fault=SLOW_DOWN, method="GET", key="*.shard", after=1, times=2))
    rules.add(Rule(fault=FORBIDDEN, key="b.shard", after=2))
    asked = [("GET", "a.shard"), ("PUT", "a.shard"), ("GET", "b.shard"), ("GET", "b.shard"), ("GET", "b.shard")]
    assert [rules.fault_of(*one) for one in asked] == [None, None, SLOW_DOWN, SLOW_DOWN, FORBIDDEN]
    rules.clear()
    assert rules.fault_of("GET", "b.shard") is None


def test_requests_that_are_open_are_counted(through: Bucket, proxy: Proxy) -> None:
    proxy.add(Rule(fault=Hang(seconds=1000, after_bytes=1000), key="shard", times=2))
    store = through.store()
    answers = [obstore.get(store, "shard") for _ in range(2)]
    wait_until_sent(proxy, 2000)
    assert len(answers) == 2
    assert proxy.in_flight == 2 * (len(DATA) - 1000)
    assert through.get("shard") == DATA
    assert proxy.traffic().peak == 3


def test_requests_without_a_signature_reach_public_buckets_only(
    server: ObjectServer, through: Bucket, proxy: Proxy
) -> None:
    public = server.make_bucket(public=True)
    public.put("shard", DATA)
    assert bytes(obstore.get(public.at(proxy.endpoint).store(skip_signature=True), "shard").bytes()) == DATA
    with pytest.raises(PermissionDeniedError, match="403 Forbidden"):
        obstore.get(through.store(skip_signature=True), "shard")
    assert through.get("shard") == DATA
    assert [one.signed for one in proxy.traffic().exchanges] == [False, False, True]


def test_the_limits_hold_while_bodies_pass(through: Bucket, proxy: Proxy) -> None:
    """Only a lower bound is asserted, so that a busy machine does not matter."""
    proxy.limit(latency_s=0.05, bytes_per_s=10e6)
    begin = time.monotonic()
    assert through.get("shard") == DATA
    assert time.monotonic() - begin >= 0.05 + len(DATA) / 10e6 - 0.06  # what an idle link may send at once
    proxy.limit()
    assert through.get("shard") == DATA


def test_a_link_is_shared_by_all_who_ask() -> None:
    now = 100.0
    link = Link(1000, clock=lambda: now)
    assert link.wait_s(50) == 0  # the allowance of an idle link
    assert [link.wait_s(100), link.wait_s(100)] == [pytest.approx(0.1), pytest.approx(0.2)]
    now += 0.15
    assert link.wait_s(100) == pytest.approx(0.15)
    now += 3600  # idle hours do not add up
    assert [link.wait_s(50), link.wait_s(100)] == [0, pytest.approx(0.1)]
    assert (link.piece(1 << 18), Link().piece(1 << 18), Link(10).piece(1 << 18)) == (10, 1 << 18, 1)
    assert Link().wait_s(10**12) == 0


def test_a_link_passes_its_bandwidth_over_a_long_time() -> None:
    """A clock that oversleeps by 1 to 8 ms each time still sees 50 MB/s."""
    now = 0.0
    link = Link(50e6, clock=lambda: now)
    piece, passed = link.piece(1 << 18), 0
    while now < 10:
        wait = link.wait_s(piece)
        now += wait + (0.001 * (1 + passed // piece % 8) if wait else 0)
        passed += piece
    assert passed / now == pytest.approx(50e6, rel=0.01)


def test_the_environment_knows_no_other_store(through: Bucket, proxy: Proxy, environment: None, tmp_path: Path) -> None:
    from obstore.store import S3Store

    store = S3Store(through.name, client_options={"allow_http": True})
    assert bytes(obstore.get(store, "shard").bytes()) == DATA
    assert proxy.requests == {("GET", "shard"): 1}
    assert list((tmp_path / "no-profiles").iterdir()) == []
