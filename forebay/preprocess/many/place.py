"""Where a merge or a subset is put, and what was done: its shards are hashed, linked, and sealed by one rename."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from forebay.config.url import is_url, url_or_path
from forebay.errors import CacheError, CacheMismatchError, ConfigError
from forebay.preprocess.many.combine import Linked
from forebay.preprocess.many.parts import Part
from forebay.store.cache import Cache
from forebay.store.files import require_writable
from forebay.store.key import SHORT
from forebay.store.layout import FORMAT_VERSION
from forebay.store.metadata import read_metadata
from forebay.store.seal import Contents, check_shard, seal
from forebay.store.shard import shard_name
from forebay.store.temporary import sweep
from forebay.store.verify import quick_problems
from forebay.visible import from_here, human_bytes

logger = logging.getLogger(__name__)

_HASHING_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ManyReport:
    """What `forebay cache merge|subset --json` prints; its fields are an interface."""

    action: Literal["merge", "subset"]
    cache: str
    key: str
    made_of: list[str]
    """Keys of the caches, in their order."""
    num_samples: int
    hours: float
    languages: dict[str, Any]
    shards_linked: int
    """Files that share their bytes with the caches that this one was made of."""
    shards_copied: int
    """Files on another file system than those, which cost their bytes again."""
    size_bytes: int
    """Bytes of the shards."""
    sample_bytes: int
    """Those of them that are values of samples of this cache."""
    duplicates: int
    """Samples of a merge that were left out, because an earlier cache has their ids."""
    missing: int
    """Ids of a list that the cache does not have."""
    repeated: int
    """Lines of a list that name an id again."""
    already_there: bool
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yields what the command prints."""
        done = "already there" if self.already_there else {"merge": "merged", "subset": "made"}[self.action]
        hours = f", {self.hours:.3g} hours" if self.hours else ""
        yield f"{done}: {from_here(self.cache)} ({self.num_samples:,} samples{hours}, {self.seconds:.1f} s)"
        share = f" ({100 * self.sample_bytes / self.size_bytes:.0f} %)" if self.size_bytes else ""
        yield (
            f"shards: {self.shards_linked} linked, {self.shards_copied} copied; {human_bytes(self.size_bytes)}, of "
            f"which {human_bytes(self.sample_bytes)}{share} are values of these samples"
        )
        if self.duplicates:
            yield f"duplicates: {self.duplicates:,} samples left out, an earlier cache has their ids"
        if self.missing or self.repeated:
            yield f"ids: {self.missing:,} are not in the cache, {self.repeated:,} lines name an id again"
        yield f"key: {self.key}"
        yield "to use it, in a config of the same steps:"
        yield "  [loader]"
        yield f"  cache_dir = {json.dumps(self.cache, ensure_ascii=False)}"


def target_of(out: str, *, beside: Cache, cache_root: str | None) -> Path:
    """Returns the folder that `--out` names: a name without a slash is one beside the first cache, or in the root.

    Raises ConfigError for a URL.
    """
    text = url_or_path(out)
    if is_url(text) or (cache_root is not None and is_url(cache_root)):
        raise ConfigError(
            f"--out {text}: shards are linked into a folder of this machine; make it here, then run: forebay cache "
            "push DIR URL"
        )
    if os.sep in text or text in (".", ".."):
        return Path(os.path.abspath(text))
    return Path(cache_root or beside.folder.parent).absolute() / text


def require_free(folder: Path, key: str, caches: Sequence[Cache]) -> bool:
    """Returns whether the cache of a key stands in a folder, which is free otherwise.

    Raises CacheMismatchError where something else stands there, or where the folder is part of a cache.
    """
    real = Path(os.path.realpath(folder))
    for cache in caches:
        if real.is_relative_to(os.path.realpath(cache.folder)) and real != Path(os.path.realpath(cache.folder)):
            raise CacheMismatchError(f"--out {folder} lies in the cache {cache.place}; name a folder outside of it")
    if not os.path.lexists(folder):
        return False
    if folder.is_dir() and not any(folder.iterdir()):
        return False
    try:
        found = f"the cache of key {str(read_metadata(folder, format_version=FORMAT_VERSION)['key'])[:SHORT]}"
    except (CacheError, KeyError, OSError):
        found = "no sealed cache"
    if found == f"the cache of key {key[:SHORT]}":
        return True
    raise CacheMismatchError(
        f"--out {folder} is there and is {found}, wanted the cache of key {key[:SHORT]}; name another folder, or "
        "remove that one"
    )


def made(
    action: Literal["merge", "subset"],
    folder: Path,
    contents: Contents,
    *,
    parts: Sequence[Part],
    linked: Linked,
    progress: bool,
    duplicates: int = 0,
    missing: int = 0,
    repeated: int = 0,
) -> ManyReport:
    """Makes a folder the sealed cache of these contents, unless it is that already, and returns what was done.

    Every shard is hashed before it is linked. Raises CacheCorruptError for a damaged one, CacheMismatchError where
    something else stands at the folder.
    """
    started_s = time.monotonic()
    caches, document = [part.cache for part in parts], contents.document
    is_there = require_free(folder, document["key"], caches)
    problems = quick_problems(folder) if is_there else []
    if not is_there or problems:
        require_writable(folder.parent, setting="--out")
        sweep(folder.parent)
        _check(linked, progress=progress)
        require_free(folder, document["key"], caches)
        is_there = not seal(folder, contents, scratch=folder.parent, replace=bool(problems))
        if is_there:  # of another process; what it sealed may be something else
            require_free(folder, document["key"], caches)
    num_linked, num_files = _num_linked(folder, linked), sum(len(entries) for _, _, entries in linked.shards)
    return ManyReport(
        action=action,
        cache=str(folder),
        key=document["key"],
        made_of=[cache.key for cache in caches],
        num_samples=document["num_samples"],
        hours=_hours(parts),
        languages=document["languages"],
        shards_linked=num_linked,
        shards_copied=num_files - num_linked,
        size_bytes=linked.size_bytes,
        sample_bytes=linked.sample_bytes,
        duplicates=duplicates,
        missing=missing,
        repeated=repeated,
        already_there=is_there and not problems,
        seconds=time.monotonic() - started_s,
    )


def _check(linked: Linked, *, progress: bool) -> None:
    from tqdm import tqdm

    files = [pair for _, _, entries in linked.shards for pair in entries]
    with (
        tqdm(
            total=linked.size_bytes, unit="B", unit_scale=True, desc="hash", disable=not progress, file=sys.stderr
        ) as bar,
        ThreadPoolExecutor(_HASHING_THREADS) as threads,
    ):
        for (_, entry), _ in zip(files, threads.map(lambda pair: check_shard(*pair), files), strict=True):
            bar.update(entry.size_bytes)


def _num_linked(folder: Path, linked: Linked) -> int:
    count = 0
    for number, (cache, _, entries) in enumerate(linked.shards):
        for group, (path, _) in zip(cache.groups, entries, strict=True):
            count += os.path.samefile(path, folder / shard_name(group, number))
    return count


def _hours(parts: Sequence[Part]) -> float:
    first = parts[0].cache
    rate_hz = first.constants.get("sample_rate_hz")
    if rate_hz is None or "num_audio_samples" not in first.lengths:
        return 0.0
    heard = sum(int(part.cache.lengths["num_audio_samples"][part.kept].sum(dtype="int64")) for part in parts)
    return heard / int(rate_hz) / 3600
