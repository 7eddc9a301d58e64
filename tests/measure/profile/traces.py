"""Traces as torch.profiler exports them, made by hand: times are microseconds."""

from __future__ import annotations

from typing import Any

MAIN = 100


def event(
    name: str, start: float, duration: float, *, thread: Any = MAIN, kind: str = "user_annotation", correlation: int = 0
) -> dict[str, Any]:
    """Returns a complete event."""
    args = {"correlation": correlation} if correlation else {}
    return {"ph": "X", "cat": kind, "name": name, "tid": thread, "ts": start, "dur": duration, "args": args}


def ours(name: str, start: float, duration: float, *, thread: Any = MAIN) -> dict[str, Any]:
    """Returns one of our own stretches."""
    return event(f"forebay/{name}", start, duration, thread=thread)


def steps(*durations: float, start: float = 1000.0) -> list[dict[str, Any]]:
    """Returns the events of steps without a gap between them."""
    found = []
    for number, duration in enumerate(durations, start=1):
        found.append(event(f"ProfilerStep#{number}", start, duration))
        start += duration
    return found
