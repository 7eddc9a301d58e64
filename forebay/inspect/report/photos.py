"""Images of a sample as files of bounded size, and the grid of their patches as lines to lay over them."""

from __future__ import annotations

import io
from collections.abc import Sequence

import PIL.Image

from forebay.inspect.report.markup import Html, tag, url_size
from forebay.store.layout import Array

_SIDES = (640, 448, 320, 224, 128, 64)
"""Pixels of an image's longer side, the best first."""

MAX_LINES = 400
"""Lines of a grid: those of a larger one would be a grey area."""


def webp(pixels: Array, *, side: int) -> bytes:
    """Returns pixels uint8 [height, width, 3] as a WebP whose longer side is at most `side`."""
    image = PIL.Image.fromarray(pixels)
    image.thumbnail((side, side), PIL.Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=80, method=2)
    return buffer.getvalue()


def webps(images: Sequence[Array], *, budget: int) -> list[bytes] | None:
    """Returns all images at one bound of size, together no longer than `budget` as URLs; None: no size fits."""
    for side in _SIDES:
        found: list[bytes] = []
        left = budget
        for pixels in images:
            found.append(webp(pixels, side=side))
            left -= url_size(found[-1])
            if left < 0:
                break
        if left >= 0:
            return found
    return None


def grid_lines(*, rows: int, columns: int, merge: int) -> Html | None:
    """Returns the borders of patches as an SVG that stretches over their image; those of a token (merged) are heavier.

    None for a grid with too many lines to be seen.
    """
    if rows + columns > MAX_LINES or min(rows, columns) < 1:
        return None
    heavy = [f"M{x} 0V{rows}" for x in range(merge, columns, merge)] + [
        f"M0 {y}H{columns}" for y in range(merge, rows, merge)
    ]
    fine = [f"M{x} 0V{rows}" for x in range(1, columns) if x % merge] + [
        f"M0 {y}H{columns}" for y in range(1, rows) if y % merge
    ]
    return tag(
        "svg",
        tag("path", d=" ".join(fine) or "M0 0", class_="fine"),
        tag("path", d=" ".join(heavy) or "M0 0", class_="heavy"),
        viewBox=f"0 0 {columns} {rows}",
        preserveAspectRatio="none",
        aria_hidden="true",
        class_="grid",
    )
