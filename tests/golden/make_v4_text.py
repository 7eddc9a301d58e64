"""Made the golden cache of texts alone of format 4: `python -m tests.golden.make_v4_text`. It is kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from forebay.store.key import digest
from forebay.store.layout import FieldSpec
from forebay.store.seal import Contents, seal
from forebay.store.shard import ShardEntry, shard_fields, shard_name, write_shard
from forebay.store.source_files import StoredSource, dump_sources

FOLDER = Path(__file__).parent / "v4_text"
"""Holds the cache and `expected.json`."""
NAME = "golden-train-text"
ROWS_PER_SHARD = 3

FIELDS = (
    FieldSpec(name="sample_id", dtype="str", group="text", role="table"),
    FieldSpec(name="input_ids", dtype="int32", group="text"),
    FieldSpec(name="prefix_len", dtype="int32", group="text"),
    FieldSpec(name="text", dtype="str", group="text", role="table"),
    FieldSpec(name="language", dtype="str", group="text", role="table"),
)
TEXTS = ("Hello, world.", "¿Qué tal?", "", "नमस्ते", "你好 👋")
LANGUAGES = ("en", "es", "", "hi", "zh")
FAILED = {2: "empty_text"}
KEPT = tuple(row for row in range(len(TEXTS)) if row not in FAILED)


def tokens(row: int) -> np.ndarray[Any, Any]:
    """Returns the token ids of a row."""
    return np.array([*TEXTS[row].encode(), 2], np.int32)


def row_values(row: int) -> dict[str, Any]:
    """Returns a row as it is written."""
    table = {"sample_id": f"text-{row}", "text": TEXTS[row], "language": LANGUAGES[row]}
    if row in FAILED:
        return {**table, "failure": FAILED[row]}
    return {**table, "input_ids": tokens(row), "prefix_len": np.zeros(1, np.int32)}


def write_shards(scratch: Path) -> list[tuple[Path, ShardEntry]]:
    """Writes the shards below a folder."""
    (scratch / "text").mkdir(parents=True, exist_ok=True)
    shards = []
    for index, start in enumerate(range(0, len(TEXTS), ROWS_PER_SHARD)):
        path = scratch / shard_name("text", index)
        part = [row_values(row) for row in range(start, min(start + ROWS_PER_SHARD, len(TEXTS)))]
        key = digest(["golden v4 text", index])
        shards.append((path, write_shard(path, shard_fields(FIELDS, "text"), part, key=key)))
    return shards


def expected() -> dict[str, Any]:
    """Returns what a reader has to find, in a form that needs no reader of ours."""
    return {
        "key": digest("golden v4 text"),
        "samples": [{"input_ids": tokens(row).tolist(), "prefix_len": [0]} for row in KEPT],
        "table": {
            "index": list(range(len(KEPT))),
            "sample_id": [f"text-{row}" for row in KEPT],
            "text": [TEXTS[row] for row in KEPT],
            "language": [LANGUAGES[row] for row in KEPT],
            "num_tokens": [len(tokens(row)) for row in KEPT],
        },
    }


def contents(scratch: Path) -> Contents:
    """Returns what the golden cache is sealed from."""
    lengths = [[len(tokens(row)) for row in KEPT]]
    return Contents(
        fields=FIELDS,
        shards={"text": write_shards(scratch)},
        items={},
        arrays={
            "slots.npy": np.array([row // ROWS_PER_SHARD << 32 | row % ROWS_PER_SHARD for row in KEPT], "<i8"),
            "lengths.npy": np.array(lengths, "<i4"),
        },
        files={
            "sources.parquet": dump_sources(
                [StoredSource("texts.jsonl", 0, listed=True, xxh3_128="0" * 32, size_bytes=10_240)]
            ),
            "rejected.jsonl": b'{"sample_id": "text-2", "kind": "excluded", "reason": "empty_text"}\n',
        },
        document={
            "name": "golden",
            "split": "train",
            "key": digest("golden v4 text"),
            "recipe_key": digest("golden text recipe"),
            "recipe": {"source": {"kind": "text"}, "audio": None, "text": {"prompt": "plain"}},
            "num_samples": len(KEPT),
            "length_names": ["num_tokens"],
            "rows_per_shard": ROWS_PER_SHARD,
            "probe": {"text": "0" * 32},
            "constants": {"text": {"features": "none", "eos_token_id": 2}},
            "excluded": {"empty_text": 1},
            "failed": {},
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
