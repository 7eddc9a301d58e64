"""The ranges of length of buckets, and how many samples of each bucket form a micro-batch.

Buckets end at the configured edges, or at `k` edges that leave the least padding. A micro-batch is as large as a
budget, a count or a calibrated table says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.plan import BucketConfig, bucket_names
from forebay.errors import ConfigError, PlanError
from forebay.store.layout import Array
from forebay.visible import an

MAX_BINS = 1024
"""Of the histogram that edges are chosen on: 30 ms apart for 30 s. Twice as many gain 0.004 points of padding."""

_PIECE = 2**20


def bucket_edges(durations: Array, *, sample_rate_hz: int, settings: BucketConfig) -> list[int]:
    """Returns the upper edges of the buckets, rising, in audio samples; with `k` at most so many as there are lengths.

    Configured edges are compared as the decimals that the config shows: 0.1 s at 16 kHz is 1600 samples.
    """
    if settings.k is None:
        return [math.ceil(Fraction(repr(edge)) * sample_rate_hz) for edge in settings.edges_s]
    return _optimal_edges(durations, k=settings.k)


def token_edges(tokens: Array, *, settings: BucketConfig) -> list[int]:
    """Returns the upper edges, in tokens and rising, of buckets of samples without audio: `edges`, else `k` optimal.

    tokens: integers [num_samples], not empty. Raises PlanError where neither is given.
    """
    if settings.edges is not None:
        return list(settings.edges)
    if settings.k is None:
        raise PlanError(
            f"{len(tokens)} samples have no audio, so edges_s cannot place them; give plan.edges in tokens (they have "
            f"{int(tokens.min())} to {int(tokens.max())}), for example edges = [32, 64, 128], or plan.k",
            code="FB504",
        )
    return _optimal_edges(tokens, k=settings.k)


def _optimal_edges(lengths: Array, *, k: int) -> list[int]:
    width = int(lengths.max()) // MAX_BINS + 1
    counts = np.zeros(MAX_BINS, dtype=np.int64)
    for start in range(0, len(lengths), _PIECE):
        counts += np.bincount(lengths[start : start + _PIECE] // width, minlength=MAX_BINS)
    held = np.flatnonzero(counts)
    tops = (held + 1) * width
    return [int(tops[last]) for last in optimal_cuts(counts[held], tops, k=k)]


def optimal_cuts(counts: Array, tops: Array, *, k: int) -> list[int]:
    """Returns the last bin of each of min(k, num_bins) buckets that together pad the least.

    counts: int64 [num_bins], samples a bin, each above 0. tops: int64 [num_bins], the lengths that bins end at, rising.
    The least is exact for samples padded to the upper edge of their bucket, sum over buckets of samples * edge: what a
    batch under a budget is sized by, and what the longest of a batch comes close to. Dynamic programme over (buckets,
    last bin), O(k * num_bins^2), in integers: the same edges on every machine; of equal ones those with the shorter
    first buckets.
    """
    num_bins = len(counts)
    below = np.concatenate(([0], np.cumsum(counts)))
    # Entry [first, last]: the cost of one bucket of these bins.
    cost = (below[1:] - below[:-1, None]) * tops
    impossible = np.iinfo(np.int64).max // 4
    cost[np.tril_indices(num_bins, -1)] = impossible
    best = cost[0]
    firsts: list[Array] = []
    for _ in range(min(k, num_bins) - 1):
        # Bins before `first` are in one bucket less.
        total = np.concatenate(([impossible], best[:-1]))[:, None] + cost
        firsts.append(total.argmin(axis=0))
        best = np.minimum(total.min(axis=0), impossible)
    cuts = [num_bins - 1]
    for chosen in reversed(firsts):
        cuts.append(int(chosen[cuts[-1]]) - 1)
    return cuts[::-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The limit on the size of one bucket's batches.

    samples: that it holds. length: in audio samples, its upper edge; of the last, open-ended bucket the longest sample;
    None where its samples have no audio.
    tokens: the most tokens that a sample of it has; None where they are not known.
    """

    samples: int
    length: int | None
    tokens: int | None = None


def batch_sizes(
    settings: BucketConfig, limits: Sequence[Limit], *, sample_rate_hz: int, edges_s: Sequence[float] = ()
) -> list[int]:
    """Returns the samples a micro-batch of each bucket. edges_s: the upper edges, which a calibration names them by.

    Under a budget floor(budget / longest), at least 1, so that only a sample that is itself over the budget exceeds it;
    under two budgets the smaller size. Many narrow buckets would have many incomplete batches: with `k` a bucket's size
    is lowered to the least that gives as many batches, so that its last one is nearly full too. Raises PlanError where
    a table is not one of these buckets, or tokens are missing.
    """
    if settings.calibration is not None:
        return [
            entry["batch_size"]
            for entry in calibrated(settings.calibration, bucket_names(edges_s, num_buckets=len(limits)))
        ]
    if isinstance(settings.batch_size, tuple):
        if len(settings.batch_size) != len(limits):
            raise PlanError(
                f"plan.batch_size has {len(settings.batch_size)} entries, these lengths have {len(limits)} buckets; "
                "lower plan.k, or give one number",
                code="FB505",
            )
        return list(settings.batch_size)
    if settings.batch_size is not None:
        return [settings.batch_size] * len(limits)
    sizes = [max(1, _affordable(settings, limit, sample_rate_hz)) for limit in limits]
    if settings.k is None:
        return sizes
    return [_even(limit.samples, size) for limit, size in zip(limits, sizes, strict=True)]


def grad_accs(settings: BucketConfig, *, edges_s: Sequence[float], num_buckets: int) -> tuple[int, ...] | None:
    """Returns the micro-batches an optimizer step of each bucket, where a calibration file says so, else None."""
    if settings.calibration is None:
        return None
    names = bucket_names(edges_s, num_buckets=num_buckets)
    return tuple(entry["grad_acc"] for entry in calibrated(settings.calibration, names))


def calibrated(path: str, names: Sequence[str]) -> list[dict[str, int]]:
    """Returns `batch_size` and `grad_acc` of every bucket of a calibration file, which calls it by name or index.

    names: of the plan's buckets. Raises PlanError, naming the file and what differs, where its buckets are not these.
    """
    table = read_calibration(path)
    found: dict[int, str] = {}
    unknown = []
    for written in table:
        bucket = names.index(written) if written in names else _index(written, len(names))
        if bucket is None:
            unknown.append(written)
        elif bucket in found:
            raise PlanError(
                f"plan.calibration {path}: {found[bucket]} and {written} are one bucket; leave one of them out",
                code="FB505",
            )
        else:
            found[bucket] = written
    missing = [name for bucket, name in enumerate(names) if bucket not in found]
    if missing or unknown:
        raise PlanError(
            f"plan.calibration {path} is of other buckets: "
            f"missing {', '.join(missing) or 'none'}; unknown {', '.join(map(repr, unknown)) or 'none'}; wanted "
            f"{', '.join(names)}, or their indices 0 to {len(names) - 1}: calibrate these buckets",
            code="FB505",
        )
    return [table[found[bucket]] for bucket in range(len(names))]


def _index(written: str, num_buckets: int) -> int | None:
    """Returns the bucket that an index of at most nine digits stands for, None where there is no such bucket."""
    is_index = written.isascii() and written.isdecimal() and len(written) < 10
    return int(written) if is_index and int(written) < num_buckets else None


def read_calibration(path: str) -> dict[str, dict[str, int]]:
    """Returns the content of a calibration file, `{bucket: {"batch_size", "grad_acc"}}`; `grad_acc` is 1 if left out.

    Other fields of a bucket (what was measured) are not read. Raises ConfigError naming file, bucket and value.
    """
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as err:
        raise ConfigError(f"plan.calibration: cannot read {path}: {err.strerror}", code="FB505") from err
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"plan.calibration: {path} is not JSON: {err}", code="FB505") from err
    if not isinstance(document, dict):
        raise ConfigError(f"plan.calibration: {path} holds {an(type(document).__name__)}, {_WANTED}", code="FB505")
    return {bucket: _entry(path, bucket, entry) for bucket, entry in document.items()}


_WANTED = 'wanted {"b_0_3": {"batch_size": 40, "grad_acc": 1}, ...}, one entry a bucket, by name or index'


def _entry(path: str, bucket: str, entry: Any) -> dict[str, int]:
    if not isinstance(entry, dict):
        raise ConfigError(f"plan.calibration: {path}: bucket {bucket} is {entry!r}, {_WANTED}", code="FB505")
    values = {"batch_size": entry.get("batch_size"), "grad_acc": entry.get("grad_acc", 1)}
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"plan.calibration: {path}: bucket {bucket}: {name} is {value!r}, wanted 1 or more", code="FB505"
            )
    return values


def _even(samples: int, size: int) -> int:
    """Returns the least size with which the samples make no more batches."""
    batches = max(-(-samples // size), 1)
    return max(-(-samples // batches), 1)


def _affordable(settings: BucketConfig, limit: Limit, sample_rate_hz: int) -> int:
    sizes = []
    if limit.length is None and settings.batch_tokens is None:
        raise PlanError(
            f"plan.batch_seconds = {settings.batch_seconds} is no budget for {limit.samples} samples without audio; "
            "give plan.batch_tokens, beside it or alone",
            code="FB504",
        )
    if settings.batch_seconds is not None and limit.length is not None:
        sizes.append(math.floor(Fraction(repr(settings.batch_seconds)) * sample_rate_hz / max(limit.length, 1)))
    if settings.batch_tokens is not None:
        if limit.tokens is None:
            raise PlanError(
                "plan.batch_tokens needs a cache with tokens: add a [text] section, or use plan.batch_seconds",
                code="FB504",
            )
        sizes.append(settings.batch_tokens // max(limit.tokens, 1))
    return min(sizes)
