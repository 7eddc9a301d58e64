"""The raw data of a config as the build sees it: its files by content, the rows that are candidates, and the key."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from forebay.config import Config
from forebay.preprocess.sources import Manifest, read_rows
from forebay.store.key import RecipeKey, SourceDigest, cache_key, recipe_key
from forebay.store.memo import Memo
from forebay.store.sources import ABSENT, SourceFile, StoredSource


class Mapper(Protocol):
    """Runs a function over items, in order: the built-in way or over processes."""

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Sequence[Any]:
        """Returns `function(item)` of every item."""
        ...


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a build starts from. hashes: xxh3-128 by file, ABSENT where a file cannot be opened. key: of the cache to be."""

    recipe: RecipeKey
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
            StoredSource(
                file.name, file.entry, file.listed, digest, -1 if digest == ABSENT else file.path.stat().st_size
            )
            for file, digest in zip(self.files, self.hashes, strict=True)
        ]


def resolve(config: Config, memo: Memo, mapper: Mapper) -> Listing:
    """Returns the listing of a config; hashes the files that the memo does not know.

    Raises ConfigError or ManifestError where the config or its manifest cannot be used.
    """
    recipe = recipe_key(config)
    manifest = _manifest(config, mapper)
    hashes = _hashes(manifest, memo, mapper)
    key = cache_key(recipe.key, _digests(manifest, hashes))
    return Listing(recipe=recipe, manifest=manifest, hashes=hashes, key=key)


def known_key(config: Config, memo: Memo, mapper: Mapper, *, may_hash: bool) -> str | None:
    """Returns the key that a build would give, or None where a file would have to be hashed and may not be."""
    manifest = _manifest(config, mapper)
    present = [file.path for number, file in enumerate(manifest.files) if number not in manifest.absent]
    if not may_hash and any(memo.known(path) is None for path in present):
        return None
    return cache_key(recipe_key(config).key, _digests(manifest, _hashes(manifest, memo, mapper)))


def _manifest(config: Config, mapper: Mapper) -> Manifest:
    if config.vision is None:
        return read_rows(config.source, cache_root=config.cache_root, map_=mapper.map)
    from forebay.preprocess.vision.listing import list_vision

    return list_vision(config, map_=mapper.map)


def narrow(rows: pa.Table, files: Sequence[SourceFile]) -> tuple[tuple[SourceFile, ...], pa.Table]:
    """Returns the files that rows use, and a copy of the rows with `file` renumbered to them.

    A copy: a slice keeps the whole table that it was cut from, and its pickle sends all of it.
    """
    used, inverse = np.unique(rows["file"].to_numpy(), return_inverse=True)
    index = rows.column_names.index("file")
    taken = rows.take(pa.array(np.arange(len(rows))))
    return tuple(files[i] for i in used.tolist()), taken.set_column(index, "file", pa.array(inverse, pa.int32()))


def _hashes(manifest: Manifest, memo: Memo, mapper: Mapper) -> list[str]:
    absent = set(manifest.absent)
    present = [number for number in range(len(manifest.files)) if number not in absent]
    paths = [manifest.files[number].path for number in present]
    hashes = [ABSENT] * len(manifest.files)
    for number, digest in zip(present, memo.hashes(paths, map_=mapper.map), strict=True):
        hashes[number] = digest
    return hashes


def _digests(manifest: Manifest, hashes: Sequence[str]) -> list[SourceDigest]:
    names = [os.fsencode(file.name).decode("utf-8", "backslashreplace") for file in manifest.files]
    return [SourceDigest(name=name, xxh3_128=digest) for name, digest in zip(names, hashes, strict=True)]
