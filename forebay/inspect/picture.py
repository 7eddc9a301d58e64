"""A sample's features as a picture."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.errors import MissingExtraError
from forebay.inspect.fonts import fonts_for
from forebay.store.files import write_bytes
from forebay.visible import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray[Any, Any]

HOP_S = 0.01
"""Between two frames, for every kind of features: 160 samples at 16 kHz."""

_TITLE_COLUMNS = 105
_TITLE_LINES = 4
_MAX_POINTS = 2000
_LABELS = {"input_features": ("mel bin", "log-mel"), "fbanks": ("mel bin", "log filter bank energy")}


def write_picture(tensors: Mapping[str, Array], row: Mapping[str, Any], path: Path, *, sample_rate_hz: int) -> None:
    """Makes `path` a PNG of a sample: features over time in seconds, its waveform where it is kept, id and text above.

    tensors: features [frames, bins] and `waveform` [num_samples], whichever are there. row: `sample_id`, `language`, `text`.
    Raises MissingExtraError where matplotlib is not installed.
    """
    figure = draw(tensors, row, sample_rate_hz=sample_rate_hz)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_bytes(path, buffer.getbuffer())


def draw(tensors: Mapping[str, Array], row: Mapping[str, Any], *, sample_rate_hz: int) -> Figure:
    """Returns the figure, one panel a field, on matplotlib's Agg canvas: it needs no display and leaves no global state."""
    figure_type, canvas_type = load_matplotlib()
    waveform = tensors.get("waveform")
    banks = [name for name in _LABELS if name in tensors]
    heights = [1.0] * (waveform is not None) + [2.0] * len(banks)
    figure: Figure = figure_type(figsize=(12, 1.2 + 1.9 * sum(heights)), layout="constrained")
    canvas_type(figure)
    panels = list(figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0])
    panels[-1].set_xlabel("time (s)")
    if waveform is not None:
        _draw_waveform(panels.pop(0), waveform, sample_rate_hz=sample_rate_hz)
    for name in banks:
        _draw_bank(figure, panels.pop(0), name, tensors[name])
    families, title = fonts_for(_title(row))
    # parse_math: a transcript's dollar signs are money, not formulas.
    figure.suptitle(title, fontfamily=families, fontsize=11, ha="left", x=0.01, parse_math=False)
    return figure


def load_matplotlib() -> tuple[Any, Any]:
    """Returns matplotlib's figure and its Agg canvas; MissingExtraError where it is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        raise MissingExtraError(f"--png needs matplotlib ({err}); run: pip install 'forebay[report]'") from err
    return Figure, FigureCanvasAgg


def _draw_bank(figure: Figure, axes: Axes, name: str, values: Array) -> None:
    bins_label, colour_label = _LABELS[name]
    frames, bins = values.shape
    axes.set_ylabel(bins_label)
    axes.set_title(f"{name} {values.dtype.name} [{frames}, {bins}]", loc="left", fontsize=9)
    if not values.size:
        axes.text(0.5, 0.5, "no frames", transform=axes.transAxes, ha="center", va="center")
        return
    # float32: matplotlib cannot average float16 when it shrinks a picture.
    image = axes.imshow(
        values.T.astype(np.float32),
        origin="lower",
        aspect="auto",
        cmap="magma",
        extent=(0.0, frames * HOP_S, 0.0, bins),
    )
    figure.colorbar(image, ax=axes, label=colour_label, pad=0.01)


def _draw_waveform(axes: Axes, waveform: Array, *, sample_rate_hz: int) -> None:
    axes.set_ylabel("amplitude")
    axes.set_title(f"waveform {waveform.dtype.name} [{len(waveform)}], {sample_rate_hz} Hz", loc="left", fontsize=9)
    if not len(waveform):
        axes.text(0.5, 0.5, "no samples", transform=axes.transAxes, ha="center", va="center")
        return
    scale = 32768.0 if waveform.dtype == np.int16 else 1.0
    # The envelope of a few thousand points: a line through millions takes minutes, and looks the same.
    starts = np.unique(np.linspace(0, len(waveform) - 1, min(_MAX_POINTS, len(waveform))).astype(np.int64))
    low, high = (function.reduceat(waveform, starts) / scale for function in (np.minimum, np.maximum))
    times_s = starts / sample_rate_hz
    axes.fill_between(times_s, low, high, linewidth=0.6, color="tab:blue", edgecolor="tab:blue")
    axes.set_xlim(0.0, len(waveform) / sample_rate_hz)
    axes.axhline(0.0, color="black", linewidth=0.4)


def _title(row: Mapping[str, Any]) -> str:
    head = " · ".join(printable(str(row[name])) for name in ("sample_id", "language") if row.get(name))
    lines = textwrap.wrap(printable(row.get("text") or ""), _TITLE_COLUMNS)
    if len(lines) > _TITLE_LINES:
        lines = [*lines[: _TITLE_LINES - 1], f"{lines[_TITLE_LINES - 1]} ..."]
    return "\n".join([head, *lines])
