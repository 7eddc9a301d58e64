"""The demo recordings as waveforms, and pieces of them with lengths at the edges of frames and of the references."""

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


def waveforms() -> tuple[np.ndarray, ...]:
    """Returns all demo waveforms and pieces of them whose lengths are edges of frames: more than 60."""
    speech = np.concatenate([samples for _, samples in recordings()])
    sizes = (560, 561, 719, 720, 1600, 7999, 8000, 8001, 15_840, 16_000)
    return (*(samples for _, samples in recordings()), *(speech[40_000 : 40_000 + n] for n in sizes))


def nearly_30_s() -> tuple[np.ndarray, ...]:
    """Returns speech around the 480,000 samples of Whisper's input, whose mirrored end the last frames may see."""
    speech = np.concatenate([samples for _, samples in recordings()])
    return tuple(speech[:n] for n in (479_599, 479_601, 479_801, 479_999, 480_000, 480_001))
