"""Two ranks under torch.distributed.run: on one node they share its cache, on two each has its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket
from tests.preprocess.corpus import speech_corpus
from tests.preprocess.here_pool import build_here
from tests.processes import torchrun


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("where", ["", "/apart"])
def test_rank_0_finds_and_every_node_opens_by_url(bucket: Bucket, proxy: Proxy, tmp_path: Path, where: str) -> None:
    corpus, root = speech_corpus(tmp_path), f"{bucket.url}/caches"
    built = build_here(corpus.config(f"run.cache_root={root}", f"remote.shard_dir={tmp_path / 'builder'}"))
    shutil.rmtree(tmp_path / "builder")
    proxy.clear()
    outcome = torchrun("tests.remote.two_nodes_worker", tmp_path / "config.toml", tmp_path, root + where)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    ranks: list[dict[str, Any]] = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]
    assert [rank["place"] for rank in ranks] == [built.cache] * 2
    assert ranks[0]["plan_key"] == ranks[1]["plan_key"]
    assert sum(rank["samples"] for rank in ranks) >= 17
    nodes = ["node_0", "node_1"] if where else ["node", "node"]
    for rank, node in zip(ranks, nodes, strict=True):
        assert Path(rank["folder"]).is_relative_to(tmp_path / node)
    shards = [n for (method, key), n in proxy.requests.items() if method == "GET" and key.endswith(".tdz")]
    assert max(shards) == 1 or where  # one download of each a node
