"""The commands `forebay cache ls|du|rm|prune|diff|verify`: what caches there are, what they take, what can go."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.caches.root_files import opened_root
from forebay.cli.options import DONE, FAILED, command, completes, load, printed
from forebay.config.load import read_remote
from forebay.config.tree import Config
from forebay.config.url import is_url, parse_url, url_or_path
from forebay.errors import CacheNotFoundError, ConfigError
from forebay.progress import during
from forebay.steps.recipe import load_config, recipe_of
from forebay.store.cache import open_cache
from forebay.store.lookup import find_cache, mirrored, require
from forebay.store.remote.mirror import cache_folder

if TYPE_CHECKING:
    from forebay.caches.difference import Side
    from forebay.caches.root_items import Survey

_ROOT = "a cache root, a folder or URL; default: that of the configs, else ./caches"
_SORTS = ("name", "used", "made", "size", "samples")


def add_housekeeping(actions: Any) -> None:
    """Adds `forebay cache ls|du|rm|prune|diff|verify`."""
    _add_ls(actions)
    _add_du(actions)
    _add_rm(actions)
    _add_prune(actions)
    _add_diff(actions)
    _add_verify(actions)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-progress", action="store_true", help="no bars")
    parser.add_argument(
        "--set", action="append", default=[], metavar="remote.FIELD=VALUE", help="where this node keeps what of stores"
    )


def _add_configs(parser: argparse.ArgumentParser) -> None:
    completes(parser.add_argument("--configs", metavar="DIR|GLOB", help="the TOML files of a folder, or of a glob"))


def _add_ls(actions: Any) -> None:
    parser = command(actions, "ls", _ls, "list the caches of a root: what they were made of, size, last use, configs")
    completes(
        parser.add_argument("places", metavar="ROOT|CONFIG", nargs="*", help=f"{_ROOT}; configs to match with caches")
    )
    _add_configs(parser)
    parser.add_argument("--sort", choices=_SORTS, default="name", help="default: name")
    _add_common(parser)


def _ls(options: argparse.Namespace) -> int:
    from forebay.caches.cache_list import ListReport
    from forebay.caches.wanted import config_files, wanted_by

    place, named = _divided(options)
    files = config_files(named, below=options.configs)
    with _surveyed(options, place, files) as found:
        wanted = wanted_by(files, found) if files else None
        return printed(options, ListReport(survey=found, wanted=wanted, sort=options.sort))


def _add_du(actions: Any) -> None:
    parser = command(actions, "du", _du, "say what everything under a cache root takes, hard links once")
    completes(parser.add_argument("places", metavar="ROOT", nargs="*", help=_ROOT))
    _add_common(parser)


def _du(options: argparse.Namespace) -> int:
    from forebay.caches.cache_list import UsageReport, node_usage

    with _surveyed(options, *_divided(options)) as found:
        return printed(options, UsageReport(survey=found, node=node_usage(read_remote(options.set))))


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
def _surveyed(options: argparse.Namespace, place: str | None, files: Sequence[str] = ()) -> Iterator[Survey]:
    """Yields what lies under the root that was named, else that of the configs, else `caches`."""
    from forebay.caches.stored import survey

    settings = read_remote(options.set)
    if place is None and files:
        configs = [load_config(file) for file in files]
        found = sorted({config.run.cache_root for config in configs})
        if len(found) > 1:
            raise ConfigError(f"these configs have the cache roots {', '.join(found)}; name one of them: --cache-root")
        place, settings = found[0], configs[0].remote
    with opened_root(place or "caches", settings) as root:
        with during("look", is_shown=not options.no_progress):
            surveyed = survey(root)
        yield surveyed


def _add_rm(actions: Any) -> None:
    summary = "remove caches, or anything else of a root, by name; without --yes only says what would go"
    parser = command(actions, "rm", _rm, summary)
    what = "a folder directly under a cache root, or its name, or plans/NAME and the like as du --json lists them"
    completes(parser.add_argument("names", metavar="NAME|DIR", nargs="+", help=what))
    _add_removal(parser)


def _add_removal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do it; without it nothing is removed")
    parser.add_argument(
        "--force",
        action="store_true",
        help="also what was used within 7 days, or may be in use on another host; never what a process has open",
    )
    _add_common(parser)


def _rm(options: argparse.Namespace) -> int:
    from forebay.caches.guard import Guard
    from forebay.caches.prune import carried_out, named

    place, names = _named_items(options)
    with _surveyed(options, place) as found:
        guard = Guard(survey=found, force=options.force)
        decisions = named(found, names, guard)
        report = carried_out(found, decisions, guard, is_wanted=options.yes, progress=not options.no_progress)
        printed(options, report)
        is_all = all(decision.goes for decision in report.decisions)
        return DONE if report.is_whole and is_all else FAILED


def _named_items(options: argparse.Namespace) -> tuple[str, list[str]]:
    """Returns the root of what was named, and the names there. Raises ConfigError where there are several roots."""
    found = [_named_item(options, text) for text in options.names]
    roots = sorted({root for root, _ in found})
    if len(roots) > 1:
        raise ConfigError(f"these lie in the cache roots {', '.join(roots)}; remove from one at a time")
    return roots[0], [name for _, name in found]


def _named_item(options: argparse.Namespace, text: str) -> tuple[str, str]:
    from forebay.caches.kinds import HOLDERS

    if is_url(place := url_or_path(text)):
        url = parse_url(place)
        return str(url.parent), url.name
    path = Path(os.path.abspath(text))
    if options.cache_root is not None:
        inside = Path(options.cache_root)
        is_inside = not is_url(options.cache_root) and path.is_relative_to(inside) and os.path.lexists(path)
        return options.cache_root, path.relative_to(inside).as_posix() if is_inside else text
    if not os.path.lexists(path):
        return os.path.abspath("caches"), text
    holder = path.parent.name if path.parent.name in HOLDERS else ""
    return str(path.parent.parent if holder else path.parent), f"{holder}/{path.name}" if holder else path.name


def _add_prune(actions: Any) -> None:
    summary = "remove what rules choose under a root; without --yes only says what would go, and why the rest stays"
    parser = command(actions, "prune", _prune, summary)
    completes(parser.add_argument("places", metavar="ROOT", nargs="*", help=_ROOT))
    parser.add_argument(
        "--older-than", metavar="AGE", help="caches and kept texts that were not used for so long: 30d, 12h, 8w"
    )
    unwanted = "caches that none of these configs wants"
    completes(parser.add_argument("--unwanted", metavar="CONFIG", nargs="*", help=unwanted))
    _add_configs(parser)
    parser.add_argument(
        "--max-size",
        metavar="SIZE",
        help="caches and kept texts used longest ago, until all under the root fits: 500G, 1.5T",
    )
    parser.add_argument("--leftovers", action="store_true", help="what builds left whose processes are gone")
    of_kind = (
        "what has no use any more of a kind, as du names it; several times: of each. plan: of caches that are gone. "
        "tar-index, text-index: of files that are gone or changed. listing: lengths of conversations read without a "
        'cache. inputs: samples that iterators of kind = "python" yielded. build, prepared, leftover: as --leftovers'
    )
    parser.add_argument("--kind", action="append", default=[], metavar="NAME", help=of_kind)
    for option, kind in _EARLIER.items():
        parser.add_argument(option, action="store_true", help=f"--kind {kind}, until 0.3")
    _add_removal(parser)


_EARLIER = {
    "--plans": "plan",
    "--tar-indexes": "tar-index",
    "--text-indexes": "text-index",
    "--listings": "listing",
    "--inputs": "inputs",
}
"""Options of `prune` that a kind has had, by the name that `--kind` takes."""


def _kinds(options: argparse.Namespace) -> list[str]:
    """Returns the kinds that are chosen from; of an option of an earlier version a line says what it is called now."""
    from forebay.caches.kinds import kind_named

    named = list(options.kind)
    for option, kind in _EARLIER.items():
        if getattr(options, option.removeprefix("--").replace("-", "_")):
            print(f"{option} is --kind {kind} now, and goes in 0.3", file=sys.stderr)
            named.append(kind)
    return [kind_named(name) for name in named]


def _prune(options: argparse.Namespace) -> int:
    from forebay.caches.difference import parse_age, parse_size
    from forebay.caches.guard import Guard
    from forebay.caches.prune import Rules, carried_out, decide, over
    from forebay.caches.wanted import config_files, wanted_by

    place, named = _divided(options)
    for text in options.unwanted or ():
        if Path(text).is_dir():
            raise ConfigError(
                f"--unwanted {text} is a folder: name the root before it, or a folder of configs by --configs"
            )
    files = config_files([*(options.unwanted or ()), *named], below=options.configs)
    rules = Rules(
        older_than_s=None if options.older_than is None else parse_age(options.older_than),
        unwanted=options.unwanted is not None,
        max_bytes=None if options.max_size is None else parse_size(options.max_size),
        leftovers=options.leftovers,
        kinds=_kinds(options),
    )
    rules.require_one()
    if rules.unwanted != bool(files):
        raise ConfigError("--unwanted and the configs to ask go together: --unwanted CONFIG..., or with --configs DIR")
    with _surveyed(options, place, files) as found:
        guard = Guard(survey=found, force=options.force)
        wanted = wanted_by(files, found) if rules.unwanted else None
        for file, problem in ({} if wanted is None else wanted.problems).items():
            raise ConfigError(f"what {file} wants is not known, so nothing is removed: {problem}")
        with during("look", is_shown=not options.no_progress):
            decisions = decide(found, rules, guard, wanted)
        report = carried_out(found, decisions, guard, is_wanted=options.yes, progress=not options.no_progress)
        report.over_bytes = over(report, rules.max_bytes)
        printed(options, report)
        return DONE if report.is_whole else FAILED


_CACHE = "the folder of a cache, its URL, or the TOML file that made it"


def _add_diff(actions: Any) -> None:
    parser = command(actions, "diff", _diff, "say how two caches differ: settings, source files, samples, sizes")
    completes(parser.add_argument("a", metavar="A", help=_CACHE))
    completes(parser.add_argument("b", metavar="B", help=_CACHE))
    _add_common(parser)


def _diff(options: argparse.Namespace) -> int:
    from forebay.caches.difference import compare

    sides = [_side(options, text) for text in (options.a, options.b)]
    return printed(options, compare(*sides, progress=not options.no_progress))


def _side(options: argparse.Namespace, text: str) -> Side:
    """Returns what a cache, a URL or a config is compared by; a config may have no cache yet."""
    from forebay.caches.difference import Side

    place = url_or_path(text)
    if is_url(place) or Path(place).is_dir():
        cache = open_cache(place, remote=read_remote(options.set))
        return Side(name=text, recipe=cache.metadata["recipe"], cache=cache)
    config = _config(options, text)
    recipe = recipe_of(config)
    found = find_cache(config, recipe).found
    if found is None:
        return Side(name=text, recipe=recipe.document)
    opened = open_cache(found.place, remote=config.remote)
    return Side(name=text, recipe=opened.metadata["recipe"], cache=opened)


def _config(options: argparse.Namespace, text: str) -> Config:
    if not Path(text).is_file():
        raise ConfigError(f"{text}: no such cache or config; name a folder, a URL or a TOML file")
    return load(argparse.Namespace(config=text, cache_root=options.cache_root))


def _add_verify(actions: Any) -> None:
    summary = "re-hash every byte of caches; ends with 1 where something is wrong, and says what and how to mend it"
    parser = command(actions, "verify", _verify, summary)
    completes(parser.add_argument("places", metavar="CACHE|CONFIG", nargs="*", help=_CACHE))
    parser.add_argument("--all", action="store_true", help="every cache of the root: --cache-root, else ./caches")
    _add_common(parser)


def _verify(options: argparse.Namespace) -> int:
    from forebay.caches.check import CheckReport, check

    if options.all == bool(options.places):
        raise ConfigError("verify what? Name caches or configs, or all of a root: forebay cache verify --all")
    report = CheckReport()
    for folder, place, config in _to_verify(options):
        report.checked.append(check(folder, place=place, config=config, progress=not options.no_progress))
    printed(options, report)
    return DONE if report.ok else FAILED


def _to_verify(options: argparse.Namespace) -> Iterator[tuple[Path, str, str | None]]:
    """Yields folder, name and config of every cache that is to be verified."""
    from forebay.caches.stored import survey

    if options.all:
        with opened_root(options.cache_root or "caches", read_remote(options.set)) as root:
            places = [f"{root.place}/{item.name}" for item in survey(root).caches]
        if not places:
            raise CacheNotFoundError(f"no cache is in {root.place}; name a cache root: --cache-root DIR")
        yield from ((cache_folder(place, read_remote(options.set)), place, None) for place in places)
    for text in options.places:
        place = url_or_path(text)
        if is_url(place) or Path(place).is_dir():
            yield cache_folder(place, read_remote(options.set)), place, None
        else:
            config = _config(options, text)
            found = require(config, find_cache(config, recipe_of(config)))
            yield mirrored(found, config.remote).folder, found.place, text
