from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.plan.shard_line import locality_window
from tests.plan.bucket.test_shard_order import local_plan


@given(
    st.integers(3, 10**5),
    st.integers(1, 10**9),
    st.integers(1, 16),
    st.integers(0, 64),
    st.floats(0, 1, exclude_max=True),
)
def test_three_blocks_and_what_is_ahead_fit_the_bound(
    held: int, shard_bytes: int, ranks: int, ahead_shards: int, part: float
) -> None:
    bound_bytes = held * shard_bytes + int(part * shard_bytes)
    window = locality_window(bound_bytes, shard_bytes=shard_bytes, ranks=ranks, ahead_shards=ahead_shards)
    reserved = min(ranks * ahead_shards, held // 4)
    assert window >= 2
    assert window % 2 == 0
    assert 3 * (window // 2) + reserved <= held < 3 * (window // 2 + 1) + reserved


def test_the_window_of_a_node_of_eight_ranks() -> None:
    # 500 GB hold 1070 shards of 467 MB; 8 ranks with 4 ahead keep 32 of these.
    assert locality_window(500 * 10**9, shard_bytes=467 * 10**6, ranks=8, ahead_shards=4) == 692
    # 12 shards: not 32 of these are ahead but 3.
    assert locality_window(12 * 10**9, shard_bytes=10**9, ranks=8, ahead_shards=4) == 6


def test_a_bound_below_three_shards_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"a bound of 1000 bytes holds 2 shards of 400 bytes, .* needs 3 \(1200 byte"):
        locality_window(1000, shard_bytes=400, ranks=1, ahead_shards=4)


@pytest.mark.parametrize("held", [12, 30, 90])
def test_steps_in_touch_reach_into_no_more_shards_than_fit(held: int) -> None:
    """Any stretch of steps around a block's border: the groups of a bucket that fills groups in every block."""
    window = locality_window(held, shard_bytes=1, ranks=1, ahead_shards=0)
    lengths, shards = np.full(40_000, 5000), np.arange(40_000) // 100
    order = local_plan(lengths, shards, window=window, edges_s=(10.0,)).order(3, 1)
    for start in range(0, len(order) - 20, 20):
        stretch = np.concatenate(order.batches(np.arange(start, start + 20)))
        assert len(np.unique(shards[stretch])) <= held
