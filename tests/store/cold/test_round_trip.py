"""A cache to its cold form in a folder and back, byte for byte; and what zarr and xarray read of it."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings

from forebay.store.cache import open_cache
from forebay.store.cold import arrays
from forebay.store.cold.pull import pull_any, pull_zarr
from forebay.store.cold.push import push_to, push_zarr, write_zarr
from forebay.store.layout import ROW_BITS, ROW_MASK, Array
from tests import store_factory
from tests.store.cold.caches import Memory, Shards, make_cache, same, settings_of, shards_of_rows

GOLDEN = Path(__file__).parents[2] / "golden"
CACHES = sorted(path.parent.relative_to(GOLDEN) for path in GOLDEN.glob("v4_*/*/metadata.json"))


def check_round_trip(cache: Path, folder: Path) -> Path:
    """Pushes to a folder, twice, and pulls, byte for byte; returns the new cache, which has no other one beside it."""
    settings = settings_of(folder)
    back = folder / "elsewhere" / "back"
    report = push_zarr(cache, str(folder / "cold"), settings, level=1)
    assert report.moved_files == report.files
    assert report.stored_bytes == sum(path.stat().st_size for path in (folder / "cold").rglob("*") if path.is_file())
    again = push_zarr(cache, str(folder / "cold"), settings, level=1)
    assert again.already_there
    assert again.stored_bytes == report.stored_bytes
    found = pull_any(str(folder / "cold"), back, settings)
    assert same(cache, back)
    assert found.moved_files == found.files == len([path for path in cache.rglob("*") if path.is_file()]) - 1
    return back


@pytest.fixture
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of a few rows, so that arrays have many of them, which end in the middle of shards."""
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 2048)
    monkeypatch.setattr(arrays, "SHARD_BYTES", 6144)


@settings(max_examples=settings().max_examples // 4)
@given(shards=shards_of_rows())
def test_any_cache(shards: Shards) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "CHUNK_BYTES", 24)
        patch.setattr(arrays, "SHARD_BYTES", 72)
        folder = Path(name)
        cache = make_cache(folder, shards)
        place = Memory(settings_of(folder))
        push_to(place, open_cache(cache), level=1)
        pull_zarr(place, folder / "elsewhere" / "back")
        assert same(cache, folder / "elsewhere" / "back")


@pytest.mark.parametrize("golden", CACHES, ids=str)
def test_golden_caches(golden: Path, tmp_path: Path) -> None:
    assert len(CACHES) >= 4
    assert len(open_cache(check_round_trip(GOLDEN / golden, tmp_path))) == len(open_cache(GOLDEN / golden))


@pytest.mark.usefixtures("small_objects")
@pytest.mark.parametrize("features", ["log_mel", "w2v_bert", "waveform", "none"])
def test_features(features: store_factory.Features, tmp_path: Path) -> None:
    cache = store_factory.make_cache(
        tmp_path, features=features, failed_rows=[0, 3, 6], rows_per_shard=3, max_duration_s=0.11
    )
    before, after = open_cache(cache), open_cache(check_round_trip(cache, tmp_path))
    assert after.samples.equals(before.samples)
    for index in range(len(before)):
        for name, value in before.read(index).items():
            np.testing.assert_array_equal(after.read(index)[name], value)


def plain(root: zarr.Group, group: str, field: str, row: int) -> Array:
    """One row of a field, by zarr alone."""
    start, stop = np.asarray(root[f"{group}/offsets/{field}"][row : row + 2])
    return np.asarray(root[f"{group}/values/{field}"][start:stop])


def test_zarr_alone_reads_every_sample(tmp_path: Path) -> None:
    folder = store_factory.make_cache(tmp_path, num_samples=9, failed_rows=[0, 4], keep_waveform=True)
    cache = open_cache(folder)
    write_zarr(cache, tmp_path / "cold")
    root = zarr.open_group(tmp_path / "cold", mode="r")
    rows = np.asarray(root["samples/row"][:])
    assert len(rows) == len(cache)
    for index, row in enumerate(rows.tolist()):
        for name, value in cache.read(index).items():
            found = plain(root, cache.fields[name].group, name, row)
            assert found.dtype == value.dtype
            assert found.tobytes() == value.tobytes()
        for name in ("text", "sample_id"):
            text = plain(root, cache.fields[name].group, name, row).tobytes().decode()
            assert text == cache.samples[name][index].as_py()
    for name, values in cache.lengths.items():
        assert np.array_equal(root[f"samples/{name}"][:], values)
    assert plain(root, "audio", "failure", 0).tobytes() == b"corrupt_audio"
    metadata = json.loads((folder / "metadata.json").read_bytes())
    assert root.attrs["metadata"] == metadata
    assert root.attrs["forebay"]["key"] == cache.key


def test_images_are_found_by_the_slots_of_a_sample(tmp_path: Path) -> None:
    cache = open_cache(GOLDEN / "v4_patches" / "golden-train-patches")
    write_zarr(cache, tmp_path / "cold")
    root = zarr.open_group(tmp_path / "cold", mode="r")
    num_images = 0
    for index in range(len(cache)):
        slots = cache.items_of("image", index)
        images = [int(root["image/shard_rows"][slot >> ROW_BITS]) + (slot & ROW_MASK) for slot in slots]
        for image, wanted in zip(images, cache.read(index)["patches"], strict=True):
            assert plain(root, "image", "patches", image).tobytes() == wanted.tobytes()
            num_images += 1
    assert num_images


def test_xarray_opens_every_group(tmp_path: Path) -> None:
    cache = open_cache(store_factory.make_cache(tmp_path, num_samples=9, failed_rows=[2]))
    write_zarr(cache, tmp_path / "cold")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = xr.open_datatree(tmp_path / "cold", engine="zarr")
        for group in ("audio", "audio/values", "audio/offsets", "text", "text/values", "text/offsets", "samples"):
            assert xr.open_zarr(tmp_path / "cold", group=group).equals(tree[group].to_dataset(inherit=False))
    values = tree["audio/values/input_features"]
    assert values.dtype == np.float16
    wanted = [cache.shard("audio", number).column("input_features")[0] for number in range(cache.num_shards)]
    assert values.values.tobytes() == np.concatenate(wanted).tobytes()
    assert tree["samples"].sizes == {"sample": len(cache)}
    assert tree["samples"]["num_tokens"].values.tolist() == cache.lengths["num_tokens"].tolist()
    row = tree["samples"]["row"].values[3]
    start, stop = tree["audio/offsets/input_features"].values[row : row + 2]
    assert np.array_equal(values[start:stop], cache.read(3)["input_features"])


def test_a_folder_that_is_complete_needs_no_objects(tmp_path: Path) -> None:
    """Files that another cache beside the folder has are linked: nothing of them is decompressed."""
    cache = store_factory.make_cache(tmp_path / "caches")
    write_zarr(open_cache(cache), tmp_path / "cold")
    for name in ("audio/values", "text/values"):
        for path in (tmp_path / "cold" / name).rglob("c/**/*"):
            if path.is_file():
                path.write_bytes(b"damaged")
    report = pull_any(str(tmp_path / "cold"), tmp_path / "caches" / "again", settings_of(tmp_path))
    assert report.linked_files == report.files
    assert same(cache, tmp_path / "caches" / "again")
    assert pull_any(str(tmp_path / "cold"), tmp_path / "caches" / "again", settings_of(tmp_path)).already_there


@pytest.mark.parametrize("level", [1, 19])
def test_levels(level: int, tmp_path: Path) -> None:
    cache = open_cache(store_factory.make_cache(tmp_path))
    report = write_zarr(cache, tmp_path / "cold", level=level)
    assert report.stored_bytes is not None
    document = json.loads((tmp_path / "cold" / "audio" / "values" / "input_features" / "zarr.json").read_bytes())
    (sharding,) = document["codecs"]
    assert sharding["configuration"]["codecs"][1]["configuration"] == {"level": level, "checksum": True}
