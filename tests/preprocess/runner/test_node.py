"""A node that has never read from a store learns from a task which store a path of raw data is of."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from forebay.config.remote import RemoteConfig, parse_url
from forebay.preprocess.runner.ray import _open_stores, stores_of
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.raw_sources import place_of
from forebay.store.source_files import SourceFile


def test_a_node_opens_the_stores_of_the_raw_data(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    settings = RemoteConfig(shard_dir=str(tmp_path / "node"), anonymous=True)
    path = Mirror.at(parse_url("s3://bucket/raw"), settings).folder / "a.tar"
    here = tmp_path / "b.tar"
    files = [
        SourceFile("a.tar", path, entry=0, listed=False, stat=(-1, 7, 10, 0, 0), xxh3_128="0" * 32),
        SourceFile("b.tar", here, entry=0, listed=False, stat=(1, 7, 10, 0, 0), xxh3_128="0" * 32),
    ]
    stores = stores_of(files)
    assert [url for url, _ in stores] == ["s3://bucket/raw"]
    shutil.rmtree(tmp_path / "node")
    forget()
    assert place_of(path) is None, "another node"
    _open_stores(stores, "this build")
    place = place_of(path)
    assert place is not None
    assert place.url == "s3://bucket/raw/a.tar"
