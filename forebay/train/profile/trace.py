"""What a trace of torch.profiler (Chrome's JSON) says: named stretches by thread, and what ran on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from forebay.spans import ALL_REDUCE
from forebay.train.profile.recorder import MARK

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
    """What a stream of the device did. launch: by which thread it was launched, and when; None where that is unknown.

    kind: `kernel`, `copy` or `all-reduce`.
    """

    start: float
    end: float
    kind: str
    launch: tuple[Any, float] | None


@dataclass(kw_only=True)
class Trace:
    """What a trace holds. spans: of each thread, by start, the longer of two first."""

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
