"""The server and its proxy in a process of their own, so that their work does not take the interpreter of a benchmark.

`python -m benchmarks.objects.beside FD` is that process. It ends when its parent does, however that ends.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.objects.faults import Rule
from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket, ObjectServer
from benchmarks.objects.traffic import Traffic

_ROOT = Path(__file__).resolve().parents[2]


class Beside:
    """A context in which another process runs an `ObjectServer` and a `Proxy` of it, with the methods of both."""

    def __init__(self) -> None:
        self._pipe: Any = None
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""
        """The proxy's URL, for AWS_ENDPOINT_URL."""
        self.server_endpoint = ""
        """The server's own URL, which nothing slows and nobody counts."""

    def __enter__(self) -> Beside:
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.objects.beside", str(theirs.fileno())],
                cwd=_ROOT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent, which ends this process when it has cleaned up
            )
        self.endpoint, self.server_endpoint = self._pipe.recv()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._pipe.close()
        self._process.wait()

    def make_bucket(self, name: str | None = None, *, public: bool = False) -> Bucket:
        """Returns a new, empty bucket, reached without the proxy."""
        bucket: Bucket = self._ask("make_bucket", name, public=public)
        return bucket

    def limit(self, *, latency_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        """Sets the link anew, for requests under way too."""
        self._ask("limit", latency_s=latency_s, bytes_per_s=bytes_per_s)

    def add(self, rule: Rule) -> None:
        """Adds a rule, which holds from the next request on."""
        self._ask("add", rule)

    def clear(self) -> None:
        """No rule holds any more, and nothing has been counted."""
        self._ask("clear")

    def traffic(self) -> Traffic:
        """Returns what has passed until now."""
        traffic: Traffic = self._ask("traffic")
        return traffic

    def cpu_s(self) -> float:
        """Returns the CPU seconds that server and proxy have used."""
        seconds: float = self._ask("cpu_s")
        return seconds

    def _ask(self, name: str, *args: object, **options: object) -> Any:
        self._pipe.send((name, args, options))
        return self._pipe.recv()  # EOFError if the process died; its traceback is on stderr


def _serve(pipe: Any) -> None:
    with ObjectServer() as server, Proxy(server.address) as proxy:
        methods: dict[str, Callable[..., Any]] = {
            "make_bucket": server.make_bucket,
            "limit": proxy.limit,
            "add": proxy.add,
            "clear": proxy.clear,
            "traffic": proxy.traffic,
            "cpu_s": time.process_time,
        }
        pipe.send((proxy.endpoint, server.endpoint))
        while True:
            try:
                name, args, options = pipe.recv()
            except EOFError:
                return
            pipe.send(methods[name](*args, **options))


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection:
        _serve(connection)
