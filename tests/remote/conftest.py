"""An object store of the tests' own, the link to it, and an environment that knows no other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.objects import server as objects
from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket, ObjectServer


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    """One moto server a test module: it takes 0.3 s to start, and 0.6 s more where nothing has imported moto."""
    with ObjectServer() as server:
        yield server


@pytest.fixture
def bucket(server: ObjectServer) -> Bucket:
    """A new, empty bucket, reached without the proxy. `bucket.at(proxy.endpoint)` is the way through it."""
    return server.make_bucket()


@pytest.fixture
def proxy(server: ObjectServer) -> Iterator[Proxy]:
    """A proxy of the server that does nothing but count, until the test says more."""
    with Proxy(server.address) as proxy:
        yield proxy


@pytest.fixture
def environment(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's variables name the proxy and dummy keys, and no profile of the machine."""
    profiles = tmp_path / "no-profiles"
    profiles.mkdir()
    variables = objects.environment(proxy.endpoint, profiles=profiles)
    for name in os.environ.keys() - variables.keys():
        monkeypatch.delenv(name)
    for name in (name for name in variables if name.startswith("AWS_")):
        monkeypatch.setenv(name, variables[name])
