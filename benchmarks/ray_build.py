"""Measures a shard on Ray beside the bare task: `python -m benchmarks.ray_build [--tiny] [--json] [--rounds N]`.

- **Bare** is `make_shard` in a loop in one warm process of one thread.
- **On Ray** is the same tasks by `--runner ray`: CPU seconds of this driver and of all processes below it, which are
  the cluster (one node of one CPU), its workers and their children.
- **The cluster alone** is what the same processes take in the same time with nothing to do.

Every round takes another share of the corpus and both in turn; the ratio is the median of those within a round. What
starts once is apart: the cluster, and a worker with its child and the libraries of the first shards.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.data import BENCH_DATA, corpus, shard_tasks
from benchmarks.report import Cost, arguments, machine, median, ratio, show, timed
from forebay.preprocess.pool import Pool
from forebay.preprocess.runner.parts import sole_driver
from forebay.preprocess.runner.ray import OnNode, Ray, imported
from forebay.preprocess.shard_task import ShardTask, make_shard
from forebay.store.layout import Constants

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE_S = 5.0


def bare(tasks: Sequence[ShardTask]) -> Cost:
    """Returns what making these shards costs in this process; their folder is new."""
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder:
        return timed(lambda: [make_shard(replace(task, folder=Path(folder))) for task in tasks])


def on_ray(ray: Ray, tasks: Sequence[ShardTask], probe: dict[Any, str]) -> Cost:
    """Returns what making these shards costs on the cluster, as `Run` hands them over."""
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as root, sole_driver(Path(root), config="CONFIG") as token:
        host = socket.gethostname()
        function = OnNode(
            function=make_shard,
            host=host,
            probe=probe,
            constants=Constants({}),
            device=None,
            driver=host,
            token=token,
            stores=(),
            config="CONFIG",
        )
        here = (replace(task, folder=Path(root)) for task in tasks)
        return tree_timed(lambda: sum(1 for _ in ray.run(function, here)))


def tree_timed(work: Callable[[], Any]) -> Cost:
    """Returns the cost of a call in this process and in all below it, those that ended meanwhile included."""
    wall, cpu = time.perf_counter(), tree_cpu_s()
    work()
    return Cost(time.perf_counter() - wall, tree_cpu_s() - cpu)


def tree_cpu_s() -> float:
    """Returns the CPU seconds of this process and of all below it, and of what these have waited for."""
    parents, ticks = {}, {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    return sum(ticks[process] for process in ticks if os.getpid() in _line(process, parents)) / _TICKS_PER_S


def _line(process: int, parents: dict[int, int]) -> Iterator[int]:
    while process in parents:
        yield process
        process = parents[process]


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    data = corpus(hours=0.05 if options.tiny else 5, num_tars=2 if options.tiny else 8)
    rounds = 1 if options.tiny else options.rounds or 4
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as root, Pool(1) as pool:
        tasks = shard_tasks(data.config(cache_root=Path(root)), pool.map)
        groups = tasks[0].groups
        probe = {group: pool.map(groups.probe, [group])[0] for group in groups.names}
        pool.map(bare, [tasks[:2]])  # loads the libraries
        costs, starts = _measured(pool, tasks, probe, rounds)
    document = {
        "machine": machine("ray", "numpy", "torch"),
        "shards": len(tasks),
        "rounds": rounds,
        "a shard": _rows(costs),
        "once": starts,
    }
    show(document, as_json=options.json)
    return 0


def _measured(
    pool: Pool, tasks: list[ShardTask], probe: dict[Any, str], rounds: int
) -> tuple[list[tuple[int, Cost, Cost, float]], list[dict[str, Any]]]:
    """Returns shards and both costs of every round, with the CPU seconds of the cluster alone in a second; starts."""
    costs = []
    with contextlib.ExitStack() as stack:
        library = imported()
        stack.callback(library.shutdown)
        cluster = tree_timed(
            lambda: library.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        )
        ray = stack.enter_context(Ray())
        warm = on_ray(ray, tasks[:2], probe)
        idle = tree_timed(lambda: time.sleep(_IDLE_S))
        for number in range(rounds):
            share = tasks[2 * number :: 2 * rounds] + tasks[2 * number + 1 :: 2 * rounds]  # recordings with their texts
            plain = pool.map(bare, [share])[0]
            costs.append((len(share), plain, on_ray(ray, share, probe), idle.cpu_s / idle.wall_s))
    starts = [
        {"start": "the cluster", "wall_s": cluster.wall_s, "cpu_s": cluster.cpu_s},
        {"start": "a worker, its child and two shards", "wall_s": warm.wall_s, "cpu_s": warm.cpu_s},
    ]
    return costs, starts


def _rows(costs: Sequence[tuple[int, Cost, Cost, float]]) -> list[dict[str, Any]]:
    plain = [cost.cpu_s / n for n, cost, _, _ in costs]
    kinds = [
        ("bare task, one process", plain, [cost.wall_s / n for n, cost, _, _ in costs]),
        ("on Ray", [cost.cpu_s / n for n, _, cost, _ in costs], [cost.wall_s / n for n, _, cost, _ in costs]),
        ("of that, the cluster alone", [idle * cost.wall_s / n for n, _, cost, idle in costs], None),
    ]
    return [
        {
            "contestant": name,
            "cpu_ms_a_shard": 1e3 * median(cpu),
            "wall_ms_a_shard": None if wall is None else 1e3 * median(wall),
            "times_bare": ratio(cpu, plain),
            "target": "<= 1.15" if name == "on Ray" else None,
        }
        for name, cpu, wall in kinds
    ]


if __name__ == "__main__":
    # Under its real name, not `__main__`: workers import the contestants by it.
    from benchmarks import ray_build

    sys.exit(ray_build.main())
