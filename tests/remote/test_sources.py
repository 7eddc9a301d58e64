"""Raw data in a bucket gives what it gives on a disk, and crosses the network once."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket
from forebay.config import Config
from tests.preprocess.corpus import shard_bytes
from tests.preprocess.here_pool import build_here
from tests.remote.raw_data import SPEECH, VISION, config_of, put_folder

pytestmark = pytest.mark.usefixtures("environment")


class Data:
    """Raw data of one kind, in a folder and in a bucket."""

    def __init__(self, tmp_path: Path, bucket: Bucket, proxy: Proxy, name: str) -> None:
        self.tmp_path, self.bucket, self.proxy, self.name = tmp_path, bucket, proxy, name
        self.folder = tmp_path / "data"
        self.folder.mkdir()
        self.manifest = (SPEECH | VISION)[name][1](self.folder)
        self.keys = put_folder(self.folder, bucket, "raw/data/")

    def local(self, **source: object) -> Config:
        manifest = str(self.folder / self.manifest)
        return config_of(self.name, manifest, root=self.tmp_path / "local", node=self.tmp_path / "node", **source)

    def remote(self, *, root: str = "remote", node: str = "node", prefix: str = "raw/data", **source: object) -> Config:
        url = f"{self.bucket.url}/{prefix}/{self.manifest}"
        return config_of(self.name, url, root=self.tmp_path / root, node=self.tmp_path / node, **source)

    def gets(self) -> dict[str, int]:
        """Downloads so far, by key."""
        counts = self.proxy.requests.items()
        return {key.removeprefix(f"{self.bucket.name}/"): n for (method, key), n in counts if method == "GET"}


@pytest.fixture
def data(tmp_path: Path, bucket: Bucket, proxy: Proxy, request: pytest.FixtureRequest) -> Data:
    return Data(tmp_path, bucket, proxy, getattr(request, "param", "tar"))


@pytest.mark.parametrize("data", [*SPEECH, *VISION], indirect=True)
def test_a_bucket_gives_what_a_disk_gives_and_is_read_once(data: Data) -> None:
    local = build_here(data.local())
    assert not data.proxy.requests
    remote = build_here(data.remote())
    assert remote.key == local.key
    assert remote.num_samples >= 4
    assert (remote.failed, remote.excluded) == (local.failed, local.excluded)
    assert shard_bytes(Path(remote.cache)) == shard_bytes(Path(local.cache))
    assert max(data.gets().values()) == 1, data.gets()
