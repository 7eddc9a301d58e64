"""The small built-in inputs of probes, from integers alone, and some of the numbers that a model gave for such inputs.

Inputs are sounds, matrices, images and texts. What the steps give for them is one digest a group, see
`ItemGroup.probe`. It moves exactly when the numerics of a library or the CPU, or the rules of a tokenizer or of Unicode
move, which no version string says. Part of the shard keys; recorded in the cache.

Another machine is held to the numbers of a model and to what it promises. Numbers of devices differ, so they are in no
key. A part of a build, a node or a later machine computes the same inputs.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import logging
import socket
import struct
import wave
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import BuildError
from forebay.steps.audio.log_mel import MAX_FRAMES
from forebay.store.files import write_bytes
from forebay.store.layout import Array

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


logger = logging.getLogger(__name__)
_NOTED = "numerics.json"
"""File in the folder of a build."""
_KEPT = 64
"""Numbers of a field that are kept."""
Outputs = Mapping[str, Array]
_ByGroup = Mapping[str, Mapping[str, Any]]
"""Constants by group."""


def promise_of(*runs: Sequence[Outputs]) -> dict[str, Any]:
    """Returns how far runs are from the first one: `within` of floats, `flips` of so many `codes`."""
    flips = codes = 0
    largest = 0.0
    for run in runs[1:]:
        for one, other in zip(runs[0], run, strict=True):
            for name, values in one.items():
                if values.dtype.kind == "f":
                    largest = max(largest, float(np.max(np.abs(values - other[name]), initial=0.0)))
                else:
                    flips, codes = flips + int((values != other[name]).sum()), codes + values.size
    return {"within": largest, "flips": flips, "codes": codes}


def in_words(promise: Mapping[str, Any]) -> str:
    """Returns `equal`, or `flips n of m` and `within X`."""
    flips = [f"flips {promise['flips']} of {promise['codes']}"] if promise["flips"] else []
    return ", ".join([*flips, *([f"within {promise['within']:.1g}"] if promise["within"] else [])]) or "equal"


def sample_of(outputs: Sequence[Outputs]) -> dict[str, list[float]]:
    """Returns up to 64 numbers of each field, evenly over all of its values."""
    found = {}
    for name in outputs[0] if outputs else ():
        flat = np.concatenate([made[name].reshape(-1) for made in outputs])
        places = np.linspace(0, len(flat) - 1, min(_KEPT, len(flat))).astype(np.int64)
        found[name] = np.nan_to_num(flat[places]).tolist()
    return found


def beyond_promise(stored: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Returns by how much the numbers of a group differ, and what was promised; None where they are within it.

    stored, here: constants of the group, of the machine that began, and of this one. Other groups have no numbers.
    """
    promise: Mapping[str, Any] = stored.get("promise", {})
    for name, wanted in stored.get("sample", {}).items():
        found = np.asarray(here["sample"].get(name, ()))
        if len(found) != len(wanted):
            return f"{name} has {len(found)} numbers, and there it had {len(wanted)}"
        if found.dtype.kind == "f":
            # In float32, as the promise was measured.
            between = np.abs(found.astype(np.float32) - np.asarray(wanted, np.float32))
            differs, allowed = float(between.max(initial=0.0)), promise["within"]
            what = f"differs by {differs:.3g}, and {allowed:.3g} is promised"
        else:
            differs, allowed = int((found != np.asarray(wanted)).sum()), promise["flips"]
            what = f"has {differs} other codes of {len(found)}, and {allowed} of {promise['codes']} are promised"
        if differs > allowed:
            return f"{name} {what}"
    return None


def is_promised(name: str, stored: Mapping[str, Any], here: Mapping[str, Any], *, where: Path) -> bool:
    """Whether shards of another cache or build may stand beside those of this machine; logs why not.

    stored, here: constants of the group, as in `beyond_promise`. where: these shards are.
    """
    has_none = "sample" in here and "sample" not in stored
    what = "it has no numbers of its model" if has_none else beyond_promise(stored, here)
    if what is not None:
        machines = f"{_machine(stored) or 'nothing'} there, {_machine(here)} here"
        logger.warning("no shard of model.%s is linked from %s: %s: %s", name, where, what, machines)
    return what is None


def numbers_of(folder: Path) -> _ByGroup:
    """Returns the numbers that `require_same_machine` noted in the folder of a build."""
    with contextlib.suppress(OSError, ValueError):
        found: _ByGroup = json.loads((folder / _NOTED).read_bytes())
        return found
    return {}


def require_promise(config: str, stored: _ByGroup, here: _ByGroup, *, where: str) -> None:
    """Raises BuildError where this machine does not keep what a model promised. where: the numbers were stored."""
    for name, constants in here.items():
        if (what := beyond_promise(stored.get(name, {}), constants)) is not None:
            raise BuildError(
                f"model.{name}: {what}: {_machine(stored[name])} {where}, {_machine(constants)} on "
                f"{socket.gethostname()}; make all of it on machines of one kind, or begin again here with another "
                f"run.cache_root, or forebay preprocess {config} --rebuild; what was finished is kept",
                code="FB305",
            )


def require_same_machine(config: str, folder: Path, here: _ByGroup) -> None:
    """Notes the numbers of this machine in the folder of a build. Raises BuildError where another one began it."""
    path = folder / _NOTED
    kept = {name: values for name, values in here.items() if "sample" in values}
    if path.exists():
        require_promise(config, json.loads(path.read_bytes()), kept, where="where the build began")
    elif kept:
        write_bytes(path, json.dumps(kept).encode("ascii"))


def _machine(constants: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in constants.get("made_with", {}).items())
