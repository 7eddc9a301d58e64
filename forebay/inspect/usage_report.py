"""`forebay inspect --usage FILE`: what a run has used, against what it was to use, and what it never used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.remote import RemoteConfig
from forebay.errors import CacheCorruptError, CacheError, ConfigError, MissingExtraError, RemoteError
from forebay.inspect.inspect_lines import usage_lines
from forebay.plan.plan_usage import FILE_NAME, add_counts, unpack_ids, walk_usage
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
        head, lines = walk_usage(path)
        return _facts(path, head, _added(head, (line for line, _ in lines)), remote)
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror}; name a run's logs/{FILE_NAME}") from err
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as err:
        raise CacheCorruptError(f"{path} does not hold a usage log: {err!r}") from err


@dataclass(kw_only=True, slots=True)
class _Added:
    """The sums of the lines of a log, added up one by one."""

    last: Mapping[str, Any]
    shards: Array
    used: Array
    columns: dict[str, Counter[str]]
    sums: Counter[str] = field(default_factory=Counter)
    gaps: list[list[int]] = field(default_factory=list)
    names_ids: bool = True


def _added(head: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> _Added:
    done = head["from_step"]
    found = _Added(
        last={"step": done, "to": {"epoch": 0, "position": 0}},
        shards=np.zeros(len(head["shards"]), np.int64),
        used=np.zeros(head["num_samples"], bool),
        columns={f"{name}s": Counter() for name in _COLUMNS if f"{name}s" in head},
        gaps=[[0, done]] if done else [],
    )
    for line in lines:
        for name in ("samples", "batches", "repeats", "frames", "padded_frames"):
            found.sums[name] += line[name]
        for name, counts in found.columns.items():
            for value, row in line[name].items():
                counts[value] += row["samples"]
        add_counts(found.shards, line["shards"])
        found.names_ids &= "ids" in line
        if found.names_ids:
            found.used[unpack_ids(line["ids"])] = True
        if found.last["step"] != line["from_step"]:
            found.gaps.append([found.last["step"], line["from_step"]])
        found.last = line
    return found


def _facts(path: Path, head: Mapping[str, Any], added: _Added, remote: RemoteConfig | None) -> dict[str, Any]:
    sums, shards = added.sums, added.shards
    columns = {name: _column(head[name], counts) for name, counts in added.columns.items()}
    unused = np.flatnonzero(~added.used) if added.names_ids else None
    frames = sums["frames"] + sums["padded_frames"]
    return {
        "file": str(path),
        "steps": added.last["step"],
        "from_step": head["from_step"],
        "gaps": added.gaps,
        "epoch": added.last["to"]["epoch"],
        "position": added.last["to"]["position"],
        "num_batches": head["num_batches"],
        "seed": head["seed"],
        "plan_key": head["plan_key"],
        "caches": [{name: cache[name] for name in ("folder", "key")} for cache in head["caches"]],
        "source_key": head["source_key"],
        "num_samples": head["num_samples"],
        "samples": sums["samples"],
        "batches": sums["batches"],
        "repeats": sums["repeats"],
        "padding": sums["padded_frames"] / frames if sums["frames"] else 0.0,
        **columns,
        "shards": _shards(head, shards),
        "never_used": {
            **{name: [value for value, row in rows.items() if not row["samples"]] for name, rows in columns.items()},
            "shards": np.flatnonzero((shards == 0) & (np.array(head["shards"], np.int64) > 0)).tolist(),
            "samples": None if unused is None else unused.tolist(),
            "sample_ids": None if unused is None else _sample_ids(head, unused, remote),
        },
    }


def _column(there: Mapping[str, Any], counts: Counter[str]) -> dict[str, dict[str, Any]]:
    total = max(counts.total(), 1)
    return {
        value: {
            "samples": counts[value],
            "share": counts[value] / total,
            "expected": row["expected"],
            "there": row["samples"],
        }
        for value, row in there.items()
    }


def _shards(head: Mapping[str, Any], counts: Array) -> dict[str, Any]:
    sizes = np.array(head["shards"], np.int64)
    passes = counts[sizes > 0] / sizes[sizes > 0]
    return {
        "num": len(passes),
        "touched": int(np.count_nonzero(passes)),
        "min_passes": float(passes.min()) if len(passes) else None,
        "max_passes": float(passes.max()) if len(passes) else None,
    }


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
