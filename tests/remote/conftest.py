"""An object store of the tests' own, the link to it, and an environment that knows no other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import ACCESS_KEY, REGION, SECRET_KEY, Bucket, ObjectServer


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
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE", "AZURE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    monkeypatch.setenv("AWS_REGION", REGION)
    profiles = tmp_path / "no-profiles"
    profiles.mkdir()
    monkeypatch.setenv("AWS_CONFIG_FILE", str(profiles / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profiles / "credentials"))
