"""Faults between a client and its bucket, and the rules that say with which requests they come."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """An error instead of an answer. The request does not reach the bucket."""

    status: int
    code: str
    message: str = "made by a test"


SERVER_ERROR = Status(status=500, code="InternalError")
SLOW_DOWN = Status(status=503, code="SlowDown", message="Please reduce your request rate.")
FORBIDDEN = Status(status=403, code="AccessDenied", message="Access Denied")
CLOCK_SKEWED = Status(status=403, code="RequestTimeTooSkewed", message="The difference is too large.")
MISSING = Status(status=404, code="NoSuchKey", message="The specified key does not exist.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reset:
    """A TCP reset: before any answer, or after at most `after_bytes` of the body, the upload's if there is one."""

    after_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncate:
    """The answer's body ends orderly after `after_bytes`, and its Content-Length promised more."""

    after_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """Silence for `seconds`, before the answer or after `after_bytes` of its body. Then the answer goes on."""

    seconds: float
    after_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replace:
    """The object `key` of the same bucket answers instead, with its own body, size and etag."""

    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockOff:
    """The server's clock is off: Date and Last-Modified of the answer move by `seconds`."""

    seconds: float = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrupt:
    """One bit of the answer's body is another, at byte `at`. Length and etag stay what they were."""

    at: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """A LIST finds `count` objects that nobody has put: moto takes minutes to list a million."""

    count: int
    size: int = 1


Fault = Status | Reset | Truncate | Hang | Replace | ClockOff | Corrupt | Names


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Gives matching requests a fault: the first `after` of them pass, the next `times` have it (None: all later ones).

    `key` is a pattern of `fnmatch`. `method` is GET, HEAD, PUT, POST, DELETE, LIST (whose key is the prefix) or "*".
    """

    fault: Fault
    method: str = "*"
    key: str = "*"
    after: int = 0
    times: int | None = None

    def matches(self, method: str, key: str) -> bool:
        """Says if the rule counts this request."""
        return self.method in ("*", method) and fnmatchcase(key, self.key)


class Rules:
    """The rules in force, and how many requests each of them has counted."""

    def __init__(self) -> None:
        self._rules: list[tuple[Rule, int]] = []
        self._lock = threading.Lock()

    def add(self, rule: Rule) -> None:
        """Adds a rule, which holds from the next request on."""
        with self._lock:
            self._rules.append((rule, 0))

    def clear(self) -> None:
        """No rule holds any more."""
        with self._lock:
            self._rules.clear()

    def fault_of(self, method: str, key: str) -> Fault | None:
        """Counts the request in every rule that it matches. Returns the fault of the first one that says so."""
        found: Fault | None = None
        with self._lock:
            for index, (rule, count) in enumerate(self._rules):
                if not rule.matches(method, key):
                    continue
                self._rules[index] = rule, count + 1
                hit = count >= rule.after and (rule.times is None or count < rule.after + rule.times)
                if hit and found is None:
                    found = rule.fault
        return found
