"""A link of a given bandwidth, that all connections share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_BURST_S = 0.05
"""What a link that idled may send at once. A sleep that ends late is made good out of the same allowance."""


class Link:
    """Says how long each piece has to wait, so that all pieces together pass at `bytes_per_s`. None is no limit."""

    def __init__(self, bytes_per_s: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait_s(self, num_bytes: int) -> float:
        """Returns the seconds after which these bytes have passed the link, and takes its time for them."""
        if self.bytes_per_s is None:
            return 0.0
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - _BURST_S) + num_bytes / self.bytes_per_s
            return max(0.0, self._free_at - now)

    def piece(self, most: int) -> int:
        """Returns into how large pieces a body is cut: 10 ms each, so that connections share the link evenly."""
        if self.bytes_per_s is None:
            return most
        return max(1, min(most, int(self.bytes_per_s * 0.01)))
