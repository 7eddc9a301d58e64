"""Encoded audio for tests: by libsndfile, and RIFF files chunk by chunk."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import soundfile

from forebay.store.tar_scan import scan_tar

DEMO = Path(__file__).parents[2] / "demo" / "speech"
LOSSLESS = ("FLAC", "WAV", "WAVEX", "RF64", "AIFF")


def voice(num_samples: int, *, channels: int = 1, seed: int = 0) -> np.ndarray[Any, Any]:
    """Returns int16 [num_samples, channels] that is neither silence nor noise."""
    rng = np.random.default_rng(seed)
    phase = np.cumsum(0.05 + 0.04 * np.sin(np.arange(num_samples) / 900))[:, None] + np.arange(channels)
    return (8_000 * np.sin(phase) + rng.normal(0, 300, (num_samples, channels))).astype(np.int16)


def encoded(samples: np.ndarray[Any, Any], rate_hz: int, *, kind: str = "FLAC", subtype: str | None = None) -> bytes:
    sink = io.BytesIO()
    soundfile.write(sink, samples, rate_hz, format=kind, subtype=subtype)
    return sink.getvalue()


def with_flac_length(data: bytes, num_samples: int) -> bytes:
    """Returns a FLAC file whose STREAMINFO claims another number of samples; 0 says that it is not known."""
    packed = int.from_bytes(data[18:26], "big") >> 36 << 36 | num_samples
    return data[:18] + packed.to_bytes(8, "big") + data[26:]


def with_flac_rate(data: bytes, rate_hz: int) -> bytes:
    packed = int.from_bytes(data[18:26], "big") & (1 << 44) - 1 | rate_hz << 44
    return data[:18] + packed.to_bytes(8, "big") + data[26:]


def chunk(name: bytes, body: bytes, *, size: int | None = None, order: str = "<") -> bytes:
    length = len(body) if size is None else size
    return name + struct.pack(order + "I", length) + body + bytes(len(body) & 1)


def wave(*chunks: bytes, magic: bytes = b"RIFF", order: str = "<") -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return magic + struct.pack(order + "I", min(len(body), 0xFFFFFFFF)) + body


def fmt(
    *, kind: int = 1, channels: int = 1, rate_hz: int = 16_000, bits: int = 16, order: str = "<", extra: bytes = b""
) -> bytes:
    block = channels * ((bits + 7) // 8)
    body = struct.pack(order + "HHIIHH", kind, channels, rate_hz, rate_hz * block & 0xFFFFFFFF, block, bits)
    return chunk(b"fmt ", body + extra, order=order)


def demo_clips() -> Iterator[tuple[str, bytes, float]]:
    """Yields (member name, encoded bytes, duration in seconds by the manifest) of every real recording."""
    for row in pq.read_table(DEMO / "train.parquet").to_pylist():
        tar = DEMO / row["tar_path"]
        index = scan_tar(tar)
        member = index.find(row["tar_member_name"])
        assert member is not None
        with open(tar, "rb") as file:
            file.seek(int(index.offsets[member]))
            yield row["tar_member_name"], file.read(int(index.sizes[member])), row["duration_s"]
