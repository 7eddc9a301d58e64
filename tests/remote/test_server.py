"""The bed of the remote tests: what a bucket behind the proxy looks like to obstore, fault by fault."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError
from obstore.store import HTTPStore

from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket, ObjectServer


def test_objects_come_back_and_are_listed(bucket: Bucket) -> None:
    bucket.put_all([("a/1", b"one"), ("a/2", b""), ("b", b"x" * 3_000_000)])
    assert bucket.names() == ["a/1", "a/2", "b"]
    assert bucket.names("a/") == ["a/1", "a/2"]
    assert bucket.get("a/1") == b"one"
    assert bucket.get("b") == b"x" * 3_000_000


def test_each_test_has_a_bucket_of_its_own(bucket: Bucket, server: ObjectServer) -> None:
    assert bucket.names() == []
    assert server.make_bucket().name != bucket.name


def test_a_second_create_of_a_key_is_refused(bucket: Bucket) -> None:
    obstore.put(bucket.store(), "metadata.json", b"first", mode="create")
    with pytest.raises(AlreadyExistsError, match=r"metadata\.json"):
        obstore.put(bucket.store(), "metadata.json", b"second", mode="create")
    assert bucket.get("metadata.json") == b"first"


def test_moto_answers_one_request_at_a_time(
    server: ObjectServer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads share the buffer of an object: a GET beside a PUT of the same key was answered by 500."""
    assert server._moto is not None
    assert server._moto._server is not None
    first = server._moto._server.app
    inside, seen = [0], []

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        inside[0] += 1
        seen.append(inside[0])
        time.sleep(0.002)
        answer = first._app(environ, start_response)
        inside[0] -= 1
        return answer

    monkeypatch.setattr(server._moto._server, "app", type(first)(app))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: bucket.put("a", bytes([number]) * 100_000), range(20)))
        read = list(threads.map(lambda _: bucket.get("a"), range(20)))
    assert seen == [1] * 40
    assert len(set(read)) == 1


def test_the_proxy_passes_all_and_counts(bucket: Bucket, proxy: Proxy) -> None:
    through = bucket.at(proxy.endpoint)
    data = bytes(range(256)) * 8192
    through.put("a b/ü", data)
    assert through.get("a b/ü") == data
    assert bytes(obstore.get_range(through.store(), "a b/ü", start=5, end=300)) == data[5:300]
    assert obstore.head(through.store(), "a b/ü")["size"] == len(data)
    assert through.names("a b/") == ["a b/ü"]
    assert proxy.requests == {("PUT", "a b/ü"): 1, ("GET", "a b/ü"): 2, ("HEAD", "a b/ü"): 1, ("LIST", "a b/"): 1}
    assert proxy.bytes_of("a b/ü") == len(data) + 295
    traffic = proxy.traffic()
    assert traffic.received == len(data)
    assert [one.range for one in traffic.exchanges if one.method == "GET"] == [None, "bytes=5-299"]
    assert proxy.in_flight == 0


def test_a_process_has_one_server(server: ObjectServer) -> None:
    with pytest.raises(RuntimeError, match="one state a process"), ObjectServer():
        pass
    assert server.make_bucket().names() == []


def test_an_error_of_moto_is_shown(server: ObjectServer) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)400 to PUT /x, 200 expected: .*InvalidBucketName"):
        server.make_bucket("x")


def test_a_public_bucket_is_a_plain_web_server_too(server: ObjectServer, proxy: Proxy) -> None:
    public = server.make_bucket(public=True)
    public.put("tars/a.tar", b"0123456789")
    web = HTTPStore(f"{proxy.endpoint}/{public.name}", client_options={"allow_http": True})
    assert bytes(obstore.get(web, "tars/a.tar").bytes()) == b"0123456789"
    assert bytes(obstore.get_range(web, "tars/a.tar", start=2, length=3)) == b"234"
    assert proxy.requests == {("GET", "tars/a.tar"): 2}
