"""The traffic of a proxy: one record a request, and the sums over them."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.objects.faults import Fault


@dataclass(kw_only=True, slots=True)
class Exchange:
    """One request and its answer. The counts move while bodies pass."""

    method: str
    """GET, HEAD, PUT, POST, DELETE, or LIST, whose key is the prefix."""
    key: str
    range: str | None = None
    if_match: str | None = None
    signed: bool = False
    """Says if the request carried an Authorization header."""
    fault: Fault | None = None
    status: int | None = None
    """None until the answer begins, and for ever if a fault left none."""
    promised: int = 0
    """Content-Length of the answer."""
    sent: int = 0
    """Bytes of the answer's body that went to the client."""
    received: int = 0
    """Bytes of the request's body that came from it."""
    open: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The exchanges of a proxy, in the order in which their requests came."""

    exchanges: list[Exchange] = field(default_factory=list)
    peak: int = 0
    """The most requests that were open at a time."""

    @property
    def requests(self) -> Counter[tuple[str, str]]:
        """Counts the requests by method and key, those that met a fault included."""
        return Counter((exchange.method, exchange.key) for exchange in self.exchanges)

    @property
    def sent(self) -> int:
        """Bytes of bodies that went to clients."""
        return sum(exchange.sent for exchange in self.exchanges)

    @property
    def received(self) -> int:
        """Bytes of bodies that came from clients."""
        return sum(exchange.received for exchange in self.exchanges)

    @property
    def in_flight(self) -> int:
        """Bytes that answers under way have promised and not sent yet."""
        return sum(exchange.promised - exchange.sent for exchange in self.exchanges if exchange.open)

    def bytes_of(self, key: str) -> int:
        """Bytes of the object's body that went to clients."""
        return sum(one.sent for one in self.exchanges if one.key == key and one.method == "GET")


class Recorder:
    """Keeps the exchanges of a proxy. Threads may share it."""

    def __init__(self) -> None:
        self._exchanges: list[Exchange] = []
        self._open = 0
        self._peak = 0
        self._lock = threading.Lock()

    def begin(self, exchange: Exchange) -> None:
        """The exchange is recorded and open."""
        with self._lock:
            self._exchanges.append(exchange)
            self._open += 1
            self._peak = max(self._peak, self._open)

    def end(self, exchange: Exchange) -> None:
        """The exchange is over, however it ended. A second call changes nothing."""
        with self._lock:
            self._open -= exchange.open
            exchange.open = False

    def snapshot(self) -> Traffic:
        """Returns what has passed. Exchanges that are open go on counting."""
        with self._lock:
            return Traffic(exchanges=list(self._exchanges), peak=self._peak)

    def clear(self) -> None:
        """Nothing has passed. Exchanges that are open are forgotten."""
        with self._lock:
            self._exchanges.clear()
            self._peak = self._open
