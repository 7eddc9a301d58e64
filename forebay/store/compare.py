"""Whether the raw data that is here is what a cache was made of: by listing, size and memo, and by reading where none knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from forebay.config import Config
from forebay.store.memo import Memo
from forebay.store.sources import ABSENT, StoredSource, anchor, listed_files

SourceState = Literal["same", "changed", "absent", "unknown"]


def compare_sources(
    config: Config, stored: Sequence[StoredSource], memo: Memo, *, may_hash: bool
) -> tuple[SourceState, list[str]]:
    """Returns whether the raw data is what a cache was made of, and the names that are not.

    `absent` only where nothing that is there differs: a source that is there and changed never hits.
    """
    listed = [(f.entry, f.name) for f in listed_files(config.source)]
    expected = [(s.entry, s.name) for s in stored if s.listed]
    if listed and listed != expected:
        return "changed", sorted({name for _, name in set(listed) ^ set(expected)} or {name for _, name in listed})
    if not listed and (there := [s.name for s in stored if s.listed and _is_there(config, s)]):
        # The cache's manifest is there and the config's is not: it names another one.
        return "changed", there
    present: list[tuple[StoredSource, Path | None]] = []
    absent: list[tuple[StoredSource, Path | None]] = []
    for source in stored:
        path = path_of(config, source)
        if source.xxh3_128 == ABSENT and (path is None or not path.is_file()):
            continue  # it was not there when the cache was built either
        (present if path is not None and path.is_file() else absent).append((source, path))
    # Sizes first: a file of another size is another file, and costs no reading.
    changed = [s.name for s, path in present if path and path.stat().st_size != s.size_bytes]
    if changed:
        return "changed", changed
    paths = [path for _, path in present if path]
    if not may_hash and any(memo.known(path) is None for path in paths):
        return "unknown", []
    hashes = memo.hashes(paths)
    changed = [s.name for (s, _), now in zip(present, hashes, strict=True) if s.xxh3_128 != now]
    if changed:
        return "changed", changed
    return ("absent", [s.name for s, _ in absent]) if absent else ("same", [])


def source_differences(
    config: Config, stored: Sequence[StoredSource], names: Sequence[str], memo: Memo
) -> list[dict[str, Any]]:
    """Returns how the sources of these names differ, as `{"field", "wanted", "stored"}`: hashes, or sizes where none is known."""
    by_name = {source.name: source for source in stored}
    return [_source_difference(config, by_name.get(name), name, memo) for name in names]


def _source_difference(config: Config, stored: StoredSource | None, name: str, memo: Memo) -> dict[str, Any]:
    path = (
        path_of(config, stored)
        if stored
        else next((f.path for f in listed_files(config.source) if f.name == name), None)
    )
    wanted = memo.known(path) if path is not None and path.is_file() else None
    if wanted is None and path is not None and path.is_file():
        wanted = f"{path.stat().st_size} bytes"
    if stored is None:
        kept: str | None = None
    else:
        kept = stored.xxh3_128 if wanted is None or "bytes" not in wanted else f"{stored.size_bytes} bytes"
    return {"field": f"sources.{name}", "wanted": wanted, "stored": kept}


def path_of(config: Config, source: StoredSource) -> Path | None:
    """Returns where a source of a cache would be by the config's manifests; None where those have no such entry."""
    entries = config.source.manifests
    return anchor(entries[source.entry]) / source.name if source.entry < len(entries) else None


def _is_there(config: Config, source: StoredSource) -> bool:
    path = path_of(config, source)
    return path is not None and path.is_file()
