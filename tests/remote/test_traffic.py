"""Requests to stores, as a run reports them: log lines, usage log, report, dry run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket
from forebay.config import BucketConfig
from forebay.plan.make import Planned, make_plan, samples_of
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.mixture.mixture_plan import mixture_plan
from forebay.plan.plan_usage import read_usage
from forebay.store.cache import Cache, open_cache
from forebay.store.remote.remote_shards import RemoteShards
from forebay.store.source import SourceUnion, without_audio
from forebay.train.loader import Loader, LoaderSettings
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import Warmed, dry_run, train
from forebay.train.loop.usage_log import NodeTraffic, Traffic
from tests.flat_constants import flat
from tests.remote.stored import node_settings, put_folder
from tests.store_factory import make_cache
from tests.train.fake_source import FakeSource
from tests.train.tiny import config_of, real_loader_model

TEXTS = flat(features="none", prompt="plain", pad_token_id=3).to_json()


@pytest.fixture
def remote(bucket: Bucket, proxy: Proxy, tmp_path: Path, environment: None) -> Cache:
    ids = [[5, *range(10, 20 + n), 3] for n in range(4)]
    folder = make_cache(tmp_path, num_samples=12, features="none", input_ids=ids, metadata={"constants": TEXTS})
    return open_cache(put_folder(bucket, folder), remote=node_settings(tmp_path, proxy.endpoint))


def mixed_loader(texts: Cache) -> Loader:
    speech = FakeSource(list(range(20, 230, 10)), features="qwen3_asr", prompt="qwen3_asr", seed=2)
    union = SourceUnion([speech, texts], ["speech", "texts"], shares_batches=False)
    plan = bucket_plan(
        union.lengths["num_audio_samples"],
        sample_rate_hz=16_000,
        settings=BucketConfig(edges_s=(1.0, 3.0), edges=(15, 30), batch_size=3, lockstep=1),
        tokens=union.lengths["num_tokens"],
        texts=without_audio(union),
    )
    mixture = mixture_plan(plan, union.source_of, names=union.names, weights=(2, 1), batches="per_source")
    return Loader(union, Planned(plan=mixture, key="0" * 64), LoaderSettings(num_threads=2))


def text_loader(texts: Cache) -> Loader:
    plan = make_plan(samples_of(texts), BucketConfig(edges=(15, 30), batch_size=2))
    return Loader(texts, Planned(plan=plan, key="0"), LoaderSettings())


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_run_says_what_its_nodes_downloaded_kept_and_waited_for(remote: Cache, tmp_path: Path) -> None:
    model = real_loader_model(tmp_path / "model")
    config = config_of(tmp_path, model=model, model_type="qwen3_asr", max_steps=6, log_every=2, usage_every=3)
    lines: list[StepLog] = []
    report = train(config, loader=mixed_loader(remote), source_kind="cache", log=lines.append)
    assert report.remote is not None
    (node,) = report.remote
    num_files = 2 * remote.num_shards
    assert (node.downloads >= num_files, node.hits + node.misses > 0) == (True, True)
    said = report.to_json()["remote"]
    assert set(said[0]) == {"hits", "misses", "downloads", "bytes", "evictions", "stalls", "stall_s", "damaged"}
    assert any(line.startswith("node 0: net ") for line in report.lines())
    assert all(line.remote is not None for line in lines)
    assert sum(line.remote.bytes for line in lines if line.remote) == node.bytes
    assert ", net " in str(lines[0])
    _, used = read_usage(tmp_path / "runs" / "tiny" / "logs" / "data_usage.jsonl")
    assert [line["remote"][0]["node"] for line in used] == [0, 0]
    assert sum(line["remote"][0]["bytes"] for line in used) == node.bytes


def test_ranks_of_a_node_add_up_and_nodes_stay_apart(remote: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    vectors: list[list[int]] = []

    def keep(values: Sequence[int]) -> list[int]:
        vectors.append(list(values))
        return list(values)

    shards = RemoteShards(remote)
    ranks = [NodeTraffic(shards, rank=rank, world=4, sum_over_ranks=keep) for rank in range(4)]
    remote.read(0)
    for rank in ranks:
        rank.take()
    nodes = [NodeTraffic(shards, rank=0, world=4, sum_over_ranks=lambda _: list(map(sum, zip(*vectors, strict=True))))]
    first, second = nodes[0].take()
    assert first == second
    assert first.downloads == 2 * ranks[0]._seen[2]
    assert [traffic.bytes for traffic in ranks[3].take()] == [0, 0]  # nothing since the last look


def test_local_caches_say_nothing(tmp_path: Path) -> None:
    source = FakeSource([20, 30])
    assert NodeTraffic.of(source, rank=0, world=1, sum_over_ranks=list) is None


def test_a_line_names_stalls_only_where_there_were_some() -> None:
    assert str(Traffic(bytes=1_200_000_000)) == "net 1.2 GB in 0 downloads"
    assert str(Traffic(bytes=1_200_000_000, hits=3, misses=1, downloads=2, stalls=3, stall_s=0.41)) == (
        "net 1.2 GB in 2 downloads, 75% of 4 files were here, 3 stalls 0.4 s"
    )


@pytest.mark.parametrize(
    ("missing_bytes", "missing_s", "end"),
    [
        (0, 0.0, "; all that this node keeps is here"),
        (6_000_000, 12.4, "; 6 MB are not here yet, 12 s more at that rate"),
        (6_000_000, None, "; 6 MB are not here yet"),
    ],
)
def test_what_is_left_to_download_is_told(missing_bytes: int, missing_s: float | None, end: str) -> None:
    warmed = Warmed(bytes=2_000_000, bytes_per_s=500_000.0, missing_bytes=missing_bytes, missing_s=missing_s)
    assert str(warmed) == "2 MB downloaded at 500 kB/s" + end


def test_a_dry_run_warms_the_node_and_says_how_far(
    remote: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("forebay.train.loop.run._SAY_EVERY_S", 0.0)
    monkeypatch.setattr("forebay.train.loop.run.make_loader", lambda *_, **__: text_loader(remote))
    assert RemoteShards(remote).missing_bytes() > 0
    config = config_of(tmp_path, model=tmp_path)
    report = dry_run(config, steps=8)
    assert report.remote is not None
    assert report.remote.bytes > RemoteShards(remote).sizes.max() // 2
    assert (report.remote.missing_bytes, report.remote.missing_s) == (0, 0.0)
    assert "1 of 8 micro-batches: " in caplog.text
    assert any("all that this node keeps is here" in line for line in report.lines())
    assert json.loads(json.dumps(report.to_json()))["remote"]["bytes"] == report.remote.bytes
