"""Small sealed caches with made-up values, for tests that read a cache without building one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forebay.store.key import digest
from forebay.store.layout import TEXT, FieldSpec, Group
from forebay.store.seal import Contents, seal
from forebay.store.shard import ShardEntry, shard_fields, shard_name, write_shard
from tests.flat_constants import flat

Features = Literal["log_mel", "qwen3_asr", "w2v_bert", "waveform", "none"]
Array = np.ndarray[Any, Any]
Row = dict[str, Any]
RATE_HZ = 16_000
LANGUAGES = ("en", "es", "")
TEXTS = ("Hello, $5 world.", "¿Qué tal?", "Привет, мир", "नमस्ते दुनिया", "你好")
EOS_ID = 2


def make_cache(
    root: Path,
    *,
    num_samples: int = 6,
    features: Features = "log_mel",
    keep_waveform: bool = False,
    rows_per_shard: int = 4,
    failed_rows: Sequence[int] = (),
    sample_ids: Sequence[str] | None = None,
    texts: Sequence[str] = TEXTS,
    languages: Sequence[str] = LANGUAGES,
    input_ids: Sequence[Sequence[int]] | None = None,
    tokenizer: str | None = "0" * 64,
    max_duration_s: float = 2.0,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Makes a sealed cache under `root` and returns its folder; the same arguments give the same bytes.

    failed_rows: rows (of num_samples + len(failed_rows)) that keep their place in the shards and are no samples.
    input_ids: of every row, in turn; left out: a few numbers, ended by 2; the prefix is their first. tokenizer: its
    digest in the recipe; None: a recipe without text. metadata: entries of metadata.json to add or replace.
    """
    fields = _fields(features, keep_waveform=keep_waveform, tokens=tokenizer is not None)
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for index in range(num_samples + len(failed_rows)):
        row = _row(fields, index, rng, max_duration_s=max_duration_s, texts=texts, input_ids=input_ids)
        row["language"] = languages[index % len(languages)]
        if sample_ids is not None:
            row["sample_id"] = sample_ids[index]
        rows.append(_failed(row) if index in failed_rows else row)
    recipe = _recipe(features, keep_waveform=keep_waveform, tokenizer=tokenizer)
    key = digest({"recipe": recipe, "seed": seed, "rows": len(rows)})
    folder = root / f"prompts-train-{key[:16]}"
    scratch = root / ".building" / key[:16]
    groups = sorted({field.group for field in fields}, key=lambda group: (group == TEXT, group))
    shards = {group: _shards(scratch, fields, rows, group, rows_per_shard) for group in groups}
    document = _document(rows, recipe, key, rows_per_shard=rows_per_shard, shards=shards)
    contents = Contents(
        fields=fields,
        shards=shards,
        items={},
        arrays=_arrays(rows, rows_per_shard, frames_field=fields[0].name if features != "none" else None),
        files={"rejected.jsonl": _rejected(rows)},
        document={**document, **(metadata or {})},
    )
    seal(folder, contents, scratch=scratch)
    return folder


def _fields(features: Features, *, keep_waveform: bool, tokens: bool) -> tuple[FieldSpec, ...]:
    audio = {
        "log_mel": [
            FieldSpec(name="input_features", dtype="float16", shape=(80,), group="audio"),
            FieldSpec(name="pad_value", dtype="float32", group="audio"),
        ],
        "qwen3_asr": [FieldSpec(name="input_features", dtype="float16", shape=(128,), group="audio")],
        "w2v_bert": [FieldSpec(name="fbanks", dtype="float32", shape=(80,), group="audio")],
        "waveform": [FieldSpec(name="waveform", dtype="int16", group="audio")],
        "none": [],
    }[features]
    if keep_waveform:
        audio.append(FieldSpec(name="waveform", dtype="int16", group="audio"))
    if features != "none":
        audio.append(FieldSpec(name="num_audio_samples", dtype="int64", group="audio", role="table"))
    text = [FieldSpec(name=name, dtype="int32", group=TEXT) for name in ("input_ids", "prefix_len")] if tokens else []
    table = [
        FieldSpec(name=name, dtype="str", group=TEXT, role="table")
        for name in ("sample_id", "text", "language", "prompt", "source")
    ]
    return (*audio, *text, *table)


def _row(
    fields: Sequence[FieldSpec],
    index: int,
    rng: np.random.Generator,
    *,
    max_duration_s: float,
    texts: Sequence[str],
    input_ids: Sequence[Sequence[int]] | None,
) -> Row:
    num_samples = int(rng.integers(RATE_HZ // 10, max(RATE_HZ // 10 + 1, int(max_duration_s * RATE_HZ))))
    frames = -(-num_samples // 160)
    tone = 0.3 * np.sin(np.arange(num_samples) * (2 * np.pi * (200 + 50 * index) / RATE_HZ))
    ids = input_ids[index % len(input_ids)] if input_ids else [1, *range(3, 5 + index % 4), EOS_ID]
    values: Row = {
        "pad_value": np.array([-1.5], np.float32),
        "waveform": (tone * 32767).astype(np.int16),
        "sample_id": f"clip-{index:04d}",
        "num_audio_samples": np.int64(num_samples),
        "input_ids": np.array(ids, np.int32),
        "prefix_len": np.array([1], np.int32),
        "text": texts[index % len(texts)],
        "prompt": "",
        "source": "train-00000.tar",
    }
    for field in fields:
        if field.shape:
            values[field.name] = rng.normal(size=(frames, *field.shape)).astype(field.numpy_dtype)
    return values


def _failed(row: Row) -> Row:
    return {"sample_id": row["sample_id"], "failure": "corrupt_audio"}


def _shards(
    folder: Path, fields: Sequence[FieldSpec], rows: Sequence[Row], group: Group, rows_per_shard: int
) -> list[tuple[Path, ShardEntry]]:
    (folder / group).mkdir(parents=True, exist_ok=True)
    names = {field.name for field in shard_fields(fields, group)}
    found = []
    for index, start in enumerate(range(0, len(rows), rows_per_shard)):
        part = [{k: v for k, v in row.items() if k in names} for row in rows[start : start + rows_per_shard]]
        path = folder / shard_name(group, index)
        found.append((path, write_shard(path, shard_fields(fields, group), part, key=digest([group, index]))))
    return found


def _arrays(rows: Sequence[Row], rows_per_shard: int, *, frames_field: str | None) -> dict[str, Array]:
    kept = [index for index, row in enumerate(rows) if "failure" not in row]
    slots = [index // rows_per_shard << 32 | index % rows_per_shard for index in kept]
    lengths = [[len(rows[index]["input_ids"]) for index in kept]]
    if frames_field is not None:
        heard = [int(rows[index]["num_audio_samples"]) for index in kept]
        lengths = [heard, [len(rows[index][frames_field]) for index in kept], *lengths]
    return {"slots.npy": np.array(slots, "<i8"), "lengths.npy": np.array(lengths, "<i4").reshape(len(lengths), -1)}


def _rejected(rows: Sequence[Row]) -> bytes:
    failed = [row for row in rows if "failure" in row]
    lines = [json.dumps({"sample_id": r["sample_id"], "kind": "failed", "reason": r["failure"]}) for r in failed]
    return "".join(f"{line}\n" for line in lines).encode("ascii")


def _recipe(features: Features, *, keep_waveform: bool, tokenizer: str | None) -> dict[str, Any]:
    audio = {"features": features, "sample_rate_hz": RATE_HZ, "clip_s": 30.0, "keep_waveform": keep_waveform}
    text = {"tokenizer": tokenizer, "prompt": "plain", "normalize": "nfkc"}
    return {
        "source": {"kind": "tar", "split": "train", "languages": ["en", "es"], "max_duration_s": 30.0},
        "audio": audio if features != "none" else None,
        "text": text if tokenizer is not None else None,
    }


def _document(
    rows: Sequence[Row],
    recipe: dict[str, Any],
    key: str,
    *,
    rows_per_shard: int,
    shards: Mapping[Group, Sequence[tuple[Path, ShardEntry]]],
) -> dict[str, Any]:
    kept = [row for row in rows if "failure" not in row]
    languages: dict[str, Any] = {}
    for row in kept:
        entry = languages.setdefault(row["language"] or "unknown", {"samples": 0, "hours": 0.0})
        entry["samples"] += 1
        entry["hours"] += float(row["num_audio_samples"]) / RATE_HZ / 3600 if recipe["audio"] else 0.0
    failed = len(rows) - len(kept)
    return {
        "name": "prompts",
        "split": "train",
        "key": key,
        "recipe_key": digest(recipe),
        "recipe": recipe,
        "num_samples": len(kept),
        "length_names": [*(["num_audio_samples", "num_frames"] if recipe["audio"] else []), "num_tokens"],
        "rows_per_shard": rows_per_shard,
        "probe": dict.fromkeys(shards, "0" * 32),
        "constants": flat(
            features=(recipe["audio"] or {"features": "none"})["features"],
            **({"sample_rate_hz": RATE_HZ} if recipe["audio"] else {}),
            prompt="plain",
        ).to_json(),
        "excluded": {},
        "failed": {"corrupt_audio": failed} if failed else {},
        "unused_fields": {},
        "clipped": 0,
        "longer": 0,
        "languages": languages,
        "size_bytes": sum(entry.size_bytes for entries in shards.values() for _, entry in entries),
        "made_with": {"forebay": "0.1.0", "numpy": "2.0.0", "python": "3.11.0"},
    }
