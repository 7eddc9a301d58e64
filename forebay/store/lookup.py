"""Finding the cache of a config: first by recipe (a miss hashes nothing), then by the content of the sources."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from forebay.config.remote import RemoteConfig, Url, is_url, parse_url
from forebay.config.tree import Config
from forebay.errors import (
    CacheCorruptError,
    CacheError,
    CacheMismatchError,
    CacheNotFoundError,
    RemoteDeniedError,
    RemoteMissingError,
)
from forebay.store.files import TEMPORARY_MARK
from forebay.store.key import SHORT, KeyedRecipe, difference, differences
from forebay.store.memo import FILE_NAME as MEMO_NAME
from forebay.store.memo import Memo
from forebay.store.metadata import check_file, check_found, read_metadata
from forebay.store.remote.mirror import cache_folder
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.raw_sources import is_file, localized
from forebay.store.remote.small_files import RemoteRoot
from forebay.store.source_comparison import (
    ShownSources,
    SourceIndex,
    SourceState,
    compare_derived,
    compare_sources,
    described,
    is_derived,
    path_of,
    source_differences,
    steps_differences,
)
from forebay.store.source_files import ABSENT, StoredSources, leads_out, load_sources
from forebay.terminal import first_of

logger = logging.getLogger(__name__)
CONFINED = "confined"
"""In the metadata of a cache built under `source.confined`: no source lay outside of its manifest's folder."""
SOURCES_NAME = "sources.parquet"
"""The list of its source files beside a cache's metadata.json."""


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A sealed cache under a root, by its metadata alone."""

    folder: Path
    """Of a cache in a store, its mirror on this node."""
    metadata: dict[str, Any]
    url: Url | None = None
    """Where it lies in a store."""

    @property
    def place(self) -> str:
        """The URL or else the folder, by which any node can open the cache."""
        return str(self.folder if self.url is None else self.url)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name if self.url is None else self.url.name

    @property
    def key(self) -> str:
        """The cache's key."""
        return str(self.metadata["key"])

    @property
    def is_derived(self) -> bool:
        """Whether it was made of other caches: then it is only used where it is named."""
        return is_derived(self.metadata["recipe"])

    @property
    def sources_sum(self) -> str | None:
        """The xxh3-128 of the list of its sources, as metadata.json has it."""
        found = self.metadata["files"].get(SOURCES_NAME)
        return None if found is None else str(found["xxh3_128"])

    def sources(self) -> StoredSources:
        """Returns the files it was made of. Raises CacheCorruptError where their list is not what was sealed."""
        path = self.folder / SOURCES_NAME
        if SOURCES_NAME in self.metadata["files"]:
            check_file(path, self.metadata["files"][SOURCES_NAME], verify=True)
        return load_sources(path)


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """The result of a lookup.

    found: the cache to use, or None. state: of its sources; `absent` means that the raw data is not here and the cache
    serves without being compared; `unknown` that a source would have had to be hashed. nearest: the cache whose recipe
    differs least. differs: how, as `{"field", "wanted", "stored"}`.
    """

    recipe: KeyedRecipe
    found: Sealed | None = None
    state: SourceState | None = None
    nearest: Sealed | None = None
    differs: list[dict[str, Any]] = field(default_factory=list)


_RANK: dict[SourceState, int] = {"unknown": 0, "changed": 1, "absent": 2, "other": 3, "same": 4}
"""What is said of several misses: an absent source serves only where no other cache shows that the data changed."""


def sealed_caches(root: Path) -> list[Sealed]:
    """Returns every sealed cache directly under a root, newest first; what cannot be read is logged and left out.

    Those of a URL come from the store too, see `RemoteRoot`: metadata.json alone, until they are `mirrored`.
    """
    remote = RemoteRoot.of(root)
    return [*_sealed_here(root), *(_sealed_there(remote) if remote is not None else ())]


def _sealed_here(root: Path) -> list[Sealed]:
    found: list[tuple[int, Sealed]] = []
    if not root.is_dir():
        return []
    for folder in sorted(root.iterdir()):
        path = folder / "metadata.json"
        # Not `Path.is_file`, which raises where another machine has just removed it.
        if folder.name.startswith(".") or TEMPORARY_MARK in folder.name or not os.path.isfile(path):
            continue
        if (sealed := _read_sealed(folder)) is not None:
            found.append((_sealed_at_ns(path), sealed))
    return [sealed for _, sealed in sorted(found, key=lambda pair: (-pair[0], pair[1].folder.name))]


def _sealed_at_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # replaced since it was read
        return 0


def _sealed_there(remote: RemoteRoot) -> list[Sealed]:
    found = (_read_sealed(folder, url=url) for url, folder in remote.caches())
    return [sealed for sealed in found if sealed is not None]


def _read_sealed(folder: Path, *, url: Url | None = None) -> Sealed | None:
    try:
        metadata = read_metadata(folder, is_exact=False)
        if "recipe" not in metadata:
            return None
        check_found(folder, metadata)
    except CacheError as err:
        logger.warning("leaving out %s", err if url is None else f"{url}: {err}")
        return None
    return Sealed(folder=folder, metadata=metadata, url=url)


def mirrored(sealed: Sealed, settings: RemoteConfig) -> Sealed:
    """Returns a cache with all but its shards on this node. Raises RemoteError, CacheError."""
    if sealed.url is None:
        return sealed
    folder = cache_folder(str(sealed.url), settings)
    return replace(sealed, folder=folder, metadata=read_metadata(folder))


def find_cache(config: Config, recipe: KeyedRecipe, *, may_hash: bool = True, memo: Memo | None = None) -> Lookup:
    """Returns the cache whose key is the config's, or the nearest cache and how it differs. recipe: of the config.

    Caches are filtered by recipe first. Of those left, sources are compared by the memo: a stat a file, and a read only
    for a file that the memo does not know (never where `may_hash` is false). `loader.cache_dir` names a cache outright;
    its recipe and sources are compared all the same: of a merge or a subset the steps of the recipe, and those sources
    that the config shows. Raises CacheMismatchError where `loader.cache_dir` is another recipe, or a merge or a subset
    of sources that have changed. A root in a store is asked where this node has built no such cache; RemoteError where
    it does not answer.
    """
    forget()
    search = _Search(config=config, recipe=recipe, may_hash=may_hash, memo=memo)
    for sealed in _places(config, recipe):
        search.look_at(sealed)
        if search.found is not None and search.found.metadata.get("codec") == config.codec:
            break
    return search.result()


def _places(config: Config, recipe: KeyedRecipe) -> Iterator[list[Sealed]]:
    """Yields the caches that may be meant, what is on this machine first: most often nothing else needs to be asked."""
    if config.loader.cache_dir:
        named = _named_cache(config)
        if not _answers(named, recipe):
            raise CacheMismatchError(_mismatch(named, recipe), code="FB405")
        yield [named]
        return
    yield _sealed_here(config.cache_root)
    if (remote := RemoteRoot.of_config(config)) is not None:
        yield _sealed_there(remote)


@dataclass(kw_only=True)
class _Search:
    """The state of a search for the cache of a config. found: a cache of its sources, perhaps in another codec."""

    config: Config
    recipe: KeyedRecipe
    may_hash: bool
    memo: Memo | None
    found: Sealed | None = None
    seen: list[Sealed] = field(default_factory=list)
    misses: list[tuple[SourceState, Sealed]] = field(default_factory=list)

    @cached_property
    def shown(self) -> ShownSources:
        """The files of the config."""
        return ShownSources(self.config)

    @cached_property
    def index(self) -> SourceIndex:
        """The facts of the lists of sources under the root."""
        return SourceIndex(self.config.cache_root, self.shown, self.memo_of())

    def memo_of(self) -> Memo:
        """Returns the memo of the root."""
        self.memo = Memo.of(self.config) if self.memo is None else self.memo
        return self.memo

    def look_at(self, sealed: Sequence[Sealed]) -> None:
        """Compares those of the recipe until one has the sources of the config."""
        # Any layout has the same values; that of the config is read as its user means it to be.
        ordered = sorted(sealed, key=lambda cache: cache.metadata.get("codec") != self.config.codec)
        self.seen += [cache for cache in ordered if not cache.is_derived]
        for cache in ordered:
            if (looked := self._state(cache)) is None:
                continue
            state, here = looked
            if state == "same":
                is_better = self.found is None or here.metadata.get("codec") == self.config.codec
                self.found = here if is_better else self.found
                break
            self.misses.append((state, here))
            logger.debug("%s: sources are %s", here.place, state)
        if "index" in self.__dict__:
            self.index.save()

    def _state(self, cache: Sealed) -> tuple[SourceState, Sealed] | None:
        """Returns how the sources of a cache are, and the cache; None of one that is not meant, or cannot be used.

        One whose sources were looked at is on this node.
        """
        config = self.config
        if not _answers(cache, self.recipe) or (cache.is_derived and not config.loader.cache_dir):
            return None
        is_indexed = not (cache.is_derived or config.source.confined or self.shown.is_unlisted)
        name = cache.sources_sum if is_indexed else None
        if name is not None and self._rules_out(name):
            return "changed", cache
        if (found := _readable(config, cache)) is None:
            return None
        here, stored = found
        if name is not None:
            self.index.add(name, stored)
        state, names = self._compared(here, stored)
        if cache.is_derived:
            logger.info("loader.cache_dir %s is %s", cache.place, described(cache.metadata["recipe"]))
        if cache.is_derived and state == "changed":
            raise CacheMismatchError(_stale(cache, names), code="FB405")
        return state, here

    def _rules_out(self, name: str) -> bool:
        try:
            return self.index.rules_out(name)
        except (RemoteDeniedError, RemoteMissingError):  # whoever compares the sources says it
            return False

    def _compared(self, cache: Sealed, stored: StoredSources) -> tuple[SourceState, list[str]]:
        memo = self.memo_of()
        memo.add_file(cache.folder / MEMO_NAME)
        if cache.is_derived:
            return compare_derived(self.config, stored, memo, may_hash=self.may_hash)
        return compare_sources(self.shown, stored, memo, may_hash=self.may_hash)

    def result(self) -> Lookup:
        if self.found is not None:
            return Lookup(recipe=self.recipe, found=self.found, state="same")
        if not self.misses or self.memo is None:
            nearest = _nearest(self.config, self.recipe, self.seen)
            differs = differences(self.recipe.document, nearest.metadata["recipe"]) if nearest else []
            return Lookup(recipe=self.recipe, nearest=nearest, differs=differs)
        # Sets of one recipe share a root, training and test data say: what has the config's name is meant first.
        name = self.config.name
        state, cache = min(self.misses, key=lambda miss: (_RANK[miss[0]], miss[1].metadata["name"] != name))
        if state == "absent":
            return Lookup(recipe=self.recipe, found=cache, state=state)
        differs = [{"field": "sources", "wanted": "not hashed", "stored": cache.key[:SHORT]}]
        state = "changed" if state == "other" else state
        if state == "changed" and (found := _readable(self.config, cache)) is not None:
            names = self._compared(*found)[1]
            differs = source_differences(self.config, found[1], names, self.memo)
        return Lookup(recipe=self.recipe, nearest=cache, differs=differs, state=state)


def not_found_message(config: Config, lookup: Lookup) -> str:
    """Returns what to tell a user without a cache: key, folder searched, nearest cache, how it differs, what to run."""
    text = f"no cache for recipe {lookup.recipe.key[:SHORT]} in {config.remote_root or config.cache_root}"
    if lookup.nearest is not None:
        fields = "; ".join(difference(config, row) for row in lookup.differs[:4])
        fields += f"; and {len(lookup.differs) - 4} more" if len(lookup.differs) > 4 else ""
        text += f"; nearest is {lookup.nearest.name}" + (f", {fields}" if fields else "")
    return f"{text}; run: forebay preprocess {config.named}"


def require(config: Config, lookup: Lookup) -> Sealed:
    """Returns the cache that was found. Raises CacheNotFoundError, which names the nearest one, where there is none."""
    if lookup.found is None:
        raise CacheNotFoundError(not_found_message(config, lookup))
    return lookup.found


def _named_cache(config: Config) -> Sealed:
    place = str(config.loader.cache_dir)
    url = parse_url(place) if is_url(place) else None
    folder = cache_folder(place, config.remote)
    if not folder.is_dir():
        raise CacheNotFoundError(f"loader.cache_dir {folder} is not a folder; run: forebay preprocess {config.named}")
    metadata = read_metadata(folder)
    if "recipe" not in metadata:
        raise CacheMismatchError(f"loader.cache_dir {place} is not a cache: its metadata.json has no recipe")
    check_found(folder, metadata)
    return Sealed(folder=folder, metadata=metadata, url=url)


def _readable(config: Config, cache: Sealed) -> tuple[Sealed, StoredSources] | None:
    """Returns a cache on this node with its sources; None of a damaged one, so that a build makes it again."""
    try:
        here = mirrored(cache, config.remote)
        # As it was written, to the letter: who opens a cache compares that too, and a root of many has no time for it.
        stored = replace(here, metadata=read_metadata(here.folder)).sources()
        _require_confined(config, here, stored)
    except (CacheCorruptError, CacheMismatchError, CacheNotFoundError) as err:
        if config.loader.cache_dir:
            raise
        logger.warning("leaving out %s", err)
        return None
    return here, stored


def _answers(cache: Sealed, recipe: KeyedRecipe) -> bool:
    """Whether a cache is of a recipe; of one that was made of other caches the steps say so."""
    if cache.is_derived:
        return not steps_differences(recipe.document, cache.metadata["recipe"])
    return bool(cache.metadata["recipe_key"] == recipe.key)


def _require_confined(config: Config, cache: Sealed, sources: StoredSources) -> None:
    """Raises CacheMismatchError under `source.confined` for a cache that may hold files from elsewhere."""
    config = localized(config) if config.source.confined else config
    if config.source.confined and cache.is_derived and cache.metadata.get(CONFINED) is not True:
        raise CacheMismatchError(
            f"{cache.place}: it was made of caches of which some were built without source.confined, so nothing says "
            "where their sources lay; build those with it, or set source.confined = false for caches that you trust",
            code="FB206",
        )
    for source in sources if config.source.confined else ():
        path = path_of(config, source)
        if source.xxh3_128 == ABSENT:
            continue
        if path is not None and (real := leads_out(path, config.source.places[source.entry])) is not None:
            raise CacheMismatchError(
                f"{cache.place}: it was made of {source.name!r}, which is {real!r}; source.confined allows no "
                "place outside of the manifest's folder: move the file there, or set source.confined = false for a "
                "cache that you trust",
                code="FB206",
            )
        if (path is None or not is_file(path)) and cache.metadata.get(CONFINED) is not True:
            raise CacheMismatchError(
                f"{cache.place}: {source.name!r} is not here, and the cache was built without source.confined, so "
                "nothing says where it lay; put the raw data back, or set source.confined = false for a cache that "
                "you trust",
                code="FB206",
            )


def failures_of(config: Config, cache: Sealed) -> str | None:
    """Returns what to say of a cache more of whose samples failed than `run.max_failed_share` allows today, else None.

    What the listing excluded counts as samples here, so that no cache is named that a build would seal.
    """
    failed, excluded = (cache.metadata.get(name, {}) for name in ("failed", "excluded"))
    count, share = sum(failed.values()), config.run.max_failed_share
    rows = cache.metadata["num_samples"] + count + sum(excluded.values())
    if count <= share * rows:
        return None
    reasons = ", ".join(f"{reason} {number}" for reason, number in failed.items())
    return (
        f"{cache.place} was sealed with {count} of {rows} samples bad ({reasons}), and run.max_failed_share = {share} "
        f"allows {int(share * rows)}; they are listed in {cache.folder / 'rejected.jsonl'}; mend them, or allow as "
        f"many: forebay preprocess {config.named} --set run.max_failed_share={min(1.0, 2 * count / rows):.3g}"
    )


def _mismatch(cache: Sealed, recipe: KeyedRecipe) -> str:
    versions = {"field": "recipe_key", "wanted": recipe.key[:SHORT], "stored": cache.metadata["recipe_key"][:SHORT]}
    compare = steps_differences if cache.is_derived else differences
    first = next(iter(compare(recipe.document, cache.metadata["recipe"])), versions)
    return (
        f"loader.cache_dir {cache.place}: {first['field']} is {first['stored']!r} in the cache, "
        f"{first['wanted']!r} in the config; change the config, or name another cache"
    )


def _stale(cache: Sealed, names: Sequence[str]) -> str:
    return (
        f"loader.cache_dir {cache.place}: {first_of(names, 4)} by source.manifest is not what this cache was made of "
        f"(it is {described(cache.metadata['recipe'])}); build the caches again and make this one of them again, or "
        "name the manifests that it was made of"
    )


def _nearest(config: Config, recipe: KeyedRecipe, sealed: Sequence[Sealed]) -> Sealed | None:
    def distance(cache: Sealed) -> tuple[bool, int]:
        return cache.metadata["name"] != config.name, len(differences(recipe.document, cache.metadata["recipe"]))

    return min(sealed, key=distance, default=None)
