"""The cells of a plan as a picture: seconds downwards, label tokens to the right, darker where more samples lie."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forebay.inspect.facts import bucket_range

_COLUMNS = 64
_SHADES = " .:+#"


@dataclass(frozen=True, kw_only=True, slots=True)
class CellBox:
    """A cell in its row. start, end: as shares of the picture's width; shade: its samples as a share of the most."""

    start: float
    end: float
    shade: float
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CellRow:
    """The cells of one range of seconds, that of the fewest tokens first."""

    label: str
    cells: tuple[CellBox, ...]


def cell_rows(statistics: Mapping[str, Any]) -> list[CellRow]:
    """Returns the rows of a picture of a plan, the shortest seconds first; none for a plan without cells.

    statistics: of a plan, as packing_stats.json has them.
    """
    cells = [bucket for bucket in statistics.get("buckets") or () if bucket.get("tokens")]
    most = max((bucket["samples"] for bucket in cells), default=0) or 1
    widest = max((bucket["tokens"][1] for bucket in cells), default=0) or 1
    found = []
    for label, own in itertools.groupby(cells, key=lambda bucket: bucket_range({"range": bucket["range"]})):
        boxes = [
            CellBox(
                start=bucket["tokens"][0] / widest,
                end=bucket["tokens"][1] / widest,
                shade=bucket["samples"] / most,
                title=f"{label}, {bucket['tokens'][0]}-{bucket['tokens'][1]} tokens: {bucket['samples']:,} samples",
            )
            for bucket in own
        ]
        found.append(CellRow(label=label, cells=tuple(boxes)))
    return found


def cell_lines(statistics: Mapping[str, Any]) -> Iterator[str]:
    """Yields the picture in characters, a line for each range of seconds; nothing for a plan without cells."""
    rows = cell_rows(statistics)
    if not rows:
        return
    widest = max(bucket["tokens"][1] for bucket in statistics["buckets"] if bucket.get("tokens"))
    beside = max(len(row.label) for row in rows)
    yield f"    cells: 0 to {widest} label tokens to the right; # is where most samples lie"
    for row in rows:
        line = ""
        for box in row.cells:
            room = max(round(box.end * _COLUMNS) - len(line) - 1, 1)
            line += _SHADES[math.ceil(box.shade * (len(_SHADES) - 1))] * room + "|"
        yield f"      {row.label:>{beside}} |{line}"
