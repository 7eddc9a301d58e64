"""Whether a source is what it was when it was listed: by its stat, and where that moved, by its content."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

from forebay.config.pretrained_folder import processor_digest
from forebay.errors import BuildError
from forebay.store.memo import Hashed, Memo, Stat, hash_now, is_same, stat_now
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.raw_sources import look_up
from forebay.store.source_files import ABSENT, SourceFile
from forebay.task_map import Map


def require_unchanged(files: Sequence[SourceFile], *, memo: Memo, map_: Map) -> None:
    """Raises BuildError, with the name, for a file whose content is not what was listed.

    It costs one stat a file, and the hash of a file whose stat moved. Stores are asked anew.
    """
    forget()
    look_up([file.path for file in files])
    moved = [file for file in files if file.xxh3_128 != ABSENT and not is_same(stat_now(file.path), file.stat)]
    try:
        hashes = memo.hashes([file.path for file in moved], map_=map_)
    except FileNotFoundError as err:
        raise _changed(str(err.filename), "is gone") from err
    for file, now in zip(moved, hashes, strict=True):
        _require_content(file, now)


def unchanged_stats(files: Iterable[SourceFile]) -> list[Stat | None]:
    """Returns the stat of each file as it is now. Raises BuildError where a content is not what was listed.

    For workers: a file that moved is hashed by each of them, once for each state.
    """
    files = list(files)
    look_up([file.path for file in files])
    return [_unchanged_stat(file) for file in files]


def require_processor(folder: Path, wanted: str) -> None:
    """Raises BuildError where the files of an image processor, which was just loaded, are not those of the key.

    wanted: their digest in the key.
    """
    now = processor_digest(folder)
    if now != wanted:
        raise _changed(str(folder), f"its digest was {wanted[:16]} when the build began and is {now[:16]} now")


def _unchanged_stat(file: SourceFile) -> Stat | None:
    stat = stat_now(file.path)
    if is_same(stat, file.stat):
        return stat
    if stat is None:
        raise _changed(str(file.path), "is gone")
    hashed = _hashed(file.path, stat)
    _require_content(file, hashed.xxh3_128)
    return hashed.stat


@functools.lru_cache(maxsize=4096)
def _hashed(path: Path, stat: Stat) -> Hashed:  # noqa: ARG001  one state of the file
    return hash_now(path)


def _require_content(file: SourceFile, now: str) -> None:
    if now != file.xxh3_128:
        raise _changed(str(file.path), f"its xxh3-128 was {file.xxh3_128} when it was listed and is {now} now")


def _changed(name: str, how: str) -> BuildError:
    return BuildError(
        f"{name} changed during the build ({how}): nothing is sealed, finished shards are kept; "
        "wait until nothing writes to it, then run: forebay preprocess CONFIG",
        code="FB303",
    )
