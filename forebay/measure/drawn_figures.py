"""The pictures of a comparison, of two runs and of a profile. Each raises MissingExtraError without matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.measure.profile_shares import UNCLAIMED, Shares
from forebay.measure.shown_figures import new_figure, write_figure
from forebay.visible import from_here, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS, _OTHERS = "#c2410c", ("#52606d", "#2b6cb0", "#9aa5b1", "#2f855a", "#805ad5")


def draw_arms(document: dict[str, Any], path: Path) -> None:
    """Makes `path` a PNG of a comparison's document. Raises MissingExtraError where matplotlib is not installed."""
    figure = new_figure(12, 8)
    arms: dict[str, dict[str, Any]] = document["arms"]
    colours = dict(zip(arms, (_OURS, *_OTHERS * len(arms)), strict=False))
    (speed, losses), (steps, shares) = figure.subplots(2, 2)
    _speed(speed, arms, colours)
    _losses(losses, arms, colours)
    _steps(steps, arms, colours)
    _shares(shares, arms, colours)
    title = f"{printable(document['name'])}: {document['steps']} steps, {document['samples']} samples, "
    figure.suptitle(title + (document["device"] or document["machine"]["cpu"]), parse_math=False)
    write_figure(figure, path)


def draw_runs(document: dict[str, Any], path: Path) -> None:
    """Makes `path` a PNG of the loss curves of two runs. Raises MissingExtraError where matplotlib is not installed."""
    figure = new_figure(9, 4.5)
    axes = figure.subplots()
    for name, curve, colour in zip(document["runs"], document["losses"], (_OURS, _OTHERS[0]), strict=True):
        label = printable(from_here(name)).replace("$", r"\$")
        axes.plot(*zip(*curve, strict=True), color=colour, label=label, linewidth=1.2)
    axes.set_title("loss by step, mean since the log line before", loc="left", fontsize=10)
    axes.legend(fontsize=8)
    write_figure(figure, path)


def _speed(axes: Axes, arms: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    for place, (name, arm) in enumerate(reversed(arms.items())):
        rate = arm["samples_per_s"]
        reach = [[rate["median"] - rate["low"]], [rate["high"] - rate["median"]]]
        axes.barh(place, rate["median"], xerr=reach, color=colours[name], capsize=3)
        axes.text(0, place, f" {rate['median']:.3g}", va="center", color="white", fontsize=9)
    axes.set_yticks(range(len(arms)), list(reversed(arms)))
    axes.set_title("samples/s: median and quartiles of blocks", loc="left", fontsize=10)


def _losses(axes: Axes, arms: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    for name, arm in reversed(arms.items()):
        axes.plot(range(1, len(arm["losses"]) + 1), arm["losses"], color=colours[name], label=name, linewidth=1.2)
    axes.set_title("loss by step", loc="left", fontsize=10)
    axes.legend(fontsize=8)


def _steps(axes: Axes, arms: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    labels = list(dict.fromkeys(label for arm in arms.values() for label in arm["buckets"]))
    heights = {
        name: {label: 1000 * row["step_s"] for label, row in arm["buckets"].items()} for name, arm in arms.items()
    }
    _beside(axes, labels, heights, colours)
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
    axes.set_title("median step by bucket, ms", loc="left", fontsize=10)


def _shares(axes: Axes, arms: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    names = {"waiting for data": "wait_share", "padding": "padding", "device busy": "utilisation", "MFU": "mfu"}
    known = {label: key for label, key in names.items() if any(arm[key] is not None for arm in arms.values())}
    heights = {name: {label: 100 * (arm[key] or 0.0) for label, key in known.items()} for name, arm in arms.items()}
    _beside(axes, list(known), heights, colours)
    axes.set_xticks(range(len(known)), list(known))
    axes.set_title("shares, %", loc="left", fontsize=10)


def _beside(axes: Axes, labels: list[str], heights: dict[str, dict[str, float]], colours: dict[str, str]) -> None:
    """Draws the bars of all arms beside each other at each label."""
    width = 0.8 / len(heights)
    for number, (name, found) in enumerate(heights.items()):
        places = [labels.index(label) + (number - (len(heights) - 1) / 2) * width for label in found]
        axes.bar(places, list(found.values()), width=width, color=colours[name])


def draw_shares(shares: Shares, device: str, path: Path) -> None:
    """Makes `path` a PNG: a bar for the main thread, one for the other threads, one for the device if there is one.

    Raises MissingExtraError where matplotlib is not installed.
    """
    bars = {"main thread": shares.main, "device": shares.device}
    bars = {title: parts for title, parts in bars.items() if parts}
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
    write_figure(figure, path)


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
