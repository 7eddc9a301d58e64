"""The two workloads: ragged speech features, and packs of image patches."""

from __future__ import annotations

import numpy as np

from benchmarks.peers.interface import Array, Workload
from benchmarks.plan import FRAME_SAMPLES, usual_durations

N_MELS = 128
PATCH_BYTES = 768
_NOISE_ROWS = 10_007
"""A prime: no two samples of one length are the same."""


def speech(count: int = 3_000, *, rows_per_shard: int = 512) -> Workload:
    """Returns workload A: float16 log-mel [T, 128], 100 frames/s, usual durations, and about 6 tokens a second."""
    rng = np.random.default_rng(0)
    frames = np.minimum(usual_durations(count) // FRAME_SAMPLES, 3000).astype(np.int64)
    tokens = np.maximum(frames * 6 // 100 + rng.integers(-4, 5, count), 2)
    noise = rng.standard_normal((_NOISE_ROWS, N_MELS), dtype=np.float32).astype(np.float16)
    return _workload("A", noise, frames, tokens, rows_per_shard=rows_per_shard)


def packs(count: int = 60) -> Workload:
    """Returns workload B: packs of uint8 patches [about 7,000, 768] and as many ids as a quarter of them."""
    rng = np.random.default_rng(1)
    patches = rng.integers(6_800, 7_200, count)
    noise = rng.integers(0, 256, (_NOISE_ROWS, PATCH_BYTES), dtype=np.uint8)
    return _workload("B", noise, patches, patches // 4, rows_per_shard=16)


def _workload(name: str, noise: Array, lengths: Array, num_ids: Array, *, rows_per_shard: int) -> Workload:
    offsets, id_offsets = (np.concatenate(([0], np.cumsum(counts))).astype(np.int64) for counts in (lengths, num_ids))
    values = np.resize(noise, (int(offsets[-1]), noise.shape[1]))
    ids = np.random.default_rng(2).integers(0, 50_000, int(id_offsets[-1])).astype(np.int32)
    values.flags.writeable = ids.flags.writeable = False
    return Workload(
        name=name, values=values, offsets=offsets, ids=ids, id_offsets=id_offsets, rows_per_shard=rows_per_shard
    )
