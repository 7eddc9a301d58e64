"""A store of the tests' own that keeps what it was asked, header by header, and answers what a test wants of it."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

MODIFIED = "Wed, 21 Oct 2015 07:28:00 GMT"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request. headers: with names in small letters."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a request. Length, etag and date are added to a body of status 200."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


Answers = Callable[[Asked], Answer]


class FakeStore:
    """The store that `fake_store` yields."""

    def __init__(self, server: ThreadingHTTPServer, asked: list[Asked]) -> None:
        self._server, self.asked = server, asked

    @property
    def endpoint(self) -> str:
        """Its address."""
        host, port = self._server.server_address[:2]
        scheme = "https" if isinstance(self._server.socket, ssl.SSLSocket) else "http"
        return f"{scheme}://{host!s}:{port}"


@contextmanager
def fake_store(answers: Answers, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Iterator[FakeStore]:
    """Yields a store on loopback whose answers are made by a function. tls: it answers to https alone."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # A response goes out as one packet; the default waits 40 ms between head and body.
        wbufsize = -1

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("content-length") or 0)
            self.rfile.read(length)
            headers = {name.lower(): value for name, value in self.headers.items()}
            one = Asked(method=self.command, path=parts.path, query=parse_qs(parts.query), headers=headers)
            asked.append(one)
            answer = answers(one)
            self.send_response(answer.status)
            given = {"ETag": '"one"', "Last-Modified": MODIFIED} if answer.status < 300 else {}
            for name, value in (given | {"Content-Length": str(len(answer.body))} | answer.headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)
            self.wfile.flush()

        do_GET = do_HEAD = do_PUT = do_POST = _answer  # noqa: N815

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *args: object) -> None:
            """Says nothing: clients go when they like."""

    server = Server((host, 0), Handler)
    if tls is not None:
        # The handshake is made by the thread of the connection.
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield FakeStore(server, asked)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def error(status: int, code: str, *, more: str = "") -> Answer:
    """Returns the answer that S3 gives for an error."""
    body = f"<Error><Code>{code}</Code><Message>made by a test</Message>{more}</Error>"
    return Answer(status=status, body=body.encode(), headers={"Content-Type": "application/xml"})


def listing(num_objects: int) -> Answers:
    """Returns a store whose bucket holds so many objects of 7 bytes, named `data/000000000.tar` and so on."""

    def answers(asked: Asked) -> Answer:
        after = asked.query.get("continuation-token") or asked.query.get("start-after") or ["-1"]
        first = int(after[0].rpartition("/")[2].removesuffix(".tar")) + 1
        stop = min(first + 1000, num_objects)
        rows = [
            f"<Contents><Key>data/{index:09}.tar</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
            f'<ETag>"{index:032x}"</ETag><Size>7</Size><StorageClass>STANDARD</StorageClass></Contents>'
            for index in range(first, stop)
        ]
        more = f"<NextContinuationToken>{stop - 1}</NextContinuationToken>" if stop < num_objects else ""
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            f"<ListBucketResult><IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{''.join(rows)}</ListBucketResult>"
        )
        return Answer(body=body.encode(), headers={"Content-Type": "application/xml"})

    return answers
