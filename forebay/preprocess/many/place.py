"""Where a merge or a subset is put: its shards are hashed, linked, and sealed by one rename."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from forebay.config.url import is_url, url_or_path
from forebay.errors import CacheError, CacheMismatchError, ConfigError
from forebay.preprocess.many.combine import Link, Linked
from forebay.progress import Progress
from forebay.store.cache import Cache
from forebay.store.files import require_writable
from forebay.store.inputs import FOLDER as INPUTS
from forebay.store.key import SHORT
from forebay.store.metadata import read_metadata
from forebay.store.remote.transfer.tally import for_each
from forebay.store.seal import Contents, check_shard, seal
from forebay.store.temporary import TEMPORARY_MARK, sweep
from forebay.store.texts import TEXTS
from forebay.store.verify import quick_problems

_HASHING_THREADS = 4
_OURS = ("plans", "tar_index", TEXTS, INPUTS)
"""Folders of a cache root that hold no cache."""


def target_of(out: str, *, beside: Cache, cache_root: str | None) -> Path:
    """Returns the folder that `--out` names: a name without a slash is one beside the first cache, or in the root.

    Raises ConfigError for a URL, and for a name that forebay has for other things.
    """
    text = url_or_path(out)
    if is_url(text) or (cache_root is not None and is_url(cache_root)):
        raise ConfigError(
            f"--out {text}: shards are linked into a folder of this machine; make it here, then run: forebay cache "
            "push DIR URL"
        )
    is_path = os.sep in text or text in (".", "..")
    folder = Path(os.path.abspath(text) if is_path else Path(cache_root or beside.folder.parent).absolute() / text)
    if folder.name in _OURS or folder.name.startswith(".") or TEMPORARY_MARK in folder.name:
        raise ConfigError(f"--out {text}: no cache is looked for in a folder of the name {folder.name}; name another")
    return folder


def put(folder: Path, contents: Contents, linked: Linked, *, caches: Sequence[Cache], progress: bool = False) -> bool:
    """Makes a folder the sealed cache of these contents; says whether it was that already.

    Every shard is hashed before it is linked. caches: those that the contents are of. Raises CacheCorruptError for a
    damaged shard, CacheMismatchError where something else stands at the folder.
    """
    key = contents.document["key"]
    _require_outside(folder, caches)
    is_there = _is_there(folder, key)
    problems = quick_problems(folder) if is_there else []
    if is_there and not problems:
        return True
    require_writable(folder.parent, setting="--out")
    sweep(folder.parent)
    _check(linked, progress=progress)
    _is_there(folder, key)  # hashing takes a while
    is_sealed_here = seal(folder, contents, scratch=folder.parent, replace=bool(problems))
    return not is_sealed_here and _is_there(folder, key)


def _require_outside(folder: Path, caches: Sequence[Cache]) -> None:
    """Raises CacheMismatchError for a folder inside of a cache."""
    for cache in caches:
        if os.path.realpath(cache.folder) in map(str, Path(os.path.realpath(folder)).parents):
            raise CacheMismatchError(f"--out {folder} lies in the cache {cache.place}; name a folder outside of it")


def _is_there(folder: Path, key: str) -> bool:
    """Returns whether the cache of a key stands at a folder; False where nothing does.

    Raises CacheMismatchError where something else stands there.
    """
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        standing = str(read_metadata(folder)["key"])
    except (CacheError, KeyError, OSError):
        standing = ""
    if standing == key:
        return True
    found = f"the cache of key {standing[:SHORT]}" if standing else "no sealed cache"
    raise CacheMismatchError(
        f"--out {folder} is there and is {found}, wanted the cache of key {key[:SHORT]}; name another folder, or "
        "remove that one",
        code="FB115",
    )


def _check(linked: Linked, *, progress: bool) -> None:
    """Raises CacheCorruptError where a shard is not, byte for byte, what was sealed."""
    bar = Progress(linked.size_bytes, unit="B", desc="hash", is_shown=progress)

    def check(link: Link) -> None:
        check_shard(link.path, link.entry)
        bar.update(link.entry.size_bytes)

    with bar:
        for_each(check, linked.links, num_threads=_HASHING_THREADS)
