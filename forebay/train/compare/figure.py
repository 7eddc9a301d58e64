"""The picture of a comparison: speed with its spread, loss curves, step times by bucket, where the time went."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import MissingExtraError
from forebay.extras import install_line
from forebay.store.files import write_bytes
from forebay.visible import from_here, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 120
_OURS, _OTHERS = "#c2410c", ("#52606d", "#2b6cb0", "#9aa5b1", "#2f855a", "#805ad5")


def draw(document: dict[str, Any], path: Path) -> None:
    """Makes `path` a PNG of a comparison's document. Raises MissingExtraError where matplotlib is not installed."""
    figure = _new_figure(12, 8)
    arms: dict[str, dict[str, Any]] = document["arms"]
    colours = dict(zip(arms, (_OURS, *_OTHERS * len(arms)), strict=False))
    (speed, losses), (steps, shares) = figure.subplots(2, 2)
    _speed(speed, arms, colours)
    _losses(losses, arms, colours)
    _steps(steps, arms, colours)
    _shares(shares, arms, colours)
    title = f"{printable(document['name'])}: {document['steps']} steps, {document['samples']} samples, "
    figure.suptitle(title + (document["device"] or document["machine"]["cpu"]), parse_math=False)
    _write(figure, path)


def draw_runs(document: dict[str, Any], path: Path) -> None:
    """Makes `path` a PNG of the loss curves of two runs. Raises MissingExtraError where matplotlib is not installed."""
    figure = _new_figure(9, 4.5)
    axes = figure.subplots()
    for name, curve, colour in zip(document["runs"], document["losses"], (_OURS, _OTHERS[0]), strict=True):
        label = printable(from_here(name)).replace("$", r"\$")
        axes.plot(*zip(*curve, strict=True), color=colour, label=label, linewidth=1.2)
    axes.set_title("loss by step, mean since the log line before", loc="left", fontsize=10)
    axes.legend(fontsize=8)
    _write(figure, path)


def _new_figure(width_in: float, height_in: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        raise MissingExtraError(f"the picture needs matplotlib ({err}); run: {install_line('report')}") from err
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _write(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    write_bytes(path, buffer.getbuffer())


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
    width = 0.8 / len(arms)
    for number, (name, arm) in enumerate(arms.items()):
        found = [(labels.index(label), 1000 * row["step_s"]) for label, row in arm["buckets"].items()]
        places = [place + (number - (len(arms) - 1) / 2) * width for place, _ in found]
        axes.bar(places, [value for _, value in found], width=width, color=colours[name])
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
    axes.set_title("median step by bucket, ms", loc="left", fontsize=10)


def _shares(axes: Axes, arms: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    names = {"waiting for data": "wait_share", "padding": "padding", "device busy": "utilisation", "MFU": "mfu"}
    known = {label: key for label, key in names.items() if any(arm[key] is not None for arm in arms.values())}
    width = 0.8 / len(arms)
    for number, (name, arm) in enumerate(arms.items()):
        places = [place + (number - (len(arms) - 1) / 2) * width for place in range(len(known))]
        axes.bar(places, [100 * (arm[key] or 0.0) for key in known.values()], width=width, color=colours[name])
    axes.set_xticks(range(len(known)), list(known))
    axes.set_title("shares, %", loc="left", fontsize=10)
