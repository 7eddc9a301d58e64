"""How ranks may differ."""

from __future__ import annotations

from typing import Any

from forebay.measure.calibrate import RankRow, RanksReport, differences


def row(rank: int, **changes: Any) -> RankRow:
    values = {"bucket": "b_0_3", "rank": rank, "size": 8, "shapes": {"labels": [8, 20]}, "steps": 5, "step_s": 0.1}
    return RankRow(**{**values, "peak_bytes": 1000, **changes})


def test_ranks_that_agree_differ_in_nothing() -> None:
    rows = [row(0), row(1, peak_bytes=960, step_s=9.0), row(0, bucket="b_3_5", size=4)]
    assert differences(rows, on_cuda=True) == []
    assert RanksReport(world_size=2, rows=rows, problems=[]).lines() == [
        "all buckets train on 2 ranks, and the ranks agree"
    ]


def test_batch_shapes_steps_and_peaks_are_compared_and_the_bucket_and_ranks_named() -> None:
    assert differences([row(0), row(1, size=9)], on_cuda=True) == ["b_0_3: size is 8 on rank 0 and 9 on rank 1"]
    assert differences([row(0), row(1), row(2, steps=4)], on_cuda=True) == [
        "b_0_3: steps is 5 on rank 0 and 4 on rank 2"
    ]
    shapes = differences([row(0), row(1, shapes={"labels": [8, 21]})], on_cuda=True)
    assert shapes == ["b_0_3: shapes is {'labels': [8, 20]} on rank 0 and {'labels': [8, 21]} on rank 1"]
    far = [row(0), row(1, peak_bytes=900)]
    assert differences(far, on_cuda=True) == [
        "b_0_3: the peak is 900 B on rank 1 and 1 kB on rank 0, more than 5 % apart"
    ]
    assert differences(far, on_cuda=False) == []
