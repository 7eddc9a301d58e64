"""The zarr form is the cold form of a cache, under another name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ConfigError
from forebay.inspect.export import ExportOptions, export_zarr
from forebay.store.cache import open_cache
from tests.commands import run, run_json
from tests.store_factory import make_cache


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"max_samples": 3}, "--max-samples does not go with --form zarr"),
        ({"ids": Path("ids.txt")}, "--ids does not go with --form zarr, which is of a whole cache"),
        ({"shard_size_mb": 5}, "--shard-size-mb does not go with .* forebay cache subset"),
    ],
)
def test_a_part_of_a_cache_is_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    cache = open_cache(make_cache(tmp_path))
    with pytest.raises(ConfigError, match=why):
        export_zarr(cache, ExportOptions(form="zarr", out=tmp_path / "out", progress=False, **change))
    with pytest.raises(ConfigError, match="lies inside the cache"):
        export_zarr(cache, ExportOptions(form="zarr", out=cache.folder / "out", progress=False))
    assert not (tmp_path / "out").exists()


def test_zarr_reads_the_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zarr = pytest.importorskip("zarr")
    folder = make_cache(tmp_path)
    found = run_json(capsys, "export", folder, "--form", "zarr", "--out", tmp_path / "out", "--no-progress")
    assert found["key"] == open_cache(folder).key
    assert zarr.open_group(str(tmp_path / "out"), mode="r").attrs
    code, out, _ = run(capsys, "export", folder, "--form", "zarr", "--out", tmp_path / "out", "--no-progress")
    assert (code, "already" in out) == (0, True)
