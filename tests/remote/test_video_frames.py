"""Lists of frames in a bucket give what they give on a disk, and each frame crosses the network once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket
from forebay.config.remote import GB, RemoteConfig
from forebay.config.train import RunConfig
from forebay.store.cache import open_cache
from forebay.train.select import select
from tests.images.clips import model_folder
from tests.images.test_video_frames import asking, frame_files, lines
from tests.images.test_videos import config_in
from tests.preprocess.here_pool import build_here
from tests.remote.raw_data import put_folder
from tests.train.test_uncached import assert_same

pytestmark = pytest.mark.usefixtures("environment")


def test_frames_in_a_bucket(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    model_folder(tmp_path / "model", "qwen3")
    data = tmp_path / "data"
    data.mkdir()
    names = frame_files(data / "f", 5)
    rows = [asking("a", "<video>", videos=[names]), asking("b", "<video><video>", videos=[names[1:], names[:2]])]
    lines(data, [*rows, asking("c", "<video>", videos=[[*names, "f/9.png"]])])
    put_folder(data, bucket, "raw/")
    config = config_in(tmp_path, f'source.manifest="{data / "train.jsonl"}"', "run.max_failed_share=1")
    local = open_cache(build_here(config).cache)
    remote = replace(
        config_in(tmp_path, f'source.manifest="{bucket.url}/raw/train.jsonl"', "run.max_failed_share=1"),
        remote=RemoteConfig(cache_size_gb=1e9 / GB, shard_dir=str(tmp_path / "node")),
        run=RunConfig(cache_root=str(tmp_path / "remote"), max_failed_share=1, num_workers=1),
    )
    report = build_here(remote)
    assert report.failed == {"missing_file": 1}
    found = open_cache(report.cache)
    assert len(found) == len(local) == 2
    for index in range(2):
        for name, values in local.read(index).items():
            for one, two in zip(values, found.read(index)[name], strict=True):
                np.testing.assert_array_equal(one, two)
    frames = [n for (method, key), n in proxy.requests.items() if method == "GET" and key.endswith(".png")]
    assert max(frames) == 1
    off = replace(remote, loader=replace(remote.loader, cache="off"))
    assert_same(found, select(off), range(2))
