"""What buckets are called: in calibration files, and as the tables that `inspect --bucket-manifests` writes."""

from __future__ import annotations

from collections.abc import Sequence


def bucket_name(low_s: float, high_s: float) -> str:
    """Returns the name of the bucket [low_s, high_s): `b_0_3`, `b_3_8.5`."""
    return f"b_{round(low_s, 4):.9g}_{round(high_s, 4):.9g}"


def bucket_names(edges_s: Sequence[float], *, num_buckets: int) -> list[str]:
    """Returns the name of every bucket by its upper edge; of those behind them, which have no seconds, the index."""
    timed = [bucket_name(low, high) for low, high in zip((0.0, *edges_s), edges_s, strict=False)]
    return [*timed, *(str(bucket) for bucket in range(len(timed), num_buckets))]
