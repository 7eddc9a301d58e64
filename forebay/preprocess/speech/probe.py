"""The probe: what the steps give for small built-in inputs, as one digest a field group.

It moves exactly when libsndfile's, soxr's, numpy's or the CPU's numerics (media), or the tokenizer's or Unicode's rules
(text) move, which no version string says. Part of the shard keys; recorded in the cache.
"""

from __future__ import annotations

import io
import json
import wave
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.preprocess.modality import values_digest
from forebay.preprocess.speech.samples import media_samples, text_samples
from forebay.steps.audio.log_mel import MAX_FRAMES
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

_LABELS = tuple((" ".join(map(str, range(start, start + 100, 7))), None) for start in range(0, 600, 100))


def media_probe(recipe: Recipe) -> str:
    """Returns the xxh3-128 of what the media steps make of three clips at three rates, or of three matrices."""
    if recipe.features.reads_sound:
        clips = [_wav(8_000, 3_000, seed=1), _wav(16_000, 9_000, seed=2), _wav(44_100, 30_000, seed=3)]
    else:
        clips = [_features(recipe.features.fields()[0].shape[0], seed=seed) for seed in (1, 2, 3)]
    ids = [f"probe-{i}" for i in range(len(clips))]
    rows = _rows(sample_id=ids, file=[0, 1, 2], offset=[0] * 3, size=[-1] * 3)
    return values_digest(media_samples(recipe, rows, lambda file, _offset, _size: clips[file]))


def text_probe(encoder: TextEncoder | None) -> str:
    """Returns the xxh3-128 of what the text steps make of texts in six scripts, or of labels.

    What they find on this machine (a program, its data) is a part of it.
    """
    texts = _LABELS if encoder is not None and encoder.reads_labels else _TEXTS
    languages = encoder.languages if encoder is not None else ()
    rows = _rows(
        sample_id=[f"probe-{i}" for i in range(len(texts))],
        file=[0] * len(texts),
        text=[text for text, _ in texts],
        language=[languages[0] if languages else language for _, language in texts],
        prompt=pa.nulls(len(texts), pa.string()),
    )
    # A program's version and data speak for more than six texts can show.
    found = {} if encoder is None else encoder.found(*zip(*((text, code or "") for text, code in texts), strict=True))
    more = [{"found": json.dumps(found, sort_keys=True)}] if found else []
    return values_digest([*text_samples(rows, ["probe"], encoder), *more])


def _rows(**columns: Any) -> pa.Table:
    return pa.table(columns)


def _features(num_bins: int, *, seed: int) -> bytes:
    """A matrix of a given column, from integers alone, with padding of its last value."""
    values = np.arange(num_bins * MAX_FRAMES, dtype=np.int64).reshape(num_bins, MAX_FRAMES)
    matrix = ((values * (2 * seed + 1)) % 4093 / np.float32(2048) - 1).astype(np.float32)
    matrix[:, 1000 * seed :] = np.float32(-0.625)
    buffer = io.BytesIO()
    np.save(buffer, matrix)
    return buffer.getvalue()


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
