"""What a config and its file are called, after the folder or file of the data."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

_MEANS_NOTHING = re.compile(
    r"((train(ing)?|dev|val(id(ation)?)?|test|eval|data(set)?|audio|wavs?|clips?|images?|photos?|metadata|manifest|"
    r"hf|default|parts?|shards?|texts?|transcripts?|tars?|files?|raw|corpus|tmp)(?![^\W\d_])|[-_.\d])*",
    re.IGNORECASE,
)
_MOST = 60
_LEVELS = 3


def config_name(paths: Sequence[Path]) -> str:
    """Returns a name for what is found at some paths: of the first one or of a folder above that says something."""
    names = list(dict.fromkeys(name_of(path) for path in paths))
    if len(names) > 1:
        above = {path.parent for path in paths}
        if len(above) == 1 and (common := name_of(above.pop() / "data")) and common != "data":
            return common
    return "-".join(names)[:_MOST].strip("-._") or "data"


def name_of(path: Path) -> str:
    """Returns the name of a path, or of a folder above it where its own says nothing; letters of any script stay."""
    own = path.name if os.path.isdir(path) else path.stem
    parts = [own, *(parent.name for parent in list(path.parents)[:_LEVELS])]
    for part in parts:
        name = plain(re.sub(r"-\d{5}(-of-\d{5})?$", "", part))
        if name and not _MEANS_NOTHING.fullmatch(name):
            return name
    return plain(own) or "data"


def plain(text: str) -> str:
    """Returns a text as the name of a folder: letters, digits, and `.`, `_`, `-` between them.

    Marks that stand on letters (vowel signs, for example) are left out, for a config's name has none.
    """
    shown = unicodedata.normalize("NFC", text.encode("utf-8", "replace").decode("utf-8"))
    letters = [c for c in shown if not unicodedata.category(c).startswith("M")]
    kept = "".join(c if c.isalnum() or c in "._-" else "-" for c in letters)
    return re.sub(r"-{2,}", "-", kept)[:_MOST].strip("-._")
