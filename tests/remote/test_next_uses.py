from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forebay.store.remote.foresight import NextUses
from forebay.store.remote.node.holdings import NEVER

NUM_SHARDS = 6
steps_of_shards = st.lists(st.sets(st.integers(0, NUM_SHARDS - 1)), max_size=60)


def plain(needed: list[set[int]], *, now: int, looked_at: int) -> list[int]:
    return [
        next((step for step in range(now, looked_at) if shard in needed[step]), NEVER) for shard in range(NUM_SHARDS)
    ]


@given(needed=steps_of_shards, moves=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=30))
def test_the_next_use_of_a_shard_is_what_a_scan_of_the_steps_finds(
    needed: list[set[int]], moves: list[tuple[bool, int]]
) -> None:
    uses, now, looked_at = NextUses(NUM_SHARDS), 0, 0
    for looks, count in moves:
        if looks:
            part = needed[looked_at : looked_at + count]
            uses.extend([np.array(sorted(shards), np.int64) for shards in part])
            looked_at += len(part)
        else:
            now += count  # behind what was looked at too: a loader may be faster
            uses.advance(now)
        assert uses.next_use.tolist() == plain(needed, now=now, looked_at=looked_at)
        assert len(uses) == sum(len(shards) for shards in needed[now:looked_at])
        assert uses.num_known == sum(step < NEVER for step in uses.next_use.tolist())


def test_more_uses_than_the_rings_were_made_for_are_kept() -> None:
    rng = np.random.default_rng(0)
    needed = [set(rng.integers(0, NUM_SHARDS, 4).tolist()) for _ in range(2000)]
    uses = NextUses(NUM_SHARDS)
    uses.extend([np.array(sorted(shards)) for shards in needed[:200]])
    uses.advance(150)
    uses.extend([np.array(sorted(shards)) for shards in needed[200:]])
    for now in (150, 151, 900, 1990, 2000):
        uses.advance(now)
        assert uses.next_use.tolist() == plain(needed, now=now, looked_at=2000)


def test_time_does_not_go_back() -> None:
    uses = NextUses(2)
    uses.extend([np.array([0]), np.array([1])])
    uses.advance(1)
    uses.advance(0)
    assert (uses.now, uses.next_use.tolist()) == (1, [NEVER, 1])
