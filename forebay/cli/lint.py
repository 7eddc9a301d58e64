"""The command that looks for what is wrong with data: `lint`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from forebay.cli.options import DONE, FAILED, command, load, on_disk, printed, remote
from forebay.config.url import is_url, url_or_path
from forebay.errors import ConfigError


def add_lint(commands: Any) -> None:
    """Adds `forebay lint`."""
    parser = command(
        commands, "lint", _lint, "look for faults in raw data or a cache: silence, clipping, duplicates, leaks, texts"
    )
    parser.add_argument("config", metavar="CONFIG|CACHE", nargs="*", help="TOML files, caches or their URLs")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="as if it stood in the config"
    )
    parser.add_argument("--max-samples", type=int, metavar="N", help="only the first N samples of each")
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="CONFIG|CACHE",
        help="sets whose samples must not be among these; those of [[train.eval]] always",
    )
    parser.add_argument("--raw", action="store_true", help="read the raw data, also where a cache keeps the recordings")
    parser.add_argument("--drop-ids", metavar="FILE", type=on_disk, help="write the ids for [filter] drop_ids")
    parser.add_argument(
        "--severity",
        choices=("error", "warning", "info"),
        default="error",
        help="of --drop-ids and --strict: this and worse; default: error",
    )
    parser.add_argument("--strict", action="store_true", help="end with 1 where something of --severity was found")
    parser.add_argument("--skip", action="append", default=[], metavar="CHECK", help="leave a check out")
    parser.add_argument("--limit", action="append", default=[], metavar="NAME=VALUE", help="change a limit")
    parser.add_argument("--explain-checks", action="store_true", help="print the checks and their limits, and end")
    parser.add_argument("--show", type=int, default=3, metavar="N", help="findings of a check in the lines; default: 3")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default: the cores")
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _lint(options: argparse.Namespace) -> int:
    from forebay.lint.limits import Limits, check_lines

    limits = Limits().changed(options.limit)
    if options.explain_checks:
        print("\n".join(check_lines(limits)))
        return DONE
    from forebay.lint.command import LintOptions, lint

    if not options.config:
        raise ConfigError("lint needs a config or a cache (a folder or URL), or --explain-checks")
    for name in ("max_samples", "workers"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: wanted 1 or more")
    wanted = LintOptions(
        limits=limits,
        severity=options.severity,
        drop_ids=options.drop_ids,
        skip=options.skip,
        is_raw=options.raw,
        workers=options.workers,
        most=options.max_samples,
        shown=max(0, options.show),
        progress=not options.no_progress,
    )
    targets = [_target(text, options, max_samples=options.max_samples) for text in options.config]
    against = [_target(text, options, max_samples=None) for text in options.against]
    report = lint(targets, against, wanted)
    printed(options, report)
    return FAILED if options.strict and report.at_least(options.severity) else DONE


def _target(text: str, options: argparse.Namespace, *, max_samples: int | None) -> Any:
    from forebay.lint.command import Target

    place = url_or_path(text)
    if is_url(place) or Path(place).is_dir():
        return Target(place=place, remote=remote(options))
    if not Path(place).exists():
        raise ConfigError(f"{place}: no such cache or config; name a folder, a URL or a TOML file")
    # What --set says is of the linted sets: another set has settings of its own.
    named = {"config": text, "max_samples": max_samples}
    return Target(config=load(argparse.Namespace(**{**vars(options), **named})))
