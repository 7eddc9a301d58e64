"""`forebay inspect --usage FILE`: what a run has used, against what it was to use, and what it never used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.remote import RemoteConfig
from forebay.errors import CacheCorruptError, CacheError, ConfigError, MissingExtraError, RemoteError
from forebay.inspect.terminal.plan import usage_lines
from forebay.plan.usage import FILE_NAME, read_usage, unpack_ids
from forebay.store.cache import open_cache
from forebay.store.layout import Array
from forebay.terminal import print_json, print_lines

_COLUMNS = ("part", "language", "source")


def usage_facts(path: Path, *, remote: RemoteConfig | None = None) -> dict[str, Any]:
    """Returns the document of `forebay inspect --usage FILE --json`: the lines of the log added up.

    `languages`, `sources`, and `parts` of a mixture: by name the `samples` handed out, their `share`, the `expected`
    share, and how many samples are `there`. `shards`: `num`, `touched`, and how often the least and the most used one
    was gone through (`min_passes`, `max_passes`). `never_used`: `languages`, `sources` (names), `shards` (numbers),
    `samples` (indices; null where the log names none, see `train.usage_ids`), `sample_ids` (null also where the cache
    is not there). `gaps`: pairs of steps between which nothing was recorded.
    remote: how the stores of caches are asked whose folders are URLs.
    Raises ConfigError where the file cannot be read, CacheCorruptError, CacheMismatchError for what is no usage log.
    """
    try:
        head, lines = read_usage(path)
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror}; name a run's logs/{FILE_NAME}") from err
    try:
        return _facts(path, head, lines, remote)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as err:
        raise CacheCorruptError(f"{path} does not hold a usage log: {err!r}") from err


def _facts(
    path: Path, head: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], remote: RemoteConfig | None
) -> dict[str, Any]:
    samples = sum(line["samples"] for line in lines)
    frames, padded = (sum(line[name] for line in lines) for name in ("frames", "padded_frames"))
    columns = {f"{name}s": _column(head, lines, f"{name}s") for name in _COLUMNS if f"{name}s" in head}
    shards = _shard_counts(head, lines)
    unused = _unused_samples(head, lines)
    return {
        "file": str(path),
        "steps": lines[-1]["step"] if lines else head["from_step"],
        "from_step": head["from_step"],
        "gaps": _gaps(head, lines),
        "epoch": lines[-1]["to"]["epoch"] if lines else 0,
        "position": lines[-1]["to"]["position"] if lines else 0,
        "num_batches": head["num_batches"],
        "seed": head["seed"],
        "plan_key": head["plan_key"],
        "caches": [{name: cache[name] for name in ("folder", "key")} for cache in head["caches"]],
        "source_key": head["source_key"],
        "num_samples": head["num_samples"],
        "samples": samples,
        "batches": sum(line["batches"] for line in lines),
        "repeats": sum(line["repeats"] for line in lines),
        "padding": padded / (frames + padded) if frames else 0.0,
        **columns,
        "shards": _shards(head, shards),
        "never_used": {
            **{name: [value for value, row in rows.items() if not row["samples"]] for name, rows in columns.items()},
            "shards": np.flatnonzero((shards == 0) & (np.array(head["shards"], np.int64) > 0)).tolist(),
            "samples": None if unused is None else unused.tolist(),
            "sample_ids": None if unused is None else _sample_ids(head, unused, remote),
        },
    }


def _column(head: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update({value: row["samples"] for value, row in line[name].items()})
    total = max(counts.total(), 1)
    return {
        value: {
            "samples": counts[value],
            "share": counts[value] / total,
            "expected": row["expected"],
            "there": row["samples"],
        }
        for value, row in head[name].items()
    }


def _shard_counts(head: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Array:
    counts = np.zeros(len(head["shards"]), np.int64)
    for line in lines:
        for number, count in line["shards"].items():
            counts[int(number)] += count
    return counts


def _shards(head: Mapping[str, Any], counts: Array) -> dict[str, Any]:
    sizes = np.array(head["shards"], np.int64)
    passes = counts[sizes > 0] / sizes[sizes > 0]
    return {
        "num": len(passes),
        "touched": int(np.count_nonzero(passes)),
        "min_passes": float(passes.min()) if len(passes) else None,
        "max_passes": float(passes.max()) if len(passes) else None,
    }


def _gaps(head: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    ends = [head["from_step"], *(line["step"] for line in lines)]
    gaps = [[0, head["from_step"]]] if head["from_step"] else []
    return gaps + [[end, line["from_step"]] for end, line in zip(ends, lines, strict=False) if end != line["from_step"]]


def _unused_samples(head: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Array | None:
    """Returns the indices of samples that no line names; None where a line names none at all."""
    used = np.zeros(head["num_samples"], bool)
    for line in lines:
        if "ids" not in line:
            return None
        used[unpack_ids(line["ids"])] = True
    return np.flatnonzero(~used)


def _sample_ids(head: Mapping[str, Any], indices: Array, remote: RemoteConfig | None) -> list[str] | None:
    """Returns the ids of samples; None where not all of the caches that were used are there."""
    names: list[str] = []
    for described in head["caches"]:
        try:
            cache = open_cache(described["folder"], remote=remote)
            cache.require_key(described["key"])
        except (CacheError, RemoteError, MissingExtraError):
            return None
        ids = cache.table(["sample_id"])["sample_id"]
        names += (ids.take(unpack_ids(described["places"])) if "places" in described else ids).to_pylist()
    return [names[index] for index in indices] if names else None


def run_usage(path: Path, *, as_json: bool, remote: RemoteConfig | None = None) -> int:
    """Prints the report on a usage log and returns the exit code, 0."""
    facts = usage_facts(path, remote=remote)
    if as_json:
        print_json(facts)
    else:
        print_lines(usage_lines(facts))
    return 0
