"""Images as they are rebuilt from the stored patches, side by side in one picture."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.inspect.fonts import fonts_for
from forebay.inspect.image_sample import ImageSample, spoken
from forebay.inspect.pack import Pack
from forebay.inspect.picture import load_matplotlib
from forebay.store.files import write_bytes
from forebay.visible import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = np.ndarray[Any, Any]

_WIDTH_IN = 12.0
_MARGIN_IN = 0.15
_GAP_IN = 0.12
_CAPTION_IN = 0.56
_LINE_IN = 0.2
_LETTER_IN = 0.068
"""Width of a letter of a caption, about."""
_HEIGHTS_IN = (0.9, 4.6)
_AREA_SQ_IN = 90.0
"""What all images together take, as far as the heights of a row allow it."""
_MIN_TILE_IN = 1.3
"""Width of a tile at least: of a narrow image its caption's."""
_DPI = 120
_MAX_PIXELS_HIGH = 30_000
_TITLE_COLUMNS = 125
_TITLE_LINES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One image and what stands below it: mark and name, then two lines. pixels: uint8 [height, width, 3]."""

    pixels: Array
    mark: str
    name: str
    about: str

    @property
    def aspect(self) -> float:
        """Width over height."""
        return float(self.pixels.shape[1] / self.pixels.shape[0])


def sample_tiles(sample: ImageSample, *, mark: str = "") -> list[Tile]:
    """Returns a tile for each image of a sample, in its order; `mark` stands before their names."""
    return [
        Tile(
            pixels=image.pixels,
            mark=mark,
            name=printable(image.name),
            about=f"grid {' x '.join(map(str, image.grid))}\n{image.size} px",
        )
        for image in sample.images
    ]


def sample_title(sample: ImageSample) -> str:
    """Returns a sample's id and its conversation, an image at its place, in a few lines."""
    lines = [f"sample {sample.index} · {printable(sample.row['sample_id'])}"]
    for role, text in spoken(sample.conversation):
        lines += textwrap.wrap(f"{role}: {printable(text)}", _TITLE_COLUMNS)
    if len(lines) > _TITLE_LINES:
        lines = [*lines[: _TITLE_LINES - 1], f"{lines[_TITLE_LINES - 1]} ..."]
    return "\n".join(lines)


def pack_title(pack: Pack, plan_name: str) -> str:
    """Returns what a pack is, in two lines."""
    fill = f"{pack.num_tokens:,} of {pack.seq_len:,} tokens"
    return (
        f"pack {pack.index} of {printable(plan_name)}\n{len(pack.segments)} samples, {fill}, {len(pack.images)} images"
    )


def write_tiles(tiles: Sequence[Tile], path: Path, *, title: str) -> None:
    """Makes `path` a PNG of the tiles in rows, each row one height, under a title.

    Raises MissingExtraError where matplotlib is not installed.
    """
    figure = draw_tiles(tiles, title=title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=min(_DPI, _MAX_PIXELS_HIGH / figure.get_figheight()))
    write_bytes(path, buffer.getbuffer())


def draw_tiles(tiles: Sequence[Tile], *, title: str) -> Figure:
    """Returns the figure, one axes an image in their order, on matplotlib's Agg canvas."""
    figure_type, canvas_type = load_matplotlib()
    rows = rows_of([tile.aspect for tile in tiles])
    top_in = 0.3 + _LINE_IN * (title.count("\n") + 1)
    height_in = top_in + sum(height + _CAPTION_IN + _GAP_IN for _, height in rows) + (0.0 if rows else _CAPTION_IN)
    figure: Figure = figure_type(figsize=(_WIDTH_IN, height_in))
    canvas_type(figure)
    families, shown = fonts_for("\n".join([*(tile.name for tile in tiles), title]))
    *names, title = shown.split("\n", len(tiles))
    # parse_math: a dollar sign of a question is money, not a formula.
    style: dict[str, Any] = {"fontfamily": families, "parse_math": False, "ha": "left", "va": "top"}
    figure.text(_MARGIN_IN / _WIDTH_IN, 1 - _MARGIN_IN / height_in, title, fontsize=11, **style)
    if not tiles:
        figure.text(0.5, _CAPTION_IN / height_in, "no images", ha="center", fontsize=10)
    y_in = height_in - top_in
    for numbers, row_in in rows:
        x_in, y_in = _MARGIN_IN, y_in - row_in
        for number in numbers:
            wide_in = tiles[number].aspect * row_in
            box = (x_in / _WIDTH_IN, y_in / height_in, wide_in / _WIDTH_IN, row_in / height_in)
            axes = figure.add_axes(box, xticks=[], yticks=[])
            axes.imshow(tiles[number].pixels, aspect="auto")
            axes.spines[:].set_linewidth(0.4)
            room_in = max(wide_in, _MIN_TILE_IN)
            caption = _caption(tiles[number], names[number], room_in)
            figure.text(box[0], (y_in - 0.05) / height_in, caption, fontsize=7.5, **style)
            x_in += room_in + _GAP_IN
        y_in -= _CAPTION_IN + _GAP_IN
    return figure


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
    """Returns the height, at most `high_in`, at which a row takes the room; found by halving, as narrow tiles do not shrink."""
    low_in = 0.0
    for _ in range(40):
        middle_in = (low_in + high_in) / 2
        low_in, high_in = (middle_in, high_in) if _width(aspects, row, middle_in) < room_in else (low_in, middle_in)
    return high_in


def _caption(tile: Tile, name: str, room_in: float) -> str:
    """Returns a tile's three lines; of a name that is too long its end, which tells files apart."""
    letters = max(int(room_in / _LETTER_IN) - len(tile.mark), 2)
    shown = name if len(name) <= letters else f"…{name[1 - letters :]}"
    return f"{tile.mark}{shown}\n{tile.about}"
