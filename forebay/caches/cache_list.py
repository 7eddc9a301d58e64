"""`forebay cache ls` and `du`: what lies under a root, as documents and as lines; and which caches configs want.

Configs want caches by their recipes and sources, and where they name one outright. What this node keeps of stores has a
bound and makes room by itself.
"""

from __future__ import annotations

import contextlib
import glob
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forebay.caches.kinds import KINDS
from forebay.caches.root_items import RootItem, Sizes, Survey, Told, ago, contents_of, entered, moment, sizes_of
from forebay.config.plan import MixtureSource
from forebay.config.pretrained_folder import tokenizer_digest
from forebay.config.remote import RemoteConfig, is_url, parse_url
from forebay.config.train import EvalConfig
from forebay.config.tree import Config
from forebay.errors import CacheError, ConfigError, ForebayError, ManifestError, RemoteError
from forebay.store.lookup import Sealed
from forebay.store.memo import FILE_NAME as MEMO
from forebay.store.memo import Memo
from forebay.store.remote.node.holdings import MIRRORS
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.raw_sources import naming_urls
from forebay.store.source_comparison import ShownSources, SourceState, compare_sources, is_derived
from forebay.terminal import columns, counted, table, wrapped
from forebay.visible import from_here, human_bytes, printable

SORTS: Mapping[str, Callable[[RootItem], Any]] = {
    "name": lambda item: item.name,
    "used": lambda item: -item.used_ns,
    "made": lambda item: -item.made_ns,
    "size": lambda item: -item.sizes.size_bytes,
    "samples": lambda item: -int(item.document["num_samples"]),
}
_MOST_FOREIGN = 20
_BEHIND = [kind for kind, kept in KINDS.items() if kept.told is not None and kind != "cache"]
"""Kinds that `ls` lists behind the caches."""


@dataclass(frozen=True, kw_only=True)
class ListReport:
    """The report of `forebay cache ls`. wanted: the caches that configs want; None if no config was given."""

    survey: Survey
    wanted: Wanted | None
    sort: str

    def _caches(self) -> list[RootItem]:
        # By name where they are equal otherwise.
        return sorted(self.survey.caches, key=SORTS[self.sort])

    def to_json(self) -> dict[str, Any]:
        """Returns the document of `--json`."""
        wanted = self.wanted
        return {
            "root": self.survey.root.place,
            "caches": [
                {**self._document(item), **({} if wanted is None else {"configs": wanted.configs_of(item.name)})}
                for item in self._caches()
            ],
            **{kind: [self._document(item) for item in self.survey.of(kind)] for kind in _BEHIND},
            "foreign": [{"name": item.name, "problem": item.problem} for item in self.survey.of("foreign")],
            **({} if wanted is None else {"problems": wanted.problems}),
        }

    def _document(self, item: RootItem) -> dict[str, Any]:
        return {
            "name": item.name,
            **self._told(item)[0],
            **_sizes(item.sizes),
            "made": item.made_ns / 1e9,
            "used": item.used_ns / 1e9,
            "used_by": [{"host": use.host, "time": use.used_ns / 1e9} for use in item.uses],
        }

    def _told(self, item: RootItem) -> Told:
        found = {} if self.wanted is None else self.wanted.tokenizers
        tokenizers = {digest: from_here(folder) for digest, folder in found.items()}
        return ({}, "", "") if item.kept.told is None else item.kept.told(item.document, tokenizers)

    def lines(self) -> Iterator[str]:
        """Yields what is printed: its name, what it is, what it was made of, and its configs, for every cache."""
        caches, now, width = self._caches(), time.time(), columns()
        yield f"{counted(len(caches), 'caches')} in {from_here(self.survey.root.place)}: {_amount(_all(caches))}"
        behind = [item for kind in _BEHIND for item in self.survey.of(kind)]
        for item in (*caches, *behind):
            _, number, words = self._told(item)
            used = f"used {ago(now - item.used_ns / 1e9)}" if item.is_used else "not used yet"
            facts = [*([number] if number else []), _amount(item.sizes), used]
            yield printable(item.name)
            for text in (", ".join(facts), f"{words}; made {moment(item.made_ns)}"):
                yield from [f"  {text}"] if len(text) < width - 2 else wrapped("  ", text)
            if self.wanted is not None and item.kind not in _BEHIND:
                configs, reason = self.wanted.configs_of(item.name), self.wanted.kept.get(item.name)
                shown = ", ".join(map(from_here, configs)) or "none that was named"
                yield from wrapped("  config: ", shown + (f" ({reason})" if reason and not configs else ""))
        foreign = self.survey.of("foreign")
        for item in foreign[:_MOST_FOREIGN]:
            yield f"not a cache: {printable(item.name)}: {printable(item.problem)}"
        if len(foreign) > _MOST_FOREIGN:
            yield f"and {len(foreign) - _MOST_FOREIGN} more that are no caches"
        for config, problem in ({} if self.wanted is None else self.wanted.problems).items():
            yield f"{from_here(config)} cannot be read: {printable(problem)}"


@dataclass(frozen=True, kw_only=True)
class UsageReport:
    """The report of `forebay cache du`. node: the folder where this node keeps shards of stores, and its bytes."""

    survey: Survey
    node: tuple[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the document of `--json`."""
        items = [item for item in self.survey.items if item.kind in KINDS]
        found = {kind: self.survey.of(kind) for kind in KINDS}
        kinds = {kind: {"number": len(of), **_sizes(_all(of))} for kind, of in found.items() if of}
        return {
            "root": self.survey.root.place,
            **_sizes(_all(items)),
            "kinds": kinds,
            "items": [{"name": item.name, "kind": item.kind, **_sizes(item.sizes)} for item in items],
            **({} if self.node is None else {"node": {"folder": self.node[0], "size_bytes": self.node[1]}}),
        }

    def lines(self) -> Iterator[str]:
        """Yields what is printed: a line a cache, a line a kind, and the sum."""
        caches = sorted(self.survey.caches, key=SORTS["size"])
        yield from table(["caches", "own", "shared"], [_row(item.sizes, item.name) for item in caches], left=1)
        by_kind = [(kept.words, found) for kind, kept in KINDS.items() if (found := self.survey.of(kind))]
        rows = [_row(_all(found), f"{words}, {len(found)}") for words, found in by_kind]
        rows.append(_row(_all([item for item in self.survey.items if item.kind in KINDS]), "together"))
        yield from table([from_here(self.survey.root.place), "own", "shared"], rows, left=1)
        yield "own: what removing it frees; shared: files that something else has links to"
        if self.node is not None:
            yield (
                f"this node keeps {human_bytes(self.node[1])} of stores in {from_here(self.node[0])}, for all roots; "
                "remote.cache_size_gb is its bound"
            )


def _all(items: Sequence[RootItem]) -> Sizes:
    return sizes_of(file for item in items for file in item.files)


def _sizes(sizes: Sizes) -> dict[str, int]:
    return {
        "size_bytes": sizes.size_bytes,
        "exclusive_bytes": sizes.exclusive_bytes,
        "shared_bytes": sizes.shared_bytes,
    }


def _row(sizes: Sizes, name: str) -> list[str]:
    return [printable(name), human_bytes(sizes.exclusive_bytes), human_bytes(sizes.shared_bytes)]


def _amount(sizes: Sizes) -> str:
    shared = f" ({human_bytes(sizes.shared_bytes)} of it shared)" if sizes.shared_bytes else ""
    return f"{human_bytes(sizes.size_bytes)}{shared}"


def node_usage(settings: RemoteConfig) -> tuple[str, int] | None:
    """Returns the folder of what this node keeps of stores, and its bytes; None where there is none."""
    folder = Path(os.path.realpath(settings.folder / MIRRORS))
    with contextlib.suppress(OSError):
        with entered(folder) as descriptor:
            found = contents_of(descriptor, device=os.fstat(descriptor).st_dev)
        return str(folder), sizes_of(found.files).size_bytes
    return None


_DEEPEST = 8
"""Configs that name configs that name configs; a circle ends here too."""


@dataclass(kw_only=True)
class Wanted:
    """The caches, plans and texts that configs want of a root.

    found: names of caches that a config is read from, by the config. kept: also those whose shards a build of a config
    would link, or of which raw data would have to be hashed to know, with the reason. problems: of configs that cannot
    be read. tokenizers: folders by digest.
    """

    found: dict[str, list[str]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    tokenizers: dict[str, str] = field(default_factory=dict)

    def configs_of(self, name: str) -> list[str]:
        """Returns the configs that are read from a cache."""
        return [config for config, names in self.found.items() if name in names]

    def reason(self, name: str) -> str | None:
        """Returns why a cache is wanted, None where it is not."""
        configs = self.configs_of(name)
        return f"wanted by {', '.join(configs[:3])}" if configs else self.kept.get(name)


def config_files(named: Iterable[str], *, below: str | None) -> list[str]:
    """Returns the files of configs that were named, and those of a folder or glob. Raises ConfigError."""
    files = list(named)
    if below is not None:
        pattern = os.path.join(glob.escape(below), "*.toml") if os.path.isdir(below) else below
        if not (found := sorted(glob.glob(pattern, recursive=True))):
            raise ConfigError(f"--configs {below}: no TOML file is there; name a folder of configs, or a glob")
        files += found
    return list(dict.fromkeys(files))


def wanted_by(files: Sequence[str], survey: Survey) -> Wanted:
    """Returns what configs want of a root. What cannot be read is named in `problems`; nothing is hashed."""
    from forebay.steps.recipe import load_config  # not at import: a root without configs is listed without the steps

    wanted = Wanted()
    for file in files:
        try:
            _add(wanted, file, load_config(file), survey, depth=0)
        except (ForebayError, OSError) as err:
            wanted.problems[file] = str(err)
    return wanted


def _add(wanted: Wanted, file: str, config: Config, survey: Survey, *, depth: int) -> None:
    """Adds what a config is read from, and what the configs that it names are read from."""
    from forebay.steps.recipe import load_config

    wanted.found.setdefault(file, [])
    if config.text is not None:
        wanted.tokenizers.setdefault(tokenizer_digest(Path(config.text.tokenizer)), config.text.tokenizer)
    others: list[MixtureSource | EvalConfig] = [*config.mixture.source, *config.train.eval]
    for place in (config.loader.cache_dir, *(other.cache for other in (*others, *config.augment))):
        if place is not None and (name := _name_of(place, survey)) is not None:
            wanted.found[file].append(name)
    if config.loader.cache_dir is None:
        _look(wanted, file, config, survey)
    for other in others:
        if other.config is not None and depth < _DEEPEST:
            _add(wanted, file, load_config(other.config), survey, depth=depth + 1)


def _name_of(place: str, survey: Survey) -> str | None:
    """Returns the name of the cache at a place if that lies directly under the root."""
    if is_url(place):
        url = parse_url(place)
        return url.name if str(url.parent) == survey.origin else None
    path = Path(os.path.realpath(place))
    return path.name if path.parent == survey.root.folder else None


def _look(wanted: Wanted, file: str, config: Config, survey: Survey) -> None:
    """Adds the caches of a config's recipe: that of its sources, or else all that a build of it would begin from."""
    from forebay.steps.recipe import recipe_of

    key = recipe_of(config).key
    of_recipe = [item for item in survey.caches if item.document["recipe_key"] == key]
    states = {item.name: _state(config, item, survey) for item in of_recipe if not is_derived(item.document["recipe"])}
    same = [name for name, state in states.items() if state == "same"]
    if not same and "changed" not in states.values():  # raw data that is not here: the cache serves without it
        same = [name for name, state in states.items() if state == "absent"]
    wanted.found[file] += same
    for name, state in states.items():
        if state == "unknown":
            wanted.kept[name] = f"of the settings of {file}; whether of its raw data would have to be hashed"
        elif not same:
            wanted.kept[name] = f"of the settings of {file}, whose raw data changed: a build links its shards"


def _state(config: Config, item: RootItem, survey: Survey) -> SourceState:
    folder = survey.root.folder / item.name
    config = replace(config, run=replace(config.run, cache_root=str(survey.root.folder)))
    memo = Memo.of(config)
    memo.add_file(folder / MEMO)
    sealed = Sealed(folder=folder, metadata=dict(item.document))
    forget()
    try:
        with naming_urls():
            return compare_sources(ShownSources(config), sealed.sources(), memo, may_hash=False)[0]
    except (CacheError, ManifestError, RemoteError, OSError, LookupError, TypeError, ValueError):
        return "unknown"
