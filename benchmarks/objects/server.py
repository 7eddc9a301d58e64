"""moto's S3 server on loopback, and buckets in it that obstore reads and writes with dummy keys."""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import logging
import os
import threading
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

import obstore
from obstore.store import S3Store

if TYPE_CHECKING:
    from moto.server import ThreadedMotoServer

REGION = "us-east-1"
ACCESS_KEY = SECRET_KEY = "testing"
_FOREIGN = ("AWS_", "GOOGLE", "AZURE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_ONE_A_PROCESS = threading.Lock()  # moto keeps one state a process: the end of one server would empty another
_HERE: set[str] = set()
"""The endpoint of the server of this process."""


def environment(endpoint: str, *, profiles: Path) -> dict[str, str]:
    """Returns this process's variables without what names another store, a profile or an HTTP proxy.

    They name the endpoint and dummy keys instead. `profiles` is a folder without files.
    """
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(_FOREIGN)}
    return kept | {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": REGION,
        "AWS_CONFIG_FILE": str(profiles / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(profiles / "credentials"),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """One bucket behind an endpoint, without retries: what the endpoint does wrong shows at once."""

    name: str
    endpoint: str

    @property
    def url(self) -> str:
        """`s3://<name>`."""
        return f"s3://{self.name}"

    def at(self, endpoint: str) -> Bucket:
        """The same bucket behind another endpoint, a proxy for one."""
        return Bucket(name=self.name, endpoint=endpoint)

    def store(self, *, timeout_s: float = 30.0, retries: int = 0, **options: Any) -> S3Store:
        """Returns an obstore client of the bucket. `options` go to `S3Store`."""
        return S3Store(
            self.name,
            endpoint=self.endpoint,
            aws_endpoint_url_s3=self.endpoint,  # of the two, AWS_ENDPOINT_URL_S3 of the environment would win
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region=REGION,
            client_options={"allow_http": True, "timeout": timedelta(seconds=timeout_s)},
            retry_config={"max_retries": retries},
            **options,
        )

    def put(self, key: str, data: bytes) -> None:
        """Puts one object, whole."""
        obstore.put(_kept_store(self), key, data, use_multipart=False)

    def put_all(self, objects: Iterable[tuple[str, bytes]]) -> None:
        """Puts many objects: into a server of this process, which takes a 15th of the time, or over one connection."""
        if self.endpoint in _HERE:
            from moto.core import DEFAULT_ACCOUNT_ID
            from moto.s3.models import s3_backends

            for key, data in objects:
                s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(self.name, key, data)
            return
        store = _kept_store(self)
        for key, data in objects:
            obstore.put(store, key, data, use_multipart=False)

    def put_folder(self, folder: Path, prefix: str) -> None:
        """Puts the folder's files under `prefix`, with their names relative to the folder."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        self.put_all((f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes()) for path in files)

    def get(self, key: str) -> bytes:
        """Returns the object's bytes."""
        return bytes(obstore.get(_kept_store(self), key).bytes())

    def names(self, prefix: str | None = None) -> list[str]:
        """Returns the keys under `prefix`, sorted."""
        return sorted(meta["path"] for page in obstore.list(_kept_store(self), prefix) for meta in page)


@functools.lru_cache(maxsize=16)
def _kept_store(bucket: Bucket) -> S3Store:
    return bucket.store()


class _OneAtATime:
    """A WSGI application that answers one request at a time; bodies come and go side by side.

    moto's threads share an object's buffer: a GET beside the PUT that replaces the object answers 500 (moto 5.2.5,
    `FakeKey.dispose`), which no real store does.
    """

    def __init__(self, app: Any) -> None:
        self._app, self._lock = app, threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        body, length = environ["wsgi.input"], environ.get("CONTENT_LENGTH")
        if length or environ.get("wsgi.input_terminated"):
            environ["wsgi.input"] = io.BytesIO(body.read(int(length)) if length else body.read())
        with self._lock:
            return self._app(environ, start_response)


class ObjectServer:
    """A context in which a moto S3 server listens on a free port of loopback. What is in it is gone at its end.

    The server's threads share this process. `benchmarks.objects.beside` starts the server in a process of its own.
    """

    def __init__(self) -> None:
        self._moto: ThreadedMotoServer | None = None

    def __enter__(self) -> ObjectServer:
        # The import takes 0.6 s, so that whoever imports this module without a server does not pay for it.
        from moto import backends
        from moto.server import ThreadedMotoServer

        if not _ONE_A_PROCESS.acquire(blocking=False):
            raise RuntimeError(
                "moto keeps one state a process, and this process has an ObjectServer already; end it first"
            )
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # one line a request
        services = tuple(backends.list_of_moto_modules())  # moto lists its folder twice a request, half of its time
        backends.list_of_moto_modules = lambda: services
        self._moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._moto.start()
        assert self._moto._server is not None
        self._moto._server.app = _OneAtATime(self._moto._server.app)
        _HERE.add(self.endpoint)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._moto is not None
        _HERE.clear()
        self._ask("POST", "/moto-api/reset")  # frees the objects, in memory and in /tmp
        self._moto.stop()
        server = self._moto._server
        assert server is not None
        server.server_close()  # `stop` leaves the listening socket open
        self._moto = None
        _ONE_A_PROCESS.release()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        assert self._moto is not None, "the server runs inside `with`"
        host, port = self._moto.get_host_and_port()
        return str(host), int(port)

    @property
    def endpoint(self) -> str:
        """The URL that clients take for AWS_ENDPOINT_URL."""
        host, port = self.address
        return f"http://{host}:{port}"

    def make_bucket(self, name: str | None = None, *, public: bool = False) -> Bucket:
        """Returns a new, empty bucket, with a name of its own if none is given.

        Objects of a public bucket are read without credentials; other buckets answer 403 then.
        """
        name = name or f"bucket-{uuid.uuid4().hex[:12]}"
        self._ask("PUT", f"/{name}", {"x-amz-acl": "public-read" if public else "private"})
        return Bucket(name=name, endpoint=self.endpoint)

    def _ask(self, method: str, path: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        with contextlib.closing(http.client.HTTPConnection(*self.address)) as connection:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        if answer.status != 200:
            raise RuntimeError(f"moto answered {answer.status} to {method} {path}, 200 expected: {text}")
