"""A made-up sealed cache of many small recordings that `forebay inspect` and `forebay lint` read as any other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from forebay.store.key import digest
from forebay.store.layout import ROW_BITS, FieldSpec, Group
from forebay.store.seal import Contents, seal
from forebay.store.shard import ShardEntry, shard_fields, write_shard

ROWS = 1_000
"""Rows of a shard; the last one of each failed."""

RATE_HZ = 16_000
_STORED = 320
"""Samples of a recording that are stored: 20 ms. Its length says 3 to 7 s, so that its text fits it."""

_LANGUAGES = ("de", "en", "fr", "nl")
_TALE = (
    "the a quiet morning train leaves from platform seven while many people wait outside under grey clouds and "
    "somebody reads yesterday news aloud before lunch with great care for detail of old towns near rivers"
)
FIELDS = (
    FieldSpec(name="input_features", dtype="float16", shape=(80,), group="audio"),
    FieldSpec(name="waveform", dtype="int16", group="audio"),
    FieldSpec(name="input_ids", dtype="int32", group="text"),
    FieldSpec(name="prefix_len", dtype="int32", group="text"),
    *(FieldSpec(name=n, dtype="str", group="text", role="table") for n in ("sample_id", "text", "language", "source")),
)

Row = dict[str, Any]


def made_cache(root: Path, *, num_shards: int) -> Path:
    """Makes a cache of `num_shards` x 999 samples; returns its folder.

    Ids have 25 characters, texts about 80. Recordings and texts differ, but that one in 500 has another's text and one
    in 1,000 its recording too.
    """
    root.mkdir(parents=True)
    shards: dict[Group, list[tuple[Path, ShardEntry]]] = {"audio": [], "text": []}
    for number in range(num_shards):
        indices = np.arange(number * ROWS, (number + 1) * ROWS)
        for group, rows in (("audio", _clips(indices)), ("text", _texts(indices))):
            path = root / f"{group}-{number}.tdz"
            failing = [row if place < ROWS - 1 else "format" for place, row in enumerate(rows)]
            entry = write_shard(path, shard_fields(FIELDS, group), failing, key=digest([group, number]))
            shards[group].append((path, entry))
    stored = np.arange(num_shards * ROWS, dtype=np.int64)
    index = stored[stored % ROWS < ROWS - 1]
    seconds = 3 + np.where(index % 500 == 499, index - 250, index) * 7 % 400 / 100
    lengths = np.stack([seconds * RATE_HZ, np.full(len(index), 2), np.full(len(index), 8)]).astype("<i4")
    refused = [{"sample_id": _id(i), "reason": "format", "kind": "failed", "message": "no"} for i in range(num_shards)]
    contents = Contents(
        fields=FIELDS,
        shards=shards,
        items={},
        arrays={"slots.npy": ((index // ROWS) << ROW_BITS) | index % ROWS, "lengths.npy": lengths},
        files={"rejected.jsonl": "".join(f"{json.dumps(each)}\n" for each in refused).encode("ascii")},
        document=_document(index, float(seconds.sum()) / 3600, failed=num_shards),
    )
    seal(root / "looked", contents, scratch=root)
    return root / "looked"


def _of(index: int) -> int:
    """Returns the sample whose text this one has."""
    return index - 250 if index % 500 == 499 else index


def _id(index: int) -> str:
    return f"speaker-{index % 977:04d}-clip-{index:07d}"


def _clips(indices: Any) -> Iterator[Row]:
    noise = np.random.default_rng(0).integers(-3000, 3000, 1 << 20, np.int16)
    for index in indices.tolist():
        start = (_of(index) if index % 1000 == 499 else index) * 3 % (len(noise) - _STORED)
        waveform = noise[start : start + _STORED].copy()
        waveform[0] = index >> 19  # where the noise begins anew
        yield {"input_features": np.zeros((2, 80), np.float16), "waveform": waveform}


def _texts(indices: Any) -> Iterator[Row]:
    words = _TALE.split()
    for index in indices.tolist():
        rng = np.random.default_rng(_of(index))
        yield {
            "input_ids": np.arange(8, dtype=np.int32),
            "prefix_len": np.ones(1, np.int32),
            "sample_id": _id(index),
            "text": " ".join(words[place] for place in rng.integers(0, len(words), 14)),
            "language": _LANGUAGES[_of(index) % len(_LANGUAGES)],
            "source": f"corpus/train-{index // 10_000:05d}.tar",
        }


def _document(index: Any, hours: float, *, failed: int) -> dict[str, Any]:
    each = {"samples": len(index) // len(_LANGUAGES), "hours": hours / len(_LANGUAGES)}
    return {
        "name": "looked",
        "split": "train",
        "key": digest(["looked", len(index)]),
        "recipe_key": digest("looked"),
        "recipe": {"audio": {"features": "log_mel", "n_mels": 80, "sample_rate_hz": RATE_HZ, "keep_waveform": True}},
        "num_samples": len(index),
        "length_names": ["num_audio_samples", "num_frames", "num_tokens"],
        "constants": {"audio": {"features": "log_mel", "sample_rate_hz": RATE_HZ}, "text": {"prompt": "plain"}},
        "rows_per_shard": ROWS,
        "size_bytes": len(index) * 2_000,
        "languages": dict.fromkeys(_LANGUAGES, each),
        "failed": {"format": failed},
        **{name: {} for name in ("excluded", "made_with", "probe", "unused_fields")},
        **dict.fromkeys(("clipped", "longer"), 0),
    }
