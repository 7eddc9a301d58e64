"""What the image and chat steps give for small built-in inputs, a digest each: `forebay.preprocess.speech.probe`."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

import numpy as np

from forebay.preprocess.modality import values_digest
from forebay.steps.image.qwen2_vl import PixelSteps
from forebay.steps.text.chat.packed import ChatEncoder

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

_ANY = 2**31
"""A user's limit is on images of theirs."""


def image_probe(steps: PixelSteps) -> str:
    """Returns the xxh3-128 of the processor's table and of the patches of four images: scaled up, down, transparent."""
    made = [steps.make(data, sample_id=name, max_pixels=_ANY) for name, data in probe_images()]
    samples: list[dict[str, Any]] = [{"patches": image.patches, "grid": np.array(image.grid)} for image in made]
    return values_digest([*samples, {"table": steps.table}])


def probe_images() -> list[tuple[str, bytes]]:
    """Returns four built-in images with names: a JPEG, PNGs to be scaled up and down, a transparent one."""
    images = [base64.b64decode(_JPEG), _png(40, 90, seed=1), _png(700, 300, seed=2), _png(64, 64, seed=3, channels=4)]
    return [(f"probe-{number}", data) for number, data in enumerate(images)]


def chat_probe(encoder: ChatEncoder) -> str:
    """Returns the xxh3-128 of the tokens of conversations with no image, one and two, in several turns and scripts."""
    grids = [[], [(1, 4, 6)], [(1, 2, 2), (1, 8, 4)]]
    made = [
        encoder.encode(text, sizes, sample_id=f"probe-{number}")
        for number, (text, sizes) in enumerate(zip(probe_conversations(), grids, strict=True))
    ]
    return values_digest(made)


def probe_conversations() -> list[str]:
    """Returns built-in conversations with no image, one and two, in several turns and scripts."""
    image, texts = {"type": "image"}, ["Hello, world! 12.5 %", "¿Dónde está el niño?", "今日は晴れです", "नमस्ते दुनिया"]
    turns = [[_text(text)] for text in texts]
    return [
        _conversation(turns[0], turns[1]),
        _conversation([image, *turns[1]], turns[2]),
        _conversation([image, image, *turns[2]], turns[3], turns[0], turns[1]),
    ]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


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
