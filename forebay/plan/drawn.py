"""Which shape classes a run has drawn, with batches and audio hours, against what its plan says.

Like all usage, this is counted from the plan's order and not step by step: of all ranks together, and of the whole run,
what came before a resume included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forebay.config.plan import bucket_names
from forebay.plan.bucket.bucket_plan import BucketPlan
from forebay.plan.cursor import LoaderState
from forebay.plan.interface import Plan
from forebay.plan.mixture.mixture_plan import MixturePlan
from forebay.plan.pack.pack_plan import PackPlan
from forebay.plan.plan_usage import in_chunks, stretches
from forebay.plan.window import WindowPlan
from forebay.store.layout import Array

_MOST_LINES = 24
_CHUNK = 4096
"""Micro-batches that are looked at in one go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """The samples of one shape class that a run has drawn."""

    batches: int
    """Micro-batches, over all ranks."""
    hours: float | None
    """Audio in them, without padding; None where samples are no audio."""
    share: float
    """Of all micro-batches of the run."""
    expected: float
    """Share of all micro-batches of an epoch."""


def drawn_classes(
    plan: Plan,
    *,
    start: LoaderState,
    end: LoaderState,
    dp_world_size: int,
    durations_s: Array | None,
    edges_s: Sequence[float] = (),
) -> dict[str, Drawn]:
    """Returns what was drawn between two states of a loader, by the name of a shape class, in the plan's order.

    Names are those of calibration (`b_0_3`); windows have `place_0` on, packs are `packs`. Classes that an epoch has
    and the run has not drawn are there with 0.
    durations_s: float64 [num_samples]; None where samples are no audio. edges_s: of the buckets, where the plan knows
    them no more (mixtures).
    """
    names = class_names(plan, edges_s=edges_s)
    expected = _expected(plan, start, count=len(names))
    batches, hours = np.zeros(len(names), np.int64), np.zeros(len(names))
    for state, positions in stretches(plan, start, end, dp_world_size=dp_world_size):
        order = plan.order(state.seed, state.epoch)
        for chunk, found in in_chunks(order, positions):
            classes = order.buckets(chunk)
            batches += np.bincount(classes, minlength=len(names))
            if durations_s is not None:
                weights = durations_s[np.concatenate(found)] / 3600
                owners = np.repeat(classes, list(map(len, found)))
                hours += np.bincount(owners, weights=weights, minlength=len(names))
    total = max(int(batches.sum()), 1)
    return {
        name: Drawn(
            batches=int(batches[number]),
            hours=None if durations_s is None else round(float(hours[number]), 6),
            share=round(int(batches[number]) / total, 6),
            expected=round(float(expected[number]), 6),
        )
        for number, name in enumerate(names)
        if batches[number] or expected[number]
    }


def class_names(plan: Plan, *, edges_s: Sequence[float] = ()) -> list[str]:
    """Returns the name of every shape class of a plan, see `drawn_classes`."""
    if isinstance(plan, PackPlan):
        return ["packs"]
    if isinstance(plan, WindowPlan):
        return [f"place_{number}" for number in range(max(plan.batches_per_window, plan.last_batches))]
    if isinstance(plan, BucketPlan):
        return bucket_names(plan.edges_s, num_buckets=len(plan.batch_sizes))
    count = len(plan.batch_sizes) if isinstance(plan, MixturePlan) else 1
    return bucket_names(edges_s[:count], num_buckets=count)


def drawn_lines(drawn: Mapping[str, Drawn]) -> Iterator[str]:
    """Yields a line for each of the first shape classes in the plan's order."""
    for name, found in list(drawn.items())[:_MOST_LINES]:
        hours = "" if found.hours is None else f", {found.hours:.3g} h"
        yield (
            f"bucket {name}: {found.batches} batches{hours}, {100 * found.share:.1f} %, "
            f"expected {100 * found.expected:.1f} %"
        )
    if len(drawn) > _MOST_LINES:
        yield f"and {len(drawn) - _MOST_LINES} more buckets (--json lists them all)"


def _expected(plan: Plan, start: LoaderState, *, count: int) -> Array:
    """Returns the share of each shape class in the micro-batches of the epoch of a state, float64 [count]."""
    order, counts = plan.order(start.seed, start.epoch), np.zeros(count, np.int64)
    for first in range(0, plan.num_batches, _CHUNK):
        chunk = np.arange(first, min(first + _CHUNK, plan.num_batches))
        counts += np.bincount(order.buckets(chunk), minlength=count)
    shares: Array = counts / max(int(counts.sum()), 1)
    return shares
