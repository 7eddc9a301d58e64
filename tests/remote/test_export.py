"""A cache of a store is exported as one of this machine is."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket
from forebay.inspect.export import ExportOptions, export
from forebay.store.cache import open_cache
from tests.preprocess.corpus import file_bytes
from tests.remote.stored import node_settings, put_folder
from tests.store_factory import make_cache


@pytest.mark.parametrize("form", ["parquet", "webdataset"])
@pytest.mark.usefixtures("environment")
def test_a_cache_of_a_store_gives_the_same_files(bucket: Bucket, proxy: Proxy, tmp_path: Path, form: str) -> None:
    folder = make_cache(tmp_path / "caches", num_samples=9)
    url = put_folder(bucket, folder)
    there = open_cache(url, remote=node_settings(tmp_path, proxy.endpoint))
    export(open_cache(folder), ExportOptions(form=form, out=tmp_path / "here", progress=False))
    report = export(there, ExportOptions(form=form, out=tmp_path / "there", progress=False))
    assert report.cache == url
    assert file_bytes(tmp_path / "here") == file_bytes(tmp_path / "there")
