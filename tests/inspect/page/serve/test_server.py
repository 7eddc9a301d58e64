"""Answers of the server, and to whom it gives them, with real sockets."""

from __future__ import annotations

import io
import json
import socket
import time
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import soundfile

from forebay.errors import ConfigError
from forebay.inspect.page import serve as server_module
from forebay.inspect.page.overview import CardChoice, overview_of
from forebay.inspect.page.serve import Server
from forebay.store.cache import open_cache
from tests.inspect.conftest import Built
from tests.inspect.page.html import read_page
from tests.inspect.page.serve.conftest import Client, reply_of, served
from tests.store.trees import tree
from tests.store_factory import make_cache


def test_it_answers_with_the_page_and_what_the_page_names(client: Client) -> None:
    reply = client.get("/")
    assert reply.status == 200
    page = read_page(reply.body.decode())
    assert page.odd == []
    assert page.data["root"] == client.root
    links = {element["src"] for name in ("img", "audio") for element in page.elements(name)}
    links |= {element["href"] for element in page.elements("a") if element["href"].startswith("/")}
    assert len(links) > 14
    assert {client.ask(link).status for link in links} == {200}


def test_sound_is_the_stored_waveform_whole_and_by_ranges(client: Client) -> None:
    whole = client.get("/audio/3.wav")
    values, _ = soundfile.read(io.BytesIO(whole.body), dtype="int16")
    assert np.array_equal(values, open_cache(client.folder).read(3)["waveform"])
    assert (whole.headers["content-type"], whole.headers["accept-ranges"]) == ("audio/wav", "bytes")
    size = len(whole.body)
    for asked, start, end in (
        ("0-9", 0, 10),
        ("40-", 40, size),
        ("-7", size - 7, size),
        (f"44-{size + 99}", 44, size),
        (f"-{size + 5}", 0, size),
    ):
        part = client.get("/audio/3.wav", headers=f"Range: bytes={asked}\r\n")
        assert part.body == whole.body[start:end], asked
        if (start, end) == (0, size):
            assert part.status == 200
        else:
            assert (part.status, part.headers["content-range"]) == (206, f"bytes {start}-{end - 1}/{size}")
    for asked in (f"{size}-", "9-3", "-0"):
        assert client.get("/audio/3.wav", headers=f"Range: bytes={asked}\r\n").status == 416
    for asked in ("bytes=1-2,4-5", "lines=1-2", "bytes=-", "bytes=" + "9" * 40 + "-"):
        assert client.get("/audio/3.wav", headers=f"Range: {asked}\r\n").body == whole.body


def test_pictures_and_images_are_drawn(client: Client, photos: Built) -> None:
    reply = client.get("/spectrum/2.png")
    assert reply.headers["content-type"] == "image/png"
    assert PIL.Image.open(io.BytesIO(reply.body)).height == 80
    with served(photos.folder) as other:
        page = read_page(other.get("/").body.decode())
        images = [element["src"] for element in page.elements("img")]
        assert len(images) == 8
        for source in images:
            assert PIL.Image.open(io.BytesIO(other.ask(source).body)).format == "WEBP"
        assert other.get("/image/0/9.webp").status == 404
        assert other.get("/audio/0.wav").status == 404
        assert other.get("/spectrum/0.png").status == 404


@pytest.mark.parametrize("token", ["", "x", "x" * 32, "%00", "é", "../", "a" * 60_000])
def test_a_wrong_token_is_refused(client: Client, token: str) -> None:
    for path in (f"/{token}", f"/{token}/", f"/{token}/rows", f"/{token}/audio/0.wav"):
        assert client.ask(path).status == 403
    assert client.ask(f"/{client.root[1:-1]}/").status == 403
    assert client.ask(f"{client.root}x/").status == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost", "127.0.0.2:{port}", "0.0.0.0:{port}", ""]
)
def test_a_page_of_another_name_is_refused(client: Client, host: str) -> None:
    reply = client.get("/", host=host.format(port=client.port))
    assert reply.status == 403
    assert client.root[1:].encode() not in reply.body


def test_localhost_is_this_machine_too(client: Client) -> None:
    assert client.get("/", host=f"localhost:{client.port}").status == 200
    assert client.get("/", host=f"LOCALHOST:{client.port}").status == 200


def test_no_host_and_two_hosts_are_refused(client: Client) -> None:
    path = f"{client.root}/".encode()
    assert reply_of(client.say(b"GET " + path + b" HTTP/1.1\r\n\r\n")).status == 403
    twice = b"Host: " + client.host.encode() + b"\r\n"
    assert reply_of(client.say(b"GET " + path + b" HTTP/1.1\r\n" + 2 * twice + b"\r\n")).status == 403
    assert reply_of(client.say(b"GET " + path + b" HTTP/1.0\r\n\r\n")).status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_only_get_and_head_are_answered(client: Client, method: str) -> None:
    reply = client.get("/", method=method)
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")
    assert "access-control-allow-origin" not in reply.headers


def test_head_is_get_without_a_body(client: Client) -> None:
    for path in ("/", "/audio/1.wav", "/nothing"):
        whole, head = client.get(path), client.get(path, method="HEAD")
        assert head.body == b""
        assert (head.status, head.headers["content-length"]) == (whole.status, str(len(whole.body)))


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/audio/../metadata.json",
        "/audio/0.wav/..",
        "/audio/0.wav%00",
        "/audio/-1.wav",
        "/audio/7.wav",
        "/audio/999999999999.wav",
        "/audio/99999999999999999999999999.wav",
        "/audio/٣.wav",
        "/audio/1e3.wav",
        "/audio/ 1.wav",
        "/audio/01x.wav",
        "/sample/-1",
        "/sample/7",
        "/sample/٣",
        "/sample/1/2",
        "/image/0/0.webp",
        "/spectrum/7.png",
        "/metadata.json",
        "/audio/00000.tdz",
        "/é",
        "/\udcff",
    ],
)
def test_what_is_no_sample_is_not_found(client: Client, path: str) -> None:
    reply = client.get(path)
    assert reply.status in (400, 404)
    assert b"root:" not in reply.body


@pytest.mark.parametrize(
    "query",
    [
        "first=-1",
        "first=x",
        "first=1&first=2",
        "size=0",
        "size=201",
        "by=99",
        "by=-1",
        "language=99",
        "down=2",
        "first=" + "9" * 13,
        "text=" + "x" * 201,
        "text=%ff",
        "&".join(f"a{i}=1" for i in range(20)),
    ],
)
def test_rows_that_no_page_asks_for_are_refused(client: Client, query: str) -> None:
    assert client.get(f"/rows?{query}").status == 400


def test_rows_are_searched_sorted_and_paged(client: Client) -> None:
    def rows(query: str) -> tuple[int, list[int]]:
        found = json.loads(client.get(f"/rows?{query}").body)
        return found["total"], [row[0] for row in found["rows"]]

    assert rows("") == (7, [0, 1, 2, 3, 4, 5, 6])
    assert rows("down=1&size=3") == (7, [6, 5, 4])
    assert rows("first=5") == (7, [5, 6])
    assert rows("first=999999999999") == (7, [])
    assert rows("text=CLIP-0003") == (1, [3])
    assert rows("text=" + "%D0%9F%D1%80%D0%B8") == (1, [2])
    assert rows("text=hello&down=1") == (2, [5, 0])
    assert rows("language=1")[1] == [0, 3, 6]
    assert rows("language=1&text=0003") == (1, [3])
    assert rows("text=nothing+like+it") == (0, [])


def test_every_answer_says_how_it_may_be_used(client: Client) -> None:
    for path, status in (("/", 200), ("/rows", 200), ("/audio/0.wav", 200), ("/nothing", 404)):
        reply = client.get(path)
        assert reply.status == status
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert reply.headers["content-security-policy"].startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
        assert not [name for name in reply.headers if name.startswith("access-control-")]
        assert reply.headers["server"] == "forebay"


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    ],
)
def test_what_is_no_request_gets_no_page(client: Client, data: bytes) -> None:
    found = client.say(data)
    assert client.root[1:].encode() not in found
    assert b" 200 " not in found.partition(b"\r\n")[0]
    assert client.get("/").status == 200


def test_it_is_reached_from_this_machine_alone(client: Client) -> None:
    with Server(overview_of(open_cache(client.folder), None, choice=CardChoice(), roots=[])) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        assert len(server.token) == 32
        assert server.url == f"http://127.0.0.1:{server.server_port}/{server.token}/"
        with pytest.raises(ConfigError, match=rf"--port {server.server_port}: Address already in use; name another"):
            Server(server.pages.overview, port=server.server_port)


def test_a_slow_client_is_let_go_and_holds_up_nobody(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEAD_S", 0.3)
    with client.connect() as slow:
        slow.sendall(b"GET ")
        assert client.get("/").status == 200
        for _ in range(200):  # a byte at a time keeps no connection open
            try:
                slow.sendall(b"x")
                slow.settimeout(0.05)
                if slow.recv(1 << 16) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("the connection stays open")


def test_more_connections_than_threads_are_told_to_come_again(client: Client) -> None:
    held: list[socket.socket] = []
    try:
        for _ in range(server_module.MAX_THREADS):
            held.append(client.connect())
            held[-1].sendall(b"GET / HTTP/1.1\r\n")
        deadline = time.monotonic() + 20
        while (reply := client.get("/")).status != 503 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert reply.status == 503
        assert reply.headers["retry-after"] == "1"
    finally:
        for connection in held:
            connection.close()
    deadline = time.monotonic() + 20
    while client.get("/").status != 200 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert client.get("/").status == 200


def test_a_damaged_sample_is_named_and_the_others_are_served(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, num_samples=4, keep_waveform=True)
    shard = folder / "audio" / "00000.tdz"
    cache = open_cache(folder)
    offset = cache.shard_entries("audio")[0][1].spans[0][0]
    with open(shard, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    with served(folder) as damaged:
        assert b"This sample cannot be read" in damaged.get("/sample/0").body
        reply = damaged.get("/audio/0.wav")
        assert reply.status == 500
        assert b"stored xxh3-64" in reply.body
        assert damaged.get("/audio/1.wav").status == 200
        assert damaged.get("/").status == 200


def test_serving_changes_nothing_on_disk(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, keep_waveform=True)
    before = tree(tmp_path)
    with served(folder) as other:
        for path in ("/", "/rows?text=x", "/audio/0.wav", "/spectrum/0.png", "/sample/1", "/nothing"):
            other.get(path)
    assert tree(tmp_path) == before
