"""The probe: what the steps give for small built-in inputs, as one digest a field group.

It moves exactly when libsndfile's, soxr's, numpy's or the CPU's numerics (media), or the tokenizer's or Unicode's rules
(text) move, which no version string says. Part of the shard keys; recorded in the cache.
"""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.preprocess.modality import values_digest
from forebay.preprocess.speech.samples import media_samples, text_samples
from forebay.steps.recipe import Recipe
from forebay.steps.text.transcript import TextEncoder

_TEXTS = (
    ("Hello, world! 12.5 %", "en"),
    ("ﬁne  \u00bd \u2460 ａｂ", None),
    ("¿Dónde está el niño?", "es"),
    ("Пожалуйста, подождите", "ru"),
    ("नमस्ते दुनिया", "hi"),
    ("今日は晴れです", "ja"),
)


def media_probe(recipe: Recipe) -> str:
    """Returns the xxh3-128 of what the media steps make of three clips at three rates."""
    clips = [_wav(8_000, 3_000, seed=1), _wav(16_000, 9_000, seed=2), _wav(44_100, 30_000, seed=3)]
    ids = [f"probe-{i}" for i in range(len(clips))]
    rows = _rows(sample_id=ids, file=[0, 1, 2], offset=[0] * 3, size=[-1] * 3)
    return values_digest(media_samples(recipe, rows, lambda file, _offset, _size: clips[file]))


def text_probe(encoder: TextEncoder | None) -> str:
    """Returns the xxh3-128 of what the text steps make of texts in six scripts."""
    rows = _rows(
        sample_id=[f"probe-{i}" for i in range(len(_TEXTS))],
        file=[0] * len(_TEXTS),
        text=[text for text, _ in _TEXTS],
        language=[language for _, language in _TEXTS],
        prompt=pa.nulls(len(_TEXTS), pa.string()),
    )
    return values_digest(text_samples(rows, ["probe"], encoder))


def _rows(**columns: Any) -> pa.Table:
    return pa.table(columns)


def _wav(sample_rate_hz: int, num_samples: int, *, seed: int) -> bytes:
    """Noise under a slow envelope, from integers alone so that the input is the same everywhere."""
    state = np.arange(num_samples, dtype=np.uint64) + np.uint64(seed * 1_000_003)
    for shift in (13, 7, 17):
        state ^= state << np.uint64(shift) if shift != 7 else state >> np.uint64(shift)
        state *= np.uint64(0x9E3779B97F4A7C15)
    noise = (state >> np.uint64(49)).astype(np.int64) - (1 << 14)
    envelope = 1 + (np.arange(num_samples) * 7 // num_samples) % 4
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate_hz)
        file.writeframes((noise // envelope).astype("<i2").tobytes())
    return buffer.getvalue()
