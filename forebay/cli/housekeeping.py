"""The commands `forebay cache ls|du|rm|prune|diff|verify`: what caches there are, what they take, what can go."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forebay.cli.options import DONE, FAILED, CacheCommand, argument, command, load_config, option
from forebay.config.load import read_remote
from forebay.config.remote import is_url, parse_url, url_or_path
from forebay.errors import CacheNotFoundError, ConfigError
from forebay.terminal import during

if TYPE_CHECKING:
    from forebay.caches.prune import Rules
    from forebay.caches.root_items import Survey
    from forebay.caches.verify_and_diff import Side

_ROOT = "a cache root, a folder or URL; default: that of the configs, else ./caches"
_CACHE = "the folder of a cache, its URL, or the TOML file that made it"


@dataclass(kw_only=True)
class _RootCommand(CacheCommand):
    """A command about what lies under a cache root."""

    no_progress: bool = option("no bars")
    set: list[str] = option("where this node keeps what of stores", "remote.FIELD=VALUE")  # noqa: RUF009  a field

    def divided(self, places: Sequence[str]) -> tuple[str | None, list[str]]:
        """Returns the root and the configs that were named. Raises ConfigError."""
        roots, files = [], []
        for text in places:
            place = url_or_path(text)
            if is_url(place) or Path(place).is_dir():
                roots.append(place)
            elif Path(place).exists() or text.endswith(".toml"):
                files.append(place)
            else:
                raise ConfigError(f"{text}: no such cache root or config; name a folder, a URL or a TOML file")
        if self.cache_root is not None:
            roots.append(self.cache_root)
        if len(roots) > 1:
            raise ConfigError(f"one cache root at a time, and these are {len(roots)}: {', '.join(roots)}")
        return (roots[0] if roots else None), files

    @contextmanager
    def surveyed(self, place: str | None, files: Sequence[str] = ()) -> Iterator[Survey]:
        """Yields what lies under the root that was named, else that of the configs, else `caches`."""
        from forebay.caches.root_items import opened_root
        from forebay.caches.survey import survey

        settings = read_remote(self.set)
        if place is None and files:
            configs = [load_config(file) for file in files]
            found = sorted({config.run.cache_root for config in configs})
            if len(found) > 1:
                raise ConfigError(
                    f"these configs have the cache roots {', '.join(found)}; name one of them: --cache-root"
                )
            place, settings = found[0], configs[0].remote
        with opened_root(place or "caches", settings) as root:
            with during("look", is_shown=self.progress):
                surveyed = survey(root)
            yield surveyed


@command("cache ls")
class ListCommand(_RootCommand):
    """List the caches of a root: what they were made of, size, last use, configs."""

    places: list[str] = argument("ROOT|CONFIG", f"{_ROOT}; configs to match with caches", nargs="*", completes=True)
    configs: str | None = option("the TOML files of a folder, or of a glob", "DIR|GLOB", completes=True)
    sort: Literal["name", "used", "made", "size", "samples"] = option("default: name", default="name")

    def run(self) -> int:
        from forebay.caches.cache_list import ListReport, config_files, wanted_by

        place, named = self.divided(self.places)
        files = config_files(named, below=self.configs)
        with self.surveyed(place, files) as found:
            wanted = wanted_by(files, found) if files else None
            return self.printed(ListReport(survey=found, wanted=wanted, sort=self.sort))


@command("cache du")
class UsageCommand(_RootCommand):
    """Say what everything under a cache root takes, hard links once."""

    places: list[str] = argument("ROOT", _ROOT, nargs="*", completes=True)

    def run(self) -> int:
        from forebay.caches.cache_list import UsageReport, node_usage

        with self.surveyed(*self.divided(self.places)) as found:
            return self.printed(UsageReport(survey=found, node=node_usage(read_remote(self.set))))


_YES = "do it; without it nothing is removed"
_FORCE = "also what was used within 7 days, or may be in use on another host; never what a process has open"


@command("cache rm")
class RemoveCommand(_RootCommand):
    """Remove caches, or anything else of a root, by name; without --yes only says what would go."""

    names: list[str] = argument(
        "NAME|DIR",
        "a folder directly under a cache root, or its name, or plans/NAME and the like as du --json lists them",
        nargs="+",
        completes=True,
    )
    yes: bool = option(_YES)
    force: bool = option(_FORCE)

    def run(self) -> int:
        from forebay.caches.guard import Guard
        from forebay.caches.prune import carried_out, named

        items = [self._item(text) for text in self.names]
        roots = sorted({root for root, _ in items})
        if len(roots) > 1:
            raise ConfigError(f"these lie in the cache roots {', '.join(roots)}; remove from one at a time")
        with self.surveyed(roots[0]) as found:
            guard = Guard(survey=found, force=self.force)
            decisions = named(found, [name for _, name in items], guard)
            report = carried_out(found, decisions, guard, is_wanted=self.yes, progress=self.progress)
            self.printed(report)
            is_all = all(decision.goes for decision in report.decisions)
            return DONE if report.is_whole and is_all else FAILED

    def _item(self, text: str) -> tuple[str, str]:
        """Returns the root of what was named, and its name there."""
        from forebay.caches.kinds import HOLDERS

        if is_url(place := url_or_path(text)):
            url = parse_url(place)
            return str(url.parent), url.name
        path = Path(os.path.abspath(text))
        if self.cache_root is not None:
            inside = Path(self.cache_root)
            is_inside = not is_url(self.cache_root) and path.is_relative_to(inside) and os.path.lexists(path)
            return self.cache_root, path.relative_to(inside).as_posix() if is_inside else text
        if not os.path.lexists(path):
            return os.path.abspath("caches"), text
        holder = path.parent.name if path.parent.name in HOLDERS else ""
        return str(path.parent.parent if holder else path.parent), f"{holder}/{path.name}" if holder else path.name


_EARLIER = {
    "plans": "plan",
    "tar_indexes": "tar-index",
    "text_indexes": "text-index",
    "listings": "listing",
    "inputs": "inputs",
}
"""Options of `prune` that a kind has had, by the name that `--kind` takes."""


@command("cache prune")
class PruneCommand(_RootCommand):
    """Remove what rules choose under a root; without --yes only says what would go, and why the rest stays."""

    places: list[str] = argument("ROOT", _ROOT, nargs="*", completes=True)
    older_than: str | None = option("caches and kept texts that were not used for so long: 30d, 12h, 8w", "AGE")
    unwanted: list[str] | None = option("caches that none of these configs wants", "CONFIG", nargs="*", completes=True)
    configs: str | None = option("the TOML files of a folder, or of a glob", "DIR|GLOB", completes=True)
    max_size: str | None = option(
        "caches and kept texts used longest ago, until all under the root fits: 500G, 1.5T", "SIZE"
    )
    leftovers: bool = option("what builds left whose processes are gone")
    kind: list[str] = option(
        "what has no use any more of a kind, as du names it; several times: of each. plan: of caches that are gone. "
        "tar-index, text-index: of files that are gone or changed. listing: lengths of conversations read without a "
        'cache. inputs: samples that iterators of kind = "python" yielded. build, prepared, leftover: as --leftovers',
        "NAME",
    )
    plans: bool = option("--kind plan, until 0.3")
    tar_indexes: bool = option("--kind tar-index, until 0.3")
    text_indexes: bool = option("--kind text-index, until 0.3")
    listings: bool = option("--kind listing, until 0.3")
    inputs: bool = option("--kind inputs, until 0.3")
    yes: bool = option(_YES)
    force: bool = option(_FORCE)

    def run(self) -> int:
        from forebay.caches.cache_list import config_files, wanted_by
        from forebay.caches.guard import Guard
        from forebay.caches.prune import carried_out, decide, over

        place, named = self.divided(self.places)
        for text in self.unwanted or ():
            if Path(text).is_dir():
                raise ConfigError(
                    f"--unwanted {text} is a folder: name the root before it, or a folder of configs by --configs"
                )
        files = config_files([*(self.unwanted or ()), *named], below=self.configs)
        rules = self._rules()
        if rules.unwanted != bool(files):
            raise ConfigError(
                "--unwanted and the configs to ask go together: --unwanted CONFIG..., or with --configs DIR"
            )
        with self.surveyed(place, files) as found:
            guard = Guard(survey=found, force=self.force)
            wanted = wanted_by(files, found) if rules.unwanted else None
            for file, problem in ({} if wanted is None else wanted.problems).items():
                raise ConfigError(f"what {file} wants is not known, so nothing is removed: {problem}")
            with during("look", is_shown=self.progress):
                decisions = decide(found, rules, guard, wanted)
            report = carried_out(found, decisions, guard, is_wanted=self.yes, progress=self.progress)
            report.over_bytes = over(report, rules.max_bytes)
            self.printed(report)
            return DONE if report.is_whole else FAILED

    def _rules(self) -> Rules:
        """Returns what is chosen by; of an option of an earlier version a line says what it is called now."""
        from forebay.caches.kinds import kind_named
        from forebay.caches.prune import Rules, parse_age, parse_size

        kinds = list(self.kind)
        for name, kind in _EARLIER.items():
            for flag in self.given(name):
                print(f"{flag} is --kind {kind} now, and goes in 0.3", file=sys.stderr)
                kinds.append(kind)
        rules = Rules(
            older_than_s=None if self.older_than is None else parse_age(self.older_than),
            unwanted=self.unwanted is not None,
            max_bytes=None if self.max_size is None else parse_size(self.max_size),
            leftovers=self.leftovers,
            kinds=[kind_named(name) for name in kinds],
        )
        rules.require_one()
        return rules


@command("cache diff")
class DiffCommand(_RootCommand):
    """Say how two caches differ: settings, source files, samples, sizes."""

    a: str = argument("A", _CACHE, completes=True)
    b: str = argument("B", _CACHE, completes=True)

    def run(self) -> int:
        from forebay.caches.verify_and_diff import compare

        return self.printed(compare(self._side(self.a), self._side(self.b), progress=self.progress))

    def _side(self, text: str) -> Side:
        """Returns what a cache, a URL or a config is compared by; a config may have no cache yet."""
        from forebay.caches.verify_and_diff import Side
        from forebay.steps.recipe import recipe_of
        from forebay.store.cache import open_cache
        from forebay.store.lookup import find_cache

        found, settings = self.named(text), read_remote(self.set)
        if not isinstance(found, str):
            config, recipe = found, recipe_of(found)
            sealed = find_cache(config, recipe).found
            if sealed is None:
                return Side(name=text, recipe=recipe.document)
            found, settings = sealed.place, config.remote
        cache = open_cache(found, remote=settings)
        return Side(name=text, recipe=cache.metadata["recipe"], cache=cache)


@command("cache verify")
class VerifyCommand(_RootCommand):
    """Re-hash every byte of caches; ends with 1 where something is wrong, and says what and how to mend it."""

    places: list[str] = argument("CACHE|ROOT|CONFIG", f"{_CACHE}; a root: all of its caches", nargs="*", completes=True)
    all: bool = option("every cache of the root: --cache-root, else ./caches")

    def run(self) -> int:
        from forebay.caches.verify_and_diff import CheckReport, check

        if self.all == bool(self.places):
            raise ConfigError("verify what? Name caches or configs, or all of a root: forebay cache verify --all")
        report = CheckReport()
        for folder, place, config in self._asked():
            report.checked.append(check(folder, place=place, config=config, progress=self.progress))
        self.printed(report)
        return DONE if report.ok else FAILED

    def _asked(self) -> Iterator[tuple[Path, str, str | None]]:
        """Yields folder, name and config of every cache that is to be verified."""
        from forebay.caches.root_items import opened_root
        from forebay.caches.survey import survey
        from forebay.store.lookup import mirrored
        from forebay.store.metadata import root_hint
        from forebay.store.remote.mirror import cache_folder

        settings = read_remote(self.set)
        roots = [self.cache_root or "caches"] if self.all else [text for text in self.places if root_hint(Path(text))]
        for named in roots:
            with opened_root(named, settings) as root:
                places = [f"{root.place}/{item.name}" for item in survey(root).caches]
            if not places:
                raise CacheNotFoundError(f"no cache is in {root.place}; name a cache root: --cache-root DIR")
            yield from ((cache_folder(place, settings), place, None) for place in places)
        for text in (text for text in self.places if text not in roots):
            found = self.named(text)
            if isinstance(found, str):
                yield cache_folder(found, settings), found, None
            else:
                sealed = self.sealed(found)
                yield mirrored(sealed, found.remote).folder, sealed.place, found.named
