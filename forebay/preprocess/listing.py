"""The raw data of a config as the build sees it: its files by content, the rows that are candidates, and the key.

What `forebay key` says: the key of a config, its cache, and how the nearest one differs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.errors import BuildError
from forebay.preprocess.pool import Pool
from forebay.preprocess.sources.rows import Manifest
from forebay.preprocess.sources.speech.listing import read_rows
from forebay.steps.recipe import AnyRecipe, recipe_of
from forebay.store.key import SourceDigest, cache_key
from forebay.store.lookup import find_cache
from forebay.store.memo import SIZE, Memo
from forebay.store.source_files import SourceFile, StoredSource

logger = logging.getLogger(__name__)


_LISTINGS = 3
"""Times that sources are listed where they change meanwhile."""


class Mapper(Protocol):
    """Runs a function over items, in order: the built-in way or over processes."""

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Sequence[Any]:
        """Returns `function(item)` of every item."""
        ...


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a build starts from. hashes: xxh3-128 by file, ABSENT where a file cannot be opened. key: of the cache to be."""

    recipe: AnyRecipe
    manifest: Manifest
    hashes: Sequence[str]
    key: str

    @property
    def rows(self) -> pa.Table:
        """Candidate samples, see `Manifest`."""
        return self.manifest.rows

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """Every file whose content defines the samples."""
        return self.manifest.files

    def sources(self) -> list[StoredSource]:
        """Returns the files as the sealed cache remembers them."""
        return [
            StoredSource(file.name, file.entry, file.listed, digest, -1 if file.stat is None else file.stat[SIZE])
            for file, digest in zip(self.files, self.hashes, strict=True)
        ]


def resolve(config: Config, recipe: AnyRecipe, memo: Memo, mapper: Mapper) -> Listing:
    """Returns the listing of a config, whose recipe this is; hashes the files that the memo does not know.

    Raises ConfigError or ManifestError where the config or its manifest cannot be used, BuildError where a file goes on
    changing while it is read.
    """
    manifest = _hashed_manifest(config, memo, mapper)
    hashes = [file.xxh3_128 for file in manifest.files]
    return Listing(recipe=recipe, manifest=manifest, hashes=hashes, key=cache_key(recipe.key, _digests(manifest)))


def known_key(config: Config, recipe: AnyRecipe, memo: Memo, mapper: Mapper, *, may_hash: bool) -> str | None:
    """Returns the key that a build would give, or None where a file would have to be hashed and may not be."""
    manifest = _manifest(config, mapper)
    if not may_hash and any(memo.known(file.path) is None for file in _present(manifest)):
        return None
    return cache_key(recipe.key, _digests(_hashed_manifest(config, memo, mapper, listed=manifest)))


def _hashed_manifest(config: Config, memo: Memo, mapper: Mapper, *, listed: Manifest | None = None) -> Manifest:
    """Returns a manifest with the hash of every file that is there: of the very bytes that were read for it.

    A file whose stat is another one when it is hashed than it was before it was read may have had other bytes then: all is
    listed again, so that rows, places and texts are of the bytes that the key names.

    listed: the manifest, where it was listed already.
    """
    for _ in range(_LISTINGS):
        manifest, listed = listed or _manifest(config, mapper), None
        files, moved = _with_hashes(manifest, memo, mapper)
        if moved is None:
            return replace(manifest, files=files)
        logger.warning("%s was changed while it was listed: it is listed again", moved)
    raise BuildError(
        f"{moved} changed each of {_LISTINGS} times that it was listed; wait until nothing writes to it, then run: "
        f"forebay preprocess {config.path}"
    )


def _with_hashes(manifest: Manifest, memo: Memo, mapper: Mapper) -> tuple[tuple[SourceFile, ...], str | None]:
    """Returns the files of a manifest with their hashes, and which is not what it was before it was listed, if one is."""
    present = _present(manifest)
    try:
        found = memo.hashed([file.path for file in present], map_=mapper.map)
    except FileNotFoundError as err:
        return (), str(err.filename)
    files = list(manifest.files)  # those that are absent stay without a hash
    numbers = np.setdiff1d(np.arange(len(files)), manifest.absent)
    for number, hashed in zip(numbers.tolist(), found, strict=True):
        if hashed.stat != files[number].stat:
            return (), str(files[number].path)
        files[number] = replace(files[number], xxh3_128=hashed.xxh3_128)
    return tuple(files), None


def _present(manifest: Manifest) -> list[SourceFile]:
    absent = set(manifest.absent)
    return [file for number, file in enumerate(manifest.files) if number not in absent]


def _manifest(config: Config, mapper: Mapper) -> Manifest:
    if config.vision is None:
        return read_rows(config.source, cache_root=config.cache_root, map_=mapper.map)
    from forebay.preprocess.vision.headers import list_vision

    return list_vision(config, map_=mapper.map)


def narrow(rows: pa.Table, files: Sequence[SourceFile]) -> tuple[tuple[SourceFile, ...], pa.Table]:
    """Returns the files that rows use, and a copy of the rows with `file` renumbered to them.

    A copy: a slice keeps the whole table that it was cut from, and its pickle sends all of it.
    """
    used, inverse = np.unique(rows["file"].to_numpy(), return_inverse=True)
    index = rows.column_names.index("file")
    taken = rows.take(pa.array(np.arange(len(rows))))
    return tuple(files[i] for i in used.tolist()), taken.set_column(index, "file", pa.array(inverse, pa.int32()))


def _digests(manifest: Manifest) -> list[SourceDigest]:
    names = [os.fsencode(file.name).decode("utf-8", "backslashreplace") for file in manifest.files]
    return [SourceDigest(name=name, xxh3_128=file.xxh3_128) for name, file in zip(names, manifest.files, strict=True)]


def explain(config: Config, *, may_hash: bool) -> dict[str, Any]:
    """Returns the JSON document of `forebay key`; `key` is None where a source would have to be hashed and may not be.

    Raises ConfigError or ManifestError where the config or its manifest cannot be used.
    """
    memo = Memo(config.cache_root)
    recipe = recipe_of(config)
    lookup = find_cache(config, recipe, may_hash=may_hash, memo=memo)
    if lookup.found is not None:
        key: str | None = lookup.found.key
    else:
        with Pool(config.run.num_workers or os.cpu_count() or 1) as pool:
            key = known_key(config, recipe, memo, pool, may_hash=may_hash)
    nearest = None
    if lookup.nearest is not None:
        nearest = {"key": lookup.nearest.key, "differs": lookup.differs}
    return {
        "key": key,
        "recipe_key": recipe.key,
        "cache": str(lookup.found.folder) if lookup.found is not None else None,
        "sealed": lookup.found is not None,
        "nearest": nearest,
    }
