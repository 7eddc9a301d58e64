"""Pack plans on disk, and their statistics."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.config import BucketConfig, PackConfig
from forebay.errors import CacheCorruptError, CacheMismatchError, PlanError
from forebay.inspect.facts import plans_of
from forebay.plan import disk as disk_module
from forebay.plan import names as names_module
from forebay.plan.disk import load_plan, save_plan
from forebay.plan.make import Samples, kept_plan
from forebay.plan.names import plan_folder, plan_key, state_key
from forebay.plan.pack.pack_plan import PackPlan, pack_plan
from forebay.plan.statistics import pack_statistics
from tests.plan.packs import packs_of, photos_and_text

KEY = "ab" * 32
SETTINGS = PackConfig(seq_len=2048, max_patches=6000, buffer_size=32)
TOKENS, PATCHES = photos_and_text(800, text_share=0.2)
IMAGES = (PATCHES > 0).astype(np.int32)
PLAN = pack_plan(TOKENS, patches=PATCHES, settings=SETTINGS)
FILES = ["metadata.json", "members.npy", "offsets.npy", "too_long.npy", "too_many_patches.npy"]


def figures(plan: PackPlan, settings: PackConfig = SETTINGS, **changes: Any) -> dict[str, Any]:
    lengths: dict[str, Any] = {"patches": PATCHES, "images": IMAGES}
    return pack_statistics(plan, TOKENS, **{**lengths, **changes})


def saved(root: Path) -> Path:
    folder = plan_folder(root, dataset="vqa", split="train", cache_key=KEY, settings=SETTINGS)
    save_plan(PLAN, folder, cache_key=KEY, settings=SETTINGS, statistics=figures(PLAN))
    return folder


def resolved(root: Path, **changes: Any) -> tuple[PackPlan, Path | None]:
    name: dict[str, Any] = {"cache_key": KEY, "settings": changes.pop("settings", SETTINGS)}
    lengths: dict[str, Any] = {"tokens": lambda: TOKENS, "patches": lambda: PATCHES, "images": lambda: IMAGES}
    folder = plan_folder(root, dataset="vqa", split="train", **name)
    return kept_plan(folder, Samples(**{**lengths, **changes}), **name)  # type: ignore[return-value]


@pytest.mark.parametrize("lazy_bytes", [0, 2**25])
def test_a_loaded_plan_has_the_same_order(tmp_path: Path, lazy_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "LAZY_BYTES", lazy_bytes)
    loaded = load_plan(saved(tmp_path), cache_key=KEY, settings=SETTINGS, num_samples=len(TOKENS))
    assert isinstance(loaded, PackPlan)
    assert (loaded.check is None) == (lazy_bytes > 0)
    assert (loaded.num_batches, loaded.tail) == (PLAN.num_batches, PLAN.tail)
    for a, b in zip(PLAN.order(3, 7).batches(range(20)), loaded.order(3, 7).batches(range(20)), strict=True):
        assert a.tolist() == b.tolist()
    assert {name: found.tolist() for name, found in loaded.unplaced.items()} == {
        name: found.tolist() for name, found in PLAN.unplaced.items()
    }
    assert len(PLAN.unplaced["too_long"]) > 0
    assert figures(loaded) == figures(PLAN)


def test_a_plan_without_unplaced_samples_is_kept(tmp_path: Path) -> None:
    settings = PackConfig(seq_len=8192)
    plan, folder = resolved(tmp_path, settings=settings)
    assert folder is not None
    assert [len(found) for found in plan.unplaced.values()] == [0, 0]
    assert resolved(tmp_path, settings=settings, patches=lambda: pytest.fail("made twice"))[1] == folder


def test_the_folder_says_what_it_is(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert folder == tmp_path / "plans" / f"vqa_train_seq2048_buf32_{plan_key(KEY, SETTINGS)[:8]}"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "packing_stats.json"])
    metadata = json.loads((folder / "metadata.json").read_bytes())
    assert metadata["plan"]["cache_keys"] == [KEY]
    statistics = figures(PLAN)
    shown = {name: metadata[name] for name in ("kind", "num_samples", "num_packs", "fill")}
    assert shown == {
        "kind": "pack",
        "num_samples": 800,
        "num_packs": PLAN.num_batches,
        "fill": statistics["fill"],
    }
    (listed,) = plans_of(KEY, [tmp_path])
    assert (listed["kind"], listed["num_packs"], listed["fill"]) == ("pack", PLAN.num_batches, statistics["fill"])
    assert listed["statistics"] == statistics


def test_the_same_plan_is_the_same_bytes(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


@pytest.mark.parametrize("name", FILES[1:])
def test_every_damage_is_noticed_and_repaired(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(tmp_path)
    path, good = folder / name, (folder / name).read_bytes()
    for content in (good[:-1], good + b"x", b"", good[:-1] + bytes([good[-1] ^ 1])):
        path.write_bytes(content)
        with pytest.raises(CacheCorruptError, match=f"{name}: "):
            load_plan(folder, cache_key=KEY, settings=SETTINGS)
    with caplog.at_level(logging.WARNING):
        assert resolved(tmp_path)[1] == folder
    assert "making the plan again" in caplog.text
    assert path.read_bytes() == good


def test_a_large_plan_is_checked_where_it_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "LAZY_BYTES", 1)
    path = saved(tmp_path) / "members.npy"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    loaded = load_plan(path.parent, cache_key=KEY, settings=SETTINGS)
    with pytest.raises(CacheCorruptError, match=r"members\.npy: items from 0 on"):
        loaded.order(0, 0).batch(0)


def test_plans_of_other_samples_and_settings_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    with pytest.raises(CacheMismatchError, match=r"num_samples differs \(799 in the cache, 800 in the plan\)"):
        resolved(tmp_path, tokens=lambda: TOKENS[:-1])
    with pytest.raises(CacheMismatchError, match=r"plan\.max_patches differs \(8000 wanted, 6000 stored\)"):
        load_plan(folder, cache_key=KEY, settings=replace(SETTINGS, max_patches=8000))
    with pytest.raises(CacheMismatchError, match=r"plan\.kind differs \(bucket wanted, pack stored\)"):
        load_plan(folder, cache_key=KEY, settings=BucketConfig(batch_size=4))


def test_an_unwritable_root_keeps_the_plan_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "plans").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        plan, folder = resolved(tmp_path)
    assert folder is None
    assert plan.members.tolist() == PLAN.members.tolist()
    assert "the plan stays in memory" in caplog.text


# Statistics


def test_statistics_are_those_of_the_packs() -> None:
    found = figures(PLAN, shards=np.arange(800) // 100)
    packs = packs_of(PLAN)
    tokens = np.array([TOKENS[pack].sum() for pack in packs])
    patches = np.array([PATCHES[pack].sum() for pack in packs])
    assert (found["total_samples"], found["total_packs"]) == (800, len(packs))
    assert found["fill"] == pytest.approx(tokens.sum() / len(packs) / 2048, abs=1e-6)
    assert found["patch_fill"] == pytest.approx(patches.sum() / len(packs) / 6000, abs=1e-6)
    assert found["pad_tokens"] == len(packs) * 2048 - tokens.sum()
    sizes = np.array([len(pack) for pack in packs])
    images = np.array([IMAGES[pack].sum() for pack in packs])
    for name, held in {"samples": sizes, "tokens": tokens, "patches": patches, "images": images}.items():
        shown = found[name]
        assert (shown["min"], shown["max"]) == (held.min(), held.max())
        assert shown["mean"] == pytest.approx(held.mean(), abs=1e-4)
        edges, counts = shown["histogram"]["edges"], shown["histogram"]["counts"]
        assert counts == np.histogram(held, bins=edges)[0].tolist()
        assert (edges[0], edges[-1], len(edges) - 1) == (held.min(), held.max(), len(counts))
    unplaced = {reason: len(samples) for reason, samples in PLAN.unplaced.items()}
    assert found["unplaced"] == unplaced
    assert found["dropped"] == sum(unplaced.values()) == 800 - sizes.sum()
    assert found["worlds"]["8"]["steps"] == -(-len(packs) // 8)
    assert found["worlds"]["8"]["mixed_steps"] == 0
    assert found["shard_spread"] > 0.2
    assert found["mean_displacement"] == pytest.approx(1 / 3, abs=0.05)


def test_statistics_without_images_or_patches() -> None:
    settings = PackConfig(seq_len=8192)
    plan = pack_plan(TOKENS, settings=settings)
    found = pack_statistics(plan, TOKENS)
    assert found["patch_fill"] is None
    assert "patches" not in found
    assert found["shard_spread"] is None
    one = pack_statistics(pack_plan(np.array([5]), settings=settings), np.array([5]))
    assert one["samples"]["histogram"] == {"edges": [1, 1], "counts": [1]}


def test_statistics_of_other_samples_are_refused() -> None:
    with pytest.raises(PlanError, match="images holds 3 samples, the plan 800"):
        figures(PLAN, images=IMAGES[:3])


def test_packs_of_an_older_packer_stay_readable_and_of_a_newer_one_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names_module, "PACKER_VERSION", 1)
    folder = saved(tmp_path)
    monkeypatch.setattr(names_module, "PACKER_VERSION", 2)
    loaded = load_plan(folder, cache_key=KEY, settings=SETTINGS, num_samples=len(TOKENS))
    assert np.array_equal(loaded.members, PLAN.members)
    content: dict[str, Any] = {"recipe": "r", "sample_ids": "s", "content": {}}
    now = state_key(SETTINGS, **content)
    again = saved(tmp_path)
    assert again != folder
    monkeypatch.setattr(names_module, "PACKER_VERSION", 1)
    assert state_key(SETTINGS, **content) == now
    with pytest.raises(CacheMismatchError, match=r"packer_version differs \(1 wanted, 2 stored\)"):
        load_plan(again, cache_key=KEY, settings=SETTINGS, num_samples=len(TOKENS))
