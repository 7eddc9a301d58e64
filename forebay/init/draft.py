"""A config to be written, while its sections come together."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from forebay.init.found import Found
from forebay.init.model import Model
from forebay.init.toml import Section

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


@dataclass(slots=True, kw_only=True)
class Draft:
    """A config to be written. trains: whether `forebay train` can train on it.

    head: comments on top. said: what was decided and a person should hear too.
    """

    name: str
    out: Path
    found: Found
    model: Model | None = None
    weights: str | None = None
    trains: bool = False
    sections: list[Section] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def relative(self, path: Path) -> str:
        """Returns a path as the config writes it: relative to the config's folder."""
        text = os.path.relpath(path, self.out.parent)
        return f"./{text}" if _SCHEME.match(text) else text
