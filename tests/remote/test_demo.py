"""`make demo-remote`: raw data in a bucket, a cache that is pushed there, and a second node that trains from it."""

from __future__ import annotations

import re

import pytest

from tests.processes import python


@pytest.mark.wide  # and `.ci/run` runs the demo itself
def test_the_demo_runs() -> None:
    ended = python("-m", "benchmarks.objects.demo")
    assert ended.returncode == 0, ended.stderr[-4000:]
    out = ended.stdout
    assert "pushed: s3://demo/caches/prompts-train-" in out
    assert re.search(r"^shards of the next 4 micro-batches: (\d+) of \1 are on this node", out, re.MULTILINE), out
    losses = re.findall(r"^6 steps, loss (\S+ -> \S+),", out, re.MULTILINE)
    assert len(losses) == 2
    assert losses[0] == losses[1], "both nodes have the same batches"
    last = re.search(r"node-2 has asked (\d+) times for the (\d+) shard files of the cache, and has read 0.0 MB", out)
    assert last is not None, out
    assert last[1] == last[2], "each is downloaded once"
