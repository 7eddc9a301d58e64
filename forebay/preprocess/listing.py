"""The raw data of a config, by content, and the key: what a build starts from, and what `forebay key` says."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from forebay.config.tree import Config
from forebay.errors import BuildError
from forebay.steps.form import promises
from forebay.steps.recipe import Recipe, recipe_of
from forebay.store.key import SourceDigest, cache_key, content_of, explained
from forebay.store.layout import Array
from forebay.store.lookup import find_cache
from forebay.store.memo import AnyPath, Memo, stats_of
from forebay.store.remote.raw.arriving import run_on_sources
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.raw_sources import is_hash_known, localized, naming_urls, place_of
from forebay.task_map import Map
from forebay.visible import printable

if TYPE_CHECKING:
    from forebay.preprocess.groups import Groups, Listing
    from forebay.rows.manifest import Manifest
    from forebay.rows.source_table import SourceFiles

R = TypeVar("R")
logger = logging.getLogger(__name__)
_PIECE_FILES = 16_384
_LISTINGS = 3
"""Times that sources are listed where they change meanwhile."""


def listed(config: Config, groups: Groups, *, map_: Map = map, is_hashed: bool = False) -> Manifest:
    """Returns the eligible rows of a config, every place known, and what was left out.

    is_hashed: all files will be hashed, so those of a store are downloaded as a whole when they are first read.
    Raises ConfigError or ManifestError where the config or its manifest cannot be used.
    """
    from forebay.rows.list_rows import list_rows  # not at import: a cache that is sealed is known without its rows
    from forebay.rows.meanings.own import meaning_of

    forget()
    source, meaning = localized(config).source, meaning_of(config)
    manifest = list_rows(source, meaning, cache_root=config.cache_root, map_=map_, is_hashed=is_hashed)
    for doubt in meaning.doubts(config.source, manifest.rows):
        logger.warning("classes: %s", doubt)
    return groups.checked(manifest)


def resolve(config: Config, memo: Memo, map_: Map, *, recipe: Recipe) -> Listing:
    """Returns the listing of a config; hashes the files that the memo does not know.

    Raises ConfigError or ManifestError where the config or its manifest cannot be used, BuildError where a file goes on
    changing while it is read.
    """
    from forebay.preprocess.groups import Groups, Listing
    from forebay.rows.columns_aside import free_memory

    groups = Groups.of(config, recipe)
    manifest = _hashed_manifest(config, memo, map_, groups=groups)
    key = cache_key(recipe.key, _digests(manifest))
    free_memory()
    return Listing(groups=groups.keeping(manifest.rows), manifest=manifest, key=key)


def known_key(config: Config, memo: Memo, map_: Map, *, recipe: Recipe, may_hash: bool) -> str | None:
    """Returns the key that a build would give, or None where a file would have to be hashed and may not be."""
    from forebay.preprocess.groups import Groups

    groups = Groups.of(config, recipe)
    manifest = listed(config, groups, map_=map_, is_hashed=True)
    if not may_hash and not _all_known(manifest, memo):
        return None
    manifest = _hashed_manifest(config, memo, map_, groups=groups, known=manifest)
    return cache_key(recipe.key, _digests(manifest))


def _hashed_manifest(
    config: Config, memo: Memo, map_: Map, *, groups: Groups, known: Manifest | None = None
) -> Manifest:
    """Returns a manifest with the hash of every file that is there: of the very bytes that were read for it.

    A file whose stat is another one when it is hashed than it was before it was read may have had other bytes then: all
    is listed again, so that rows, places and texts are of the bytes that the key names.

    known: the manifest, where it was listed already.
    """
    for _ in range(_LISTINGS):
        manifest, known = known or listed(config, groups, map_=map_, is_hashed=True), None
        files, moved = _with_hashes(manifest, memo, map_)
        if moved is None:
            return replace(manifest, files=files)
        logger.warning("%s was changed while it was listed: it is listed again", moved)
    raise BuildError(
        f"{moved} changed each of {_LISTINGS} times that it was listed; wait until nothing writes to it, then run: "
        f"forebay preprocess {config.named}",
        code="FB303",
    )


def _with_hashes(manifest: Manifest, memo: Memo, map_: Map) -> tuple[SourceFiles, str | None]:
    """Returns the files of a manifest with their hashes, and one that has changed since it was listed, if any."""
    from forebay.rows.source_table import SourceFiles

    files = SourceFiles.of(manifest.files)
    present = _present(manifest)  # those that are absent stay without a hash
    own = files if len(present) == len(files) else files.take(present)
    digests, moved, at = np.zeros(len(own), "V16"), None, 0
    try:
        for piece in own.blocks(max(_PIECE_FILES, len(own) // 8)):  # the memo is written after each
            stats, digests[at : at + len(piece)] = memo.hashed(piece.paths, map_=_arriving(map_, own))
            is_moved = (stats != piece.stats).any(axis=1) | ~piece.has_stat
            moved = moved or next((str(piece[number].path) for number in np.flatnonzero(is_moved)[:1].tolist()), None)
            at += len(piece)
    except FileNotFoundError as err:
        return files, str(err.filename)
    return (files, moved) if moved else (files.with_digests(present, digests), None)


def _arriving(map_: Map, files: SourceFiles) -> Map:
    """Returns a map over paths that keeps those of a store in this process: their download, ahead, hashes them."""
    if not files.is_of_store.any():
        return map_

    def mapped(function: Callable[[Sequence[AnyPath]], R], tasks: Sequence[Sequence[AnyPath]]) -> list[R]:
        paths = [path for task in tasks for path in task]
        of_store = [[path] for path in paths if place_of(path) is not None]
        others = [[path] for path in paths if place_of(path) is None]
        found = run_on_sources(map, function, of_store, _unhashed, is_remote=True, total=len(of_store))
        made = zip([*of_store, *others], [*found, *map_(function, others)], strict=True)
        results = {task[0]: result for task, result in made}
        return [results[path] for path in paths]

    return cast(Map, mapped)


def _unhashed(task: Sequence[AnyPath]) -> list[str]:
    return [os.fspath(path) for path in task if not is_hash_known(path)]


def _present(manifest: Manifest) -> Array:
    """Returns the numbers of the files that are there: a link in a folder may lead to none."""
    from forebay.rows.source_table import SourceFiles

    files = SourceFiles.of(manifest.files)
    return np.setdiff1d(np.flatnonzero(files.has_stat | ~files.is_listed), np.array(manifest.absent, np.int64))


def _all_known(manifest: Manifest, memo: Memo) -> bool:
    """Whether no file has to be hashed."""
    from forebay.rows.source_table import SourceFiles

    paths = SourceFiles.of(manifest.files).take(_present(manifest)).paths
    stats, is_there = stats_of(paths)
    return bool((is_there & memo.known_of(paths, stats)[1]).all())


def _digests(manifest: Manifest) -> Iterator[SourceDigest]:
    from forebay.rows.source_table import SourceFiles

    for part in SourceFiles.of(manifest.files).blocks():
        for name, found in zip(part.shown_names, part.hashes, strict=True):
            yield SourceDigest(name=name, xxh3_128=found)


def explain_lines(document: Mapping[str, Any], *, with_nearest: bool) -> Iterator[str]:
    """Yields what `forebay key` prints of the document of `explain`. with_nearest: the nearest cache too."""
    yield f"key:        {document['key'] or 'unknown (a source would have to be hashed)'}"
    yield f"recipe key: {document['recipe_key']}"
    yield f"cache:      {document['cache'] or 'none'}{' (sealed)' if document['sealed'] else ''}"
    nearest = document["nearest"]
    for name, digest in document["models"].items():
        yield f'model:      {name}: digest = "{digest}"'
    if with_nearest:
        for group, promise in document["promises"].items():
            yield f"batches:    {group}: {printable(promise)}"
    if with_nearest and nearest:
        yield f"nearest:    {nearest['key']}"
        for row in nearest["differs"]:
            yield f"  {explained(row)}"


def explain(config: Config, *, may_hash: bool) -> dict[str, Any]:
    """Returns the JSON document of `forebay key`; `key` is None where a source would have to be hashed and may not be.

    Raises ConfigError or ManifestError where the config or its manifest cannot be used.
    """
    memo = Memo.of(config)
    recipe = recipe_of(config)
    with naming_urls():
        lookup = find_cache(config, recipe, may_hash=may_hash, memo=memo)
    if lookup.found is not None:
        key: str | None = lookup.found.key
    else:
        from forebay.preprocess.pool import Pool

        with naming_urls(), Pool(config.run.num_workers or os.cpu_count() or 1) as pool:
            key = known_key(config, memo, pool.map, recipe=recipe, may_hash=may_hash)
    nearest = None
    if lookup.nearest is not None:
        named = [(row, content_of(config, row)) for row in lookup.differs]
        differs = [row if content is None else {**row, "content_of": content} for row, content in named]
        nearest = {"key": lookup.nearest.key, "differs": differs}
    return {
        "key": key,
        "recipe_key": recipe.key,
        "cache": lookup.found.place if lookup.found is not None else None,
        "sealed": lookup.found is not None,
        "nearest": nearest,
        "models": {group.name: group.step.digest for group in recipe.models},
        "promises": {} if lookup.found is None else promises(lookup.found.metadata.get("constants") or {}),
    }
