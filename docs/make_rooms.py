"""Draws `docs/images/rooms.svg`, the picture of `ARCHITECTURE.md` (`make images`).

The rows are the layers that import-linter holds (`setup.cfg`), a wide one in two rows. A room's words are the first
sentence of its docstring, and its list of folders is read from disk. `tests/test_documents.py` compares the picture
with what this script draws.
"""

from __future__ import annotations

import ast
import configparser
import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/rooms.svg"

_WIDTH, _BOX, _ROW, _MARGIN = 800, 56, 66, 40
_BESIDE = 4
"""Rooms that stand beside each other: those of a wider layer stand in several rows."""


def picture() -> str:
    """Returns the text of `docs/images/rooms.svg`."""
    layers = _layers()
    height = _ROW * len(layers) + 10
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
            f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
            f'<line x1="18" y1="20" x2="18" y2="{height - 30}" stroke="#9aa5b1" stroke-width="2"/>',
            f'<path d="M 12 {height - 32} L 24 {height - 32} L 18 {height - 18} Z" fill="#9aa5b1"/>',
            f'<text x="14" y="{height // 2}" font-size="12" fill="#64748b" '
            f'transform="rotate(-90 14 {height // 2})">imports go down</text>',
            *(
                _box(room, row, column, len(rooms))
                for row, rooms in enumerate(layers)
                for column, room in enumerate(rooms)
            ),
            "</svg>\n",
        ]
    )


def _layers() -> list[list[str]]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    lines = parser["importlinter:contract:layers"]["layers"].split("\n")
    layers = [[name.strip().removeprefix("forebay.") for name in line.split("|")] for line in lines if line]
    return [layer[first : first + _BESIDE] for layer in layers for first in range(0, len(layer), _BESIDE)]


def _box(room: str, row: int, column: int, columns: int) -> str:
    folder = ROOT / "forebay" / room
    width = (_WIDTH - _MARGIN - 10 - 16 * (columns - 1)) // columns
    x, y = _MARGIN + column * (width + 16), row * _ROW + 10
    inner = sorted(path.parent.relative_to(folder).as_posix() + "/" for path in folder.glob("**/__init__.py"))
    lines = textwrap.wrap(_sentence(room), width=(width - 20) // 6, max_lines=2, placeholder=" ...")
    name = f"{room}/" if folder.is_dir() else f"{room}.py"
    beside = x + 20 + 9 * len(name)
    shown = textwrap.shorten(
        " ".join(name for name in inner if name != "./"), (x + width - beside) // 6, placeholder=" ..."
    )
    words = [
        _text(x + 10, y + 18, name, size=13, colour="#c2410c", bold=True),
        *(_text(x + 10, y + 34 + 14 * number, line, size=11, colour="#334155") for number, line in enumerate(lines)),
        _text(beside, y + 18, shown, size=10, colour="#64748b"),
    ]
    frame = f'<rect x="{x}" y="{y}" width="{width}" height="{_BOX}" rx="6" fill="#f8fafc" stroke="#c2410c"/>'
    return frame + "".join(words)


def _text(x: int, y: int, text: str, *, size: int, colour: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}"{weight} fill="{colour}">{escape(text)}</text>'


def _sentence(room: str) -> str:
    folder = ROOT / "forebay" / room
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    document = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    return " ".join(document.split("\n\n")[0].split()).replace("`", "").split(". ")[0].rstrip(".")


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
