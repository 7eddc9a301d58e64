"""A server and its proxy in a process of their own."""

from __future__ import annotations

import obstore
import pytest
from obstore.exceptions import GenericError

from benchmarks.objects.beside import Beside
from benchmarks.objects.faults import SLOW_DOWN, Rule


def test_another_process_serves_and_counts() -> None:
    with Beside() as beside:
        bucket = beside.make_bucket("forebay")
        through = bucket.at(beside.endpoint)
        bucket.put("a", b"x" * 1000)
        beside.limit(latency_s=0.001, bytes_per_s=1e9)
        beside.add(Rule(fault=SLOW_DOWN, method="GET", after=1, times=1))
        assert through.get("a") == b"x" * 1000
        with pytest.raises(GenericError, match="SlowDown"):
            through.get("a")
        assert beside.traffic().requests == {("GET", "a"): 2}
        assert [one.fault for one in beside.traffic().exchanges] == [None, SLOW_DOWN]
        beside.clear()
        assert through.get("a") == b"x" * 1000
        assert beside.traffic().bytes_of("a") == 1000
        assert beside.cpu_s() > 0
    with pytest.raises(GenericError, match="error sending request"):
        obstore.get(through.store(timeout_s=5), "a")
