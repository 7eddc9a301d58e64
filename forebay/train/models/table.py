"""The families of models that the reference loop trains: a line here and a file make a family."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path

from forebay.errors import ConfigError
from forebay.train.models.facts import Family

FAMILIES = {
    "qwen3_asr": "forebay.train.models.qwen3_asr",
    "qwen3_vl": "forebay.train.models.qwen3_vl",
    "whisper": "forebay.train.models.whisper",
}
"""The module of each `model_type`; `Family` says what the module has."""


def family_of(model_type: object, *, path: Path) -> Family:
    """Returns the family of a model type; ConfigError, with all families and the nearest, where the table has none.

    path: the config.json that names the model type.
    """
    if isinstance(model_type, str) and model_type in FAMILIES:
        family: Family = importlib.import_module(FAMILIES[model_type])
        return family
    near = difflib.get_close_matches(str(model_type), FAMILIES, n=1)
    raise ConfigError(
        f"train.model: {path} has model_type {model_type!r}, wanted one of {', '.join(FAMILIES)}"
        + (f"; the nearest is {near[0]!r}" if near else "")
    )
