"""The source files of a config: which files a listing has, and whether they are those that a cache was made of.

They are compared by name, size and remembered hash, and read only where no hash is known.

A cache that was made of other caches has the sections of their steps in its recipe, and one that no config has. So a
lookup by recipe never takes it: it is used where `loader.cache_dir` names it.
"""

from __future__ import annotations

import glob
import io
import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from forebay.config.data import SOURCE_KINDS, SourceConfig
from forebay.config.tree import Config
from forebay.errors import CacheCorruptError, RemoteDeniedError, RemoteMissingError
from forebay.store.inputs import SAMPLES, is_unlisted
from forebay.store.key import SHORT, differences
from forebay.store.layout import Array
from forebay.store.memo import SIZE, Memo, Stat, digests_of, hexes, stats_of
from forebay.store.remote.raw import raw_sources as sources
from forebay.store.remote.raw.raw_sources import localized

logger = logging.getLogger(__name__)
COMPRESSED_TARS = (".tgz", ".tbz2", ".txz", *(f".tar.{kind}" for kind in ("gz", "bz2", "xz", "zst", "lz4")))
"""How names of compressed tars end; their members cannot be read by place."""
_BLOCK = 4096
_MOST_BYTES = 1 << 31
"""Bytes of the texts that one array of arrow holds under 32-bit offsets."""
_DICT = "dataset_dict.json"
_OURS = re.compile(r"logs/data_usage\.jsonl|tar_index/[0-9a-f]{32}\.parquet|text_index/[0-9a-f]{32}\.lines")
_SPLIT_FILE = re.compile(r"(.+)-\d{5}-of-\d{5}\.parquet")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file whose content defines samples.

    name: how it enters the key: POSIX, relative to the folder of its manifest; as the manifest writes it where it lies
    outside. entry: which of `source.places` it belongs to, an entry of `source.manifest` or `source.media_dir`. listed:
    it was found by expanding that entry (a manifest, a tar of a folder), not named inside such a file. stat: from
    before it was read; None where there was none, or nobody has looked yet. xxh3_128: of the bytes that were read then;
    empty where they are not known. Neither says which file it is.
    """

    name: str
    path: Path
    entry: int = 0
    listed: bool = True
    stat: Stat | None = field(default=None, compare=False)
    xxh3_128: str = field(default="", compare=False)


ABSENT = ""
"""Instead of a hash: a file that the manifest names and that could not be opened; its samples have failed. With a size:
a tar behind the last sample of `max_samples`."""


@dataclass(frozen=True, slots=True)
class StoredSource:
    """A source file as a sealed cache remembers it."""

    name: str
    entry: int
    listed: bool
    xxh3_128: str
    size_bytes: int


def anchor(entry: str) -> Path:
    """Returns the folder that names of an entry of `source.manifest` are relative to."""
    path = Path(entry)
    if (place := sources.place_of(path)) is not None:
        return place.origin.folder
    if path.is_dir():
        return path
    if path.exists():  # `[` and `*` are letters in the name of what is there
        return path.parent
    while glob.has_magic(str(path.parent)):
        path = path.parent
    return path.parent


def leads_out(path: Path, entry: str) -> str | None:
    """Returns where a file really lies if that is not below the folder of an entry of `source.manifest`, else None."""
    return sources.leads_out(path, anchor(entry))


class EntryFiles(NamedTuple):
    """The files that an entry of `source.manifest` stands for. names: as they enter the key.

    base: the folder that they are relative to. paths: where they are; None: each below `base`, under its name.
    """

    entry: int
    base: str
    names: list[str]
    paths: list[str] | None = None


def entry_files(source: SourceConfig, *, meaning: str = "recordings") -> list[EntryFiles]:
    """Returns the files that the entries of `source.manifest` stand for, folders and globs in sorted order.

    A file stands for itself, a folder for its files of the kind's type (an `hf` folder of several splits for those of
    `source.split`), a glob for what it matches, perhaps nothing. meaning: of the rows, `Config.meaning`.
    """
    found = []
    for number, entry in enumerate(source.manifests):
        path, kind = Path(entry), SOURCE_KINDS[source.kind]
        if kind.is_deep and sources.place_of(path) is None and path.is_dir():
            endings = tuple(pattern[1:] for pattern in kind.files_of(meaning))
            found.append(EntryFiles(number, str(path), _below_here(path, endings)))
        else:
            found.append(_named(anchor(entry), number, _expand(source, path, meaning)))
    if source.texts is not None:
        found.append(_named(anchor(source.manifests[0]), 0, [Path(source.texts)]))
    return found


def _named(base: Path, entry: int, paths: Sequence[Path]) -> EntryFiles:
    names = [Path(os.path.relpath(path, base)).as_posix() for path in paths]
    return EntryFiles(entry, str(base), names, [str(path) for path in paths])


def listed_files(source: SourceConfig, *, meaning: str = "recordings") -> list[SourceFile]:
    """Returns what `entry_files` does, a file by itself."""
    return [
        SourceFile(name, Path(path), entry=found.entry)
        for found in entry_files(source, meaning=meaning)
        for name, path in zip(found.names, found.paths or below(found.base, found.names), strict=True)
    ]


def below(base: str, names: Iterable[str]) -> list[str]:
    """Returns the paths of files by their names relative to a folder, as `pathlib` joins them."""
    front = "" if base == "." else f"{base.rstrip('/')}/"
    return [name if name.startswith("/") else front + name for name in names]


def _expand(source: SourceConfig, path: Path, meaning: str) -> list[Path]:
    if sources.is_folder(path):
        kind = SOURCE_KINDS[source.kind]
        if kind.is_deep:
            endings = tuple(pattern[1:] for pattern in kind.files_of(meaning))
            return sorted(sources.files_below(path, lambda name: _is_wanted(name, endings)), key=str)
        folder = path / source.split if kind.has_splits and sources.exists(path / _DICT) else path
        found: list[Path] = []
        for patterns in (kind.files, *kind.else_files):
            found = found or [path for pattern in patterns for path in sources.files_in(folder, pattern)]
        # `datasets` leaves results of map() in a dataset's folder as cache-*.arrow; they are not the dataset.
        found = [p for p in found if not p.match("cache-*.arrow")]
        return _of_split(found, source.split) if kind.has_splits else found
    if sources.exists(path):
        return [path]
    return [p for p in sources.glob_files(path) if not _is_ours(p)] if glob.has_magic(str(path)) else []


def _is_wanted(name: Path, endings: tuple[str, ...]) -> bool:
    return name.name.lower().endswith(endings) and not any(part.startswith(".") for part in name.parts)


def _below_here(folder: Path, endings: tuple[str, ...]) -> list[str]:
    """Returns the files at any depth whose names end so, in any case of letters; what is hidden is left out.

    The folders are read, and of the files only links are looked at.
    """
    found: list[str] = []
    for below_it, folders, names in sources.walk_files(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        front = f"{below_it}/" if below_it else ""
        found += [front + n for n in names if n.lower().endswith(endings) and not n.startswith(".")]
    return sorted(found)


def hf_splits(folder: Path) -> list[str]:
    """Returns an `hf` folder's splits, sorted: folders of a DatasetDict, or names in its files; [] for one data set."""
    if not sources.is_folder(folder):
        return []
    if sources.exists(folder / _DICT):
        return [part.name for part in sources.folders_in(folder) if sources.exists(part / "state.json")]
    return sorted({split for p in sources.files_in(folder, "*.parquet") if (split := _file_split(p)) is not None})


def _file_split(path: Path) -> str | None:
    """The split in the name of a file as the Hub keeps them: `train-00000-of-00002.parquet`."""
    found = _SPLIT_FILE.fullmatch(path.name)
    return found[1] if found else None


def _of_split(found: list[Path], split: str) -> list[Path]:
    """Leaves out the files of other splits where the names of all tell."""
    splits = [_file_split(path) for path in found]
    if None in splits or len(set(splits)) < 2:
        return found
    return [path for path, named in zip(found, splits, strict=True) if named == split]


def _is_ours(path: Path) -> bool:
    """Whether a glob has met a file of a cache root or a run, which lie beside the config unless it says otherwise."""
    if path.name in ("sources.parquet", "rejected.jsonl"):
        return all(sources.exists(path.parent / name) for name in ("metadata.json", "slots.npy"))
    return _OURS.fullmatch("/".join(path.parts[-2:])) is not None


_COLUMNS = {"name": "binary", "entry": "int32", "listed": "bool", "xxh3_128": "string", "size_bytes": "int64"}


@dataclass(frozen=True, slots=True, eq=False)
class StoredSources(Sequence[StoredSource]):
    """The sources of a cache, each made when it is asked for. table: arrow's, a column a field, names as bytes."""

    table: Any

    @classmethod
    def of(cls, sources: Iterable[StoredSource]) -> StoredSources:
        """Returns some sources, by column."""
        if isinstance(sources, StoredSources):
            return sources
        rows = ((os.fsencode(s.name), s.entry, s.listed, s.xxh3_128, s.size_bytes) for s in sources)
        return cls.of_columns(*(list(zip(*rows, strict=True)) or [()] * len(_COLUMNS)))

    @classmethod
    def of_columns(cls, *columns: Any) -> StoredSources:
        """Returns sources by what each has, in the order of the fields; names are bytes."""
        import pyarrow as pa

        kinds = [pa.type_for_alias(kind) for kind in _COLUMNS.values()]
        schema = pa.schema(zip(_COLUMNS, kinds, strict=True))
        return cls(pa.table([_arrow(c, k) for c, k in zip(columns, kinds, strict=True)], schema=schema))

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, at: int) -> StoredSource: ...
    @overload
    def __getitem__(self, at: slice) -> StoredSources: ...
    def __getitem__(self, at: int | slice) -> StoredSource | StoredSources:
        places = range(len(self))[at]
        if isinstance(places, range):
            return (
                type(self)(self.table.slice(places.start, len(places)))
                if places.step == 1
                else self.of(map(self.__getitem__, places))
            )
        name, *others = (column[places].as_py() for column in self.table.columns)
        return StoredSource(os.fsdecode(name), *others)

    def __iter__(self) -> Iterator[StoredSource]:
        for batch in self.table.to_batches(max_chunksize=_BLOCK):
            names, *others = (column.to_pylist() for column in batch.columns)
            yield from map(StoredSource, map(os.fsdecode, names), *others)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(StoredSource.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def numbers(self, name: str) -> Array:
        """Returns a column of numbers, [sources]."""
        return _numbers(self.table[name])

    @property
    def is_hashed(self) -> Array:
        """Whether a source has a hash, bool [sources]: `ABSENT` is none."""
        chunks = [each for each in self.table["xxh3_128"].chunks if len(each)]
        ends = (np.frombuffer(each.buffers()[1], np.int32, len(each) + 1, 4 * each.offset) for each in chunks)
        return np.concatenate([np.zeros(0, np.int32), *map(np.diff, ends)]) > 0

    def where(self, chosen: Array) -> StoredSources:
        """Returns those that are chosen. chosen: bool [sources]."""
        start = int(np.append(chosen, [True]).argmax())
        stop = start + int(np.count_nonzero(chosen))
        if chosen[start:stop].all():  # most often; arrow's functions take a while to load
            return self[start:stop]
        import pyarrow as pa

        return type(self)(self.table.filter(_arrow(chosen, pa.bool_())))

    def names_at(self, chosen: Array) -> list[str]:
        """Returns the names of those that are chosen. chosen: bool [sources]."""
        return [os.fsdecode(name) for name in self.where(chosen).table["name"].to_pylist()]


def chunks_of(column: Any) -> list[Any]:
    """Returns the chunks of a column of arrow's, one if it is an array."""
    return getattr(column, "chunks", [column])


def _arrow(values: Any, kind: Any) -> Any:
    """Returns values as a column, those of texts as bytes or strings; arrow's own conversion loads pandas."""
    import pyarrow as pa

    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        numbers = np.asarray(values, bool if pa.types.is_boolean(kind) else str(kind))
        data = np.packbits(numbers, bitorder="little") if pa.types.is_boolean(kind) else numbers
        return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(np.ascontiguousarray(data))])
    texts = [value if isinstance(value, bytes) else value.encode("utf-8") for value in values]
    if sum(map(len, texts)) >= _MOST_BYTES and (half := len(texts) // 2):
        return pa.chunked_array([c for part in (texts[:half], texts[half:]) for c in chunks_of(_arrow(part, kind))])
    ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    return pa.Array.from_buffers(kind, len(texts), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))])


def _numbers(column: Any) -> Array:
    """Returns a column of numbers or truth values; arrow's own conversion loads pandas."""
    kind = np.dtype(str(column.type))
    if not len(column):
        return np.zeros(0, kind)
    whole = column.combine_chunks()
    if kind.kind == "b":
        bits = np.frombuffer(whole.buffers()[1], np.uint8)
        return np.unpackbits(bits, count=whole.offset + len(whole), bitorder="little")[whole.offset :].view(bool)
    return np.frombuffer(whole.buffers()[1], kind, len(whole), kind.itemsize * whole.offset)


def dump_sources(sources: Iterable[StoredSource]) -> bytes:
    """Returns the parquet file that a cache keeps of its sources."""
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(StoredSources.of(sources).table.combine_chunks(), buffer, compression="zstd")
    return buffer.getvalue()


def load_sources(path: Path, data: bytes | None = None) -> StoredSources:
    """Returns the sources that a cache was made of. data: of the file, where somebody has read it.

    Raises CacheCorruptError where the file is not what was written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # `read_table` imports pyarrow.dataset, and that pandas if it is installed
        with pq.ParquetFile(path if data is None else pa.BufferReader(data)) as file:
            table = file.read(use_threads=False)
        return StoredSources.of_columns(*(table[name] for name in _COLUMNS))
    except (OSError, KeyError, TypeError, UnicodeDecodeError, pa.ArrowException) as err:
        raise CacheCorruptError(
            f"{path} is not the sources of a cache: {err}; run: forebay preprocess CONFIG --rebuild"
        ) from err


SourceState = Literal["same", "changed", "absent", "other", "unknown"]
"""`other`: the config names other files, which are not here."""


class ShownSources:
    """The source files that a config shows now: named once and looked at once, whatever caches are compared with them.

    is_unlisted: it is code whose samples are not listed.
    """

    def __init__(self, config: Config) -> None:
        """Asks no store yet."""
        self._config, self.is_unlisted = config, is_unlisted(config)
        self._looked_at: tuple[list[str], tuple[Array, Array]] = ([], (np.zeros((0, 5), np.int64), np.zeros(0, bool)))

    @cached_property
    def config(self) -> Config:
        """The config with mirrors in place of URLs. Raises RemoteError where a store does not show what they name."""
        return sources.localized(self._config)

    @property
    def manifests(self) -> Sequence[str]:
        """The entries of `source.manifest`."""
        return self._config.source.manifests

    @cached_property
    def listed(self) -> StoredSources:
        """The files that the entries of `source.manifest` stand for; nobody has looked at them."""
        found = entry_files(self.config.source, meaning=self.config.meaning)
        names = [os.fsencode(name) for each in found for name in each.names]
        entries = np.repeat(
            np.array([each.entry for each in found], np.int32), np.array([len(each.names) for each in found], np.int64)
        )
        return StoredSources.of_columns(
            names, entries, np.ones(len(names), bool), [b""] * len(names), np.full(len(names), -1)
        )

    def stats(self, paths: list[str]) -> tuple[Array, Array]:
        """Returns what `stats_of` does; of the paths that were asked for last as they were then."""
        if self._looked_at[0] != paths:
            sources.look_up(path for path in paths if sources.MIRRORS in path)
            self._looked_at = paths, stats_of(paths, sources.file_stat)
        return self._looked_at[1]


def compare_sources(
    shown: ShownSources, stored: StoredSources, memo: Memo, *, may_hash: bool
) -> tuple[SourceState, list[str]]:
    """Returns whether the raw data is what a cache was made of, and the names that are not.

    `absent` only where nothing that is there differs: a source that is there and changed never hits. What a store does
    not show, or a bucket that is gone, is absent, with a warning: who trains need not be who may read it.
    """
    if shown.is_unlisted:  # edited code yields other samples, as far as anybody knows
        return "changed", [SAMPLES]
    try:
        return _compared(shown, stored, memo, may_hash=may_hash)
    except (RemoteDeniedError, RemoteMissingError) as err:
        if names := _of_other_names(shown.manifests, stored.where(stored.numbers("listed"))):
            return "other", names
        logger.warning("%s; the cache is not compared with its sources", err)
        return "absent", []


def _of_other_names(entries: Sequence[str], own: StoredSources) -> list[str]:
    """Returns by which files entries, which are gone, cannot mean those of a cache: of another name, more or fewer."""
    files = Counter(source.entry for source in own)

    def is_other(source: StoredSource) -> bool:
        if source.entry >= len(entries):
            return True
        path, name = PurePath(entries[source.entry]), PurePath(source.name)
        is_file = files[source.entry] == 1 and path.suffix == name.suffix != ""
        return is_file and path.name != name.name and not glob.has_magic(str(path))

    more = [PurePath(e).name for i, e in enumerate(entries) if i not in files and not glob.has_magic(e)]
    return [source.name for source in own if is_other(source)] + more


def _compared(
    shown: ShownSources, stored: StoredSources, memo: Memo, *, may_hash: bool
) -> tuple[SourceState, list[str]]:
    config, listed, own = shown.config, shown.listed, stored.where(stored.numbers("listed"))
    if len(listed) and not are_named_alike(listed, own):
        there, known = ({(source.entry, source.name) for source in each} for each in (listed, own))
        return "changed", sorted({name for _, name in there ^ known} or {name for _, name in there})
    if not len(listed):
        # The cache's manifest is there and the config's is not: it names another one. Or both are gone, of two names.
        found = [s.name for s in own if _file_of(config, s)] or _of_other_names(shown.manifests, own)
        if found:
            return "other", found
    # A file that was not there when the cache was built is missed by nobody.
    asked = stored.where(stored.is_hashed | (stored.numbers("size_bytes") < 0))
    paths = stored_paths(config, asked)
    stats, is_there = shown.stats(paths)
    here, gone = asked.where(is_there), asked.where(~is_there)
    paths, stats = list(itertools.compress(paths, is_there.tolist())), stats[is_there]
    # Sizes first: a file of another size is another file, and costs no reading.
    if (is_other := stats[:, SIZE] != here.numbers("size_bytes")).any():
        return "changed", here.names_at(is_other)
    if not may_hash and not memo.known_of(paths, stats)[1].all():
        return "unknown", []
    is_other = memo.hashed(paths, stats=stats)[1] != digests_of(here.table["xxh3_128"].to_pylist())
    if is_other.any():
        return "changed", here.names_at(is_other)
    absent = gone.names_at(gone.is_hashed)
    return "absent" if absent else "same", absent


def are_named_alike(some: StoredSources, others: StoredSources) -> bool:
    """Whether sources have the same names, of the same entries, in the same order."""
    return len(some) == len(others) and all(some.table[name].equals(others.table[name]) for name in ("name", "entry"))


def stored_paths(config: Config, stored: StoredSources) -> list[str]:
    """Returns where sources of a cache would be by the config's manifests; "" where those have no such entry."""
    bases = [anchor(entry) for entry in sources.localized(config).source.places]
    fronts = [None if sources.place_of(base) is not None else below(str(base), [""])[0] for base in bases]
    found: list[str] = []
    for batch in stored.table.select(["name", "entry"]).to_batches(max_chunksize=_BLOCK):
        names, entries = map(os.fsdecode, batch["name"].to_pylist()), batch["entry"].to_pylist()
        for name, entry in zip(names, entries, strict=True):
            if entry >= len(bases):
                found.append("")
            elif (front := fronts[entry]) is None or name.startswith("/"):
                found.append(str(bases[entry] / name))
            else:
                found.append(front + name)
    return found


def source_differences(
    config: Config, stored: Sequence[StoredSource], names: Sequence[str], memo: Memo
) -> list[dict[str, Any]]:
    """Returns how the sources of these names differ, as `{"field", "wanted", "stored"}`: hashes, or else sizes.

    One row says it where the same files stand in another order.
    """
    config = sources.localized(config)
    by_name = {source.name: source for source in stored}
    # A folder may have gained thousands of files, so it is listed once; of two of a name the first one counts.
    listed = {file.name: file.path for file in reversed(listed_files(config.source, meaning=config.meaning))}
    rows = [_source_difference(config, by_name.get(name), name, listed.get(name), memo) for name in names]
    differ = [row for row in rows if row["wanted"] != row["stored"]]
    return differ or [{"field": "source.manifest", "wanted": "its files in this order", "stored": "another order"}]


def _source_difference(
    config: Config, stored: StoredSource | None, name: str, listed: Path | None, memo: Memo
) -> dict[str, Any]:
    path = _file_of(config, stored) if stored is not None and not stored.listed else listed
    path = path if path is not None and sources.is_file(path) else None
    wanted = None if path is None else memo.known(path)
    kept = stored and stored.xxh3_128
    if path is not None and wanted is None:
        wanted, kept = f"{sources.source_stat(path)[SIZE]} bytes", stored and f"{stored.size_bytes} bytes"
    return {"field": f"sources.{name}", "wanted": wanted, "stored": kept}


def path_of(config: Config, source: StoredSource) -> Path | None:
    """Returns where a source of a cache would be by the config's manifests; None where those have no such entry."""
    entries = sources.localized(config).source.places
    return anchor(entries[source.entry]) / source.name if source.entry < len(entries) else None


def _file_of(config: Config, source: StoredSource) -> Path | None:
    """Returns where a source of a cache is by the config's manifests; None where no such file is there."""
    path = path_of(config, source)
    return path if path is not None and sources.is_file(path) else None


MERGED, SUBSET = "merged", "subset"
"""The section that a recipe document has on top."""


def is_derived(recipe: Mapping[str, Any]) -> bool:
    """Returns whether a recipe document is that of a cache which was made of other caches."""
    return MERGED in recipe or SUBSET in recipe


def steps_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of a recipe document that decide values: not which rows of which caches are samples."""
    return {name: section for name, section in recipe.items() if name not in ("source", MERGED, SUBSET)}


def steps_differences(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the fields in which the steps of two recipe documents differ, as `differences` does."""
    return differences(steps_of(wanted), steps_of(stored))


def described(recipe: Mapping[str, Any]) -> str:
    """Returns what a derived cache is, in words for a log line; `recipe` is its document."""
    if (merged := recipe.get(MERGED)) is not None:
        return f"a merge of the caches {', '.join(str(key)[:SHORT] for key in merged.get('of', ()))}"
    found = recipe.get(SUBSET) or {}
    chosen = f"where {found['where']}" if "where" in found else "by a list of ids"
    return f"a subset of the cache {str(found.get('of'))[:SHORT]}, {chosen}"


def compare_derived(
    config: Config, stored: Sequence[StoredSource], memo: Memo, *, may_hash: bool
) -> tuple[SourceState, list[str]]:
    """Returns whether raw data that a config shows is what a derived cache was made of, and the names that are not.

    A config may name other manifests than the caches were made of, or some of them. So only those files are compared
    that a manifest entry of the config leads to: a file of that name must have the content that one of the caches was
    made of. `absent` where some file of the cache is not seen from the config, or a store refuses to show it.
    """
    try:
        return _compared_derived(_seen(config, stored), stored, memo, may_hash=may_hash)
    except (RemoteDeniedError, RemoteMissingError) as err:
        logger.warning("%s; the cache is not compared with its sources", err)
        return "absent", []


Seen = Sequence[tuple[str, Path]]


def _compared_derived(
    seen: Seen, stored: Sequence[StoredSource], memo: Memo, *, may_hash: bool
) -> tuple[SourceState, list[str]]:
    expected: dict[str, set[str]] = {}
    sizes: dict[str, set[int]] = {}
    for source in stored:
        expected.setdefault(source.name, set()).add(source.xxh3_128)
        sizes.setdefault(source.name, set()).add(source.size_bytes)
    paths = [path for _, path in seen]
    stats, is_there = stats_of(paths, sources.file_stat)
    names = [name for (name, _), found in zip(seen, is_there.tolist(), strict=True) if found]
    paths = [path for path, found in zip(paths, is_there.tolist(), strict=True) if found]
    stats = stats[is_there]
    found_sizes = stats[:, SIZE].tolist()
    if changed := sorted({name for name, size in zip(names, found_sizes, strict=True) if size not in sizes[name]}):
        return "changed", changed
    if not may_hash and not memo.known_of(paths, stats)[1].all():
        return "unknown", []
    hashes = hexes(memo.hashed(paths, stats=stats)[1])
    if changed := sorted({name for name, now in zip(names, hashes, strict=True) if now not in expected[name]}):
        return "changed", changed
    known = set(zip(names, hashes, strict=True))
    missing = [s.name for s in stored if s.xxh3_128 != ABSENT and (s.name, s.xxh3_128) not in known]
    return "absent" if missing else "same", missing


def _seen(config: Config, stored: Sequence[StoredSource]) -> Seen:
    """Returns name and path of every file that a cache was made of and that may be there, by the config's manifests."""
    names = {source.name for source in stored if source.xxh3_128 != ABSENT}
    files = listed_files(localized(config).source, meaning=config.meaning)
    listed = {(file.name, file.path) for file in files if file.name in names}
    # What a manifest names is only found where its entry is in the place that it had.
    named = {(s.name, path) for s in stored if s.name in names and (path := path_of(config, s)) is not None}
    found = sorted(listed | named)
    sources.look_up([path for _, path in found])
    return found
