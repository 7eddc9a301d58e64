"""A run without a model: the plan and the loader at full speed, and what they hand out."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.plan.interface import Plan
from forebay.plan.plan_usage import Population, Usage, UsageCounter, expected_shares, population
from forebay.store.remote.remote_shards import RemoteShards
from forebay.store.source import SampleSource, source_kind
from forebay.terminal import CommandReport
from forebay.train.collate.patches import fields_of
from forebay.train.device import Batch
from forebay.train.loader import Loader
from forebay.train.loop.usage_log import NodeTraffic, Traffic
from forebay.train.select import make_loader
from forebay.visible import human_bytes, printable

logger = logging.getLogger(__name__)

_SAY_EVERY_S = 10.0

_MAX_ROWS = 24
"""Languages, or sources, that are printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Warmed:
    """The shards that a dry run brought to this node from stores."""

    bytes: int
    bytes_per_s: float
    """Over the whole time."""
    missing_bytes: int
    """Of shards that an epoch needs and that are not here; what does not fit the bound of the node is left out."""
    missing_s: float | None
    """How long these take at that rate; None where nothing came."""

    def __str__(self) -> str:
        line = f"{human_bytes(self.bytes)} downloaded at {human_bytes(self.bytes_per_s)}/s"
        if not self.missing_bytes:
            return f"{line}; all that this node keeps is here"
        line += f"; {human_bytes(self.missing_bytes)} are not here yet"
        return line if self.missing_s is None else f"{line}, {self.missing_s:.0f} s more at that rate"


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunReport(CommandReport):
    """The document of `forebay train --dry-run --json`; its fields are an interface."""

    steps: int
    """Micro-batches that were read."""
    epochs: float
    """Epochs that these are."""
    samples: int
    repeats: int
    """Samples that came again in one epoch."""
    batches_per_s: float
    """Over the whole time, the start included."""
    samples_per_s: float
    first_batch_s: float
    """Seconds until the first batch: threads start, files are opened."""
    size_bytes: int
    """Of all batches."""
    padding: float
    """Share of padded frames in all frames."""
    languages: dict[str, dict[str, float]]
    """By language `samples`, their `share` of all samples and the `expected` share; empty where none is known."""
    sources: dict[str, dict[str, float]]
    parts: dict[str, dict[str, float]]
    """By cache of `[[mixture.source]]`; empty where there is but one."""
    shards_touched: int
    num_shards: int
    """0 where nothing is sharded: uncached."""
    num_batches: int
    """Micro-batches of an epoch."""
    source: Literal["cache", "uncached"]
    remote: Warmed | None = None
    """None where all caches are local."""

    def lines(self) -> Iterator[str]:
        """Yields what `forebay train --dry-run` prints."""
        yield (
            f"{self.steps} batches ({self.epochs:g} epochs), {self.samples} samples, {human_bytes(self.size_bytes)} "
            f"from {self.source}: {self.batches_per_s:.1f} batches/s, {self.samples_per_s:.1f} samples/s, "
            f"first batch after {self.first_batch_s:.2f} s"
        )
        yield f"padding {100 * self.padding:.1f} %, {self.repeats} samples repeated in their epoch"
        if self.remote is not None:
            yield str(self.remote)
        if self.num_shards:
            yield f"shards touched: {self.shards_touched} of {self.num_shards}"
        for kind, rows in (("part", self.parts), ("language", self.languages), ("source", self.sources)):
            for name, row in sorted(rows.items(), key=lambda item: -item[1]["samples"])[:_MAX_ROWS]:
                yield f"{kind} {printable(name)}: {100 * row['share']:.2f} %, expected {100 * row['expected']:.2f} %"
            if len(rows) > _MAX_ROWS:
                yield f"and {len(rows) - _MAX_ROWS} more {kind}s (--json lists them all)"


def dry_run(config: Config, *, steps: int = 200) -> DryRunReport:
    """Returns what the loader of a config gives in `steps` micro-batches of one rank, epoch after epoch from the first.

    Needs no `train.model`, and writes nothing but, where it is missing, the plan. Shards of a remote cache that these
    micro-batches need are on this node then; a log line says now and then how far that is. Raises what `make_loader`
    raises.
    """
    if steps < 1:
        raise ConfigError(f"--steps is {steps}, wanted 1 or more")
    loader = make_loader(config, dp_rank=0, dp_world_size=1)
    start, times_s, size_bytes = loader.state, [time.perf_counter()], 0
    warming = _Warming.of(loader.source)
    with contextlib.closing(_batches(loader)) as batches:
        for step, batch in enumerate(itertools.islice(batches, steps), start=1):
            times_s.append(time.perf_counter())
            if warming is not None:
                warming.say(step, steps)
            size_bytes += sum(
                getattr(value, "nbytes", 0) for value in fields_of(batch).values()
            )  # packs hold plain numbers
    people = population(loader.source)
    usage = UsageCounter(people, loader.plan, dp_world_size=1).count(start, loader.state)
    elapsed_s = max(times_s[-1] - times_s[0], 1e-9)
    return DryRunReport(
        steps=usage.batches,
        epochs=round(usage.batches / loader.plan.num_batches, 4),
        samples=usage.samples,
        repeats=usage.repeats,
        batches_per_s=usage.batches / elapsed_s,
        samples_per_s=usage.samples / elapsed_s,
        first_batch_s=times_s[1] - times_s[0],
        size_bytes=size_bytes,
        padding=float(loader.report()["padding"]),
        languages=_compared(usage, people, loader.plan, "language"),
        sources=_compared(usage, people, loader.plan, "source"),
        parts=_compared(usage, people, loader.plan, "part"),
        shards_touched=int(np.count_nonzero(usage.shards)),
        num_shards=len(usage.shards),
        num_batches=loader.plan.num_batches,
        source=source_kind(loader.source),
        remote=None if warming is None else warming.warmed(),
    )


class _Warming:
    """Follows what a dry run downloads."""

    def __init__(self, shards: RemoteShards) -> None:
        self._shards, self._traffic = shards, NodeTraffic(shards, rank=0, world=1, sum_over_ranks=list)
        self._done, self._start_s = Traffic(), time.perf_counter()
        self._said_s = self._start_s

    @classmethod
    def of(cls, source: SampleSource) -> _Warming | None:
        shards = RemoteShards(source)
        return cls(shards) if len(shards) else None

    def say(self, step: int, steps: int) -> None:
        """Logs how far the run is, now and then."""
        now_s = time.perf_counter()
        if now_s - self._said_s > _SAY_EVERY_S:
            self._said_s, left_s = now_s, (now_s - self._start_s) / step * (steps - step)
            bytes_, per_s = self._rate()
            logger.info(
                "%d of %d micro-batches: %s downloaded at %s/s, %.0f s to go",
                *(step, steps, human_bytes(bytes_), human_bytes(per_s), left_s),
            )

    def warmed(self) -> Warmed:
        """Returns what is here now, and what is not."""
        bytes_, per_s = self._rate()
        missing = min(self._shards.missing_bytes(), max(self._shards.bound_bytes - bytes_, 0))
        return Warmed(
            bytes=bytes_, bytes_per_s=per_s, missing_bytes=missing, missing_s=missing / per_s if per_s else None
        )

    def _rate(self) -> tuple[int, float]:
        self._done = sum(self._traffic.take(), self._done)
        return self._done.bytes, self._done.bytes / max(time.perf_counter() - self._start_s, 1e-9)


def _batches(loader: Loader) -> Generator[Batch, None, None]:
    """Yields batches for ever. Every epoch has one: a loader without any cannot be made."""
    while True:
        yield from loader


def _compared(usage: Usage, people: Population, plan: Plan, column: str) -> dict[str, dict[str, float]]:
    if column not in usage.counts:
        return {}
    counts = usage.counts[column].tolist()
    shares = expected_shares(people, plan, column).tolist()
    return {
        name: {"samples": count, "share": round(count / usage.samples, 6), "expected": round(share, 6)}
        for name, count, share in zip(people.names[column], counts, shares, strict=True)
    }
