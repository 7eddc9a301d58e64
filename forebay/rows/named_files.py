"""Files that a manifest names: their names in the key, paths and numbers, and whether they are what was listed.

Each has the stat from before it is read: what is read later is of the same bytes as long as the stat is. Where that
moved, contents are compared.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import PICTURES, SOURCE_KINDS, SourceConfig
from forebay.config.pretrained_folder import hub_advice, processor_digest
from forebay.config.remote import is_url
from forebay.errors import BuildError, ManifestError
from forebay.rows.columns_aside import BLOCK_ROWS
from forebay.rows.equal_values import StringIndex, first_rows, hashes_of
from forebay.rows.source_table import SourceFiles
from forebay.store.layout import Array
from forebay.store.memo import Hashed, Hashing, Memo, Stat, hash_now, hexes, stats_of
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.raw_sources import (
    MIRRORS,
    identity,
    is_elsewhere,
    is_folder,
    look_up,
    named_path,
    place_of,
)
from forebay.store.source_files import SourceFile, anchor, below, entry_files, hf_splits, leads_out

_YOUNG_NS = 2_000_000_000
_TICK_S, _COARSE_TICK_S = 0.02, 2.0
"""Time stamps move in ticks of the kernel's clock, 10 ms at most, or every two seconds (FAT, old NFS)."""
_WAITS = 3
_BYTES = pa.large_binary()
_NOT_PLAIN = r"(^|/)\.?(/|$)"
"""What `pathlib` changes in a name."""
_LOOKED_AT = 16_384
"""Paths that are strings at once."""
_DOUBTFUL = r"(?i)^$|^data:|://|\x00"
"""What `usable_name` may refuse."""


class NamedFiles:
    """A growing list of different source files: first the manifests, then what these name, in order of appearance."""

    def __init__(self, manifests: Sequence[SourceFile], source: SourceConfig) -> None:
        self._manifests, self._parts = SourceFiles.of(manifests), [SourceFiles.of(manifests)]
        self._starts, self._index = [0], StringIndex()
        self._indexed = 0
        self._anchors = [anchor(entry) for entry in source.places]
        self._bases = tuple(map(str, self._anchors))
        self._num_stamped = len(self._manifests)
        self._source = source

    @property
    def files(self) -> SourceFiles:
        """All files."""
        self._parts, self._starts = [SourceFiles.joined(self._parts)], [0]
        return self._parts[0]

    def __len__(self) -> int:
        return self._starts[-1] + len(self._parts[-1])

    def number(self, written: str, *, manifest: SourceFile, folder: Path | None = None) -> int:
        """Returns the number of one file, see `numbers`."""
        return int(self.numbers(pa.array([written], pa.large_string()), manifest=manifest, folder=folder)[0])

    def numbers(self, written: Any, *, manifest: SourceFile, folder: Path | None = None) -> Array:
        """Returns the numbers of files named in a manifest, int32 [names], added to the list where they are new.

        written: arrow's strings without nulls. A relative name is relative to `folder`, by default `source.media_dir`,
        or else the manifest's. It enters the key relative to the folder of the manifest entry, or to
        `source.media_dir`; an absolute one outside of it as it is written.
        Raises ManifestError under `source.confined` for a file that lies outside of that folder.
        """
        starts = range(0, len(written), BLOCK_ROWS)
        found = [self._numbered(written.slice(at, BLOCK_ROWS), manifest=manifest, folder=folder) for at in starts]
        return np.concatenate([np.zeros(0, np.int32), *found])

    def _numbered(self, written: Any, *, manifest: SourceFile, folder: Path | None) -> Array:
        entry, media_dir = manifest.entry, self._source.media_dir
        if media_dir is not None:
            entry, folder = len(self._source.manifests), folder or Path(media_dir)
        home, base = manifest.path.parent if folder is None else folder, self._anchors[entry]
        encoded = written.dictionary_encode()
        different = encoded.dictionary
        is_odd, names = np.ones(len(different), bool), different.cast(_BYTES)
        if place_of(home) is None and home.is_relative_to(base):
            is_odd = np.asarray(pc.match_substring_regex(different, _NOT_PLAIN))
            names = _below(home.relative_to(base), different)
        paths, own = _below(home, different), pa.nulls(len(different), _BYTES)
        if is_odd.any():
            odd = pa.array(is_odd)
            each = different.filter(odd).to_pylist()
            found = [named_path(name, home, named_in=manifest.path) for name in each]
            own = pc.replace_with_mask(own, odd, pa.array(map(os.fsencode, found), _BYTES))
            paths = pc.coalesce(own, paths)
            of_odd = (os.fsencode(self._name(path, name, base)) for path, name in zip(found, each, strict=True))
            names = pc.replace_with_mask(names, odd, pa.array(of_odd, _BYTES))
        by_path = paths.dictionary_encode()  # names of one file may be written in several ways
        self._index_manifests()
        count, hashes = len(self), hashes_of(by_path.dictionary)
        numbers = self._index.find(by_path.dictionary, hashes, self._paths_of, lambda: self.files.written_paths())
        new = np.flatnonzero(numbers < 0)
        numbers[new] = np.arange(count, count + len(new))
        self._index.add(hashes[new], count)
        codes = by_path.indices.to_numpy()
        first = pa.array(np.unique(codes, return_index=True)[1][new])
        added = SourceFiles.made(self._bases, names.take(first), own=own.take(first), entries=entry, is_listed=False)
        require_confined(added, self._source, named_in=manifest.path)
        self._starts.append(count)
        self._parts.append(added)
        return np.asarray(numbers[codes[encoded.indices.to_numpy()]])

    def _index_manifests(self) -> None:
        if not self._indexed:
            self._indexed = len(self._manifests)
            self._index.add(hashes_of(self._manifests.written_paths()), 0)

    def _paths_of(self, numbers: Array) -> Any:
        """Returns the paths of files, as arrow's binaries."""
        part = np.searchsorted(self._starts, numbers, side="right") - 1
        found = [self._parts[n].take(numbers[part == n] - self._starts[n]).written_paths() for n in np.unique(part)]
        order = np.argsort(np.argsort(part, kind="stable"), kind="stable")
        return pa.concat_arrays([pa.array([], _BYTES), *found]).take(pa.array(order))

    def listed(self, paths: Any) -> Array:
        """Returns the numbers of manifests, int32 [paths]. paths: arrow's strings without nulls."""
        found = pc.index_in(paths.cast(_BYTES), value_set=self._manifests.written_paths())
        return np.asarray(found).astype(np.int32)

    def stamp(self) -> None:
        """Notes the stat of the files that were added since the last call, before any of them is read."""
        self._parts = [stamped(self.files, first=self._num_stamped)]
        self._num_stamped = len(self)

    def _name(self, path: Path, written: str, base: Path) -> str:
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
        if PurePosixPath(written).is_absolute() or is_url(written):
            return written
        return (Path(os.path.relpath(path.parent, base)) / path.name).as_posix()


def _below(folder: Path, names: Any) -> Any:
    """Returns the paths of files by their names relative to a folder, as arrow's binaries."""
    front = pa.scalar(os.fsencode(below(str(folder), [""])[0]), _BYTES)
    return pc.binary_join_element_wise(front, names.cast(_BYTES), pa.scalar(b"", _BYTES))


def manifest_files(source: SourceConfig, *, meaning: str = "recordings") -> SourceFiles:
    """Returns the files that `source.manifest` stands for, with the stat that they have before they are read.

    meaning: the name of what their rows are.
    Raises ManifestError where an entry stands for none, two for the same, or under `source.confined` for a file outside
    of its folder.
    """
    entries = entry_files(source, meaning=meaning)
    found = {each.entry for each in entries if each.names}
    for number, entry in enumerate(source.manifests):
        if number not in found and source.kind == "python":
            raise ManifestError(
                "source.manifest: the samples of this code are not listed yet, and nothing else runs it; run: forebay "
                "preprocess CONFIG",
                code="FB129",
            )
        if number not in found:
            raise ManifestError(f"source.manifest {entry} {_nothing(Path(entry), source)}", code="FB201")
    bases = [str(anchor(entry)) for entry in source.places]
    parts = [
        SourceFiles.made(
            bases,
            pa.array(map(os.fsencode, each.names), _BYTES),
            own=None if each.paths is None else pa.array(map(os.fsencode, each.paths), _BYTES),
            entries=each.entry,
        )
        for each in entries
    ]
    files = SourceFiles.joined(parts)
    first = first_rows(files.written_paths())
    if len(again := np.flatnonzero(first != np.arange(len(files)))):
        twice = files[int(first[again].min())].path
        raise ManifestError(f"source.manifest names {twice} twice; name it once")
    require_confined(files, source)
    return stamped(files)


def require_folder(source: SourceConfig) -> None:
    """Raises ManifestError where the folder that names of recordings or images are relative to is none."""
    if source.media_dir is not None and not os.path.isdir(source.media_dir):
        name = "audio_dir" if source.audio_dir is not None else "image_dir"
        raise ManifestError(
            f"source.{name} {Path(source.media_dir)} is no folder; correct it in the config", code="FB201"
        )


def _nothing(entry: Path, source: SourceConfig) -> str:
    """Says why an entry of `source.manifest` stands for no file, and what to do."""
    is_dataset = SOURCE_KINDS[source.kind].has_splits
    if is_dataset and (splits := hf_splits(entry)):
        return (
            f'has no split "{source.split}", it has {", ".join(splits)}; set source.split to one of them, or name '
            "files in source.manifest"
        )
    what = f"holds no manifest of kind {source.kind}" if is_folder(entry) else "does not exist"
    advice = hub_advice(entry, "dataset") if is_dataset else ""
    return f"{what}; correct source.manifest or source.kind in the config{advice}"


def require_confined(files: Iterable[SourceFile], source: SourceConfig, *, named_in: Path | None = None) -> None:
    """Returns if `source.confined` is off, or every file lies below the folder of its manifest entry, links followed.

    named_in: the manifest that names the files. Raises ManifestError for the first one that lies elsewhere.
    """
    for file in files if source.confined else ():
        entry = source.places[file.entry]
        if (real := leads_out(file.path, entry)) is not None:
            raise ManifestError(
                f"{named_in or f'source.manifest {entry}'} names {str(file.path)!r}, which is {real!r} and not "
                f"below {identity(anchor(entry))!r}; source.confined allows no other place: move "
                "the file there, or set source.confined = false for a manifest that you trust",
                code="FB206",
            )


def shown_name(file: SourceFile) -> str:
    r"""Returns the name of a file for keys and messages: a byte that is not UTF-8 is written as `\xe9`."""
    return os.fsencode(file.name).decode("utf-8", "backslashreplace")


def usable_name(written: str, home: Path | None = None) -> str | None:
    """Returns what is wrong with a file name in a manifest, or None.

    home: the manifest, or the folder that its names are relative to; with it, a URL of elsewhere is no file name.
    """
    if not written:
        return "is empty, wanted a file name"
    if written[:5].lower() == "data:":
        return "is a data: URI, the file itself, wanted a file name"
    if home is not None and is_url(written) and is_elsewhere(written, place_of(home)):
        return f"is {written[:200]!r}, and nothing is fetched from elsewhere; put it beside the manifest, under a name"
    return "holds a NUL character, wanted a file name" if "\0" in written else None


def may_be_unusable(written: Any) -> Array:
    """Returns bool [names], whether `usable_name` has to look at a name. written: arrow's strings."""
    return np.asarray(pc.fill_null(pc.match_substring_regex(written, _DOUBTFUL), fill_value=True))


def is_picture(file: SourceFile) -> bool:
    """Whether a file is an image by its name."""
    return file.path.name.lower().endswith(PICTURES)


def path_stem(written: str) -> str:
    """Returns a file name without its extension, folders kept, as it is written; `.hidden` has none."""
    folder, slash, name = written.rpartition("/")
    stem, dot, _ = name.rpartition(".")
    return f"{folder}{slash}{stem}" if dot and stem else written


def stamped(files: Sequence[SourceFile], *, first: int = 0) -> SourceFiles:
    """Returns the files from the first on with their stat as it is now; those that have one keep it.

    A file that was changed just now could be changed again in the same tick and keep its stat: where there is one, this
    waits for the next tick, once for all of them. One stat a file; of objects of a store its listing.
    """
    found = SourceFiles.of(files)
    todo = first + np.flatnonzero(~found.has_stat[first:])
    if not len(todo):
        return found
    stats, is_there = found.stats.copy(), found.has_stat.copy()
    _look(found, todo, stats, is_there)
    young = todo[is_there[todo] & (stats[todo, -1] > time.time_ns() - _YOUNG_NS)]
    for _ in range(_WAITS):
        if not len(young):
            break
        is_coarse = bool((is_there[young] & (stats[young, -1] % 1_000_000_000 == 0)).any())
        time.sleep(_COARSE_TICK_S if is_coarse else _TICK_S)
        before, was_there = stats[young], is_there[young]
        _look(found, young, stats, is_there)
        young = young[(stats[young] != before).any(axis=1) | (is_there[young] != was_there)]
    return replace(found, stats=stats, has_stat=is_there)


def _look(files: SourceFiles, numbers: Array, stats: Array, is_there: Array) -> None:
    """Puts the stats of some files as they are now in those of all, int64 [files, 5] and bool [files]: it is there."""
    for start in range(0, len(numbers), _LOOKED_AT):
        block = numbers[start : start + _LOOKED_AT]
        paths = files.take(block).paths
        look_up(path for path in paths if MIRRORS in path)
        stats[block], is_there[block] = stats_of(paths)


def _stats(files: SourceFiles) -> tuple[Array, Array]:
    """Returns the stats of files as they are now, int64 [files, 5], and whether there is one, bool [files]."""
    stats, is_there = np.zeros((len(files), 5), np.int64), np.zeros(len(files), bool)
    _look(files, np.arange(len(files)), stats, is_there)
    return stats, is_there


def require_unchanged(files: Sequence[SourceFile], *, memo: Memo, map_: Hashing) -> Array:
    """Returns the stats of files as they are now, int64 [files, 5], zeros of what is not there.

    Raises BuildError, with the name, for a file whose content is not what was listed. It costs one stat a file, and the
    hash of a file whose stat moved. Stores are asked anew.
    """
    forget()
    known = SourceFiles.of(files)
    stats, is_there = _stats(known)
    moved = np.flatnonzero(known.is_hashed & ~are_same(known, stats, is_there))
    try:
        stats[moved], digests = memo.hashed(known.take(moved).paths, map_=map_)
    except FileNotFoundError as err:
        raise _changed(str(err.filename), "is gone") from err
    for number, now in zip(moved.tolist(), hexes(digests), strict=True):
        _require_content(known[number], now)
    return known.stats if (stats == known.stats).all() else stats  # most often: memory of one of the two


def unchanged_stats(files: Sequence[SourceFile]) -> list[Stat | None]:
    """Returns the stat of each file as it is now. Raises BuildError where a content is not what was listed.

    For workers: a file that moved is hashed by each of them, once for each state.
    """
    known = SourceFiles.of(files)
    stats, is_there = _stats(known)
    for number in np.flatnonzero(~are_same(known, stats, is_there)).tolist():
        file = known[number]
        if not is_there[number]:
            raise _changed(str(file.path), "is gone")
        hashed = _hashed(file.path, tuple(stats[number].tolist()))
        _require_content(file, hashed.xxh3_128)
        stats[number] = hashed.stat
    return [tuple(stat) if there else None for stat, there in zip(stats.tolist(), is_there.tolist(), strict=True)]


def are_same(files: SourceFiles, stats: Array, is_there: Array) -> Array:
    """Returns bool [files], whether files have the stat that they had, on whichever machine."""
    devices, known = (np.minimum(each[:, 0], 0) for each in (stats, files.stats))  # see `anywhere`, which copies all
    is_same = (stats[:, 1:] == files.stats[:, 1:]).all(axis=1) & (devices == known)
    return np.asarray((is_same | ~is_there) & (is_there == files.has_stat))


def require_processor(folder: Path, wanted: str) -> None:
    """Raises BuildError where the files of an image processor, which was just loaded, are not those of the key.

    wanted: their digest in the key.
    """
    now = processor_digest(folder)
    if now != wanted:
        raise _changed(str(folder), f"its digest was {wanted[:16]} when the build began and is {now[:16]} now")


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
