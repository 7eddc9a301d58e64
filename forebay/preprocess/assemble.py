"""From finished shards to the contents of a cache: which rows are samples, their lengths, the counts and the lists."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config import Config
from forebay.config.recipe import Recipe
from forebay.preprocess.listing import Listing
from forebay.preprocess.samples import sample_fields
from forebay.store.cache import ROW_BITS
from forebay.store.layout import Group
from forebay.store.seal import Contents
from forebay.store.shard import Shard, ShardEntry, shard_fields
from forebay.store.sources import dump_sources
from forebay.version import __version__

Array = np.ndarray[Any, Any]
Finished = Mapping[Group, Sequence[tuple[Path, ShardEntry]]]

LENGTHS = ("num_samples", "num_frames", "num_tokens")

EXCLUDING = frozenset({"empty_text", "label_too_long", "too_long", "too_short"})
"""Reasons that say that a good sample is not wanted; all others say that a sample is bad."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """One row that is no sample: why, and whether it was filtered (`excluded`) or bad (`failed`)."""

    sample_id: str
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Every row of every shard, in order."""

    slots: Array
    sample_ids: list[str]
    reasons: list[str]
    languages: list[str]
    lengths: Array


def assemble(
    config: Config,
    listing: Listing,
    finished: Finished,
    *,
    probe: Mapping[Group, str],
    constants: Mapping[str, Any],
    memo: bytes,
) -> Contents:
    """Returns what is sealed."""
    recipe = listing.recipe.recipe
    fields = sample_fields(recipe)
    rows = _read_rows(recipe, finished)
    reasons = [
        reason or _limit(config, recipe, int(n)) for reason, n in zip(rows.reasons, rows.lengths[0], strict=True)
    ]
    keep = np.array([not reason for reason in reasons], bool)
    rejections = [
        Rejection(sample_id=r["sample_id"], kind=r["kind"], reason=r["reason"])
        for r in listing.manifest.rejected.to_pylist()
    ]
    rejections += [
        Rejection(sample_id=sample_id, kind="excluded" if reason in EXCLUDING else "failed", reason=reason)
        for sample_id, reason in zip(rows.sample_ids, reasons, strict=True)
        if reason
    ]
    lengths = np.ascontiguousarray(rows.lengths[:, keep])
    document = {
        "name": config.name,
        "split": config.source.split,
        "key": listing.key,
        "recipe_key": listing.recipe.key,
        "recipe": listing.recipe.document,
        "num_samples": int(keep.sum()),
        "length_names": list(LENGTHS),
        "rows_per_shard": config.layout.rows_per_shard,
        "probe": dict(probe),
        "constants": dict(constants),
        "excluded": _counts(rejections, "excluded"),
        "failed": _counts(rejections, "failed"),
        "clipped": _num_clipped(listing, recipe, rows, keep),
        "languages": _languages(rows, keep, recipe),
        "size_bytes": sum(entry.size_bytes for shards in finished.values() for _, entry in shards),
        "made_with": {"forebay": __version__, "numpy": np.__version__, "python": platform.python_version()},
    }
    return Contents(
        fields=fields,
        shards=finished,
        arrays={"slots.npy": rows.slots[keep], "lengths.npy": lengths},
        files={
            "sources.parquet": dump_sources(listing.sources()),
            "hashes.memo": memo,
            "rejected.jsonl": _jsonl(rejections),
        },
        document=document,
    )


def _read_rows(recipe: Recipe, finished: Finished) -> _Rows:
    fields = sample_fields(recipe)
    slots, sample_ids, reasons, languages, lengths = [], [], [], [], []
    pairs = zip(finished["media"], finished["text"], strict=True)
    for index, ((media_path, media_entry), (text_path, text_entry)) in enumerate(pairs):
        media = Shard(media_path, media_entry, shard_fields(fields, "media"))
        text = Shard(text_path, text_entry, shard_fields(fields, "text"))
        count = media_entry.rows
        slots.append((np.int64(index) << ROW_BITS) | np.arange(count, dtype=np.int64))
        sample_ids += media.strings("sample_id")
        languages += text.strings("language")
        reasons += [a or b for a, b in zip(media.strings("failure"), text.strings("failure"), strict=True)]
        num_samples, num_frames = _audio_lengths(media) if recipe.has_audio else np.zeros((2, count), np.int64)
        num_tokens = text.lengths("input_ids") if recipe.tokens is not None else np.zeros(count, np.int64)
        lengths.append(np.stack([num_samples, num_frames, num_tokens]))
    table = np.concatenate([np.zeros((3, 0), np.int64), *lengths], axis=1)
    if len(table[0]) and table.max() > np.iinfo(np.int32).max:
        raise OverflowError(f"a sample of {table.max()} elements does not fit int32 lengths")
    return _Rows(
        slots=np.concatenate([np.zeros(0, np.int64), *slots]),
        sample_ids=sample_ids,
        reasons=reasons,
        languages=languages,
        lengths=table.astype("<i4"),
    )


def _audio_lengths(media: Shard) -> tuple[Array, Array]:
    """Returns audio samples and stored frames of every row, int64 [rows]; 0 where a row failed."""
    values, offsets = media.column("num_samples")
    present = np.diff(offsets) > 0
    num_samples = np.zeros(len(present), np.int64)
    num_samples[present] = values[offsets[:-1][present]]
    return num_samples, media.lengths(media.fields[0].name)


def _limit(config: Config, recipe: Recipe, num_samples: int) -> str:
    """The duration filters again, on what was decoded: a manifest may be wrong about a clip."""
    source = config.source
    duration_s = num_samples / recipe.decode.sample_rate_hz
    # A manifest's rounded duration passed the filter once; only a real difference is one.
    slack_s = 0.1
    if source.overlong == "drop" and source.max_duration_s is not None and duration_s > source.max_duration_s + slack_s:
        return "too_long"
    return "too_short" if duration_s < source.min_duration_s - slack_s else ""


def _counts(rejections: Sequence[Rejection], kind: str) -> dict[str, int]:
    return dict(sorted(Counter(r.reason for r in rejections if r.kind == kind).items()))


def _num_clipped(listing: Listing, recipe: Recipe, rows: _Rows, keep: Array) -> int:
    """Samples of which only the first `clip_s` seconds were taken."""
    if recipe.decode.clip_s is None:
        return 0
    rate = recipe.decode.sample_rate_hz
    reached = rows.lengths[0] >= round(recipe.decode.clip_s * rate)
    # A clip that ends just at the limit lost nothing; a manifest that says less than was decoded is wrong about it.
    lost = np.abs(listing.rows["duration_s"].to_numpy() - recipe.decode.clip_s) > 1 / rate
    return int((reached & lost & keep).sum())


def _languages(rows: _Rows, keep: Array, recipe: Recipe) -> dict[str, Any]:
    names, inverse = np.unique(np.array(rows.languages, dtype=object)[keep].astype(str), return_inverse=True)
    seconds = np.bincount(inverse, rows.lengths[0][keep], len(names)) / recipe.decode.sample_rate_hz
    samples = np.bincount(inverse, minlength=len(names))
    return {
        name or "unknown": {"samples": int(n), "hours": float(s / 3600)}
        for name, n, s in zip(names.tolist(), samples, seconds, strict=True)
    }


def _jsonl(rejections: Sequence[Rejection]) -> bytes:
    lines = [json.dumps({"sample_id": r.sample_id, "kind": r.kind, "reason": r.reason}) for r in rejections]
    return "".join(f"{line}\n" for line in lines).encode("ascii")
