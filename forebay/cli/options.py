"""What the commands share: options, the config that they name, how a report is printed; and the exit codes."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.config.load import read_remote
from forebay.config.remote import RemoteConfig
from forebay.config.tree import Config
from forebay.config.url import is_url, url_or_path
from forebay.errors import ConfigError
from forebay.steps.recipe import load_config
from forebay.visible import json_text

DONE, FAILED, BAD_CONFIG, NO_CACHE, INTERRUPTED = 0, 1, 2, 3, 130
CLOSED = 128 + 13
"""What a shell shows of a program that SIGPIPE ended."""


def command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, *, has_caches: bool = True
) -> argparse.ArgumentParser:
    """Returns the parser of a new command; `run` carries it out and returns its exit code."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more; twice for all")
    if has_caches:
        parser.add_argument(
            "--cache-root", metavar="DIR", type=place, help="instead of run.cache_root; a folder or URL"
        )
    return parser


def place(text: str) -> str:
    """Returns a URL of the command line, or the absolute path of a folder."""
    try:
        place = url_or_path(text)
    except ConfigError as err:
        raise argparse.ArgumentTypeError(str(err)) from err
    return place if is_url(place) else os.path.abspath(place)


def on_disk(text: str) -> Path:
    """Returns a path of the command line, which is of this machine."""
    try:
        place = url_or_path(text)
    except ConfigError as err:
        raise argparse.ArgumentTypeError(str(err)) from err
    if is_url(place):
        raise argparse.ArgumentTypeError(f"{place} is a URL, and this is of this machine: name a local path")
    return Path(place)


def add_config(parser: argparse.ArgumentParser, *, is_needed: bool = True) -> None:
    """Adds CONFIG and what changes its settings."""
    config = parser.add_argument("config", metavar="CONFIG", nargs=None if is_needed else "?", help="a TOML file")
    completes(config)
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="as if it stood in the file"
    )
    parser.add_argument("--max-samples", type=int, metavar="N", help="short for --set source.max_samples=N")


def completes(argument: argparse.Action) -> None:
    """Makes a shell complete the names of files for an argument; shtab reads it, see `forebay completion`."""
    argument.complete = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}  # type: ignore[attr-defined]


def load(options: argparse.Namespace) -> Config:
    """Returns the config that the options name, with what they set in it. Raises ConfigError."""
    overrides = list(getattr(options, "set", []))
    if getattr(options, "max_samples", None) is not None:
        overrides.append(f"source.max_samples={options.max_samples}")
    if options.cache_root is not None:
        overrides.append(f"run.cache_root={json.dumps(options.cache_root)}")
    if getattr(options, "workers", None) is not None:
        overrides.append(f"run.num_workers={options.workers}")
    return load_config(options.config, overrides=overrides)


def remote(options: argparse.Namespace) -> RemoteConfig:
    """Returns what `--set remote.x=y` says, for a command that was given no config. The rest is a config's."""
    return read_remote([override for override in options.set if override.lstrip().startswith("remote.")])


def printed(options: argparse.Namespace, report: Any) -> int:
    """Prints a report: its document, or its lines."""
    print(json_text(report.to_json()) if options.json else "\n".join(report.lines()))
    return DONE


def level(options: argparse.Namespace) -> int:
    """Returns the level of logging that was asked for."""
    return {0: logging.WARNING, 1: logging.INFO}.get(options.verbose, logging.DEBUG)
