"""A server over a small cache in this process, and a client that says exactly what it is told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay.inspect.page.overview import CardChoice, overview_of
from forebay.inspect.page.serve import Server
from forebay.store.cache import open_cache
from tests.store_factory import make_cache


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Client:
    """root: `/TOKEN`. host: what a browser sends as Host."""

    port: int
    root: str
    folder: Path

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def say(self, data: bytes) -> bytes:
        """Sends bytes and returns all that comes back until the server closes."""
        with self.connect() as connection:
            connection.sendall(data)
            return _all(connection)

    def ask(self, path: str, *, method: str = "GET", host: str | None = None, headers: str = "") -> Reply:
        """Returns the reply to one request; `headers` are lines that end in \\r\\n."""
        name = self.host if host is None else host
        return reply_of(
            self.say(f"{method} {path} HTTP/1.1\r\nHost: {name}\r\n{headers}\r\n".encode("utf-8", "surrogateescape"))
        )

    def get(self, path: str, **options: str) -> Reply:
        """Returns the reply to a path below the token."""
        return self.ask(f"{self.root}{path}", **options)


def _all(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def reply_of(data: bytes) -> Reply:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = [line.partition(": ") for line in lines]
    assert len({name.lower() for name, _, _ in pairs}) == len(pairs), "a header stands twice"
    return Reply(int(first.split(" ")[1]), {name.lower(): value for name, _, value in pairs}, body)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Client]:
    """Serves a cache until the context ends."""
    with Server(overview_of(open_cache(folder), None, choice=CardChoice(), roots=[])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield Client(server.server_port, f"/{server.token}", folder)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = make_cache(tmp_path_factory.mktemp("served"), num_samples=7, keep_waveform=True)
    with served(folder) as found:
        yield found
