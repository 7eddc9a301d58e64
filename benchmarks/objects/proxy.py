"""An HTTP/1.1 proxy on loopback in front of an object store: slow, narrow and faulty as it is told, and it counts.

One thread serves one connection. Latency is waited once a request, before its answer. The bandwidth holds for each
direction over all connections together.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from types import TracebackType

from benchmarks.objects.connection import Conditions, Connection
from benchmarks.objects.faults import Rule
from benchmarks.objects.link import Link
from benchmarks.objects.message import GoneError, Wire
from benchmarks.objects.traffic import Traffic


class Proxy:
    """A context in which a proxy of `upstream` (host, port) listens on a free port of loopback.

    Clients get `endpoint` instead of the server's. Link and rules may change at any time.
    """

    def __init__(self, upstream: tuple[str, int], *, latency_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        self._upstream = upstream
        self._conditions = Conditions(latency_s=latency_s, down=Link(bytes_per_s), up=Link(bytes_per_s))
        self._sockets: set[socket.socket] = set()
        self._acceptor = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket()

    def __enter__(self) -> Proxy:
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conditions.ended.set()
        for sock in (self._listener, *list(self._sockets)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()  # first: after it no thread begins
        for thread in self._threads:
            thread.join()
        self._listener.close()

    @property
    def endpoint(self) -> str:
        """The URL that clients take for AWS_ENDPOINT_URL."""
        host, port = self._listener.getsockname()
        return f"http://{host}:{port}"

    def limit(self, *, latency_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        """Sets the link anew, for requests under way too. Without arguments it is as fast as the machine."""
        self._conditions.latency_s = latency_s
        self._conditions.down.bytes_per_s = self._conditions.up.bytes_per_s = bytes_per_s

    def add(self, rule: Rule) -> None:
        """Adds a rule, which holds from the next request on."""
        self._conditions.rules.add(rule)

    def clear(self) -> None:
        """No rule holds any more, and nothing has been counted."""
        self._conditions.rules.clear()
        self._conditions.recorder.clear()

    def traffic(self) -> Traffic:
        """Returns what has passed until now."""
        return self._conditions.recorder.snapshot()

    @property
    def requests(self) -> Counter[tuple[str, str]]:
        """Counts the requests by method and key, those that met a fault included."""
        return self.traffic().requests

    def bytes_of(self, key: str) -> int:
        """Bytes of the object's body that went to clients."""
        return self.traffic().bytes_of(key)

    @property
    def in_flight(self) -> int:
        """Bytes that answers under way have promised and not sent yet."""
        return self.traffic().in_flight

    def _accept(self) -> None:
        while not self._conditions.ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:  # the listener was shut down
                return
            thread = threading.Thread(target=self._serve, args=(client,), name="proxy", daemon=True)
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, GoneError), client, socket.create_connection(self._upstream) as server:
            self._sockets |= {client, server}
            if self._conditions.ended.is_set():
                return
            try:
                connection = Connection(self._conditions, client=Wire(client), server=Wire(server))
                while connection.exchange():
                    pass
            finally:
                self._sockets -= {client, server}
