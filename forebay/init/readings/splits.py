"""Which split the name of a file or folder says."""

from __future__ import annotations

import re

_SPLITS = {
    "train": re.compile(r"(^|[^a-z])(train|training)([^a-z]|$)"),
    "dev": re.compile(r"(^|[^a-z])(dev|valid|validation|val)([^a-z]|$)"),
    "test": re.compile(r"(^|[^a-z])(test|eval|evaluation)([^a-z]|$)"),
}


def split_of(stem: str) -> str:
    """Returns which split the name of a file says: `train`, `dev`, `test`, or an empty text for none of them."""
    return next((split for split, pattern in _SPLITS.items() if pattern.search(stem.lower())), "")
