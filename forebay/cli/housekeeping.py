"""The commands `forebay cache ls|du|rm|prune|diff|verify`: what caches there are, what they take, what can go."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forebay.caches.root import Root, opened_root
from forebay.cli.options import command, printed
from forebay.config.load import read_remote
from forebay.config.url import is_url, url_or_path
from forebay.errors import ConfigError
from forebay.steps.recipe import load_config

_ROOT = "a cache root, a folder or URL; default: that of the configs, else ./caches"
_SORTS = ("name", "used", "made", "size", "samples")


def add_housekeeping(actions: Any) -> None:
    """Adds `forebay cache ls|du`."""
    _add_ls(actions)
    _add_du(actions)


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="remote.FIELD=VALUE", help="where this node keeps what of stores"
    )


def _add_configs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--configs", metavar="DIR|GLOB", help="the TOML files of a folder, or of a glob")


def _add_ls(actions: Any) -> None:
    parser = command(actions, "ls", _ls, "list the caches of a root: what they were made of, size, last use, configs")
    parser.add_argument("places", metavar="ROOT|CONFIG", nargs="*", help=f"{_ROOT}; and configs to match with caches")
    _add_configs(parser)
    parser.add_argument("--sort", choices=_SORTS, default="name", help="default: name")
    _add_root(parser)


def _ls(options: argparse.Namespace) -> int:
    from forebay.caches.listing import ListReport
    from forebay.caches.survey import survey
    from forebay.caches.wanted import config_files, wanted_by

    place, named = _divided(options)
    files = config_files(named, below=options.configs)
    with _root(options, place, files) as root:
        found = survey(root)
        wanted = wanted_by(files, found) if files else None
        return printed(options, ListReport(survey=found, wanted=wanted, sort=options.sort))


def _add_du(actions: Any) -> None:
    parser = command(actions, "du", _du, "say what everything under a cache root takes, hard links once")
    parser.add_argument("places", metavar="ROOT", nargs="*", help=_ROOT)
    _add_root(parser)


def _du(options: argparse.Namespace) -> int:
    from forebay.caches.listing import UsageReport
    from forebay.caches.node import node_usage
    from forebay.caches.survey import survey

    place, files = _divided(options)
    with _root(options, place, files) as root:
        return printed(options, UsageReport(survey=survey(root), node=node_usage(read_remote(options.set))))


def _divided(options: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Returns the root and the configs that were named. Raises ConfigError."""
    roots, files = [], []
    for text in options.places:
        place = url_or_path(text)
        if is_url(place) or Path(place).is_dir():
            roots.append(place)
        elif Path(place).exists() or text.endswith(".toml"):
            files.append(place)
        else:
            raise ConfigError(f"{text}: no such cache root or config; name a folder, a URL or a TOML file")
    if options.cache_root is not None:
        roots.append(options.cache_root)
    if len(roots) > 1:
        raise ConfigError(f"one cache root at a time, and these are {len(roots)}: {', '.join(roots)}")
    return (roots[0] if roots else None), files


@contextmanager
def _root(options: argparse.Namespace, place: str | None, files: list[str]) -> Iterator[Root]:
    """Yields the root that was named, else that of the configs, else `caches`."""
    settings = read_remote(options.set)
    if place is None and files:
        configs = [load_config(file) for file in files]
        found = sorted({config.run.cache_root for config in configs})
        if len(found) > 1:
            raise ConfigError(f"these configs have the cache roots {', '.join(found)}; name one of them: --cache-root")
        place, settings = found[0], configs[0].remote
    with opened_root(place or "caches", settings) as root:
        yield root
