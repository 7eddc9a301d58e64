"""Images that ten shards of texts share, on a node that holds half: each shard is downloaded about once an epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket
from forebay.config import BucketConfig, Config, LoaderConfig, SourceConfig
from forebay.config.remote import GB
from forebay.config.train import RunConfig
from forebay.plan.make import plan_of
from forebay.plan.remote_cost import windows_of
from forebay.plan.shard_line import shard_run
from forebay.store.cache import Cache, open_cache
from forebay.store.key import digest
from forebay.store.layout import ROW_BITS, ListedItems
from forebay.store.remote.remote_shards import RemoteShards
from forebay.store.seal import Contents, seal
from forebay.store.shard import shard_fields, shard_name, write_shard
from forebay.train.loader import Loader, LoaderSettings
from tests.golden import make_v4_declared as golden
from tests.remote.stored import node_settings, put_folder

pytestmark = pytest.mark.usefixtures("environment")
SHARED_BY = 10
GROUPS, ROWS, IMAGES = 12, 4, 3
"""Sets of shards of texts; samples of such a shard; images of a set, all of which each of its samples lists."""
PLAN = BucketConfig(batch_size=2, lockstep=1, locality="auto")


def image(number: int) -> dict[str, Any]:
    """An image as its processor gives it, of 6 kB."""
    pixels = np.random.default_rng(number).integers(0, 5, (3, 40, 50)).astype(np.uint8)
    arrays: dict[str, Any] = {"pixel_values": pixels, "places": np.array([[number, 0]], np.int32)}
    stored = [field.stored(arrays[field.name]) for field in golden.IMAGES_FORM.stored]
    return {**{k: v for one in stored for k, v in one.items()}, "image_hash": f"{number:032x}"}


def text(sample: int) -> dict[str, Any]:
    """A question of a sample."""
    ids = np.arange(5, dtype=np.int32) + sample % 7
    table = {"sample_id": f"chat-{sample}", "text": "?", "images": "[]", "source": "train.jsonl"}
    return {"input_ids": ids, "label_mask": np.ones(5, np.uint8), **table}


def downloads(proxy: Proxy) -> dict[str, int]:
    """How many shards of each group were asked for."""
    return {
        group: sum(n for (method, key), n in proxy.requests.items() if method == "GET" and f"/{group}/" in key)
        for group in ("image", "text")
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of 120 shards of texts; the images of ten such shards are a shard of images."""
    root = tmp_path_factory.mktemp("shared")
    count = GROUPS * SHARED_BY * ROWS
    rows = {
        "image": [[image(IMAGES * group + n) for n in range(IMAGES)] for group in range(GROUPS)],
        "text": [[text(first + n) for n in range(ROWS)] for first in range(0, count, ROWS)],
    }
    shards: dict[str, Any] = {}
    for group, parts in rows.items():
        fields = shard_fields(golden.IMAGES_FIELDS, group)
        (root / "made" / group).mkdir(parents=True)
        paths = [root / "made" / shard_name(group, number) for number in range(len(parts))]
        shards[group] = [
            (path, write_shard(path, fields, part, key=digest([group, number])))
            for number, (path, part) in enumerate(zip(paths, parts, strict=True))
        ]
    slots = np.concatenate([(number << ROW_BITS) + np.arange(ROWS) for number in range(GROUPS * SHARED_BY)])
    listed = [(group << ROW_BITS) + np.arange(IMAGES) for group in np.arange(count) // (SHARED_BY * ROWS)]
    of_golden = golden.contents(golden.IMAGES, root / "golden")
    contents = Contents(
        fields=golden.IMAGES_FIELDS,
        shards=shards,
        items={"image": ListedItems(np.arange(count + 1) * IMAGES, np.concatenate(listed))},
        arrays={"slots.npy": slots, "lengths.npy": np.array([[5] * count, [IMAGES] * count, [IMAGES] * count], "<i4")},
        files=of_golden.files,
        document={**of_golden.document, "key": digest("shared"), "num_samples": count, "num_images": GROUPS * IMAGES},
    )
    seal(root / "shared", contents, scratch=root / "made")
    return root / "shared"


def holding(folder: Path, bucket: Bucket, proxy: Proxy, tmp_path: Path, share: float) -> Cache:
    """The cache on a node that keeps so much of it."""
    url = put_folder(bucket, folder)
    shards = RemoteShards(open_cache(url, remote=node_settings(tmp_path, proxy.endpoint)))
    bound = shards.kept_bytes + share * (shards.total_bytes - shards.kept_bytes)
    settings = node_settings(tmp_path, proxy.endpoint, shard_dir=str(tmp_path / "small"), prefetch_shards=1)
    return open_cache(url, remote=replace(settings, cache_size_gb=bound / GB))


def config_of(tmp_path: Path, locality: str = "auto") -> Config:
    return Config(
        name="shared",
        source=SourceConfig(kind="jsonl", manifest=str(tmp_path / "train.jsonl")),
        plan=replace(PLAN, locality=locality),
        loader=LoaderConfig(),
        run=RunConfig(cache_root=str(tmp_path / "root")),
        path=str(tmp_path / "shared.toml"),
    )


def test_each_shard_is_downloaded_about_once_an_epoch(
    folder: Path, bucket: Bucket, proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = holding(folder, bucket, proxy, tmp_path, 0.5)
    planned = plan_of(config_of(tmp_path), small)
    assert planned.locality is not None
    windows = windows_of(planned.plan)
    assert windows is not None
    assert windows.run == SHARED_BY
    loader = Loader(small, planned, LoaderSettings(num_threads=0))
    before, seen = downloads(proxy), []
    for _ in range(2):
        for _ in loader:
            seen += loader.indices
    assert sorted(seen) == sorted([*range(len(small))] * 2)
    an_epoch = {group: (number - before[group]) / 2 for group, number in downloads(proxy).items()}
    for group, number in an_epoch.items():
        assert number <= 1.3 * small.unit_count(group), an_epoch
    assert "downloaded more than once" not in caplog.text


def test_what_comes_later_goes_first_whatever_group_it_is_of(folder: Path) -> None:
    cache = open_cache(folder)
    for unit in range(cache.num_units):
        assert {wanted.number for wanted in cache.unit_files(unit)} == {unit}


def test_shards_that_share_images_stay_together(folder: Path, tmp_path: Path) -> None:
    cache = open_cache(folder)
    assert shard_run(cache) == SHARED_BY
    shards = cache.slots >> ROW_BITS
    plan: Any = plan_of(config_of(tmp_path, "shards:20"), cache).plan
    again: Any = plan_of(config_of(tmp_path, "shards:20"), cache).plan  # from the disk
    assert plan.shard_run == again.shard_run == SHARED_BY
    batches = plan.order(0, 1).batches(np.arange(plan.num_batches))
    assert [b.tolist() for b in batches] == [b.tolist() for b in again.order(0, 1).batches(np.arange(plan.num_batches))]
    sets = [
        set((shards[np.concatenate(batches[n : n + 20])] // SHARED_BY).tolist()) for n in range(0, len(batches), 20)
    ]
    assert max(map(len, sets)) <= 2
    narrow: Any = plan_of(config_of(tmp_path, "shards:4"), cache).plan
    assert narrow.shard_run == 2
