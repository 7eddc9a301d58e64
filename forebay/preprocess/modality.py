"""What speech and vision have of their own, and what both are given and give; all else of a build is shared by them.

Reasons and languages are columns of few different strings, a number a row: of millions of rows they are no Python
objects.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import xxhash

from forebay.config.tree import Config
from forebay.preprocess.cut import Cut
from forebay.preprocess.workspace import Failure
from forebay.rows.manifest import Manifest
from forebay.steps.recipe import AnyRecipe, ImagesRecipe, Recipe, VisionRecipe
from forebay.store.layout import ROW_BITS, Array, FieldSpec, Group
from forebay.store.memo import SIZE
from forebay.store.shard import Shard, ShardEntry, shard_fields
from forebay.store.source_files import SourceFile, StoredSource
from forebay.task_map import Map

MODALITIES: Mapping[type[AnyRecipe], str] = {
    Recipe: "forebay.preprocess.speech.modality:Speech",
    VisionRecipe: "forebay.preprocess.vision.modality:Vision",
    ImagesRecipe: "forebay.preprocess.images.modality:Images",
}
"""Class by the type of a config's recipe."""

Values = dict[str, Any]
"""Fields of one sample, those of one group; of a row that failed its table fields, `failure` and `message`."""

Read = Callable[[int, int, int], bytes]
"""(index of the source file, offset, size) -> encoded bytes of one sample."""

Finished = Mapping[Group, Sequence[tuple[Path, ShardEntry]]]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Every row of every text shard, in order, which is that of the listing: what `assemble` decides about.

    slots: int64 [rows]. reasons: why a row is no sample, empty where it is one. languages: empty where a row has none.
    lengths: int32 [names, rows], as the modality's `length_names`. failures: the bad samples among them that no receipt
    lists.
    """

    slots: Array
    reasons: Coded
    languages: Coded
    lengths: Array
    failures: tuple[Failure, ...] = ()


class Modality(Protocol):
    """The steps of a config and what they make. Picklable and hashable: a worker keeps what it loaded for one."""

    @property
    def recipe(self) -> AnyRecipe:
        """The steps."""
        ...

    @property
    def media_column(self) -> str:
        """The column of an `hf` source that holds recordings or images."""
        ...

    @property
    def media_unit(self) -> str:
        """What a row of media is called: clip, image."""
        ...

    @property
    def row_unit(self) -> str:
        """What rows of a listing are called: samples, conversations."""
        ...

    @property
    def max_sample_bytes(self) -> int:
        """The most that one encoded recording or image may have."""
        ...

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of fields that its samples have, "text" among them."""
        ...

    @property
    def read_values(self) -> frozenset[str]:
        """Tensor fields whose values `read_rows` reads; of others it reads how many each row has."""
        ...

    @property
    def length_names(self) -> tuple[str, ...]:
        """What `lengths.npy` holds a row of."""
        ...

    def manifest(self, config: Config, *, map_: Map = map, is_hashed: bool = False) -> Manifest:
        """Returns the eligible samples of a config, every place known, and what was left out.

        is_hashed: all files will be hashed, so those of a store are downloaded as a whole when they are first read.
        Raises ConfigError or ManifestError where the config or its manifest cannot be used.
        """
        ...

    def keeping(self, rows: pa.Table) -> Self:
        """Returns the modality whose samples have the kept columns of a listing's rows."""
        ...

    def measured(self, constants: Mapping[str, Any]) -> Self:
        """Returns the modality that knows its constants: what a worker found need not be found again."""
        ...

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns every field, media first, without the `failure` field that shards add."""
        ...

    def shard_rows(self, rows_per_shard: int) -> int:
        """Returns how many rows a shard holds at most. rows_per_shard: `layout.rows_per_shard`."""
        ...

    def cuts(self, listing: Listing, *, probe: Mapping[Group, str], rows_per_shard: int) -> Iterator[Cut]:
        """Yields every shard with its keys. rows_per_shard: `layout.rows_per_shard`."""
        ...

    def task_rows(self, listing: Listing, cut: Cut, group: Group) -> tuple[tuple[SourceFile, ...], pa.Table]:
        """Returns the rows of one shard, one an element of it, and the files that they use."""
        ...

    def media_samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:
        """Yields the media fields of every row in order; see `Values` for a row that fails."""
        ...

    def text_samples(self, rows: pa.Table, names: Sequence[str]) -> Iterator[Values]:
        """Yields the text fields of every row in order, in the same way. names: of the source files, by `file`."""
        ...

    def used_by(self, listing: Listing, rows: pa.Table, *, group: Group, position: int) -> tuple[str, list[str]]:
        """Returns what to call a row of `task_rows`, and the ids of the samples that need that row."""
        ...

    def constants(self) -> dict[str, Any]:
        """Returns what collating needs and is equal for all samples: kinds, rates, token ids, tables."""
        ...

    def probe(self, group: Group) -> str:
        """Returns the xxh3-128 of what a group's steps give for small built-in inputs."""
        ...

    def estimate_bytes(self, listing: Listing) -> int:
        """Returns the expected size of the cache in bytes, from what the listing knows."""
        ...

    def read_rows(self, finished: Finished, listing: Listing) -> Rows:
        """Returns every row of finished shards, which are those of a listing in its order."""
        ...

    def summary(self, listing: Listing, rows: Rows, keep: Array) -> dict[str, Any]:
        """Returns what metadata.json says of the samples that are kept, beside their number."""
        ...


def modality_of(config: Config, recipe: AnyRecipe) -> Modality:
    """Returns the modality of a config whose recipe is known. Raises ConfigError where its files cannot be used."""
    modality: Modality = pkgutil.resolve_name(MODALITIES[type(recipe)]).of(config, recipe)
    return modality


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a build starts from. hashes: xxh3-128 by file, ABSENT where a file cannot be opened. key: the cache's."""

    recipe: AnyRecipe
    modality: Modality
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


def narrow(rows: pa.Table, files: Sequence[SourceFile]) -> tuple[tuple[SourceFile, ...], pa.Table]:
    """Returns the files that rows use, and a copy of the rows with `file` renumbered to them.

    A copy: a slice keeps the whole table that it was cut from, and its pickle sends all of it.
    """
    used, inverse = np.unique(rows["file"].to_numpy(), return_inverse=True)
    index = rows.column_names.index("file")
    taken = rows.take(pa.array(np.arange(len(rows))))
    return tuple(files[i] for i in used.tolist()), taken.set_column(index, "file", pa.array(inverse, pa.int32()))


def as_int32(lengths: Array) -> Array:
    """Returns lengths as `lengths.npy` holds them. Raises OverflowError for a sample that no int32 can count."""
    if lengths.size and lengths.max() > np.iinfo(np.int32).max:
        raise OverflowError(f"a sample of {lengths.max()} elements does not fit int32 lengths")
    return lengths.astype("<i4")


@dataclass(frozen=True, slots=True)
class Coded:
    """A column of strings: `names[codes[i]]` is that of row i, `names[0]` is empty. codes: int32 [rows]."""

    names: tuple[str, ...]
    codes: Array

    def counts(self, chosen: Array | None = None, weights: Array | None = None) -> Array:
        """Returns how many rows have each name, or the sum of their weights. chosen: bool [rows], those that count."""
        rows = slice(None) if chosen is None else chosen
        return np.bincount(self.codes[rows], None if weights is None else weights[rows], len(self.names))


@dataclass(slots=True)
class Coder:
    """Numbers for strings, in order of first appearance in all shards that it is asked about; 0 is the empty string."""

    _numbers: dict[str, int] = field(default_factory=lambda: {"": 0})

    def number(self, name: str) -> int:
        """Returns the number of a string."""
        return self._numbers.setdefault(name, len(self._numbers))

    def column(self, shard: Shard, name: str) -> Array:
        """Returns the numbers of a shard's string field, int32 [rows], after checking its CRC-32."""
        values, offsets = shard.column(name)
        rows = len(offsets) - 1
        if not len(values):
            return np.zeros(rows, np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
        encoded = pa.Array.from_buffers(pa.large_binary(), rows, buffers).dictionary_encode()
        texts = (data.decode("utf-8", "surrogateescape") for data in encoded.dictionary.to_pylist())
        numbers: Array = np.array([self.number(text) for text in texts], np.int32)
        return np.asarray(numbers[encoded.indices.to_numpy()])

    def coded(self, codes: Array) -> Coded:
        """Returns a column of numbers that were given here."""
        return Coded(tuple(self._numbers), codes)


def gathered(
    fields: Sequence[FieldSpec],
    finished: Finished,
    *,
    reasons: Callable[[Shard | None, Shard, Coder], Array],
    lengths: Callable[[Shard | None, Shard], Array],
    num_lengths: int = 3,
) -> tuple[Rows, Coder]:
    """Returns every row of finished shards, and what numbers their reasons.

    reasons: (media shard if there is one, text shard, what numbers reasons) -> why each of their rows is no sample,
    0 where it is one: int32 [rows]. lengths: (media, text) -> int64 [names, rows]. num_lengths: names.
    """
    why, spoken = Coder(), Coder()
    slots, codes = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    languages, counts = [np.zeros(0, np.int32)], [np.zeros((num_lengths, 0), np.int32)]
    for index, (path, entry) in enumerate(finished["text"]):
        text = Shard(path, entry, shard_fields(fields, "text"))
        media = Shard(*finished["media"][index], shard_fields(fields, "media")) if "media" in finished else None
        slots.append((np.int64(index) << ROW_BITS) | np.arange(entry.rows, dtype=np.int64))
        codes.append(reasons(media, text, why))
        has_language = any(field.name == "language" for field in text.fields)
        languages.append(spoken.column(text, "language") if has_language else np.zeros(entry.rows, np.int32))
        counts.append(as_int32(lengths(media, text)))
    return Rows(
        slots=np.concatenate(slots),
        reasons=why.coded(np.concatenate(codes)),
        languages=spoken.coded(np.concatenate(languages)),
        lengths=np.concatenate(counts, axis=1),
    ), why


def values_digest(samples: Iterable[Mapping[str, Any]]) -> str:
    """Returns the xxh3-128 of the names and values of some samples; messages do not count."""
    state = xxhash.xxh3_128()
    for sample in samples:
        for name in sorted(sample):
            value = sample[name]
            if name != "message":
                state.update(f"{name}\0".encode())
                state.update(value.encode() if isinstance(value, str) else np.ascontiguousarray(value).tobytes())
    return state.hexdigest()
