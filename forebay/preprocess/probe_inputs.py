"""The small built-in inputs of probes: sounds, matrices, images and texts, from integers alone.

What the steps give for them is one digest a group, see `ItemGroup.probe`. It moves exactly when the numerics of a
library or the CPU, or the rules of a tokenizer or of Unicode move, which no version string says. Part of the shard
keys; recorded in the cache.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import struct
import wave
import zlib
from collections.abc import Sequence

import numpy as np

from forebay.steps.audio.log_mel import MAX_FRAMES

PROBE_TEXTS = (
    ("Hello, world! 12.5 %", "en"),
    ("ﬁne  \u00bd \u2460 ａｂ", None),
    ("¿Dónde está el niño?", "es"),
    ("Пожалуйста, подождите", "ru"),
    ("नमस्ते दुनिया", "hi"),
    ("今日は晴れです", "ja"),
)

PROBE_LABELS = tuple((" ".join(map(str, range(start, start + 100, 7))), None) for start in range(0, 600, 100))


_JPEG = """
/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdBRkxOUlNSMj5aYV
pQYEpRUk//2wBDAQ4ODhMREyYVFSZPNS01T09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT0//wAARCAAv
AD0DASIAAhEBAxEB/8QAHwAAAQUBAQEBAQEAAAAAAAAAAAECAwQFBgcICQoL/8QAtRAAAgEDAwIEAwUFBAQAAAF9AQIDAAQRBRIhMUEGE1FhBy
JxFDKBkaEII0KxwRVS0fAkM2JyggkKFhcYGRolJicoKSo0NTY3ODk6Q0RFRkdISUpTVFVWV1hZWmNkZWZnaGlqc3R1dnd4eXqDhIWGh4iJipKT
lJWWl5iZmqKjpKWmp6ipqrKztLW2t7i5usLDxMXGx8jJytLT1NXW19jZ2uHi4+Tl5ufo6erx8vP09fb3+Pn6/8QAHwEAAwEBAQEBAQEBAQAAAA
AAAAECAwQFBgcICQoL/8QAtREAAgECBAQDBAcFBAQAAQJ3AAECAxEEBSExBhJBUQdhcRMiMoEIFEKRobHBCSMzUvAVYnLRChYkNOEl8RcYGRom
JygpKjU2Nzg5OkNERUZHSElKU1RVVldYWVpjZGVmZ2hpanN0dXZ3eHl6goOEhYaHiImKkpOUlZaXmJmaoqOkpaanqKmqsrO0tba3uLm6wsPExc
bHyMnK0tPU1dbX2Nna4uPk5ebn6Onq8vP09fb3+Pn6/9oADAMBAAIRAxEAPwDorcqQPQVbAUg8CsSC6GAc1NcXxS1lZGw4Qkcd8VyyouB1Qwso
2SL04GMetZd1GpzxWMdXv263Gf8AgC/4Utvf3Mtwqyy7lOc/KPSsXNpaDxmU4qFOVTmVkm+vT5Dri3BJqm1nk9K1iQ1PjiVuccVhLESPlqdWTk
Yy2HTiplsSBxW9HaA9BVgWmB92qhVbPo8HVstTnFmKgCmy3fyMueCuDSzRFRnFZtzleK9epOMj3as4pXQ4yIOrUqTorZDcisuWRgcfnUaytu64
rk9gnscGKzStUhKnZWaa69fmdHBdZI5rUtZgSM1ylvM1bFrORjJIzUvB3PFo4C7Opt3Bx7VeUpj/AOvXPQXWOpq2L0AfeoWEcT01hXBFS6txjB
FY93bdsda6WfDZ44rOmiDeledDESbPOxOOaOXmtmz0qH7K2eldG1qpJOM0q2IJ6frXq0Knc46eK5pGHFbtV6JGWtNLEAHpT2tdvPSvQjUifSYO
cWiiHK8UjXJHc1PLDtrOlU7qJVIs7qtSNj//2Q=="""
"""A photo-like 61 x 47 JPEG with subsampled colours: its decoded pixels move with libjpeg's arithmetic."""


def probe_sounds() -> list[bytes]:
    """Returns three clips at three rates."""
    return [_wav(8_000, 3_000, seed=1), _wav(16_000, 9_000, seed=2), _wav(44_100, 30_000, seed=3)]


def probe_features(num_bins: int) -> list[bytes]:
    """Returns three matrices of a given column of features."""
    return [_features(num_bins, seed=seed) for seed in (1, 2, 3)]


@functools.cache
def probe_images() -> tuple[tuple[str, bytes], ...]:
    """Returns four built-in images with names: a JPEG, PNGs to be scaled up and down, a transparent one."""
    images = [base64.b64decode(_JPEG), _png(40, 90, seed=1), _png(700, 300, seed=2), _png(64, 64, seed=3, channels=4)]
    return tuple((f"probe-{number}", data) for number, data in enumerate(images))


def probe_conversations(groups: Sequence[str]) -> list[str]:
    """Returns built-in conversations with no item, one and two of each group, in several turns and scripts."""
    item = [{"type": group} for group in groups]
    texts = ["Hello, world! 12.5 %", "¿Dónde está el niño?", "今日は晴れです", "नमस्ते दुनिया"]
    turns = [[{"type": "text", "text": text}] for text in texts]
    return [
        _conversation(turns[0], turns[1]),
        _conversation([*item, *turns[1]], turns[2]),
        _conversation([*item, *item, *turns[2]], turns[3], turns[0], turns[1]),
    ]


def _conversation(*turns: list[dict[str, str]]) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": content} for number, content in enumerate(turns)]
    return json.dumps(messages, ensure_ascii=False, separators=(",", ":"))


def _png(width: int, height: int, *, seed: int, channels: int = 3) -> bytes:
    """Noise over slow waves, RGB or RGBA, from integers alone so that the pixels are the same everywhere."""
    y, x, channel = np.ogrid[:height, :width, :channels]
    noise = ((x * 2_654_435_761 + y * 40_503 + channel * 97 + seed * 1_000_003) >> 7) & 31
    pixels = ((x * 5 + y * 3 + channel * 40 + seed) // 3 % 224 + noise).astype(np.uint8)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, {3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


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
