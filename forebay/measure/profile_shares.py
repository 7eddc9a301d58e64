"""The shares of a step: every moment of the main thread falls to one part, what other threads did stands beside it.

Of nested stretches a moment falls to the innermost one. A moment in no stretch falls to `unclaimed`, so the rows of the
main thread add up to the wall time, always. Work of loader threads costs a step nothing while the main thread works on
something else; that share of it is `beside`.

What a trace of torch.profiler (Chrome's JSON) says: named stretches by thread, and what ran on the device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from forebay.spans import ALL_REDUCE, BACKWARD, COPY, DATA_WAIT, EVALUATION, FORWARD
from forebay.train.loop.recorder import MARK

STEP = "ProfilerStep#"
DEVICE_WAIT = "idle: waiting for the device"

_COLLECTIVES = ("c10d::", "gloo:", "nccl:", "record_param_comms")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
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
    if kind in ("cpu_op", "user_annotation") and name.startswith(_COLLECTIVES):
        return ALL_REDUCE
    return DEVICE_WAIT if kind in _LAUNCHES and name in _WAITS else None


def _within(spans: Iterable[Stretch], start: float, end: float) -> list[Stretch]:
    cut = [Stretch(max(s.start, start), min(s.end, end), s.name) for s in spans if s.start < end and s.end > start]
    return sorted(cut, key=lambda each: (each.start, -each.end))


DEVICE_IDLE = "idle"
RECOMPUTE = "backward: recompute"
UNCLAIMED = "unclaimed"

_IDLE = (DATA_WAIT, DEVICE_WAIT)


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
    rows: defaultdict[str, float] = defaultdict(float)
    modules: defaultdict[str, float] = defaultdict(float)
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
        threads=_beside(segments.values(), idle=[each for each in main if each.name in _IDLE]),
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
        open_.append(span._replace(name=_inside(open_[-1].name, span.name) if open_ else span.name))
    close(float("inf"))
    return found


def _inside(outer: str, name: str) -> str:
    """Returns what a stretch counts as that is inside of another one."""
    if outer in (EVALUATION, RECOMPUTE):
        return outer
    return RECOMPUTE if outer == BACKWARD and name.startswith(FORWARD) else name


def _beside(threads: Iterable[Sequence[Stretch]], *, idle: Sequence[Stretch]) -> dict[str, Beside]:
    seconds: defaultdict[str, float] = defaultdict(float)
    alone: defaultdict[str, float] = defaultdict(float)
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
    rows: defaultdict[str, float] = defaultdict(float)
    hidden: defaultdict[str, float] = defaultdict(float)
    taken: list[Stretch] = []
    for kind in ("kernel", ALL_REDUCE, "copy"):
        before = taken
        added = []
        at = trace.start
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
