"""A node of a Ray cluster killed while it makes shards."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.building import Site, check_settled, config_of, site
from tests.faults.row import Row, dice
from tests.preprocess.runner.nodes import add_node, on_ray, two_nodes

_BUILD_S = 3.0
"""About what a build takes; a node that dies later dies of no work."""


@contextlib.contextmanager
def cluster_and_site(folder: Path) -> Iterator[tuple[Any, Site]]:
    """Prepares two nodes, a driver that is connected to them, and what a build gives."""
    from forebay.preprocess.runner.ray import Ray

    with site(folder) as place, two_nodes() as cluster, Ray(cluster.address):
        yield cluster, place


def dies(shared: tuple[Any, Site], number: int, folder: Path) -> str:
    cluster, place = shared
    after_s = dice("ray", number).uniform(0.0, _BUILD_S)
    root = folder / "caches"
    node = add_node(cluster, num_cpus=2)
    killer = threading.Timer(after_s, lambda: cluster.remove_node(node, allow_graceful=False))
    killer.start()
    try:
        report = on_ray(config_of(place.config, root))
    finally:
        killer.join()
    check_settled(root, place.wanted)
    return f"one result, {report.shards_written + report.shards_kept} shards"


ROW: Row[Any] = Row(
    name="ray",
    fault="a node of a Ray cluster killed at a random moment",
    outcome="its shards are made by other nodes; the cache is byte-equal",
    prepared=cluster_and_site,
    trial=dies,
    short=1,
    long=40,
)


@pytest.mark.wide
def test_a_node_that_dies_costs_its_shards_in_flight(tmp_path: Path) -> None:
    """15 s of CPU: a cluster, its workers, and a node more. `tests/preprocess/runner/test_ray.py` has the small one."""
    pytest.importorskip("ray")
    assert sum(ROW.check(tmp_path).values()) == ROW.short
