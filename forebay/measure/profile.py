"""`forebay train --profile`: a short look at where a run's time goes, which leaves the run as it is.

A trace of torch.profiler (Chrome's JSON) says named stretches by thread, and what ran on the device. Every moment of
the main thread falls to one part, what other threads did stands beside it. Of nested stretches a moment falls to the
innermost one. A moment in no stretch falls to `unclaimed`, so the rows of the main thread add up to the wall time,
always. Work of loader threads costs a step nothing while the main thread works on something else; that share of it is
`beside`. What is handed out: profile.json, the lines of a table, and a picture.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.inspect.picture import new_figure
from forebay.measure.machine import device_name
from forebay.measure.shown_figures import write_report, written_line
from forebay.spans import ALL_REDUCE, BACKWARD, COPY, DATA_WAIT, EVALUATION, FORWARD
from forebay.train.loop.checkpoint import find_checkpoint, run_folder
from forebay.train.loop.meter import Phases
from forebay.train.loop.recorder import MARK, Recorder
from forebay.train.loop.run import run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP = "ProfilerStep#"
DEVICE_WAIT = "idle: waiting for the device"
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}


class Stretch(NamedTuple):
    """Some time with a name, in microseconds."""

    start: float
    end: float
    name: str


class DeviceWork(NamedTuple):
    """The work of a stream of the device. launch: the thread that launched it, and when; None if that is unknown.

    kind: `kernel`, `copy` or `all-reduce`.
    """

    start: float
    end: float
    kind: str
    launch: tuple[Any, float] | None


@dataclass(kw_only=True)
class Trace:
    """The contents of a trace. spans: of each thread, by start, the longer of two first."""

    main: Any
    """The thread that did the steps."""
    start: float
    end: float
    """Of the recorded steps."""
    num_steps: int
    spans: dict[Any, list[Stretch]] = field(default_factory=dict)
    device: list[DeviceWork] = field(default_factory=list)


def read_trace(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Returns what the `traceEvents` of a trace say between the first recorded step and the end of the last one.

    Raises ValueError for a trace without a step.
    """
    spans: dict[Any, list[Stretch]] = defaultdict(list)
    launches: dict[Any, tuple[Any, float]] = {}
    steps, works = [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        start, kind, thread = float(event["ts"]), event.get("cat", ""), event["tid"]
        stretch = Stretch(start, start + float(event.get("dur", 0)), str(event["name"]))
        if kind in _ON_DEVICE:
            works.append((stretch, _ON_DEVICE[kind], event.get("args", {}).get("correlation")))
        elif kind == "user_annotation" and stretch.name.startswith(STEP):
            steps.append((thread, stretch))
        elif (name := _name(stretch.name, kind)) is not None:
            spans[thread].append(stretch._replace(name=name))
        if kind in _LAUNCHES:
            launches[event.get("args", {}).get("correlation")] = (thread, start)
    if not steps:
        raise ValueError("the trace has no step")
    start, end = min(step.start for _, step in steps), max(step.end for _, step in steps)
    return Trace(
        main=steps[0][0],
        start=start,
        end=end,
        num_steps=len(steps),
        spans={thread: _within(found, start, end) for thread, found in spans.items()},
        device=[
            DeviceWork(
                max(work.start, start),
                min(work.end, end),
                ALL_REDUCE if "nccl" in work.name.lower() else kind,
                launches.get(correlation),
            )
            for work, kind, correlation in works
            if work.start < end and work.end > start
        ],
    )


def _name(name: str, kind: str) -> str | None:
    """Returns what an event of the host counts as; None for one that is a detail of another."""
    if kind == "user_annotation" and name.startswith(MARK):
        return name.removeprefix(MARK)
    if kind in ("cpu_op", "user_annotation") and name.startswith(("c10d::", "gloo:", "nccl:", "record_param_comms")):
        return ALL_REDUCE
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
    return DEVICE_WAIT if kind in _LAUNCHES and name in waits else None


def _within(spans: Iterable[Stretch], start: float, end: float) -> list[Stretch]:
    cut = [Stretch(max(s.start, start), min(s.end, end), s.name) for s in spans if s.start < end and s.end > start]
    return sorted(cut, key=lambda each: (each.start, -each.end))


DEVICE_IDLE = "idle"
RECOMPUTE = "backward: recompute"
UNCLAIMED = "unclaimed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """The work of threads other than the main one during a part."""

    seconds: float
    """In all of them together."""
    beside: float
    """Share of these seconds in which the main thread worked, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Seconds by part, in falling order."""

    num_steps: int
    wall_s: float
    main: dict[str, float]
    """Of the main thread; adds up to `wall_s`."""
    modules: dict[str, float]
    """Of the rows `forward: ...`, by submodule; indices of layers are left out, so alike layers are one."""
    threads: dict[str, Beside]
    num_threads: int
    """Other threads in which something was recorded."""
    device: dict[str, float]
    """Of the device; adds up to `wall_s`. Empty on a CPU."""
    hidden: dict[str, float]
    """Of the device: seconds of copies and collectives that ran under kernels, and are not in `device`."""


def shares_of(trace: Trace) -> Shares:
    """Returns where the time of a trace's steps went."""
    segments = {thread: innermost(spans) for thread, spans in trace.spans.items()}
    main = segments.pop(trace.main, [])
    rows, modules = defaultdict[str, float](float), defaultdict[str, float](float)
    for start, end, name in main:
        rows[row_of(name)] += end - start
        if name.startswith(f"{FORWARD}: "):
            modules[name.partition(": ")[2]] += end - start
    wall = trace.end - trace.start
    rows[UNCLAIMED] = wall - sum(rows.values())
    device, hidden = _device(trace, {**segments, trace.main: main})
    return Shares(
        num_steps=trace.num_steps,
        wall_s=wall / 1e6,
        main=_falling(rows),
        modules=_falling(modules),
        threads=_beside(segments.values(), idle=[each for each in main if each.name in (DATA_WAIT, DEVICE_WAIT)]),
        num_threads=len(segments),
        device=_falling(device),
        hidden=_falling(hidden),
    )


def row_of(name: str) -> str:
    """Returns the row of a stretch: a submodule, `forward: encoder.layers`, belongs to `forward: encoder`."""
    if name == FORWARD:
        return f"{FORWARD}: rest"
    return name.partition(".")[0] if name.startswith(f"{FORWARD}: ") else name


def innermost(spans: Sequence[Stretch]) -> list[Stretch]:
    """Returns stretches without overlap, by start, each with the name of the innermost of those that were open.

    spans: nested, of one thread, by start, the longer of two first. What is inside of an evaluation is evaluation, and
    a forward pass inside of a backward one makes activations again that were not kept.
    """
    found: list[Stretch] = []
    open_: list[Stretch] = []
    at = 0.0

    def close(until: float) -> None:
        nonlocal at
        while open_ and open_[-1].end <= until:
            last = open_.pop()
            if last.end > at:
                found.append(Stretch(at, last.end, last.name))
                at = last.end

    for span in spans:
        close(span.start)
        if open_ and span.start > at:
            found.append(Stretch(at, span.start, open_[-1].name))
        at = max(at, span.start)
        name, outer = span.name, open_[-1].name if open_ else ""
        if outer in (EVALUATION, RECOMPUTE):
            name = outer
        elif outer == BACKWARD and name.startswith(FORWARD):
            name = RECOMPUTE
        open_.append(span._replace(name=name))
    close(float("inf"))
    return found


def _beside(threads: Iterable[Sequence[Stretch]], *, idle: Sequence[Stretch]) -> dict[str, Beside]:
    seconds, alone = defaultdict[str, float](float), defaultdict[str, float](float)
    for segments in threads:
        for segment in segments:
            seconds[segment.name] += segment.end - segment.start
            alone[segment.name] += _covered(segment.start, segment.end, idle)
    return {
        name: Beside(seconds=total / 1e6, beside=1 - alone[name] / total if total else 0.0)
        for name, total in _falling(seconds, unit=1).items()
    }


def _covered(start: float, end: float, stretches: Sequence[Stretch]) -> float:
    """Returns how much of a time lies in stretches that are disjoint and in order."""
    covered, place = 0.0, max(bisect_right(stretches, start, key=lambda each: each.start) - 1, 0)
    while place < len(stretches) and stretches[place].start < end:
        covered += max(min(end, stretches[place].end) - max(start, stretches[place].start), 0.0)
        place += 1
    return covered


def _device(trace: Trace, segments: dict[object, list[Stretch]]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the time of the device by part, and what of copies and collectives ran under kernels.

    A moment falls to kernels, else to a collective, else to a copy, else it is idle.
    """
    if not trace.device:
        return {}, {}
    rows, hidden = defaultdict[str, float](float), defaultdict[str, float](float)
    taken: list[Stretch] = []
    for kind in ("kernel", ALL_REDUCE, "copy"):
        before, added, at = taken, [], trace.start
        for work in sorted((work for work in trace.device if work.kind == kind), key=lambda each: each.start):
            start, at = max(work.start, at), max(work.end, at)
            if at <= start:
                continue
            under = _covered(start, at, before)
            name = COPY if kind == "copy" else ALL_REDUCE if kind == ALL_REDUCE else _part(work, trace, segments)
            rows[name] += at - start - under
            if under:
                hidden[name] += under
            added.append(Stretch(start, at, name))
        taken = _merged([*before, *added])
    rows[DEVICE_IDLE] = trace.end - trace.start - sum(rows.values())
    return rows, hidden


def _part(work: DeviceWork, trace: Trace, segments: dict[object, list[Stretch]]) -> str:
    """Returns the part in which a kernel was launched: by its thread, else (autograd's threads) by the main one."""
    if work.launch is None:
        return UNCLAIMED
    thread, at = work.launch
    for found in (segments.get(thread, []), segments[trace.main]):
        place = bisect_right(found, at, key=lambda each: each.start) - 1
        if place >= 0 and found[place].end > at:
            return row_of(found[place].name)
    return UNCLAIMED


def _merged(stretches: Sequence[Stretch]) -> list[Stretch]:
    merged: list[Stretch] = []
    for each in sorted(stretches):
        if merged and each.start <= merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(merged[-1].end, each.end))
        else:
            merged.append(each)
    return merged


def _falling(microseconds: dict[str, float], *, unit: float = 1e6) -> dict[str, float]:
    return {name: value / unit for name, value in sorted(microseconds.items(), key=lambda item: -item[1])}


_logger = logging.getLogger(__name__)
_TRACE = "profile/trace.json"
"""Under the run's folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileReport:
    """The document of `forebay train --profile --json`; its fields are an interface."""

    shares: Shares
    device: str
    """`cpu`, or the name of the GPU."""
    num_ranks: int
    """Ranks of the run; rank 0 is the one that was recorded."""
    folder: str
    """Where profile.json, trace.json and profile.png are."""

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values; `main` and `device` have `seconds` and `share` by part."""
        found = dataclasses.asdict(self.shares)
        for name in ("main", "device"):
            found[name] = {
                part: {"seconds": seconds, "share": seconds / self.shares.wall_s}
                for part, seconds in found[name].items()
            }
        return {**found, "device_name": self.device, "num_ranks": self.num_ranks, "folder": self.folder}

    def lines(self) -> Iterator[str]:
        """Yields the tables that `forebay train --profile` prints."""
        shares, each_ms = self.shares, 1e3 * self.shares.wall_s / self.shares.num_steps
        yield f"{shares.num_steps} steps of {each_ms:.1f} ms on {self.device}, rank 0 of {self.num_ranks}"
        yield from self._rows("main thread", shares.main)
        title = f"{shares.num_threads} other thread{'s' * (shares.num_threads > 1)}"
        beside = {name: found.beside for name, found in shares.threads.items()}
        yield from self._rows(title, {name: found.seconds for name, found in shares.threads.items()}, beside)
        yield from self._rows("device", shares.device)
        yield from self._rows("device, under its kernels", shares.hidden)
        yield written_line(self.folder, ["profile.json", "trace.json (ui.perfetto.dev)", "profile.png"])

    def _rows(
        self, title: str, seconds: Mapping[str, float], beside: Mapping[str, float] | None = None
    ) -> Iterator[str]:
        """Yields a table, nothing where there are no rows. beside: the shares that it shows; None: of the wall time."""
        if seconds:
            yield f"{title:<28} {'share' if beside is None else 'beside':>7} {'ms a step':>10}"
        for name, taken in seconds.items():
            share = taken / self.shares.wall_s if beside is None else beside[name]
            yield f"  {name:<26} {100 * share:>5.1f} % {1e3 * taken / self.shares.num_steps:>10.2f}"

    def write(self) -> None:
        """Makes profile.json, and profile.png if matplotlib is installed; a line names the extra if it is not."""
        draw = partial(draw_shares, self.shares, self.device)
        write_report(Path(self.folder), "profile", self.to_json(), draw, log=_logger.info)


def profile(
    config: Config, *, num_steps: int = 20, resume: bool = False, phases: Phases | None = None
) -> ProfileReport | None:
    """Returns where the time of `num_steps` steps went, None on ranks other than 0; `<run>/profile/` has it then, too.

    The steps are those that `train` would do, from the first one or, with `resume`, from the last checkpoint, after a
    warm-up step that is not recorded. Then the run ends: without a checkpoint, a usage log or a tracker. An evaluation
    that is due on the way is part of the profile. Its line, and log lines, go to files under `<run>/profile/`, too.
    Raises ConfigError for less than one step, and what `run` raises.
    """
    if num_steps < 1:
        raise ConfigError(f"--profile is {num_steps}, wanted 1 step or more")
    folder = run_folder(config)
    recorder = Recorder(num_steps=num_steps)
    report = run(
        _short(config, folder),
        resume=(find_checkpoint(folder) or False) if resume else False,
        phases=phases,
        recorder=recorder,
    )
    if report is None:
        return None
    trace = folder / _TRACE
    recorder.write(trace)
    with open(trace, encoding="utf-8") as file:
        shares = shares_of(read_trace(json.load(file)["traceEvents"]))
    made = ProfileReport(
        shares=shares,
        device=device_name() or "cpu",
        num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
        folder=str(trace.parent),
    )
    made.write()
    return made


def _short(config: Config, folder: Path) -> Config:
    """Returns a config whose run writes nothing but under `<run>/profile/`, and has no end before the profile's."""
    settings = dataclasses.replace(
        config.train,
        max_steps=10**9,  # more than any run has, so nothing of a run's end happens
        epochs=None,
        checkpoint_every=0,
        usage_every=0,
        save_best=None,
        trackers=(),
        output_dir=str((folder / _TRACE).parent),
    )
    return dataclasses.replace(config, train=settings)


def draw_shares(shares: Shares, device: str) -> Figure:
    """Returns a picture: a bar for the main thread, one for the other threads, one for the device if there is one.

    Raises MissingExtraError where matplotlib is not installed.
    """
    bars = {title: parts for title, parts in (("main thread", shares.main), ("device", shares.device)) if parts}
    panels = len(bars) + bool(shares.threads)
    rows = [len(parts) for parts in bars.values()] + [len(shares.threads)] * bool(shares.threads)
    why = "the profile goes without its picture, which needs matplotlib"
    figure = new_figure(9, 0.9 * panels + 0.28 * sum(rows), why=why)
    axes = list(figure.subplots(panels, 1, squeeze=False, sharex=True, height_ratios=[row + 1 for row in rows])[:, 0])
    for title, parts in bars.items():
        _draw_parts(axes.pop(0), title, {name: seconds / shares.wall_s for name, seconds in parts.items()})
    if axes:
        _draw_threads(axes[0], shares)
    figure.suptitle(f"{shares.num_steps} steps of {1e3 * shares.wall_s / shares.num_steps:.1f} ms on {device}")
    return figure


def _draw_parts(axes: Axes, title: str, shares: Mapping[str, float]) -> None:
    names = list(shares)[::-1]
    colours = ["tab:gray" if name.startswith("idle") or name == UNCLAIMED else "tab:blue" for name in names]
    bars = axes.barh(names, [100 * shares[name] for name in names], color=colours)
    axes.bar_label(bars, labels=[f"{100 * shares[name]:.1f} %" for name in names], padding=3, fontsize=8)
    axes.set_title(f"{title}, % of the wall time", loc="left", fontsize=9)
    axes.margins(x=0.12)


def _draw_threads(axes: Axes, shares: Shares) -> None:
    names = list(shares.threads)[::-1]
    found = [shares.threads[name] for name in names]
    beside = [100 * each.seconds * each.beside / shares.wall_s for each in found]
    alone = [100 * each.seconds * (1 - each.beside) / shares.wall_s for each in found]
    axes.barh(names, beside, color="tab:green", label="while the main thread works")
    axes.barh(names, alone, left=beside, color="tab:orange", label="while the main thread waits")
    axes.set_title("other threads, % of the wall time", loc="left", fontsize=9)
    axes.legend(fontsize=8)
