"""Made the golden cache of audio of format 4: `python -m tests.golden.make_v4_audio`. It is kept and never made again.

Beside its texts lie kept columns that hold nulls. The values are synthetic and exact in every dtype, so that no library
decides them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from forebay.store.key import digest
from forebay.store.layout import FieldSpec, Group
from forebay.store.seal import Contents, seal
from forebay.store.shard import ShardEntry, shard_fields, shard_name, write_shard
from forebay.store.source_files import ABSENT, StoredSource, dump_sources

FOLDER = Path(__file__).parent / "v4_audio"
"""Holds the cache and `expected.json`."""
NAME = "golden-train-audio"
ROWS_PER_SHARD = 3
RATE_HZ = 16_000

FIELDS = (
    FieldSpec(name="input_features", dtype="float16", shape=(4,), group="audio"),
    FieldSpec(name="pad_value", dtype="float32", group="audio"),
    FieldSpec(name="fbanks", dtype="float64", shape=(2, 3), group="audio"),
    FieldSpec(name="waveform", dtype="int16", group="audio"),
    FieldSpec(name="patches", dtype="uint8", shape=(5,), group="audio"),
    FieldSpec(name="codes", dtype="int8", group="audio"),
    FieldSpec(name="num_audio_samples", dtype="int64", group="audio", role="table"),
    FieldSpec(name="input_ids", dtype="int32", group="text"),
    FieldSpec(name="positions", dtype="int64", group="text"),
    FieldSpec(name="sample_id", dtype="str", group="text", role="table"),
    FieldSpec(name="text", dtype="str", group="text", role="table"),
    FieldSpec(name="language", dtype="str", group="text", role="table"),
    FieldSpec(name="snr", dtype="float64", group="text", role="table"),
    FieldSpec(name="speaker", dtype="str", group="text", role="table", nullable=True),
    FieldSpec(name="takes", dtype="int64", group="text", role="table"),
)
GROUPS = ("audio", "text")
TEXTS = ("Hello, world.", "¿Qué tal?", "Привет, мир", "नमस्ते", "", "你好 👋", "a\nb\tc")
LANGUAGES = ("en", "es", "ru", "hi", "", "zh", "en")
NUM_FRAMES = (3, 0, 1, 5, 2, 0, 4)
COLUMNS: dict[str, tuple[Any, ...]] = {
    "snr": (1.5, None, 0.5, 3.0, -0.25, 12.0, 0.0),
    "speaker": ("anna", None, "b", "carl", "", "दीपा", "g"),
    "takes": (1, 2, 3, None, -(2**62), None, 7),
}
"""Kept columns; of some samples they are null."""
FAILED = {2: "corrupt_audio", 6: "missing_member"}


def values(field: FieldSpec, row: int) -> np.ndarray[Any, Any]:
    """Returns the values of a tensor field: small integers, halves in floats, both signs where there are two."""
    count = 1 if field.name == "pad_value" else NUM_FRAMES[row] * (160 if field.name == "waveform" else 1)
    size = count * int(np.prod(field.shape, dtype=np.int64))
    numbers = (np.arange(size) * 37 + row * 11 + len(field.name)) % 251
    dtype = field.numpy_dtype
    if dtype.kind == "f":
        return ((numbers - 125) / 2).astype(dtype).reshape(count, *field.shape)
    return (numbers % 128 - (64 if dtype.kind == "i" else 0)).astype(dtype).reshape(count, *field.shape)


def rows(group: Group) -> list[dict[str, Any]]:
    """Returns the rows of one group as they are written; rows in `FAILED` have table values and a reason."""
    table = [
        {
            "sample_id": f"clip-{row}",
            "num_audio_samples": np.int64(NUM_FRAMES[row] * 160),
            "text": TEXTS[row],
            "language": LANGUAGES[row],
            **_kept(row),
        }
        for row in range(len(TEXTS))
    ]
    fields = shard_fields(FIELDS, group)
    found = []
    for index, row in enumerate(table):
        kept = {field.name: row[field.name] for field in fields if field.name in row}
        if index in FAILED:
            kept = {name: value for name, value in kept.items() if name != "num_audio_samples"}
            found.append({**kept, "failure": FAILED[index]})
        else:
            found.append({**kept, **{f.name: values(f, index) for f in fields if f.role == "tensor"}})
    return found


def _kept(row: int) -> dict[str, Any]:
    kinds = {"snr": np.float64, "speaker": lambda text: text, "takes": np.int64}
    found = {name: None if values[row] is None else kinds[name](values[row]) for name, values in COLUMNS.items()}
    return {name: value for name, value in found.items() if value is not None or name == "speaker"}


def write_shards(scratch: Path) -> dict[Group, list[tuple[Path, ShardEntry]]]:
    """Writes the shards of both groups below a folder."""
    shards: dict[Group, list[tuple[Path, ShardEntry]]] = {}
    for group in GROUPS:
        (scratch / group).mkdir(parents=True, exist_ok=True)
        shards[group] = []
        for index, start in enumerate(range(0, len(TEXTS), ROWS_PER_SHARD)):
            path = scratch / shard_name(group, index)
            part = rows(group)[start : start + ROWS_PER_SHARD]
            entry = write_shard(path, shard_fields(FIELDS, group), part, key=digest(["golden", group, index]))
            shards[group].append((path, entry))
    return shards


def expected() -> dict[str, Any]:
    """Returns what a reader has to find, in a form that needs no reader of ours."""
    kept = [row for row in range(len(TEXTS)) if row not in FAILED]
    tensors = [field for field in FIELDS if field.role == "tensor"]
    samples = [
        {
            field.name: {
                "dtype": field.dtype,
                "shape": list(values(field, row).shape),
                "values": values(field, row).reshape(-1).tolist(),
            }
            for field in tensors
        }
        for row in kept
    ]
    table = {
        "index": list(range(len(kept))),
        "sample_id": [f"clip-{row}" for row in kept],
        "num_audio_samples": [NUM_FRAMES[row] * 160 for row in kept],
        "num_frames": [NUM_FRAMES[row] for row in kept],
        "num_tokens": [NUM_FRAMES[row] for row in kept],
        "duration_s": [NUM_FRAMES[row] * 160 / RATE_HZ for row in kept],
        "text": [TEXTS[row] for row in kept],
        "language": [LANGUAGES[row] for row in kept],
        **{name: [values[row] for row in kept] for name, values in COLUMNS.items()},
    }
    return {"key": digest("golden v4 audio"), "samples": samples, "table": table}


def contents(scratch: Path) -> Contents:
    """Returns what the golden cache is sealed from."""
    kept = [row for row in range(len(TEXTS)) if row not in FAILED]
    lengths = [[NUM_FRAMES[row] * factor for row in kept] for factor in (160, 1, 1)]
    sources = [
        StoredSource("a.tar", 0, listed=True, xxh3_128="0" * 32, size_bytes=10_240),
        StoredSource("gone.tar", 0, listed=False, xxh3_128=ABSENT, size_bytes=-1),
    ]
    rejected = [{"sample_id": f"clip-{row}", "kind": "failed", "reason": reason} for row, reason in FAILED.items()]
    return Contents(
        fields=FIELDS,
        shards=write_shards(scratch),
        items={},
        arrays={
            "slots.npy": np.array([row // ROWS_PER_SHARD << 32 | row % ROWS_PER_SHARD for row in kept], "<i8"),
            "lengths.npy": np.array(lengths, "<i4"),
        },
        files={
            "sources.parquet": dump_sources(sources),
            "rejected.jsonl": "".join(f"{json.dumps(row)}\n" for row in rejected).encode("ascii"),
        },
        document={
            "name": "golden",
            "split": "train",
            "key": digest("golden v4 audio"),
            "recipe_key": digest("golden recipe"),
            "recipe": {
                "source": {"kind": "tar", "keep_columns": sorted(COLUMNS)},
                "audio": {"features": "log_mel"},
                "text": None,
            },
            "num_samples": len(kept),
            "length_names": ["num_audio_samples", "num_frames", "num_tokens"],
            "rows_per_shard": ROWS_PER_SHARD,
            "probe": dict.fromkeys(GROUPS, "0" * 32),
            "constants": {
                "audio": {"sample_rate_hz": RATE_HZ, "features": "log_mel", "pad": [-1.5, 1e-05]},
                "text": {},
            },
            "excluded": {},
            "failed": {"corrupt_audio": 1, "missing_member": 1},
            "unused_fields": {},
            "clipped": 0,
            "longer": 0,
            "languages": {},
        },
    )


def main() -> None:
    """Makes the golden cache beside this file. Raises FileExistsError where it is: it is never written again."""
    FOLDER.mkdir()
    scratch = FOLDER / "scratch"
    seal(FOLDER / NAME, contents(scratch), scratch=scratch)
    shutil.rmtree(scratch)
    (FOLDER / "expected.json").write_text(json.dumps(expected(), indent=None), encoding="utf-8")


if __name__ == "__main__":
    main()
