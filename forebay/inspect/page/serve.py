"""A server for one user on this machine: bound to 127.0.0.1, GET alone, every path behind a random token.

What is answered to a path: pages, media of samples by their index, and rows of all samples, searched and sorted here: a
browser holds fifty rows of a million."""

from __future__ import annotations

import functools
import hmac
import http.server
import json
import logging
import re
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import CacheError, ConfigError
from forebay.inspect.page.cards import SERVED_COLUMNS, SERVED_SIDE, Card, CardReading, linked, wav_head, webp
from forebay.inspect.page.overview import Overview, PageRows
from forebay.inspect.page.page_samples import Chosen
from forebay.inspect.page.words import page, policy
from forebay.inspect.page.write_pages import cache_page
from forebay.store.layout import Array
from forebay.store.metadata import foreign_values
from forebay.visible import printable

_KEPT = 6
"""Orders, and answers to searches, that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """The question of a page: `size` rows from `first` on, sorted by column `by`, of those that hold `text`.

    language: the number of one; None: all of them.
    """

    first: int = 0
    size: int = 50
    by: int = 0
    is_falling: bool = False
    text: str = ""
    language: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, list[str]], *, columns: int, languages: int) -> Query | None:
        """Returns the query of a URL's parameters; None where one of them is none that a page sends."""
        one = {name: values[0] for name, values in given.items() if len(values) == 1}
        language, text = one.get("language", ""), one.get("text", "")
        numbers = [one.get("first", "0"), one.get("size", "50"), one.get("by", "0"), language or "0"]
        if len(one) < len(given) or not all(n.isascii() and n.isdigit() and len(n) <= 12 for n in numbers):
            return None
        first, size, by, number = map(int, numbers)
        is_there = 1 <= size <= 200 and by < columns and number < max(languages, 1) and len(text) <= 200
        if not is_there or one.get("down", "0") not in ("0", "1"):
            return None
        chosen = number if language else None
        return cls(first=first, size=size, by=by, is_falling=one.get("down") == "1", text=text, language=chosen)


class PageSearch:
    """Answers queries over all samples of a cache, and keeps its last orders and masks. Threads share it."""

    def __init__(self, *, rows: PageRows) -> None:
        self.rows = rows
        # Two threads may make one value at once; either is right.
        self._order, self._mask = (functools.lru_cache(_KEPT)(make) for make in (self._ordered, self._masked))

    def answer(self, query: Query) -> dict[str, Any]:
        """Returns `total`, how many samples are found, and `rows`, those that are asked for."""
        order = self._order(query.by, query.is_falling)
        if query.text or query.language is not None:
            order = order[self._mask(query.text, query.language)[order]]
        return {"total": len(order), "rows": self.rows.of(order[query.first : query.first + query.size])}

    def _ordered(self, by: int, is_falling: bool) -> Array:  # noqa: FBT001  the key of what is kept
        key = self.rows.shown[by].key()
        return np.argsort(-key if is_falling else key, kind="stable")

    def _masked(self, text: str, language: int | None) -> Array:
        columns = self.rows.columns
        found = np.ones(len(columns), bool)
        if language is not None:
            found &= columns.languages[1] == language
        if text:
            found &= _holds(columns.ids, text) | _holds(columns.texts, text)
        return found


def _holds(column: pa.ChunkedArray, text: str) -> Array:
    held = pc.match_substring(column, text, ignore_case=True)
    return np.asarray(pc.fill_null(held, fill_value=False).to_numpy(), bool)


_NUMBER = "([0-9]{1,12})"


@dataclass(frozen=True, kw_only=True, slots=True)
class PageAnswer:
    """The answer to a path. parts: the body, end to end; content_policy: what a page may load."""

    status: int
    media_type: str
    parts: Sequence[bytes | memoryview]
    content_policy: str = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; sandbox"
    has_ranges: bool = False

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return sum(memoryview(part).nbytes for part in self.parts)


def plain(status: int, text: str) -> PageAnswer:
    """Returns an answer of plain text."""
    return PageAnswer(status=status, media_type="text/plain; charset=utf-8", parts=[f"{text}\n".encode()])


class Pages:
    """Answers paths below a root of one cache. Threads share it.

    What a path names is looked up by a table of patterns: there is no path on disk in any of them.
    """

    def __init__(self, overview: Overview, *, root: str) -> None:
        """root: `/TOKEN`, without a slash at its end."""
        self.overview, self.root = overview, root
        self._search = PageSearch(rows=overview.rows)
        self._first: str | None = None
        self._lock = threading.Lock()
        routes: list[tuple[str, Callable[..., PageAnswer]]] = [
            ("/?", self._home),
            (f"/sample/{_NUMBER}", self._sample),
            (f"/audio/{_NUMBER}\\.wav", self._audio),
            (f"/spectrum/{_NUMBER}\\.png", self._spectrum),
            (f"/image/{_NUMBER}/([0-9]{{1,4}})\\.webp", self._image),
        ]
        self._routes = [(re.compile(pattern), make) for pattern, make in routes]

    def answer(self, path: str, query: str) -> PageAnswer:
        """Returns what stands at a path below the root: 404 where nothing does, 500 where a sample is damaged."""
        try:
            with foreign_values(self.overview.columns.cache.folder):
                if path == "/rows":
                    return self._rows(query)
                for pattern, make in self._routes:
                    if found := pattern.fullmatch(path):
                        return make(*map(int, found.groups()))
        except CacheError as err:
            return plain(500, f"it cannot be read: {err}")
        return plain(404, "there is nothing at this address")

    def _home(self) -> PageAnswer:
        overview, root, note = self.overview, self.root, f"All {len(self.overview.columns):,}."
        with self._lock:
            if self._first is None:
                cards = [self._card(chosen) for chosen in overview.chosen]
                self._first = cache_page(
                    overview, cards, data={"root": root}, note=note, title="forebay", root=root, origin=_ORIGIN
                )
        return self._page(self._first)

    def _page(self, text: str) -> PageAnswer:
        rules = f"{policy(origin=_ORIGIN)}; frame-ancestors 'none'"
        parts = [text.encode("utf-8")]
        return PageAnswer(status=200, media_type="text/html; charset=utf-8", parts=parts, content_policy=rules)

    def _where(self, index: int) -> str:
        return f"{self.root}/sample/{index}"

    def _card(self, chosen: Chosen) -> Card:
        return linked(self.overview.reader.read(chosen), root=self.root, rate_hz=self.overview.rate_hz)

    def _sample(self, index: int) -> PageAnswer:
        count = len(self.overview.columns)
        if index >= count:
            return plain(404, f"there is no sample {index:,}: the cache has {count:,}")
        near = {"previous": self._where(index - 1)} if index else {}
        near |= {"next": self._where(index + 1)} if index + 1 < count else {}
        links = [(f"{self.root}/", "All samples"), *((where, name.capitalize()) for name, where in near.items())]
        text = page(
            "sample.html",
            f"sample {index}: forebay",
            data={"root": self.root, "neighbours": near},
            origin=_ORIGIN,
            home=f"{self.root}/",
            links=links,
            card=self._card(Chosen(index=index)),
            count=count,
            root="",
        )
        return self._page(text)

    def _reading(self, index: int) -> CardReading | None:
        if index >= len(self.overview.columns):
            return None
        reading = self.overview.reader.read(Chosen(index=index))
        if reading.card.problem:
            raise CacheError(reading.card.problem)
        return reading

    def _audio(self, index: int) -> PageAnswer:
        reading = self._reading(index)
        if reading is None or reading.waveform is None:
            return plain(404, "there is no such sound")
        # The values go from the mapping to the socket: an hour of sound takes no memory here.
        head = wav_head(reading.waveform, self.overview.rate_hz)
        values = reading.waveform.data.cast("B")
        return PageAnswer(status=200, media_type="audio/wav", parts=[head, values], has_ranges=True)

    def _spectrum(self, index: int) -> PageAnswer:
        reading = self._reading(index)
        if reading is None or not reading.tensors:
            return plain(404, "there is no such picture")
        made = reading.picture(rate_hz=self.overview.rate_hz, columns=SERVED_COLUMNS)
        return plain(404, "nothing to draw") if made is None else _media("image/png", made[0])

    def _image(self, index: int, place: int) -> PageAnswer:
        reading = self._reading(index)
        if reading is None or place >= len(reading.pictures):
            return plain(404, "there is no such image")
        return _media("image/webp", webp(reading.pictures[place].pixels, side=SERVED_SIDE))

    def _rows(self, query: str) -> PageAnswer:
        languages = len(self.overview.columns.languages[0])
        try:
            given = parse_qs(query[:2_000], keep_blank_values=True, max_num_fields=10, errors="strict")
        except ValueError:
            given = {"first": ["?"]}
        wanted = Query.of(given, columns=len(self.overview.rows.shown), languages=languages)
        if wanted is None:
            return plain(400, "these are no rows that a page asks for")
        return _media("application/json", json.dumps(self._search.answer(wanted), allow_nan=False).encode("ascii"))


_ORIGIN = "'self'"


def _media(media_type: str, data: bytes) -> PageAnswer:
    return PageAnswer(status=200, media_type=media_type, parts=[data])


logger = logging.getLogger(__name__)
HOST = "127.0.0.1"
MAX_THREADS = 24
"""Connections that are answered at once; another one is told to come again."""
HEAD_S = 10.0
"""A connection has so long to say what it wants."""
SEND_S = 20.0
"""A reader has so long to take 64 kB."""
_CHUNK = 1 << 16
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\nRetry-After: 1\r\n\r\n"


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Answers for one cache until it is told to stop. url: where a browser finds it."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, overview: Overview, *, port: int = 0) -> None:
        """port: 0: any free one. Raises ConfigError where the port cannot be had."""
        self.token = secrets.token_urlsafe(24)
        self.pages = Pages(overview, root=f"/{self.token}")
        self._room = threading.BoundedSemaphore(MAX_THREADS)
        self._heads: dict[socket.socket, float] = {}
        try:
            super().__init__((HOST, port), Handler)
        except OSError as err:
            raise ConfigError(
                f"--port {port}: {err.strerror}; name another port, or leave --port out for a free one"
            ) from err
        self.hosts = (f"{HOST}:{self.server_port}", f"localhost:{self.server_port}")

    @property
    def url(self) -> str:
        """The address, with the token that opens it."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def server_bind(self) -> None:
        """Binds without asking a name server what this machine is called."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives a connection a thread, or where all are at work an answer at once."""
        if not self._room.acquire(blocking=False):
            request.settimeout(1.0)
            try:
                request.sendall(_BUSY)
            except OSError as err:
                logger.debug("a connection was refused, and gone: %s", err)
            self.shutdown_request(request)
            return
        self._heads[request] = time.monotonic() + HEAD_S
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers, and makes room for the next."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._heads.pop(request, None)
            self._room.release()

    def has_asked(self, request: socket.socket) -> None:
        """Notes that a connection has said what it wants."""
        self._heads.pop(request, None)

    def service_actions(self) -> None:
        """Ends connections that take too long to say what they want, byte by byte perhaps."""
        now = time.monotonic()
        for request, until in list(self._heads.items()):
            if now > until:
                self._heads.pop(request, None)
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError as err:
                    logger.debug("a slow connection was gone: %s", err)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  the base class calls it so
        """Logs what went wrong, without a word where a reader went away."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            logger.error("a request could not be answered", exc_info=error)


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection: one request, one answer."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = SEND_S

    def do_GET(self) -> None:
        """Answers with a body."""
        self._respond(has_body=True)

    def do_HEAD(self) -> None:
        """Answers without one."""
        self._respond(has_body=False)

    def parse_request(self) -> bool:
        """Returns whether this is a request, and one that changes nothing."""
        is_request = super().parse_request()
        if is_request and self.command not in ("GET", "HEAD"):
            self.send_error(405)
            return False
        return is_request

    def _respond(self, *, has_body: bool) -> None:
        self.server.has_asked(self.connection)
        self._send(self._answer(), has_body=has_body)

    def _answer(self) -> PageAnswer:
        hosts = self.headers.get_all("Host", [])
        # A page of another site whose name leads here sends its own name.
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            return plain(403, "this server answers to 127.0.0.1 and localhost alone")
        path, _, query = self.path.partition("?")
        given, slash, rest = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(_bytes(given), _bytes(self.server.token)):
            return plain(403, "the address needs the token that forebay inspect --serve printed")
        return self.server.pages.answer(slash + rest, query)

    def _send(self, answer: PageAnswer, *, has_body: bool) -> None:
        size = answer.size
        span = self._span(size) if answer.has_ranges and answer.status == 200 else (0, size)
        if span is None:
            answer, span = plain(416, "no such range"), (0, 0)
        start, end = span
        is_part = (start, end) != (0, size) and answer.status == 200
        self.send_response(206 if is_part else answer.status)
        self.close_connection = True
        headers = {
            "Connection": "close",
            "Content-Type": answer.media_type,
            "Content-Security-Policy": answer.content_policy,
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }
        if answer.has_ranges:
            headers["Accept-Ranges"] = "bytes"
        if answer.status == 405:
            headers["Allow"] = "GET, HEAD"
        for name, value in headers.items():
            self.send_header(name, value)
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        elif answer.status == 416:
            self.send_header("Content-Range", f"bytes */{size}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if has_body:
            for chunk in _chunks(answer, start, end):
                self.wfile.write(chunk)

    def _span(self, size: int) -> tuple[int, int] | None:
        """Returns which bytes are asked for; all of them where the header says nothing known; None: there are none."""
        found = _RANGE.fullmatch(self.headers.get("Range", "").strip())
        if found is None or found.groups() == ("", ""):
            return 0, size
        first, last = found.groups()
        if not first:
            start, end = max(0, size - int(last)), size
        else:
            start, end = int(first), min(size, int(last) + 1) if last else size
        return (start, end) if start < end else None

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answers what is no request with plain text: nothing of it comes back."""
        self.server.has_asked(self.connection)
        self._send(
            plain(code, "only GET and HEAD" if code == 405 else "this request is not understood"),
            has_body=self.command != "HEAD",
        )

    def version_string(self) -> str:
        """Returns what the server calls itself, without versions."""
        return "forebay"

    def log_message(self, format: str, *args: Any) -> None:
        """Logs what was asked for, without the token."""
        logger.debug("%s", printable(format % args).replace(self.server.token, "TOKEN"))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _chunks(answer: PageAnswer, start: int, end: int) -> Iterator[memoryview]:
    """Yields the bytes from start to end of a body, at most 64 kB at a time, copying none."""
    place = 0
    for part in answer.parts:
        view = memoryview(part)
        low, high = max(start - place, 0), min(end - place, view.nbytes)
        for first in range(low, high, _CHUNK):
            yield view[first : min(first + _CHUNK, high)]
        place += view.nbytes
