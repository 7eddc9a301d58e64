from __future__ import annotations

import errno
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from forebay.config import BucketConfig
from forebay.errors import CacheCorruptError, CacheError, CacheMismatchError, CacheNotFoundError
from forebay.plan.bucket_plan import BucketPlan, Order
from forebay.plan.disk import load_plan, save_plan
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.names import plan_folder, plan_key
from forebay.plan.statistics import batch_statistics
from forebay.store.key import canonical_json

KEY = "ab" * 32
SETTINGS = BucketConfig(batch_seconds=60.0)
LENGTHS = np.random.default_rng(2).integers(500, 32_000, 400)
PLAN = bucket_plan(LENGTHS, sample_rate_hz=1000, settings=SETTINGS)
FILES = ["metadata.json", "members.npy", "offsets.npy", "batch_sizes.npy"]


def saved(root: Path) -> Path:
    folder = plan_folder(root, dataset="prompts", split="train", cache_key=KEY, settings=SETTINGS)
    save_plan(PLAN, folder, cache_key=KEY, settings=SETTINGS, statistics=batch_statistics(PLAN, LENGTHS))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None], *, checksum: bool = True) -> None:
    metadata = json.loads((folder / "metadata.json").read_bytes())
    change(metadata)
    if checksum:
        metadata.pop("checksum")
        metadata["checksum"] = xxhash.xxh3_128_hexdigest(canonical_json(metadata))
    (folder / "metadata.json").write_text(json.dumps(metadata))


def test_a_loaded_plan_has_the_same_order(tmp_path: Path) -> None:
    loaded = load_plan(saved(tmp_path), cache_key=KEY, settings=SETTINGS, num_samples=400)
    assert isinstance(loaded, BucketPlan)
    for epoch in (0, 7):
        ours, theirs = (Order(plan, seed=3, epoch=epoch) for plan in (PLAN, loaded))
        positions = np.arange(len(ours))
        for a, b in zip(ours.batches(positions), theirs.batches(positions), strict=True):
            assert np.array_equal(a, b)
    assert (loaded.edges_s, loaded.sample_rate_hz) == (PLAN.edges_s, 1000)


def test_a_loaded_plan_finds_its_calibration_by_name(tmp_path: Path) -> None:
    (tmp_path / "sizes.json").write_text(
        json.dumps({"b_9_32": {"batch_size": 2, "grad_acc": 3}, "b_0_9": {"batch_size": 5}})
    )
    settings = BucketConfig(edges_s=(9, 32), calibration=str(tmp_path / "sizes.json"))
    plan = bucket_plan(LENGTHS, sample_rate_hz=1000, settings=settings)
    folder = plan_folder(tmp_path, dataset="prompts", split="train", cache_key=KEY, settings=settings)
    save_plan(plan, folder, cache_key=KEY, settings=settings, statistics=batch_statistics(plan, LENGTHS))
    loaded = load_plan(folder, cache_key=KEY, settings=settings)
    assert isinstance(loaded, BucketPlan)
    assert (loaded.grad_accs, plan.grad_accs) == ((1, 3), (1, 3))
    assert loaded.batch_sizes.tolist() == [5, 2]


def test_arrays_are_read_only_mappings(tmp_path: Path) -> None:
    loaded = load_plan(saved(tmp_path), cache_key=KEY, settings=SETTINGS)
    assert isinstance(loaded.members.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        loaded.members[0] = 1


def test_the_folder_says_what_it_is(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert folder == tmp_path / "plans" / f"prompts_train_bucket_{plan_key(KEY, SETTINGS)[:8]}"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "packing_stats.json"])
    metadata = json.loads((folder / "metadata.json").read_bytes())
    assert metadata["plan"]["cache_keys"] == [KEY]
    assert metadata["plan_key"] == plan_key(KEY, SETTINGS)
    stats = json.loads((folder / "packing_stats.json").read_bytes())
    assert (metadata["kind"], metadata["num_batches"], metadata["padding"]) == (
        "bucket",
        PLAN.num_batches,
        stats["padding"],
    )
    assert metadata["statistics_xxh3_128"] == xxhash.xxh3_128_hexdigest((folder / "packing_stats.json").read_bytes())


def test_the_same_plan_is_the_same_bytes(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_saving_again_leaves_the_plan_alone(tmp_path: Path) -> None:
    inode = saved(tmp_path).stat().st_ino
    assert saved(tmp_path).stat().st_ino == inode
    assert len(list((tmp_path / "plans").iterdir())) == 1


@pytest.mark.parametrize("name", FILES)
def test_every_damage_is_noticed_and_repaired(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path)
    path, good = folder / name, (folder / name).read_bytes()
    rng = np.random.default_rng(len(good))
    damaged = [good[:-1], good[: len(good) // 2], b"", good + b" x"]
    for place in rng.integers(0, len(good), 40):
        damaged.append(good[:place] + bytes([good[place] ^ 1 << int(rng.integers(7))]) + good[place + 1 :])
    for content in damaged:
        path.write_bytes(content)
        if name == "metadata.json" and _same_document(content, good):
            continue
        with pytest.raises(CacheError, match=str(folder)):
            load_plan(folder, cache_key=KEY, settings=SETTINGS)
    path.write_bytes(good[:-1])
    saved(tmp_path)
    assert path.read_bytes() == good
    assert [entry.name for entry in (tmp_path / "plans").iterdir()] == [folder.name]


def _same_document(content: bytes, good: bytes) -> bool:
    """Whether the damage hit white space of the JSON and changed nothing."""
    try:
        return bool(json.loads(content) == json.loads(good))
    except ValueError:
        return False


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed_and_repaired(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path)
    (folder / name).unlink()
    error, message = (
        (CacheNotFoundError, f"no plan in {folder}: no metadata.json; run: forebay preprocess")
        if name == "metadata.json"
        else (CacheCorruptError, f"{name} cannot be read: No such file or directory; delete that folder and run")
    )
    with pytest.raises(error, match=message):
        load_plan(folder, cache_key=KEY, settings=SETTINGS)
    saved(tmp_path)
    assert load_plan(folder, cache_key=KEY, settings=SETTINGS).num_batches == PLAN.num_batches


def test_a_newer_format_is_refused_by_name_and_not_replaced(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    rewrite(folder, lambda metadata: metadata.update(format_version=3, arrays="elsewhere"), checksum=False)
    message = r"format_version differs \(3 stored, 2 is the newest that this forebay reads\); install a newer forebay"
    with pytest.raises(CacheMismatchError, match=message):
        load_plan(folder, cache_key=KEY, settings=SETTINGS)
    with pytest.raises(CacheMismatchError, match="format_version differs"):
        saved(tmp_path)


def test_an_older_format_is_refused_by_its_own_code(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    rewrite(folder, lambda metadata: metadata.update(format_version=1))
    with pytest.raises(CacheMismatchError, match=r"format_version is 1, this forebay reads 2; delete that") as err:
        load_plan(folder, cache_key=KEY, settings=SETTINGS)
    assert err.value.code == "FB407"


def test_another_plan_is_refused_with_both_values(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    with pytest.raises(CacheMismatchError, match=r"cache_keys differs \(\['cd'\] wanted, \['abab"):
        load_plan(folder, cache_key="cd", settings=SETTINGS)
    with pytest.raises(CacheMismatchError, match=r"plan\.batch_seconds differs \(90\.0 wanted, 60\.0 stored\)"):
        load_plan(folder, cache_key=KEY, settings=BucketConfig(batch_seconds=90.0))
    with pytest.raises(CacheMismatchError, match=r"num_samples differs \(399 in the cache, 400 in the plan\)"):
        load_plan(folder, cache_key=KEY, settings=SETTINGS, num_samples=399)
    rewrite(folder, lambda metadata: metadata["plan"].update(order_version=0))
    with pytest.raises(CacheMismatchError, match=r"order_version differs \(1 wanted, 0 stored\)"):
        load_plan(folder, cache_key=KEY, settings=SETTINGS)


@pytest.mark.parametrize("failing", range(9))
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    from forebay.store import files

    calls = 0
    real = files.write_all

    def write_all(file: Any, data: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > failing:
            real(file, bytes(data)[:1])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, data)

    monkeypatch.setattr("forebay.store.files.write_all", write_all)
    monkeypatch.setattr("forebay.plan.disk.write_all", write_all)
    if failing < 8:
        with pytest.raises(OSError, match="No space left on device"):
            saved(tmp_path)
        assert list((tmp_path / "plans").iterdir()) == []
    else:
        assert load_plan(saved(tmp_path), cache_key=KEY, settings=SETTINGS).num_batches == PLAN.num_batches
        assert calls == 8


def test_several_savers_at_once_leave_one_plan(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        folders = set(pool.map(saved, [tmp_path] * 12))
    (folder,) = folders
    assert [entry.name for entry in (tmp_path / "plans").iterdir()] == [folder.name]
    assert load_plan(folder, cache_key=KEY, settings=SETTINGS).num_batches == PLAN.num_batches


def test_a_mapped_plan_outlives_its_replacement(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    loaded = load_plan(folder, cache_key=KEY, settings=SETTINGS)
    (folder / "metadata.json").unlink()
    saved(tmp_path)
    assert np.array_equal(loaded.members, PLAN.members)


@pytest.mark.parametrize("name", ["arrays", "plan", "sample_rate_hz", "num_samples", "cache_keys", "settings"])
def test_a_signed_document_of_another_shape_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path)
    rewrite(folder, lambda metadata: (metadata["plan"] if name in metadata["plan"] else metadata).pop(name))
    with pytest.raises(CacheCorruptError, match=r"metadata.json is none that forebay writes"):
        load_plan(folder, cache_key=KEY, settings=SETTINGS, num_samples=400)
