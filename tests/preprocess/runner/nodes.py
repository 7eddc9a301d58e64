"""A Ray cluster of several nodes on this machine, and builds whose shards are made there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.here_pool import HerePool
from forebay.config.tree import Config
from forebay.preprocess import pipeline
from forebay.preprocess.build_report import BuildReport, Options
from forebay.preprocess.pipeline import build
from forebay.preprocess.runner.ray import ENVIRONMENT

_STORE_BYTES = 80 * 2**20


@contextlib.contextmanager
def two_nodes() -> Iterator[Any]:
    """Yields a cluster of two nodes of one CPU each; its head is the first."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        add_node(cluster, num_cpus=1)
        try:
            yield cluster
        finally:
            cluster.shutdown()


def add_node(cluster: Any, *, num_cpus: int) -> Any:
    """Returns a new node, for `cluster.remove_node`."""
    return cluster.add_node(num_cpus=num_cpus, object_store_memory=_STORE_BYTES)


def on_ray(config: Config, **options: Any) -> BuildReport:
    """Returns the report of a build by the cluster that this process is connected to; all else is done in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "Pool", HerePool)
        return build(config, replace(Options(progress=False, runner="ray"), **options))
