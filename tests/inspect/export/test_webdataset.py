"""WebDataset, read back by tarfile and by the rule of grouping, and as a source of a build."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from forebay.inspect.export import ExportOptions, export
from forebay.store.cache import Cache, open_cache
from tests.golden.make_v4_patches import FOLDER as VISION
from tests.golden.make_v4_patches import name as vision_name
from tests.store_factory import RATE_HZ, make_cache

IDS = ["a", "b/c.d", "../x", "ü", "A", "a%2Eb", "a.b", "y" * 300, "क"]


def exported(cache: Cache, out: Path, **options: Any) -> list[Path]:
    """The tars of a cache."""
    export(cache, ExportOptions(form="webdataset", out=out, progress=False, **options))
    return sorted(out.glob("*.tar"))


def samples_of(path: Path) -> list[dict[str, Any]]:
    """Reads a tar as webdataset does: consecutive members whose names are equal up to their first dot are a sample."""
    found: list[dict[str, Any]] = []
    with tarfile.open(path) as tar:
        for info in tar:
            match = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", info.name)
            assert match is not None
            key, extension = match.groups()
            if not found or found[-1]["__key__"] != key:
                found.append({"__key__": key})
            file = tar.extractfile(info)
            assert file is not None
            assert extension not in found[-1]
            found[-1][extension] = decoded(extension, file.read())
    return found


def decoded(extension: str, data: bytes) -> Any:
    if extension == "json":
        return json.loads(data)
    return np.load(io.BytesIO(data)) if extension.endswith(".npy") else soundfile.read(io.BytesIO(data), dtype="int16")


def test_every_row_and_tensor_comes_back_under_any_id(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, num_samples=9, sample_ids=IDS, keep_waveform=True))
    (path,) = exported(cache, tmp_path / "out")
    assert path.name == "prompts-train-000000.tar"
    found = samples_of(path)
    assert [each["json"].pop("id") for each in found] == IDS
    assert len({each["__key__"] for each in found}) == 9
    assert found[0]["__key__"] == "a"
    rows = cache.samples.drop(["sample_id"]).to_pylist()
    assert [each["json"] for each in found] == rows
    for index, each in enumerate(found):
        sample = cache.read(index)
        samples, rate = each["wav"]
        assert rate == RATE_HZ
        assert np.array_equal(samples, sample.pop("waveform"))
        assert set(each) == {"__key__", "json", "wav", *(f"{name}.npy" for name in sample)}
        for name, value in sample.items():
            assert each[f"{name}.npy"].dtype == value.dtype
            assert np.array_equal(each[f"{name}.npy"], value)


def test_images_are_a_member_each(tmp_path: Path) -> None:
    cache = open_cache(VISION / vision_name("zstd"))
    (path,) = exported(cache, tmp_path / "out")
    for index, each in enumerate(samples_of(path)):
        sample = cache.read(index)
        assert each["json"]["text"] == cache.samples["text"][index].as_py()
        assert np.array_equal(each["image_grid_thw.npy"], sample["image_grid_thw"])
        for number, image in enumerate(sample["patches"]):
            assert np.array_equal(each[f"patches.{number}.npy"], image)
        assert f"patches.{len(sample['patches'])}.npy" not in each


def test_a_tar_stays_within_its_size_and_no_sample_is_divided(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, num_samples=40, features="waveform", max_duration_s=20.0))
    paths = exported(cache, tmp_path / "out", shard_size_mb=2)
    assert [path.name for path in paths] == [f"prompts-train-{number:06d}.tar" for number in range(len(paths))]
    assert len(paths) > 3
    assert all(path.stat().st_size <= 2_000_000 + 10_240 for path in paths)
    found = [each["json"]["id"] for path in paths for each in samples_of(path)]
    assert found == cache.samples["sample_id"].to_pylist()


def test_a_sample_above_the_size_has_a_tar_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.inspect.export._MB", 100)
    cache = open_cache(make_cache(tmp_path, num_samples=3, features="waveform"))
    assert [len(samples_of(path)) for path in exported(cache, tmp_path / "out", shard_size_mb=1)] == [1, 1, 1]


def test_the_same_cache_gives_the_same_bytes(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path))
    one, two = (exported(cache, tmp_path / name)[0].read_bytes() for name in ("one", "two"))
    assert one == two


def test_a_float_waveform_is_exact_and_no_wav(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, features="w2v_bert"))
    (path,) = exported(cache, tmp_path / "out")
    assert set(samples_of(path)[0]) == {"__key__", "json", "fbanks.npy", "input_ids.npy", "prefix_len.npy"}


def test_a_name_that_is_no_utf8_is_kept_apart_and_shown_escaped(tmp_path: Path) -> None:
    ids = ["\udcff", "\\xff", "b", "c", "d", "e"]
    cache = open_cache(make_cache(tmp_path, sample_ids=ids))
    found = samples_of(exported(cache, tmp_path / "out")[0])
    assert [each["__key__"] for each in found[:2]] == ["%FF", "%5Cxff"]
    assert [each["json"]["id"] for each in found[:2]] == ["\\xff", "\\xff"]
