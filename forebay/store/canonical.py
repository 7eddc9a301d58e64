"""Canonical JSON and its digest: the form in which documents are named by content."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(document: Any) -> bytes:
    """Returns the one byte string of a document: sorted keys, no white space, ASCII, types kept (1 is not 1.0).

    Raises ValueError for NaN and infinities, TypeError for what JSON cannot hold (keys that are not strings included:
    json would turn them into strings, and two documents would share one form).
    """
    _refuse_foreign_keys(document)
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest(document: Any) -> str:
    """Returns the sha256 of the canonical JSON, as 64 hex digits."""
    return hashlib.sha256(canonical_json(document)).hexdigest()


def _refuse_foreign_keys(document: Any) -> None:
    if isinstance(document, dict):
        for name, value in document.items():
            if not isinstance(name, str):
                raise TypeError(f"key {name!r} of a canonical document is {type(name).__name__}, wanted str")
            _refuse_foreign_keys(value)
    elif isinstance(document, (list, tuple)):
        for value in document:
            _refuse_foreign_keys(value)
