"""Plans of every kind on disk, and large ones that are checked where they are touched."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from forebay.config import BucketConfig
from forebay.config.plan import LengthsConfig
from forebay.errors import CacheCorruptError, CacheMismatchError
from forebay.plan import disk as disk_module
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.disk import load_plan, save_plan
from forebay.plan.make import Samples, kept_plan
from forebay.plan.names import plan_folder
from forebay.plan.statistics import batch_statistics
from forebay.plan.window import WindowPlan
from forebay.store.layout import Array
from forebay.store.open_shards import MEMBERS_A_CHUNK, CheckedArray, chunk_sums
from tests.plan.kinds import RATE, of_lengths, plan_of_any_kind, shards_of, tokens_of
from tests.plan.test_kinds import EVERY_KIND, some_lengths

KEY = "ab" * 32
LENGTHS = some_lengths()


def saved(root: Path, settings: LengthsConfig) -> tuple[BucketPlan | WindowPlan, Path]:
    plan = plan_of_any_kind(LENGTHS, settings)
    assert plan is not None
    folder = plan_folder(root, dataset="prompts", split="train", cache_key=KEY, settings=settings)
    save_plan(plan, folder, cache_key=KEY, settings=settings, statistics=batch_statistics(plan, LENGTHS))
    return plan, folder


@pytest.mark.parametrize("settings", EVERY_KIND)
@pytest.mark.parametrize("lazy_bytes", [0, 2**25])
@pytest.mark.few
def test_a_loaded_plan_has_the_same_order(
    tmp_path: Path, settings: LengthsConfig, lazy_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "LAZY_BYTES", lazy_bytes)
    plan, folder = saved(tmp_path, settings)
    loaded = load_plan(folder, cache_key=KEY, settings=settings, num_samples=len(LENGTHS))
    assert loaded.num_batches == plan.num_batches
    assert (loaded.check is None) == (lazy_bytes > 0)
    positions = np.arange(plan.num_batches)
    for a, b in zip(plan.order(3, 7).batches(positions), loaded.order(3, 7).batches(positions), strict=True):
        assert np.array_equal(a, b)
    assert batch_statistics(of_lengths(loaded), LENGTHS) == batch_statistics(plan, LENGTHS)


def test_plans_of_all_kinds_stand_beside_each_other(tmp_path: Path) -> None:
    names = {saved(tmp_path, settings)[1].name for settings in EVERY_KIND}
    assert len(names) == len(EVERY_KIND)
    assert {name.split("_")[2] for name in names} == {"bucket", "window"}
    for settings in EVERY_KIND:
        assert saved(tmp_path, settings)[1].name in names


def test_a_setting_that_only_the_stored_plan_has_is_named(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, EVERY_KIND[3])
    with pytest.raises(CacheMismatchError, match=r"plan\.locality differs \(None wanted, shards:4 stored\)"):
        load_plan(folder, cache_key=KEY, settings=BucketConfig(batch_size=4))


def test_what_a_plan_needs_is_asked_for_only_when_it_is_made(tmp_path: Path) -> None:
    def resolved(settings: LengthsConfig, *, is_made: bool) -> None:
        def fail() -> Array:
            return pytest.fail("asked again")

        samples = Samples(
            durations=LENGTHS,
            frames=(lambda: LENGTHS // 10) if is_made else fail,
            tokens=(lambda: tokens_of(LENGTHS)) if is_made else fail,
            shards=(lambda: shards_of(LENGTHS)) if is_made else fail,
            sample_rate_hz=RATE,
        )
        place = plan_folder(tmp_path, dataset="prompts", split="train", cache_key=KEY, settings=settings)
        _, folder = kept_plan(place, samples, cache_key=KEY, settings=settings)
        assert folder is not None
        stats = json.loads((folder / "packing_stats.json").read_bytes())
        assert stats["shard_spread"] is not None

    for settings in EVERY_KIND:
        resolved(settings, is_made=True)
        resolved(settings, is_made=False)


# Large plans


def large(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(disk_module, "LAZY_BYTES", 1)
    return saved(root, EVERY_KIND[0])[1]


def test_damage_is_noticed_where_it_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = large(tmp_path, monkeypatch)
    path, good = folder / "members.npy", (folder / "members.npy").read_bytes()
    path.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
    loaded = load_plan(folder, cache_key=KEY, settings=EVERY_KIND[0])
    message = r"members\.npy: items from 0 on \(byte 0 of the array\): stored xxh3-64 \w{16}, computed \w{16}; delete"
    with pytest.raises(CacheCorruptError, match=message):
        loaded.order(0, 0).batch(0)
    with pytest.raises(CacheCorruptError, match=message):  # also the second time
        loaded.order(0, 0).batch(0)


@pytest.mark.parametrize("name", ["members.npy", "members_sums.npy", "offsets.npy"])
def test_files_of_other_sizes_are_noticed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = large(tmp_path, monkeypatch)
    path, good = folder / name, (folder / name).read_bytes()
    for content in (good[:-1], good + b"x", b""):
        path.write_bytes(content)
        with pytest.raises(CacheCorruptError, match=f"{name}: {len(content)} bytes, {len(good)} were written"):
            load_plan(folder, cache_key=KEY, settings=EVERY_KIND[0])


def test_a_damaged_head_is_noticed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = large(tmp_path, monkeypatch)
    path, good = folder / "members.npy", (folder / "members.npy").read_bytes()
    for old, new in ((b"<i4", b"<f4"), (b"(600,)", b"(300,)"), (b"NUMPY", b"MUMPY")):
        path.write_bytes(good.replace(old, new))
        with pytest.raises(CacheCorruptError, match=r"members\.npy (holds|is no array)"):
            load_plan(folder, cache_key=KEY, settings=EVERY_KIND[0])


def test_every_chunk_is_checked_once_and_none_beside_it(tmp_path: Path) -> None:
    array = np.arange(3 * MEMBERS_A_CHUNK + 5, dtype=np.int32)
    sums = chunk_sums(array, MEMBERS_A_CHUNK)
    assert len(sums) == 4
    array[2 * MEMBERS_A_CHUNK + 1] += 1
    check = CheckedArray(tmp_path / "members.npy", array, sums, chunk_items=MEMBERS_A_CHUNK, again="again").require_all
    check(np.array([0, MEMBERS_A_CHUNK, 3 * MEMBERS_A_CHUNK + 4]))
    for place in (2 * MEMBERS_A_CHUNK, 3 * MEMBERS_A_CHUNK - 1):
        with pytest.raises(CacheCorruptError, match=f"items from {2 * MEMBERS_A_CHUNK} on"):
            check(np.array([0, place]))
    array[0] += 1  # already compared: what was read once is not read again
    check(np.array([1]))
    check(np.array([], dtype=np.int64))
