"""The cost for a node of reading shards of a store in a plan's order; too much is refused before the first step."""

from __future__ import annotations

import heapq
import logging
import os
from dataclasses import dataclass

import numpy as np

from forebay.errors import ConfigError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.cursor import Cursor
from forebay.plan.in_order import InOrderPlan
from forebay.plan.interface import Plan
from forebay.plan.mixture.mix_sources import PackMixture
from forebay.plan.mixture.mixture_plan import MixturePlan
from forebay.plan.shard_line import BLOCKS_IN_TOUCH, Windows
from forebay.plan.window import WindowPlan
from forebay.store.layout import Array, Ints
from forebay.store.remote.node.node import check_bound
from forebay.store.remote.node.room import gb
from forebay.store.remote.remote_shards import RemoteShards
from forebay.store.source import SampleSource

logger = logging.getLogger(__name__)
_LOOKED_AT = 256
"""Micro-batches, of the head of an epoch, that tell what all are like."""
_MOST_USES = 200_000
"""Uses of shards, of an epoch, whose downloads are counted one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochCost:
    """The downloads of a node in an epoch of a global shuffle that it cannot keep.

    A use is a step of the node's ranks together and a shard that it needs. Belady's choice, which a loader's is, is
    played through over the order of two epochs, with the downloads ahead of it that a step leaves time for. first: of
    the first epoch, from an empty node; later: of each that follows.
    """

    first: float
    """Downloads of a shard, with all its files one, over all shards."""
    later: float


def check_remote(source: SampleSource, cursor: Cursor, *, threads: int) -> None:
    """Raises ConfigError where this node cannot read a plan's remote shards, or only at a price that nobody allowed.

    A bound below what the micro-batches that are filled at once need is always an error. A shuffle over more data than
    the node keeps is one unless `remote.global_shuffle` is "allow"; then the price is logged. Local caches, and remote
    ones that the node keeps as a whole, cost nothing. threads: that fill micro-batches, a rank.
    """
    shards = RemoteShards(source)
    if not len(shards) or shards.fit:
        return
    ranks = node_ranks(cursor.world)
    needed = _needed(shards, cursor, at_once=ranks * max(threads, 1))
    most = max(int(shards.sizes[step].sum()) for step in needed)
    who = f"{ranks} ranks" if ranks > 1 else "one rank"
    check_bound(shards.bound_bytes, shards.kept_bytes + most, what=f"a step of {who} with {threads} threads")
    windows = windows_of(cursor.plan)
    if windows is not None or isinstance(cursor.plan, InOrderPlan):  # a sample of a shard may not stand anywhere
        _warn_of_width(shards, windows)
        return
    cost = epoch_cost(shards, cursor, ranks=ranks)
    first, later = (gb(int(downloads * float(shards.sizes.mean()))) for downloads in (cost.first, cost.later))
    said = (
        f"{shards.mirrors[0].url}: an epoch reads {gb(shards.total_bytes)} in {shards.num_used} shards, all of them "
        f"again and again in the order of a global shuffle, and this node keeps {gb(shards.bound_bytes)} of them "
        f"(remote.cache_size_gb): a shard is downloaded about {_times(cost.later / shards.num_used)} times an epoch, "
        f"{_times(cost.first / shards.num_used)} in the first, about {later} and {first} in all on each node"
    )
    if shards.mirrors[0].settings.global_shuffle == "allow":
        logger.warning("%s", said)
        return
    enough = shards.total_bytes / 1e9 + 0.001
    raise ConfigError(
        f"{said}; set {_instead(cursor.plan)}remote.cache_size_gb = {enough:.3f} or more, or "
        'remote.global_shuffle = "allow"',
        code="FB609",
    )


def _warn_of_width(shards: RemoteShards, windows: Windows | None) -> None:
    """Warns of a window that this node cannot keep: its shards are downloaded more often than once an epoch."""
    if windows is None:
        return
    held = windows.held(blocks=BLOCKS_IN_TOUCH)
    needed = min(held * shards.row_shard_bytes(run=windows.run), held * shards.text_shard_bytes + shards.item_bytes)
    if needed > shards.bound_bytes - shards.kept_bytes:
        logger.warning(
            'plan.locality is "shards:%d", whose steps reach into %s, and this node keeps %s (remote.cache_size_gb): '
            'shards are downloaded more than once an epoch; set plan.locality = "auto"',
            *(windows.window, gb(needed), gb(shards.bound_bytes)),
        )


def epoch_cost(shards: RemoteShards, cursor: Cursor, *, ranks: int) -> EpochCost:
    """Returns the price of an epoch for one node of so many ranks, see `EpochCost`."""
    held = int((shards.bound_bytes - shards.kept_bytes) / float(shards.sizes.mean()))
    a_step = float(np.mean([len(step) for step in _needed(shards, cursor, at_once=ranks)]))
    count = min(len(cursor), max(1, int(_MOST_USES / a_step)))
    positions = (np.arange(count)[:, None] * cursor.world + np.arange(ranks)) % cursor.plan.num_batches
    uses = [_uses(shards, cursor, epoch, positions) for epoch in (0, 1)]
    ahead = shards.mirrors[0].settings.prefetch_shards  # one process of a node downloads ahead for all its ranks
    misses = _missed(np.concatenate(uses), room=max(1, held), ahead=ahead)
    first, later = int(misses[: len(uses[0])].sum()), int(misses[len(uses[0]) :].sum())
    later_whole = later * len(cursor) / count
    return EpochCost(first=later_whole + first - later, later=later_whole)


def _uses(shards: RemoteShards, cursor: Cursor, epoch: int, positions: Ints) -> Ints:
    """Returns the shards that the steps of an epoch use. positions: of micro-batches [steps, ranks]."""
    batches = cursor.plan.order(cursor.start.seed, epoch).batches(positions.ravel().tolist())
    ranks = positions.shape[1]
    steps = (np.concatenate(batches[start : start + ranks]) for start in range(0, len(batches), ranks))
    return np.concatenate([np.unique(shards.of(step)) for step in steps])


def _missed(uses: Ints, *, room: int, ahead: int) -> Array:
    """Returns bool [uses], which of them a node downloads: the shards that are needed soonest up to `ahead` too early.

    What is downloaded ahead takes its room before its use, so that more is downloaded than by Belady's choice alone.
    """
    order = np.argsort(uses, kind="stable")
    following = np.full(len(uses), len(uses))
    is_used_again = uses[order[1:]] == uses[order[:-1]]
    following[order[:-1][is_used_again]] = order[1:][is_used_again]
    node, shards, looked_at = _Node(room), uses.tolist(), 0
    missed, waiting = np.zeros(len(uses), bool), set[int]()
    for place, (shard, again) in enumerate(zip(shards, following.tolist(), strict=True)):
        looked_at = max(looked_at, place)
        while len(waiting) < ahead and looked_at < len(shards):
            if shards[looked_at] not in node.held:
                if not node.hold(shards[looked_at], looked_at, beyond=looked_at):
                    break
                missed[looked_at] = True
                waiting.add(looked_at)
            looked_at += 1
        missed[place] |= shard not in node.held
        waiting.discard(place)
        node.hold(shard, again)
    return missed


class _Node:
    """Shards that are held, by their next use; the one whose next use is farthest is given up."""

    def __init__(self, room: int) -> None:
        self._room, self.held = room, dict[int, int]()
        self._farthest: list[tuple[int, int]] = []

    def hold(self, shard: int, again: int, *, beyond: int = -1) -> bool:
        """Holds a shard that is used again at a place; whether one that is used beyond another could go for it."""
        while shard not in self.held and len(self.held) >= self._room:
            distance, victim = self._farthest[0]
            if (is_true := self.held.get(victim) == -distance) and -distance <= beyond:
                return False
            heapq.heappop(self._farthest)
            if is_true:
                del self.held[victim]
        self.held[shard] = again
        heapq.heappush(self._farthest, (-again, shard))
        return True


def _times(times: float) -> str:
    return f"{times:,.1f}" if times >= 1 else f"{times:.2g}"  # below 0.05 it is not 0.0


def windows_of(plan: Plan) -> Windows | None:
    """Returns the moving windows of a plan; None: it has none."""
    if isinstance(plan, MixturePlan):
        return plan.windows
    if not isinstance(plan, BucketPlan) or plan.shard_counts is None or plan.locality_shards is None:
        return None
    return Windows(window=plan.locality_shards, sizes=np.array([len(plan.shard_counts)]), run=plan.shard_run)


def node_ranks(world: int) -> int:
    """Returns how many ranks this node has, as the launcher says it (LOCAL_WORLD_SIZE); else 1."""
    written = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(max(int(written), 1), world) if written.isdecimal() else 1


def _needed(shards: RemoteShards, cursor: Cursor, *, at_once: int) -> list[Ints]:
    """Returns the shards of the first micro-batches of an epoch, `at_once` of them together."""
    order = cursor.plan.order(cursor.start.seed, 0)
    count = min(len(order), max(_LOOKED_AT, at_once))
    batches = order.batches(range(count))
    return [np.unique(shards.of(np.concatenate(batches[i : i + at_once]))) for i in range(0, count, at_once)]


def _instead(plan: Plan) -> str:
    if isinstance(plan, PackMixture):
        return ""
    if isinstance(plan, BucketPlan | MixturePlan):
        return 'plan.locality = "auto", '
    return 'plan.kind = "bucket" with plan.locality = "auto", ' if isinstance(plan, WindowPlan) else ""
