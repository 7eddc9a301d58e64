"""TOML of a stranger: an answer at once, whatever it is."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_DEPTH = 16
"""Levels of tables and lists; settings lie three deep."""

_STRINGS = re.compile(r'''"""(?:[^\\]|\\.)*?"""|'{3}.*?'{3}|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+'|\#[^\n]*+''', re.DOTALL)
_LONG_KEY = re.compile(rf"(?:\.[ \t]*+[\w\-\"]++[ \t]*+){{{MAX_DEPTH},}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the document of a TOML text.

    Raises ValueError for what is no TOML, and where a key has more than `MAX_DEPTH` parts or values lie too deep to be read.
    """
    # tomllib takes time with the square of a key's parts: minutes for 100,000 of them.
    if (found := _LONG_KEY.search(_STRINGS.sub(_stand_in, text))) is not None:
        raise ValueError(f"a key has more than {MAX_DEPTH} parts, {found[0]:.40}... among them")
    try:
        return tomllib.loads(text)
    except RecursionError as err:
        raise ValueError("its values lie in one another too deep to be read") from err


def _stand_in(found: re.Match[str]) -> str:
    # A quoted part of a key stays a part; dots inside of strings and comments separate nothing.
    return "" if found[0].startswith("#") else '"'
