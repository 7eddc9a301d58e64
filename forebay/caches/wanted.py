"""Which caches of a root configs want: by their recipes and sources, and where they name one outright."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forebay.caches.root_items import RootItem, Survey
from forebay.config.pretrained_folder import tokenizer_digest
from forebay.config.remote import is_url, parse_url
from forebay.config.train import EvalConfig
from forebay.config.tree import Config, MixtureSource
from forebay.errors import CacheError, ConfigError, ForebayError, ManifestError, RemoteError
from forebay.steps.recipe import load_config, recipe_of
from forebay.store.lookup import Sealed
from forebay.store.memo import FILE_NAME as MEMO
from forebay.store.memo import Memo
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.raw_sources import naming_urls
from forebay.store.source_files import SourceState, compare_sources, is_derived

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
    wanted = Wanted()
    for file in files:
        try:
            _add(wanted, file, load_config(file), survey, depth=0)
        except (ForebayError, OSError) as err:
            wanted.problems[file] = str(err)
    return wanted


def _add(wanted: Wanted, file: str, config: Config, survey: Survey, *, depth: int) -> None:
    """Adds what a config is read from, and what the configs that it names are read from."""
    wanted.found.setdefault(file, [])
    if config.text is not None:
        wanted.tokenizers.setdefault(tokenizer_digest(Path(config.text.tokenizer)), config.text.tokenizer)
    others: list[MixtureSource | EvalConfig] = [*config.mixture.source, *config.train.eval]
    named = [config.loader.cache_dir, *(other.cache for other in others)]
    for place in named:
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
            return compare_sources(config, sealed.sources(), memo, may_hash=False)[0]
    except (CacheError, ManifestError, RemoteError, OSError, LookupError, TypeError, ValueError):
        return "unknown"
