"""`forebay compare`: the arms of a config, or two run folders, by what was asked for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.config.tree import Config
from forebay.errors import ConfigError, MissingExtraError
from forebay.train.compare.arms import PARTS
from forebay.train.compare.compare import compare
from forebay.train.compare.figure import draw, draw_runs
from forebay.train.compare.report import Comparison
from forebay.train.compare.runs import RunComparison, compare_runs

logger = logging.getLogger(__name__)

DEFAULT_STEPS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """What the command line says beside the config, or beside the first run's folder."""

    other: str | None = None
    against: str | None = None
    steps: int | None = None
    out: Path | None = None


def show(first: Config | Path, options: CompareOptions) -> Comparison | RunComparison:
    """Returns the comparison of a config's arms, or of the runs in two folders; its files are written."""
    return _runs(first, options) if isinstance(first, Path) else _arms(first, options)


def _runs(first: Path, options: CompareOptions) -> RunComparison:
    if options.other is None:
        raise ConfigError(f"{first} is a folder; name another run's folder behind it, or a config file instead")
    if options.against is not None or options.steps is not None:
        raise ConfigError("--against and --steps go with a config; two runs are compared by what their folders tell")
    comparison = compare_runs(first, Path(options.other), out=options.out)
    comparison.write()
    if comparison.out is not None:
        with _without_matplotlib():
            draw_runs(comparison.to_json(), comparison.out / "compare.png")
    return comparison


def _arms(config: Config, options: CompareOptions) -> Comparison:
    if options.other is not None:
        raise ConfigError(
            f"{config.path} is a config and {options.other} stands behind it; give a config alone, or two run folders"
        )
    if options.against is None:
        raise ConfigError(f"compare CONFIG needs --against, one or more of {', '.join(PARTS)} separated by commas")
    steps = DEFAULT_STEPS if options.steps is None else options.steps
    comparison = compare(config, against=options.against, steps=steps, out=options.out)
    comparison.write()
    with _without_matplotlib():
        draw(comparison.to_json(), comparison.folder / "compare.png")
    return comparison


@contextlib.contextmanager
def _without_matplotlib() -> Iterator[None]:
    """Makes a picture that cannot be drawn a line of the log, which names the extra."""
    try:
        yield
    except MissingExtraError as err:
        logger.warning("%s", err)
