"""The demo recordings as waveforms, and pieces of them whose lengths stand at the edges of frames and of the references."""

from __future__ import annotations

import io
import tarfile
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import soundfile as sf

MANIFEST = Path(__file__).parents[3] / "demo" / "speech" / "train.parquet"
SAMPLE_RATE_HZ = 16_000


@cache
def recordings() -> tuple[tuple[str, np.ndarray], ...]:
    """Returns (language, float32 waveform) of every demo clip, in the manifest's order."""
    clips = []
    for row in pq.read_table(MANIFEST).to_pylist():
        with tarfile.open(MANIFEST.parent / row["tar_path"]) as tar:
            member = tar.extractfile(row["tar_member_name"])
            assert member is not None
            samples, rate = sf.read(io.BytesIO(member.read()), dtype="float32")
        assert rate == SAMPLE_RATE_HZ
        clips.append((row["language"], samples))
    return tuple(clips)


@cache
def waveforms() -> tuple[np.ndarray, ...]:
    """Returns all demo waveforms and pieces of them of 560 samples to just over 30 s: more than 60."""
    whole = [samples for _, samples in recordings()]
    speech = np.concatenate(whole)
    edges = (560, 561, 719, 720, 1600, 7999, 8000, 8001, 15_840, 16_000)
    near_30_s = (479_599, 479_601, 479_801, 479_999, 480_000, 480_001)
    return (*whole, *(speech[40_000 : 40_000 + n] for n in edges), *(speech[:n] for n in near_30_s))
