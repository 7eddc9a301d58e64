"""A picture of what a format's shuffled batches cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a PNG with a bar a format: samples a second, on a logarithmic axis, the fastest on top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ordered = sorted(rows, key=lambda row: float(row["samples/s"]))
    figure = Figure(figsize=(9, 0.4 * len(ordered) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = ["#2a78d6" if row["format"].startswith("forebay") else "#b4b2a9" for row in ordered]
    bars = axes.barh([row["format"] for row in ordered], [row["samples/s"] for row in ordered], color=colors)
    axes.bar_label(bars, [f"{row['samples/s']:,.0f}" for row in ordered], padding=3)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel("samples a second, shuffled batches of 32 of workload A")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
