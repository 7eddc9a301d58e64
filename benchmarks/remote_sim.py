"""Simulates the shard cache of a node over forebay's own orders: `python -m benchmarks.remote_sim [--tiny] [--json]`.

The order of an epoch is a function, so a node can know when it needs each shard next. A row is an order (`global`, or
`shards:N`, a shuffle within a moving window of N shards) and a policy of eviction: `lru` sees the past alone, `belady`
gives up the shard whose next use is farthest.

The plans are real ones (`Order` and `ShardOrder`) of made-up clips of the usual durations in seven buckets. Their
`members` hold the shard of each sample in place of its index, because shards are all that a cache sees. Languages do
not enter but under `mixtures`: a plan of buckets shuffles the shards of all of them.

- **Fetches** are GETs of whole shards, all of one size. A step uses a shard once, however many samples it takes of it.
- **Stall** is the share of the time in which steps wait for shards. The link of a node brings one shard after the
  other, in the order of their first use. Under both policies a loader asks for the shards of the next 4 batches. Under
  `belady` it also asks for the next shards along the plan, until `ahead` of them wait for their step. Room for these,
  a quarter of the cache at most, is kept free (else Belady's choice would leave none: under a global shuffle the shard
  with the farthest next use is often one that was used a moment ago). No shard comes before there is a place for it.

`small` is three epochs of one process from an empty cache that has room for half of the shards. `fetches`, `windows`
and `stalls` are the large case: 70,000 hours of log-mel in 8,640 shards, and nodes of 8 ranks with 500 GB each. They
sample the order, see `fetch_rows`, `window_rows` and `stall_rows`. `mixtures` is a mixture of twelve languages in
shards of their own, each with a window.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.plan import EDGES_S, SHARES
from benchmarks.report import arguments, machine, show
from benchmarks.shard_cache import POLICIES, Result, simulate
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.cursor import num_steps
from forebay.plan.mixture.mixture_plan import MixturePlan, mixture_plan
from forebay.plan.shard_line import locality_window
from forebay.store.layout import Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Uses of shards by a node. uses: int64 [num_uses], shards, each once a step; steps: the step of each use.

    sizes: int64 [num_steps], samples of each step.
    """

    uses: Ints
    steps: Ints
    sizes: Ints


def made_plan(*, num_shards: int, shard_samples: int, batch_seconds: float, window: int | None) -> BucketPlan:
    """Returns a plan of clips of the usual durations in seven buckets, whose members are the shards of the samples."""
    counts = np.random.default_rng(0).multinomial(shard_samples, np.array(SHARES) / sum(SHARES), size=num_shards)
    shards = np.arange(num_shards, dtype=np.int32)
    return BucketPlan(
        members=np.concatenate([np.repeat(shards, column) for column in counts.T]),
        offsets=np.concatenate(([0], np.cumsum(counts.sum(axis=0)))),
        batch_sizes=np.array([int(batch_seconds // edge) for edge in EDGES_S[1:]]),
        edges_s=EDGES_S[1:],
        sample_rate_hz=16_000,
        lockstep=8,
        tail="short",
        shard_counts=None if window is None else counts.astype(np.int32),
        locality_shards=window,
    )


def made_mixture(
    *,
    num_sources: int,
    num_shards: int,
    shard_samples: int,
    batch_seconds: float,
    window: int | None,
    spread: float = 0.0,
) -> MixturePlan:
    """Returns a mixture of languages of `num_shards` shards each, weighted as 1 to `num_sources`, see `made_plan`.

    spread: how far the lengths of one shard are from those of all: 0 alike, 1 hardly two buckets a shard.
    """
    rng = np.random.default_rng(0)
    usual = np.array(SHARES) / sum(SHARES)
    mixes = rng.dirichlet(usual / spread, size=num_sources * num_shards) if spread else usual
    counts = rng.multinomial(shard_samples, mixes, size=num_sources * num_shards)
    buckets = made_plan(num_shards=1, shard_samples=1, batch_seconds=batch_seconds, window=window)
    classes = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
    lying = np.repeat(np.arange(len(counts), dtype=np.int32), shard_samples)
    plan = replace(
        buckets,
        members=np.argsort(classes, kind="stable"),
        offsets=np.concatenate(([0], np.cumsum(counts.sum(axis=0)))),
        shard_counts=None if window is None else counts,
    )
    made = mixture_plan(
        plan,
        lying // num_shards,
        names=[f"language {number}" for number in range(num_sources)],
        weights=[1 + number for number in range(num_sources)],
    )
    return replace(made, members=lying[made.members])


def node_positions(plan: BucketPlan | MixturePlan, *, nodes: int, ranks: int) -> Ints:
    """Returns the positions that the ranks of node 0 take in an epoch, int64 [num_steps, ranks], see `plan.cursor`."""
    world = nodes * ranks
    steps = num_steps(plan.num_batches, world, tail=plan.tail)
    found: Ints = (np.arange(steps)[:, None] * world + np.arange(ranks)) % plan.num_batches
    return found


def trace(plan: BucketPlan | MixturePlan, positions: Ints, *, epochs: Sequence[int] = (0,)) -> Trace:
    """Returns the uses of the steps at `positions` [num_steps, ranks] in these epochs, one after the other."""
    shards, sizes = [], []
    for epoch in epochs:
        order = plan.order(0, epoch)
        for start in range(0, len(positions), _STEPS_AT_ONCE):
            batches = order.batches(positions[start : start + _STEPS_AT_ONCE].ravel())
            shards += batches
            sizes += [len(batch) for batch in batches]
    line = np.concatenate(shards)
    samples = np.array(sizes).reshape(-1, positions.shape[1]).sum(axis=1)
    steps = np.repeat(np.arange(len(samples)), samples)
    _, firsts = np.unique(steps * (int(line.max()) + 1) + line, return_index=True)
    firsts.sort()
    return Trace(uses=line[firsts], steps=steps[firsts], sizes=samples)


_STEPS_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """How shards come to a node.

    fetch_s: seconds of the link for a shard. step_s: seconds of a step that waits for nothing. batches: micro-batches
    that each loader fills ahead. ahead: shards that no step has used yet, downloaded at most along the plan; 0 where
    the plan is not known. spare: shards that the node has room for beside the cache that was simulated.
    """

    fetch_s: float
    step_s: float
    batches: int = 4
    ahead: int = 0
    spare: int = 0


def step_starts(steps: Trace, result: Result, feed: Feed) -> list[float]:
    """Returns when each step begins, in seconds.

    The link brings the fetches of `result` in their order, one at a time. A shard is asked for when a loader begins to
    fill the batch that needs it; along the plan earlier, as soon as fewer than `ahead` shards wait for their step. In
    both cases it comes when there is a place: `spare` fetches ago, the victim was used for the last time.
    """
    needed, freed = steps.steps[result.missed].tolist(), _freed(steps, result).tolist()
    starts: list[float] = []
    link_free, fetch = 0.0, 0
    for step in range(len(steps.sizes)):
        ready = starts[-1] + feed.step_s if starts else 0.0
        start = ready
        while fetch < len(needed) and needed[fetch] == step:
            asked = _time(starts, step - feed.batches, ready)
            if feed.ahead:
                asked = min(asked, _time(starts, needed[fetch - feed.ahead] if fetch >= feed.ahead else -1, ready))
            room = _time(starts, freed[fetch - feed.spare] if fetch >= feed.spare else -1, ready)
            link_free = max(link_free, asked, room) + feed.fetch_s
            start = max(start, link_free)
            fetch += 1
        starts.append(start)
    return starts


def _time(starts: Sequence[float], step: int, ready: float) -> float:
    """Returns when a step began: 0 before the first, `ready` for the step that waits."""
    return 0.0 if step < 0 else starts[step] if step < len(starts) else ready


def _freed(steps: Trace, result: Result) -> Ints:
    """Returns for each fetch the step that used its victim last, int64; -1 where a place was free."""
    places = np.flatnonzero(result.missed)
    victims = result.victims[places]
    span = len(steps.uses) + 1
    keys = steps.uses * span + np.arange(len(steps.uses))
    order = np.argsort(keys)
    last = order[np.searchsorted(keys, victims * span + places, sorter=order) - 1]
    return np.where(victims < 0, -1, steps.steps[last])


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A set of data, and the nodes that train on it. ahead: the depths of the download ahead that are compared."""

    num_shards: int
    shard_samples: int
    shard_bytes: int
    bound_bytes: int
    batch_seconds: float
    step_s: float
    ranks: int
    nodes: tuple[int, ...]
    windows: tuple[int | None, ...]
    ahead: tuple[int, ...]
    gbit_s: tuple[int, ...]

    @property
    def capacity(self) -> int:
        """Shards that a node holds."""
        return self.bound_bytes // self.shard_bytes

    def plan(self, window: int | None) -> BucketPlan:
        """Returns the plan of a shuffle within `window` shards, or of a global one."""
        return made_plan(
            num_shards=self.num_shards,
            shard_samples=self.shard_samples,
            batch_seconds=self.batch_seconds,
            window=window,
        )

    def starts(self, steps: Trace, *, policy: str, ahead: int) -> list[list[float]]:
        """Returns when each step begins, see `step_starts`, for each link of `gbit_s`."""
        spare = min(ahead, self.capacity // 4)
        result = simulate(steps.uses, capacity=self.capacity - spare, policy=policy)
        feeds = [
            Feed(fetch_s=self.shard_bytes * 8e-9 / gbit_s, step_s=self.step_s, ahead=ahead, spare=spare)
            for gbit_s in self.gbit_s
        ]
        return [step_starts(steps, result, feed) for feed in feeds]


def order_name(window: int | None) -> str:
    """Returns what a config calls an order."""
    return "global" if window is None else f"shards:{window}"


def small_rows(setting: Setting) -> list[dict[str, Any]]:
    """Returns a row for each order and policy: three whole epochs of one process, from an empty cache."""
    rows = []
    for window in setting.windows:
        plan = setting.plan(window)
        steps = trace(plan, node_positions(plan, nodes=1, ranks=setting.ranks), epochs=range(3))
        found = {policy: simulate(steps.uses, capacity=setting.capacity, policy=policy) for policy in POLICIES}
        for policy, result in found.items():
            ahead = setting.ahead[0] if policy == "belady" else 0
            starts = setting.starts(steps, policy=policy, ahead=ahead)[0]
            rows.append(
                {
                    "order": order_name(window),
                    "policy": policy,
                    "misses a sample": result.fetches / int(steps.sizes.sum()),
                    "fetches a shard and epoch": result.fetches / setting.num_shards / 3,
                    "GB an epoch": result.fetches * setting.shard_bytes / 3e9,
                    "bytes x lru": result.fetches / found["lru"].fetches,
                    f"stall at {setting.gbit_s[0]} Gbit/s": _stall(starts, setting, slice(0, None)),
                }
            )
    return rows


def _stall(starts: Sequence[float], setting: Setting, counted: slice) -> float:
    """Returns the share of the time of these steps in which the node waits for shards."""
    times = [*starts, starts[-1] + setting.step_s][counted]
    return max(0.0, round(1 - (len(times) - 1) * setting.step_s / (times[-1] - times[0]), 6))


def fetch_rows(setting: Setting) -> list[dict[str, Any]]:
    """Returns a row for each order, policy and number of nodes: what a node fetches in an epoch after the first.

    The sample is every step of node 0 of the most nodes. With fewer nodes, each sample misses as often under a global
    shuffle; within windows, each shard is fetched as often.
    """
    rows = []
    samples = setting.num_shards * setting.shard_samples
    for window in setting.windows:
        plan = setting.plan(window)
        steps = trace(plan, node_positions(plan, nodes=setting.nodes[-1], ranks=setting.ranks), epochs=range(_EPOCHS))
        counted = steps.steps >= len(steps.sizes) // _EPOCHS
        for policy in ("lru", "belady"):
            missed = simulate(steps.uses, capacity=setting.capacity, policy=policy).missed
            fetched = int(missed[counted].sum()) / (_EPOCHS - 1)
            for nodes in setting.nodes:
                epoch = fetched * setting.nodes[-1] / nodes if window is None else fetched
                epoch_bytes = epoch * setting.shard_bytes
                epoch_s = num_steps(plan.num_batches, nodes * setting.ranks, tail=plan.tail) * setting.step_s
                rows.append(
                    {
                        "order": order_name(window),
                        "policy": policy,
                        "nodes": nodes,
                        "misses a sample": epoch * nodes / samples,
                        "fetches a shard and epoch": epoch / setting.num_shards,
                        "TB a node and epoch": epoch_bytes / 1e12,
                        "Gbit/s a node": epoch_bytes * 8e-9 / epoch_s,
                    }
                )
    return rows


def window_rows(setting: Setting) -> list[dict[str, Any]]:
    """Returns a row for windows of several widths: fetches a shard in one epoch from an empty cache.

    The sample is every step of node 0 of the most nodes.
    """
    rows = []
    for share in (1 / 3, 2 / 3, 1, 2, 3, 4):
        plan = setting.plan(window := int(share * setting.capacity))
        steps = trace(plan, node_positions(plan, nodes=setting.nodes[-1], ranks=setting.ranks))
        row: dict[str, Any] = {"order": order_name(window), "window, in caches": share}
        for policy in ("lru", "belady"):
            fetches = simulate(steps.uses, capacity=setting.capacity, policy=policy).fetches
            row[f"fetches a shard, {policy}"] = fetches / setting.num_shards
        rows.append(row)
    return rows


def stall_rows(setting: Setting) -> list[dict[str, Any]]:
    """Returns a row for each order, policy, depth and link: the share of stalls for each number of nodes.

    The sample is consecutive steps from the middle of an epoch: four blocks of a window, at least `_STALL_STEPS`. The
    cache is empty before them, and the middle half of them counts.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for window in setting.windows:
        plan = setting.plan(window)
        for nodes in setting.nodes:
            steps = trace(plan, _stretch(plan, setting, nodes=nodes))
            counted = slice(len(steps.sizes) // 4, len(steps.sizes) - len(steps.sizes) // 4)
            for policy, ahead in [("lru", 0), *(("belady", depth) for depth in setting.ahead)]:
                found = setting.starts(steps, policy=policy, ahead=ahead)
                for gbit_s, starts in zip(setting.gbit_s, found, strict=True):
                    key = (order_name(window), policy, ahead, gbit_s)
                    row = rows.setdefault(key, dict(zip(("order", "policy", "ahead", "Gbit/s"), key, strict=True)))
                    row[f"{nodes} node{'s' * (nodes > 1)}"] = _stall(starts, setting, counted)
    return list(rows.values())


def mixture_rows(
    *, num_shards: int, shard_samples: int, batch_seconds: float, held: Sequence[int]
) -> list[dict[str, Any]]:
    """Returns a row for each bound and spread of lengths: what 8 ranks of one node download in their first epoch.

    Twelve languages of `num_shards` shards; the last is read twelve times as often as the first. held: shards of the
    node. A pass is of a shard's own language.
    """
    rows = []
    for room, spread in itertools.product(held, (0.0, 0.1)):
        sizes = np.full(12, num_shards)
        window = locality_window(room, shard_bytes=1, ranks=1, ahead_shards=4, sizes=sizes)
        made = {"num_sources": 12, "num_shards": num_shards, "shard_samples": shard_samples}
        plan = made_mixture(**made, batch_seconds=batch_seconds, window=window, spread=spread)
        steps = trace(plan, node_positions(plan, nodes=1, ranks=8))
        passes = plan.order(0, 0).drawn(plan.num_batches) / plan.sizes.sum(1)
        fetches = simulate(steps.uses, capacity=room - min(4, room // 4), policy="belady").fetches
        rows.append(
            {
                "order": order_name(window),
                "shards a node": room,
                "spread of lengths": spread,
                "passes": f"{passes.min():.2f} to {passes.max():.2f}",
                "fetches a shard and pass": fetches / float(passes @ sizes),
            }
        )
    return rows


def _stretch(plan: BucketPlan, setting: Setting, *, nodes: int) -> Ints:
    """Returns the positions of the sampled steps."""
    positions = node_positions(plan, nodes=nodes, ranks=setting.ranks)
    blocks = setting.num_shards / max(1, (plan.locality_shards or 0) // 2)
    count = min(len(positions), max(_STALL_STEPS, int(4 * len(positions) / blocks)))
    start = min(len(positions) // 2, len(positions) - count)
    return positions[start : start + count]


_EPOCHS = 3

_STALL_STEPS = 800

HOUR_BYTES = 58_776_157
"""Bytes of an hour in the cache of configs/demo_speech.toml: `bytes_per_hour` of `forebay inspect --json`."""

HOURS = 70_000

SMALL = Setting(
    num_shards=400,
    shard_samples=200,
    shard_bytes=50 * 10**6,
    bound_bytes=10 * 10**9,
    batch_seconds=120.0,
    step_s=0.25,
    ranks=1,
    nodes=(1,),
    windows=(None, 16, 64),
    ahead=(4,),
    gbit_s=(10,),
)


def large() -> Setting:
    """Returns the large case: 12 languages of 720 shards each."""
    num_shards, bound_bytes, ranks = 12 * 720, 500 * 10**9, 8
    shard_bytes = HOURS * HOUR_BYTES // num_shards
    clip_s = float(np.dot(np.array(SHARES) / sum(SHARES), (np.array(EDGES_S[1:]) + EDGES_S[:-1]) / 2))
    widest = locality_window(bound_bytes, shard_bytes=shard_bytes, ranks=ranks, ahead_shards=4)
    return Setting(
        num_shards=num_shards,
        shard_samples=int(HOURS * 3600 / clip_s / num_shards),
        shard_bytes=shard_bytes,
        bound_bytes=bound_bytes,
        batch_seconds=240.0,
        step_s=0.5,
        ranks=ranks,
        nodes=(1, 4, 16, 64),
        windows=(None, 64, widest),
        ahead=(4, 32, widest // 2),
        gbit_s=(10, 25),
    )


TINY = Setting(
    num_shards=48,
    shard_samples=100,
    shard_bytes=50 * 10**6,
    bound_bytes=10**9,
    batch_seconds=30.0,
    step_s=0.5,
    ranks=2,
    nodes=(1, 2),
    windows=(None, 8),
    ahead=(4, 48),
    gbit_s=(10,),
)

MIXTURE: dict[str, Any] = {"num_shards": 500, "shard_samples": 200, "batch_seconds": 240.0, "held": (1050, 300, 150)}

TINY_MIXTURE: dict[str, Any] = {"num_shards": 20, "shard_samples": 50, "batch_seconds": 30.0, "held": (100,)}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases and prints their tables."""
    options = arguments(__doc__, argv)
    small, big = (TINY, TINY) if options.tiny else (SMALL, large())
    document = {
        "machine": machine("numpy"),
        "small": small_rows(small),
        "large": {"shards": big.num_shards, "samples a shard": big.shard_samples, "MB a shard": big.shard_bytes / 1e6}
        | {"shards a node": big.capacity, "ranks": big.ranks, "seconds a step": big.step_s},
        "fetches": fetch_rows(big),
        "windows": window_rows(big),
        "stalls": stall_rows(big),
        "mixtures": mixture_rows(**(TINY_MIXTURE if options.tiny else MIXTURE)),
    }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
