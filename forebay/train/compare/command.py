"""`forebay compare`: the arms of a config, or two run folders, by what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.train.compare.compare import compare


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """What the command line says beside the config, or beside the first run's folder."""

    other: str | None = None
    against: str | None = None
    steps: int | None = None
    out: Path | None = None


def show(first: Config | Path, options: CompareOptions) -> Any:
    """Returns the comparison of a config's arms, or of the runs in two folders; its files are written."""
    if isinstance(first, Path):
        raise ConfigError(f"{first} is a folder")
    if options.against is None:
        raise ConfigError("compare needs --against, for example --against uncached,hf; or two run folders")
    comparison = compare(
        first, against=options.against, steps=200 if options.steps is None else options.steps, out=options.out
    )
    comparison.write()
    return comparison
