"""The source files of a config: which files a listing has; and those of a cache, as it remembers them."""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, overload

import numpy as np

from forebay.config.data import SOURCE_KINDS, SourceConfig
from forebay.errors import CacheCorruptError
from forebay.store.layout import Array
from forebay.store.memo import Stat
from forebay.store.remote.raw import raw_sources as sources

COMPRESSED_TARS = (".tgz", ".tbz2", ".txz", *(f".tar.{kind}" for kind in ("gz", "bz2", "xz", "zst", "lz4")))
"""How names of compressed tars end; their members cannot be read by place."""
BLOCK_SOURCES = 4096
"""Sources whose columns are taken apart at once."""
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
        for batch in self.table.to_batches(max_chunksize=BLOCK_SOURCES):
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
    buffer = io.BytesIO()
    write_sources(buffer, sources)
    return buffer.getvalue()


def write_sources(file: BinaryIO, sources: Iterable[StoredSource]) -> None:
    """Writes the parquet file that a cache keeps of its sources."""
    import pyarrow.parquet as pq

    table = StoredSources.of(sources).table
    # Names and hashes are all different: dictionaries of them would only take memory.
    pq.write_table(table, file, compression="zstd", use_dictionary=["entry"], row_group_size=4 * BLOCK_SOURCES)


def load_sources(path: Path) -> StoredSources:
    """Returns the sources that a cache was made of. Raises CacheCorruptError for what is not as it was written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # `read_table` imports pyarrow.dataset, and that pandas if it is installed
        with pq.ParquetFile(path) as file:
            table = file.read(use_threads=False)
        return StoredSources.of_columns(*(table[name] for name in _COLUMNS))
    except (OSError, KeyError, TypeError, UnicodeDecodeError, pa.ArrowException) as err:
        raise CacheCorruptError(
            f"{path} is not the sources of a cache: {err}; run: forebay preprocess CONFIG --rebuild"
        ) from err
