"""The output of `forebay doctor`: a table of stages, predictions, advice; or one document.

What to change, the most useful first, each with its line, its gain and how sure that is. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from forebay.config.plan import PackConfig
from forebay.config.tree import Config
from forebay.measure.diagnosis import FED, MeasuredArms
from forebay.measure.predict import Prediction, Sure
from forebay.measure.shown_figures import duration_text, ms_text, percent, short_number
from forebay.terminal import human_number, paragraph, table
from forebay.visible import from_here, human_bytes

Needs = Literal["nothing", "build"]
"""What a setting needs to be of use: nothing, or a new build of the cache."""
_POINT = 0.01
"""The least gain worth a line."""
_SLOW_DISK = 2.0
"""Times that reading from the disk takes beyond reading from memory, from which on the disk is worth a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One thing to do. settings: dotted name -> value, for `--apply`. rank: the share of an epoch that it saves."""

    text: str
    line: str
    """The line of the config, or the command."""
    gain: str
    sure: Sure = "extrapolated"
    rank: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: Needs = "nothing"


def advice(found: MeasuredArms, config: Config) -> list[Advice]:
    """Returns what to do, what saves the most of an epoch first; where nothing does, that the step decides."""
    makers = (_build, _threads, _prefetch, _plan, _codec, _storage, _workers, _shards)
    ranked = sorted((each for make in makers for each in make(found, config)), key=lambda each: -each.rank)
    return [*_step(found, config), *ranked]


def _step(found: MeasuredArms, config: Config) -> Iterator[Advice]:
    now = found.now
    if now is None or now.idle is None or now.idle >= FED:
        return
    yield Advice(
        text="the step is the bottleneck: data can be no faster",
        line=f"forebay train {config.named} --profile 5",
        gain=f"the device waits {percent(now.idle)} of the time",
        sure="measured" if now.sure == "measured" else "extrapolated",
    )


def _build(found: MeasuredArms, config: Config) -> Iterator[Advice]:
    if found.is_sealed:
        return
    now, then = found.predicted(is_cached=False), found.predicted(is_cached=True)
    if now is None or then is None:
        return
    cost = [] if found.build_s is None else [f"{duration_text(found.build_s)} once"]
    cost += [] if found.size_bytes is None else [human_bytes(found.size_bytes)]
    saved = 1 - then.epoch_s / now.epoch_s if now.epoch_s else 0.0
    if saved < _POINT:
        return
    yield Advice(
        text="build the cache",
        line=f"forebay preprocess {config.named}",
        gain=", ".join([_change(now, then), *cost]),
        rank=saved,
    )


def _threads(found: MeasuredArms, _config: Config) -> Iterator[Advice]:
    now = found.predicted(is_cached=True)
    if now is None or now.idle is None:  # without a step nothing overlaps, and no thread is of use
        return
    others = [each for each in found.predictions if each.is_cached]
    best_s = min(each.epoch_s for each in others)
    # The fewest that are as good: a thread more takes a core from somebody else.
    enough = min((each for each in others if each.epoch_s <= best_s * (1 + _POINT)), key=lambda each: each.workers)
    saved = 1 - enough.epoch_s / now.epoch_s if now.epoch_s else 0.0
    if saved < 5 * _POINT:
        return
    yield Advice(
        text="fill batches with more threads" if enough.workers > now.workers else "fill batches with fewer threads",
        line=f"loader.num_threads = {enough.workers}",
        gain=_change(now, enough),
        sure="measured" if found.is_sealed else "extrapolated",
        rank=saved * now.epoch_s / max((found.now or now).epoch_s, now.epoch_s) if now.epoch_s else saved,
        settings={"loader.num_threads": enough.workers},
    )


def _prefetch(found: MeasuredArms, config: Config) -> Iterator[Advice]:
    rates = found.cached if found.is_sealed else found.uncached
    if found.step is None or found.now is None or rates is None:
        return
    rate = rates.rates.get(found.num_threads)
    if rate is None or not rate.workers:
        return
    more = 4 * config.loader.prefetch
    before, after = (found.timeline(rate, prefetch=each) for each in (found.prefetch, more))
    saved = 1 - after.total_s / before.total_s
    if saved < 2 * _POINT:
        return
    yield Advice(
        text="fill more batches ahead: some batches take longer to fill than others",
        line=f"loader.prefetch = {more}",
        gain=f"idle {percent(before.idle)} -> {percent(after.idle)}",
        rank=saved,
        settings={"loader.prefetch": more},
    )


def _plan(found: MeasuredArms, config: Config) -> Iterator[Advice]:
    plan = found.plan
    if plan is None or not plan.others or plan.room_is_fixed:
        return
    best = min(plan.others, key=lambda other: other.padding)
    if best.padding >= plan.padding:
        return
    # The fewest buckets that save most of it: every bucket has a last batch that is not full.
    enough = next(o for o in plan.others if plan.padding - o.padding >= 0.8 * (plan.padding - best.padding))
    saved = 1 - (1 - plan.padding) / (1 - enough.padding)
    if saved < 2 * _POINT:
        return
    is_pack = isinstance(config.plan, PackConfig)
    what = "empty room" if is_pack else "padding"
    settings = {f"plan.{name}": value for name, value in enough.settings.items()}
    edges = "plan.edges" if getattr(config.plan, "edges", None) else "plan.edges_s"  # of tokens, or of seconds
    yield Advice(
        text="fill the packs better" if is_pack else "cut buckets where the lengths are",
        line=", ".join(f"{name} = {value}" for name, value in settings.items()),
        gain=f"{what} {percent(plan.padding)} -> {percent(enough.padding)}",
        sure="measured" if plan.is_exact else "extrapolated",
        # A step takes what its room takes; a device that waits gains less.
        rank=saved * (1 - (found.now.idle or 0.0)) if found.now is not None and found.now.idle is not None else saved,
        # `k` stands instead of edges.
        settings={**settings, edges: None} if "plan.k" in settings else settings,
    )


def _codec(found: MeasuredArms, config: Config) -> Iterator[Advice]:
    codecs = found.codecs
    if codecs is None or not isinstance(config.plan, PackConfig):
        return
    own_bytes, own_ms = codecs.bytes_a_sample[codecs.own], codecs.read_ms[codecs.own]
    hands = max(found.num_threads, 1)
    # A codec pays if a cache of it is smaller and the loader still keeps up with half of its hands' time to spare.
    budget_ms = max(2 * own_ms, 1e3 * sum(found.steps_s) / max(len(found.batches), 1) * hands / 2)
    pays = [
        codec
        for codec in codecs.read_ms
        if codec != codecs.own and codecs.bytes_a_sample[codec] < 0.8 * own_bytes and codecs.read_ms[codec] <= budget_ms
    ]
    if not pays:
        return
    best = min(pays, key=lambda codec: codecs.bytes_a_sample[codec])
    slow = {codec: ms_text(ms) for codec, ms in codecs.read_ms.items() if codec not in (*pays, codecs.own)}
    against = f"; {', '.join(slow)} would take {', '.join(slow.values())}" if slow else ""
    share, size = codecs.bytes_a_sample[best] / own_bytes, found.size_bytes
    sizes = f"{human_bytes(size)} -> {human_bytes(size * share)}" if size else f"{share:.2f} of the bytes"
    yield Advice(
        text=f"codec {best} pays on this set",
        line=f'vision.codec = "{best}"',
        gain=f"{sizes}; {ms_text(own_ms)} -> {ms_text(codecs.read_ms[best])} to read a pack{against}",
        rank=_POINT * (1 - share),
        settings={"vision.codec": best},
        needs="build",
    )


def _storage(found: MeasuredArms, config: Config) -> Iterator[Advice]:
    now = found.now
    if now is None:
        return
    if found.is_sealed and found.pieces is not None and found.pieces.cold_ms is not None:
        warm = next((stage.ms for stage in found.pieces.stages if stage.name == "cached read"), 0.0)
        cold, what = found.pieces.cold_ms, "the cache"
        fix = ("copy the cache to a disk of this machine", 'forebay cache pull CACHE, or plan.locality = "shards:16"')
    elif not found.is_sealed and found.raw_read is not None and found.raw_read.cold_ms is not None:
        warm, cold, what = found.raw_read.warm_ms, found.raw_read.cold_ms, "raw data"
        fix = ("copy the raw data to a disk of this machine, or build the cache", f"forebay preprocess {config.named}")
    else:
        return
    hands = max(found.num_threads, 1)
    sample_ms = 1e3 / now.samples_per_s if now.samples_per_s else 0.0
    if cold < _SLOW_DISK * warm or cold / hands <= sample_ms:
        return
    slower = (cold - warm) / hands / (sample_ms + (cold - warm) / hands)
    yield Advice(
        text=f"the storage of {what} is slow: {fix[0]}",
        line=fix[1],
        gain=f"a sample takes {ms_text(cold)} from the disk and {ms_text(warm)} from memory; an epoch that does not "
        f"fit into memory waits {percent(slower)} of its time for the disk",
        rank=slower / 2,
    )


def _workers(found: MeasuredArms, config: Config) -> Iterator[Advice]:
    own = config.run.num_workers or found.cores
    if found.is_sealed or found.build_s is None or own >= found.cores:
        return
    faster = dataclasses.replace(found, num_workers=found.cores).build_s
    assert faster is not None
    yield Advice(
        text="build with all cores",
        line=f"run.num_workers = {found.cores}",
        gain=f"the build {duration_text(found.build_s)} -> {duration_text(faster)}",
        settings={"run.num_workers": found.cores},
    )


def _shards(found: MeasuredArms, config: Config) -> Iterator[Advice]:
    made, listed, rows = found.made, found.listed, config.layout.rows_per_shard
    if found.is_sealed or made is None or listed is None or not listed.is_whole:
        return
    hands = min(config.run.num_workers or found.cores, found.cores)
    shards = -(-listed.num_rows // rows)
    if shards >= 2 * hands or listed.num_rows < 64 * hands:
        return
    wanted = max(listed.num_rows // (4 * hands), 16)
    yield Advice(
        text=f"cut the build into more shards: {shards} for {hands} workers leave some of them idle",
        line=f"layout.rows_per_shard = {wanted}",
        gain=f"a build of up to {hands} times the speed",
        sure="rule",
        settings={"layout.rows_per_shard": wanted},
        needs="build",
    )


def _change(now: Prediction, then: Prediction) -> str:
    epochs = f"an epoch {duration_text(now.epoch_s)} -> {duration_text(then.epoch_s)}"
    if now.idle is None or then.idle is None:
        return epochs
    return f"idle {percent(now.idle)} -> {percent(then.idle)}, {epochs}"


_TITLES = {"raw": "from raw data", "build": "a build, beside that", "cache": "from a cache", "step": "training"}


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """The document of `forebay doctor --json`; its fields are an interface."""

    config: str
    seconds: float
    found: MeasuredArms
    advice: Sequence[Advice]
    applied: str | None = None
    """The file that `--apply` wrote."""
    wants_file: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns all figures, predictions and advice as JSON values."""
        found = self.found
        bottleneck = found.bottleneck
        measured = dataclasses.asdict(found)
        plan = measured.get("plan")
        if plan is not None:
            del plan["batches"]
        return {
            "config": self.config,
            "seconds": round(self.seconds, 1),
            "cached": found.is_sealed,
            "bottleneck": None if bottleneck is None else bottleneck.name,
            "stages": [dataclasses.asdict(stage) for stage in found.stages],
            "predictions": [dataclasses.asdict(each) for each in found.predictions],
            "build_s": found.build_s,
            "size_bytes": found.size_bytes,
            "advice": [dataclasses.asdict(each) for each in self.advice],
            "applied": self.applied,
            "measured": measured,
        }

    def lines(self) -> list[str]:
        """Returns what is printed, no line wider than the terminal."""
        parts = (self._head, self._stages, self._not_measured, self._predictions, self._advice)
        return [line for part in parts for line in part()]

    def _head(self) -> Iterator[str]:
        found = self.found
        where = "no cache is sealed"
        if found.opened is not None and found.opened.place is not None:
            hours = "" if found.opened.hours is None else f", {found.opened.hours:.3g} h"
            where = f"{from_here(found.opened.place)}: {found.opened.num_samples:,} samples{hours}"
        elif found.listed is not None:
            few = "" if found.listed.is_whole else "the first "
            where += f"; {few}{found.listed.num_rows:,} rows"
            where += "" if found.listed.hours is None else f", {found.listed.hours:.3g} h"
        yield from paragraph("", f"{from_here(self.config)}, {found.cores} cores: {where}")
        if (worst := found.bottleneck) is not None:
            yield from paragraph("bottleneck: ", f"{worst.name}, {ms_text(worst.ms)} a sample")

    def _stages(self) -> Iterator[str]:
        for kind, title in _TITLES.items():
            own = [stage for stage in self.found.stages if stage.kind == kind]
            total = sum(stage.ms for stage in own)
            rows = []
            for stage in own:
                rate = human_number(1e3 / stage.ms) if stage.ms else ""
                rows.append([stage.name, short_number(stage.ms), percent(stage.ms / total if total else 0.0), rate])
            if rows:
                yield ""
                yield from table([title, "ms a sample", "share", "samples/s"], rows, left=1)
        yield from self._cold()

    def _cold(self) -> Iterator[str]:
        reads, pieces = self.found.raw_read, self.found.pieces
        for what, told in (("raw read", reads), ("cached read", pieces)):
            if told is not None:
                cold, why = told.cold_ms, told.why_not_cold
                found = f"not measured, {why}" if cold is None else f"{ms_text(cold)} a sample"
                yield from paragraph("  ", f"{what} from the disk: {found}")

    def _not_measured(self) -> Iterator[str]:
        if self.found.not_measured:
            yield ""
        for name, why in self.found.not_measured.items():
            yield from paragraph("not measured: ", f"{name}: {why}")

    def _predictions(self) -> Iterator[str]:
        found = self.found
        yield ""
        if found.predictions:
            rows = []
            for each in found.predictions:
                idle = "?" if each.idle is None else percent(each.idle)
                rows.append([each.name, idle, duration_text(each.epoch_s), human_number(each.samples_per_s), each.sure])
            yield from table(["a run", "idle", "an epoch", "samples/s", "how sure"], rows, left=1, last_left=True)
            if found.steps is None:
                yield from paragraph("  ", "idle needs a step: a [train] model in the config, or --step-s")
        if found.build_s is not None and found.size_bytes is not None:
            yield from paragraph("a build: ", f"{duration_text(found.build_s)}, {human_bytes(found.size_bytes)}")

    def _advice(self) -> Iterator[str]:
        yield ""
        if self.found.is_empty:
            yield from paragraph("", "nothing could be measured, so nothing is said of what to change")
        elif not self.advice:
            yield from paragraph("", "nothing to change was found")
        for number, each in enumerate(self.advice, 1):
            yield from paragraph(f"{number}. ", f"{each.text}: {each.gain} ({each.sure})")
            yield from paragraph("   ", each.line)
        if self.applied is not None:
            yield from paragraph("written: ", from_here(self.applied))
        elif self.wants_file:
            yield from paragraph("", "nothing is written: no setting that --apply may change would be better")
