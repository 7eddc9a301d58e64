"""One connection through the proxy: each request meets the link, its fault and the server."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http import HTTPStatus
from xml.sax.saxutils import escape

from benchmarks.objects.faults import ClockOff, Corrupt, Fault, Hang, Names, Replace, Reset, Rules, Status, Truncate
from benchmarks.objects.link import Link
from benchmarks.objects.listing import page
from benchmarks.objects.message import PIECE, GoneError, Head, Target, Wire
from benchmarks.objects.traffic import Exchange, Recorder

_RST_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(kw_only=True)
class Conditions:
    """The state that all connections of a proxy share."""

    latency_s: float
    down: Link
    up: Link
    rules: Rules = field(default_factory=Rules)
    recorder: Recorder = field(default_factory=Recorder)
    creates: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float) -> None:
        """Sleeps, but not longer than the proxy lives: then it raises `GoneError`."""
        if seconds > 0 and self.ended.wait(seconds):
            raise GoneError


class Connection:
    """Passes requests of `client` to `server` and the answers back, one after the other."""

    def __init__(self, conditions: Conditions, *, client: Wire, server: Wire) -> None:
        self._conditions = conditions
        self._client = client
        self._server = server

    def exchange(self) -> bool:
        """Serves one request. Returns False if it was the last one; raises `GoneError` if a side has gone."""
        head = self._client.head()
        target = Target.of(head)
        fault = self._conditions.rules.fault_of(target.method, target.key)
        record = _record(head, target, fault)
        self._conditions.recorder.begin(record)
        try:
            self._conditions.wait(self._conditions.latency_s)
            return self._meet(head, target, record) and not head.closes
        finally:
            self._conditions.recorder.end(record)

    def _meet(self, head: Head, target: Target, record: Exchange) -> bool:
        match record.fault:
            case Status(status=status, code=code, message=message):
                text = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
                return self._make_up(head, record, status=status, body=text.encode())
            case Names(count=count, size=size):
                body = page(target.query, bucket=target.bucket, count=count, size=size)
                return self._make_up(head, record, status=200, body=body)
            case Replace(key=key):
                return self._pass(head.but(first=target.line(key)), record)
            case Reset(after_bytes=None):
                self._reset()
        return self._pass(head, record)

    def _make_up(self, head: Head, record: Exchange, *, status: int, body: bytes) -> bool:
        """Answers without the server."""
        for _ in self._upload(head, record):
            pass
        body = b"" if record.method == "HEAD" else body
        first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"
        answer = Head(first=first, headers=(("Content-Type", "application/xml"), ("Content-Length", str(len(body)))))
        record.status = status
        record.sent = record.promised = len(body)
        self._conditions.recorder.end(record)
        self._client.sock.sendall(answer.encode() + body)
        return True

    def _pass(self, head: Head, record: Exchange) -> bool:
        """Lets the server answer. Whoever creates an object waits until the creator before has an answer."""
        fault = record.fault
        upload: Iterable[bytes | memoryview] = self._upload(head, record)
        creates = head.get("if-none-match") == "*"
        if creates:
            upload = [bytes(part) for part in upload]
        # moto looks for the object first and stores it later, so that two creators at once would both succeed.
        with self._conditions.creates if creates else contextlib.nullcontext():
            self._server.sock.sendall(head.but(expect=None).encode())
            for part in upload:
                self._server.sock.sendall(part)
                if isinstance(fault, Reset) and record.received >= (fault.after_bytes or 0):
                    self._reset()
            answer = self._server.head()
        if isinstance(fault, Hang) and fault.after_bytes is None:
            self._conditions.wait(fault.seconds)
        if isinstance(fault, ClockOff):
            answer = _moved(answer, fault.seconds)
        self._answer(answer, record)
        return not answer.closes

    def _upload(self, head: Head, record: Exchange) -> Iterator[memoryview]:
        """Yields the request's body, as fast as the link lets it pass."""
        if head.chunked:
            raise NotImplementedError("the proxy takes uploads with Content-Length only")
        if (head.get("expect") or "").lower() == "100-continue":
            self._client.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        for part in self._through(self._conditions.up, self._client, head.length):
            record.received += len(part)
            yield part

    def _answer(self, answer: Head, record: Exchange) -> None:
        record.status = int(answer.first.split(" ")[1])
        bodiless = record.method == "HEAD" or record.status in (204, 304)
        if answer.chunked and not bodiless:
            body = self._server.chunks()
            self._server.unread(body)
            answer = answer.but(transfer_encoding=None, content_length=str(len(body)))
        length = 0 if bodiless else answer.length
        record.promised = length
        if not length:
            self._conditions.recorder.end(record)
        self._client.sock.sendall(answer.encode())
        at = getattr(record.fault, "after_bytes", None)
        begin = length if at is None else min(at, length)
        self._download(begin, record)
        if at is not None:
            self._interrupt(record.fault)
            self._download(length - begin, record)

    def _download(self, length: int, record: Exchange) -> None:
        for part in self._through(self._conditions.down, self._server, length):
            match record.fault:
                case Corrupt(at=at) if 0 <= at - record.sent < len(part):
                    part = _corrupted(part, at - record.sent)
            record.sent += len(part)
            if record.sent == record.promised:  # counted first: who has the last byte finds the counts complete
                self._conditions.recorder.end(record)
            self._client.sock.sendall(part)

    def _through(self, link: Link, source: Wire, length: int) -> Iterator[memoryview]:
        for part in source.body(length, piece=lambda: link.piece(PIECE)):
            self._conditions.wait(link.wait_s(len(part)))
            yield part

    def _interrupt(self, fault: Fault | None) -> None:
        match fault:
            case Hang(seconds=seconds):
                self._conditions.wait(seconds)
            case Reset():
                self._reset()
            case Truncate():
                raise GoneError

    def _reset(self) -> None:
        self._client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
        self._client.sock.close()
        raise GoneError


def _record(head: Head, target: Target, fault: Fault | None) -> Exchange:
    return Exchange(
        method=target.method,
        key=target.key,
        range=head.get("range"),
        if_match=head.get("if-match"),
        signed=head.get("authorization") is not None,
        fault=fault,
    )


def _corrupted(part: memoryview, at: int) -> memoryview:
    data = bytearray(part)
    data[at] ^= 1
    return memoryview(data)


def _moved(answer: Head, seconds: float) -> Head:
    moved = {}
    for name in ("date", "last-modified"):
        if (value := answer.get(name)) is not None:
            when = parsedate_to_datetime(value) + timedelta(seconds=seconds)
            moved[name.replace("-", "_")] = format_datetime(when, usegmt=True)
    return answer.but(**moved)
