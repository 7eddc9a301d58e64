"""A sample as a picture: its features over time, or its images as they are rebuilt from the stored patches."""

from __future__ import annotations

import io
import logging
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.errors import MissingExtraError
from forebay.extras import install_line
from forebay.inspect.facts import Pack
from forebay.inspect.sample import Sample, spoken
from forebay.inspect.seen_images import Picture
from forebay.store.files import write_bytes
from forebay.store.layout import Array
from forebay.visible import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)
HOP_S = 0.01
"""Between two frames of features that are defined at 16 kHz: 160 samples."""
_TITLE_LINES = 4
_DPI = 120
_MAX_PIXELS_HIGH = 30_000
_LABELS = {
    "input_features": ("mel bin", "log-mel"),
    "fbanks": ("mel bin", "log filter bank energy"),
    "mel": ("mel bin", "mel"),
}


def draw(tensors: Mapping[str, Array], row: Mapping[str, Any], *, sample_rate_hz: int, hop_s: float = HOP_S) -> Figure:
    """Returns a sample's features over time in seconds, its waveform where it is kept, its id and text above.

    tensors: features [frames, bins] and `waveform` [num_samples], whichever are there. row: `sample_id`, `language`,
    `text`. hop_s: between two frames.
    Raises MissingExtraError where matplotlib is not installed.
    """
    waveform = tensors.get("waveform")
    banks = [name for name in _LABELS if name in tensors]
    heights = [1.0] * (waveform is not None) + [2.0] * len(banks)
    figure = new_figure(_WIDTH_IN, 1.2 + 1.9 * sum(heights))
    panels = list(figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0])
    panels[-1].set_xlabel("time (s)")
    if waveform is not None:
        _draw_waveform(panels.pop(0), waveform, sample_rate_hz=sample_rate_hz)
    for name in banks:
        _draw_bank(figure, panels.pop(0), name, tensors[name], hop_s=hop_s)
    head = " · ".join(printable(str(row[name])) for name in ("sample_id", "language") if row.get(name))
    lines = textwrap.wrap(printable(row.get("text") or ""), 105)
    families, title = fonts_for("\n".join([head, *_shortened(lines, _TITLE_LINES)]))
    # parse_math: a transcript's dollar signs are money, not formulas.
    figure.suptitle(title, fontfamily=families, fontsize=11, ha="left", x=0.01, parse_math=False)
    return figure


def write_figure(figure: Figure, path: Path) -> None:
    """Makes `path` a PNG of a figure."""
    buffer = io.BytesIO()
    dpi = min(_DPI, _MAX_PIXELS_HIGH / figure.get_figheight())
    # Few images do not fill the width: what is white beside them is left out.
    whole: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": _MARGIN_IN}
    figure.savefig(buffer, format="png", dpi=dpi, **(whole if figure.get_layout_engine() is None else {}))
    write_bytes(path, buffer.getbuffer())


def new_figure(
    width_in: float, height_in: float, *, why: str = "--png needs matplotlib", is_laid_out: bool = True
) -> Figure:
    """Returns an empty figure on matplotlib's Agg canvas: no display is needed, no global state left.

    Raises MissingExtraError, which says why, where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        raise MissingExtraError(f"{why} ({err}); run: {install_line('report')}") from err
    figure = Figure(figsize=(width_in, height_in), layout="constrained" if is_laid_out else None)
    FigureCanvasAgg(figure)
    return figure


def _draw_bank(figure: Figure, axes: Axes, name: str, values: Array, *, hop_s: float) -> None:
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
        extent=(0.0, frames * hop_s, 0.0, bins),
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
    starts = np.unique(np.linspace(0, len(waveform) - 1, min(2000, len(waveform))).astype(np.int64))
    low, high = (function.reduceat(waveform, starts) / scale for function in (np.minimum, np.maximum))
    axes.fill_between(starts / sample_rate_hz, low, high, linewidth=0.6, color="tab:blue", edgecolor="tab:blue")
    axes.set_xlim(0.0, len(waveform) / sample_rate_hz)
    axes.axhline(0.0, color="black", linewidth=0.4)


def _shortened(lines: list[str], count: int) -> list[str]:
    return lines if len(lines) <= count else [*lines[: count - 1], f"{lines[count - 1]} ..."]


_WIDTH_IN = 12.0
_MARGIN_IN = 0.15
_GAP_IN = 0.12
_CAPTION_IN = 0.26
"""Height of a caption that is a name alone."""
_ABOUT_IN = 0.15
"""Height of each line more."""
_LINE_IN = 0.2
_LETTER_IN = 0.068
"""Width of a letter of a caption, about."""
_HEIGHTS_IN = (0.9, 4.6)
_AREA_SQ_IN = 90.0
"""The area that all images together take, as far as the heights of a row allow it."""
_MIN_TILE_IN = 1.3
"""Width of a tile at least: of a narrow image its caption's."""
_CONVERSATION_COLUMNS = 125


def sample_title(sample: Sample) -> str:
    """Returns a sample's id and its conversation, an image at its place, or its text or class, in a few lines."""
    lines = [f"sample {sample.index} · {printable(sample.row['sample_id'])}"]
    if sample.conversation is None:
        lines += textwrap.wrap(printable(sample.row.get("text") or ""), _CONVERSATION_COLUMNS)
    for role, text in spoken(sample.conversation or []):
        lines += textwrap.wrap(f"{role}: {printable(text)}", _CONVERSATION_COLUMNS)
    return "\n".join(_shortened(lines, 6))


def pack_title(pack: Pack, plan_name: str) -> str:
    """Returns what a pack is, in two lines."""
    fill = f"{pack.num_tokens:,} of {pack.seq_len:,} tokens"
    return (
        f"pack {pack.index} of {printable(plan_name)}\n{len(pack.segments)} samples, {fill}, {len(pack.images)} images"
    )


def draw_tiles(tiles: Sequence[Picture], *, title: str) -> Figure:
    """Returns the tiles in rows, each row one height, under a title; the axes are those of the images in their order.

    Raises MissingExtraError where matplotlib is not installed.
    """
    rows = rows_of([tile.aspect for tile in tiles])
    top_in = 0.3 + _LINE_IN * (title.count("\n") + 1)
    rooms = {n: max(tiles[n].aspect * height, _MIN_TILE_IN) for numbers, height in rows for n in numbers}
    captions_in = _CAPTION_IN + _ABOUT_IN * max((len(_about(tiles[n], room)) for n, room in rooms.items()), default=2)
    height_in = top_in + sum(height + captions_in + _GAP_IN for _, height in rows) + (0.0 if rows else captions_in)
    figure = new_figure(_WIDTH_IN, height_in, is_laid_out=False)
    families, shown = fonts_for("\n".join([*(printable(tile.name) for tile in tiles), title]))
    *names, title = shown.split("\n", len(tiles))
    # parse_math: a dollar sign of a question is money, not a formula.
    style: dict[str, Any] = {"fontfamily": families, "parse_math": False, "ha": "left", "va": "top"}
    figure.text(_MARGIN_IN / _WIDTH_IN, 1 - _MARGIN_IN / height_in, title, fontsize=11, **style)
    if not tiles:
        figure.text(0.5, captions_in / height_in, "no images", ha="center", fontsize=10)
    y_in = height_in - top_in
    for numbers, row_in in rows:
        x_in, y_in = _MARGIN_IN, y_in - row_in
        for number in numbers:
            wide_in = tiles[number].aspect * row_in
            box = (x_in / _WIDTH_IN, y_in / height_in, wide_in / _WIDTH_IN, row_in / height_in)
            axes = figure.add_axes(box, xticks=[], yticks=[])
            axes.imshow(tiles[number].pixels, aspect="auto")
            axes.spines[:].set_linewidth(0.4)
            tile, name, room_in = tiles[number], names[number], rooms[number]
            # Of a name that is too long its end is shown, which tells files apart.
            letters = max(int(room_in / _LETTER_IN) - len(tile.mark), 2)
            name = name if len(name) <= letters else f"…{name[1 - letters :]}"
            caption = "\n".join([f"{tile.mark}{name}", *_about(tile, room_in)])
            figure.text(box[0], (y_in - 0.05) / height_in, caption, fontsize=7.5, **style)
            x_in += rooms[number] + _GAP_IN
        y_in -= captions_in + _GAP_IN
    return figure


def _about(tile: Picture, room_in: float) -> list[str]:
    width = max(int(room_in / _LETTER_IN), 8)
    return [part for line in tile.about for part in textwrap.wrap(printable(line), width)][:12]


def rows_of(aspects: Sequence[float]) -> list[tuple[list[int], float]]:
    """Returns the rows: the numbers of their images, in order, and their height in inches.

    A row is as high as makes it as wide as the picture, or lower where it is the last one or its images are few.
    """
    room_in = _WIDTH_IN - 2 * _MARGIN_IN
    wanted_in = math.sqrt(_AREA_SQ_IN / max(sum(aspects), 1e-9))
    wanted_in = min(max(wanted_in, _HEIGHTS_IN[0]), _HEIGHTS_IN[1])
    rows: list[tuple[list[int], float]] = []
    row: list[int] = []
    for number in range(len(aspects)):
        row.append(number)
        if _width(aspects, row, wanted_in) >= room_in:
            rows.append((row, _fitting(aspects, row, room_in, wanted_in)))
            row = []
    return [*rows, (row, wanted_in)] if row else rows


def _width(aspects: Sequence[float], row: Sequence[int], height_in: float) -> float:
    return sum(max(aspects[i] * height_in, _MIN_TILE_IN) for i in row) + _GAP_IN * (len(row) - 1)


def _fitting(aspects: Sequence[float], row: Sequence[int], room_in: float, high_in: float) -> float:
    """Returns the height, at most `high_in`, at which a row takes the room; halving, as narrow tiles do not shrink."""
    low_in = 0.0
    for _ in range(40):
        middle_in = (low_in + high_in) / 2
        low_in, high_in = (middle_in, high_in) if _width(aspects, row, middle_in) < room_in else (low_in, middle_in)
    return high_in


_FIRST = "DejaVu Sans"
"""Comes with matplotlib: Latin, Greek, Cyrillic, Arabic, but no Indic scripts and no CJK."""
_NO_FONT = "Last Resort"
"""Also comes with matplotlib, and has a box for every character instead of a letter."""


_NAMED = 8
"""Characters without a font that a warning lists."""


def fonts_for(text: str) -> tuple[list[str], str]:
    """Returns the families to draw a text with, and the text with `\ufffd` for characters that no installed font has.

    Without this, matplotlib draws an empty box and warns once a character.
    """
    from matplotlib.font_manager import findfont, fontManager

    missing = {c for c in text if not c.isspace()} - _characters(findfont(_FIRST))
    families = [_FIRST]
    fonts = {(font.name, font.fname) for font in fontManager.ttflist if not font.name.startswith(_NO_FONT)}
    for name, path in sorted(fonts) if missing else []:
        found = missing & _characters(path)
        if found and name not in families:
            families.append(name)
            missing -= found
        if not missing:
            break
    if missing:
        named = " ".join(f"U+{ord(c):04X}" for c in sorted(missing)[:_NAMED])
        logger.warning("no font here has %d of the characters, drawn as \ufffd: %s; install one", len(missing), named)
    return families, "".join("\ufffd" if c in missing else c for c in text)


def _characters(path: Any) -> set[str]:
    from matplotlib.ft2font import FT2Font

    return set(map(chr, FT2Font(str(path)).get_charmap()))
