"""Prints what every benchmark prints: the machine and rows, as a table or as JSON; takes the cost of a call."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a piece of work. cpu_s: user and system seconds of its whole process, all threads."""

    wall_s: float
    cpu_s: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


def timed(work: Callable[[], Any]) -> Cost:
    """Returns the cost of one call in this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def median(values: Iterable[float]) -> float:
    """Returns the median of at least one value."""
    return statistics.median(list(values))


def ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """Returns the median of the ratios within a round: a busy neighbour slows both sides of a ratio."""
    return median(a / b for a, b in zip(above, below, strict=True))


def arguments(description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns `tiny`, `json` and `rounds` (None if not given) of a command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few seconds: does it run")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--rounds", type=int, help="how often every contestant is timed")
    return parser.parse_args(argv)


def machine(*packages: str) -> dict[str, Any]:
    """Returns what a figure depends on: processor, cores, load when it began, Python, versions of these packages."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1_min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def show(document: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints a document: lists of rows as tables, mappings and plain values as lines; or all of it as JSON."""
    if as_json:
        print(json.dumps(document, indent=1))
        return
    for name, value in document.items():
        if isinstance(value, list):
            print(f"\n{name}\n{table(value)}")
        elif isinstance(value, Mapping):
            print(f"{name}: {', '.join(f'{key} {part}' for key, part in value.items())}")
        else:
            print(f"{name}: {value}")


def table(rows: Sequence[Row]) -> str:
    """Returns rows as text, with the columns of all; numbers to three significant digits, on the right."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([_text(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    is_left = [isinstance(rows[0].get(column, ""), str) for column in columns]
    return "\n".join(
        "  ".join(c.ljust(w) if left else c.rjust(w) for c, w, left in zip(line, widths, is_left, strict=True)).rstrip()
        for line in cells
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
