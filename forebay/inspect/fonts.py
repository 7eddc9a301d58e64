"""Fonts for transcripts in any script."""

from __future__ import annotations

from typing import Any

_FIRST = "DejaVu Sans"
"""Comes with matplotlib: Latin, Greek, Cyrillic, Arabic, but no Indic scripts and no CJK."""

_NO_FONT = "Last Resort"
"""Also comes with matplotlib, and has a box for every character instead of a letter."""


def fonts_for(text: str) -> tuple[list[str], str]:
    """Returns the families to draw a text with, and the text with `\ufffd` for characters that no installed font has.

    Without this, matplotlib draws an empty box and warns once a character.
    """
    from matplotlib.font_manager import findfont

    missing = {c for c in text if not c.isspace()} - _characters(findfont(_FIRST))
    families = [_FIRST]
    for name, path in _installed() if missing else []:
        found = missing & _characters(path)
        if found and name not in families:
            families.append(name)
            missing -= found
        if not missing:
            break
    return families, "".join("\ufffd" if c in missing else c for c in text)


def _installed() -> list[tuple[str, str]]:
    from matplotlib.font_manager import fontManager

    return sorted({(font.name, font.fname) for font in fontManager.ttflist if not font.name.startswith(_NO_FONT)})


def _characters(path: Any) -> set[str]:
    from matplotlib.ft2font import FT2Font

    return set(map(chr, FT2Font(str(path)).get_charmap()))
