"""Results of other libraries for texts, kept in references.json with their versions and licences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

_MADE = json.loads((Path(__file__).parent / "references.json").read_text(encoding="utf-8"))


def reference_pairs(step: str) -> pytest.MarkDecorator:
    """Returns the parametrisation `text`, `expected` of a step's reference."""
    return pytest.mark.parametrize(("text", "expected"), _MADE[step]["texts"])
