"""Some samples of a source, as a source: those that a filter leaves, or the first ones.

`[filter]` is applied here: which samples a condition, lists of ids and quotas leave.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from forebay.config.tree import FilterConfig
from forebay.errors import ConfigError, ForebayError
from forebay.store.by_hand import ByHand, id_hashes, read_ids
from forebay.store.key import digest
from forebay.store.layout import Array, Ints
from forebay.store.source import Sample, SampleBatch, SampleSource, SourceUnion
from forebay.store.where import WhereClause, is_no_column, parse_where
from forebay.terminal import first_of

if TYPE_CHECKING:
    import pyarrow as pa


class Selection(ByHand):
    """Some samples of one source, no union, in the source's order. Threads share it as far as they share the source.

    source: what samples are read from, itself no selection. places: int64 [num_samples], where each sample stands in
    `source`. choice: what the last filter did; None: no filter. Everything else is the source's own.
    """

    def __init__(
        self,
        source: SampleSource,
        places: Ints,
        *,
        key: str,
        filter_key: str | None = None,
        choice: FilterChoice | None = None,
        name: str | None = None,
    ) -> None:
        """places: in `source`, rising. key: of these samples. filter_key: of what they were chosen by, see `Filter`.

        name: of the source, for messages.
        """
        if isinstance(source, SourceUnion):
            raise TypeError("a selection is of one source; make a selection of each source of the union")
        self.key, self.choice, self.name = key, choice, name or source.place
        self.filter_key = filter_key if source.filter_key is None else digest([source.filter_key, filter_key])
        base, own = origin(source) if source.are_whole else (source, None)
        self.source: SampleSource = base
        self.places: Ints = np.array(places if own is None else own[places], np.int64)
        self.places.flags.writeable = False
        # A memoryview gives Python ints at a third of the cost of numpy's scalars.
        self._place_at = self.places.data
        self.recipe_key, self.fields, self.constants = source.recipe_key, source.fields, source.constants

    def __len__(self) -> int:
        return len(self.places)

    def __repr__(self) -> str:
        return f"Selection({len(self)} of the {len(self.source)} samples of {self.source!r}, key={self.key[:16]})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_place_at"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _place_at=state["places"].data)

    @property
    def place(self) -> str:
        """The name of the source in messages."""
        return self.name

    @cached_property
    def lengths(self) -> Mapping[str, Array]:  # type: ignore[override]  # mypy takes it for read-only
        """int32 [num_samples] by name; see `SampleSource`."""
        return {name: column[self.places] for name, column in self.source.lengths.items()}

    @property
    def tokenizer(self) -> str | None:
        return self.source.tokenizer

    @property
    def processor(self) -> str | None:
        return self.source.processor

    @cached_property
    def slots(self) -> Array | None:
        slots = self.source.slots
        return None if slots is None else slots[self.places]

    def read(self, index: int) -> Sample:
        """Returns the sample's tensor fields, as the source does; the note of a failure names the index there."""
        return self.read_one(index)[0]

    def read_one(self, index: int) -> tuple[Sample, int]:
        """See `SampleSource`. The source keeps to these samples where one stands in for another (`keep_to`)."""
        place = self._place(index)
        try:
            sample, read = self.source.read_one(place)
            return sample, index if read == place else int(np.searchsorted(self.places, read))
        except ForebayError as err:
            err.add_note(f"sample {place} of {self.name}")
            raise

    def read_batch(self, indices: Sequence[int]) -> SampleBatch | None:
        """See `SampleSource`."""
        return self.source.read_batch([self._place(index) for index in indices])

    def joined(self, sample: Sample) -> dict[str, Any]:
        """See `ByHand`."""
        return self.source.joined(sample) if isinstance(self.source, ByHand) else dict(sample)

    def text_of(self, index: int) -> tuple[Sample, str]:
        """See `SampleSource`."""
        return self.source.text_of(self._place(index))

    def sample_id(self, index: int) -> str:
        return self.source.sample_id(self._place(index))

    def ids_digest(self) -> str:
        """Returns the digest of the ids of the source and of which of these samples are taken: no id is read again."""
        taken = xxhash.xxh3_128_hexdigest(self.places.data)
        return digest({"of": self.source.ids_digest(), "taken": taken})

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """See `SampleSource`; the values are those of these samples."""
        found = self.source.categories(name)
        if found is None:
            return None
        used, codes = np.unique(found[1][self.places], return_inverse=True)
        return [found[0][value] for value in used.tolist()], codes.astype(np.int32)

    @property
    def column_names(self) -> list[str]:
        return self.source.column_names

    def table(self, names: Collection[str] | None = None) -> pa.Table:
        """See `SampleSource`; `index` is a sample's index in the source."""
        return self.source.table(names).take(self.places)

    def will_need(self, indices: Iterable[int]) -> None:
        self.source.will_need([self._place(index) for index in indices])

    def _place(self, index: int) -> int:
        try:
            return self._place_at[index]
        except IndexError:
            raise IndexError(f"sample {index} of {len(self)} samples chosen of {self.name}") from None


def filtered(source: SampleSource, filter_: Filter, *, name: str | None = None) -> Selection:
    """Returns the samples of one source, no union, that a filter leaves. name, errors: of `Filter.choose`."""
    name = name or source.place
    choice = filter_.choose(source, name=name)
    key = digest({"of": source.key, "filter": filter_.key})
    return Selection(source, choice.places, key=key, filter_key=filter_.key, choice=choice, name=name)


def first_samples(source: SampleSource, count: int | None) -> SampleSource:
    """Returns the first `count` samples of a source; the source itself where it has no more, or `count` is None.

    Of a union they are those of its sources in their order; sources of which none is taken are not in the result.
    """
    if count is None or count >= len(source):
        return source
    if not isinstance(source, SourceUnion):
        selection = Selection(source, np.arange(count), key=digest({"of": source.key, "first": count}))
        selection.source.keep_to(selection.places)
        return selection
    parts, names, left = [], [], count
    for part, name in zip(source.sources, source.names, strict=True):
        if left:
            parts.append(first_samples(part, min(left, len(part))))
            names.append(name)
            left -= len(parts[-1])
    return SourceUnion(parts, names, shares_batches=False)


def origin(source: SampleSource) -> tuple[SampleSource, Ints | None]:
    """Returns the source that a selection is of, and where its samples stand there; of another source itself, None."""
    return (source.source, source.places) if isinstance(source, Selection) else (source, None)


logger = logging.getLogger(__name__)
FILTER_VERSION = 1
"""Bumped when the same settings leave other samples."""
_QUOTA_SEED = 0x666F726562617931
_SHOWN = 5
"""Ids, or values of a column, that a message lists."""
_MAX_SHOWN = 200
"""Characters of a condition that a line shows."""


@dataclass(frozen=True, kw_only=True)
class FilterStep:
    """The effect of one setting. name, said: the setting, and its value in words. before, after: samples."""

    name: str
    said: str
    before: int
    after: int

    def __str__(self) -> str:
        if self.name in ("where", "ids"):
            return f"{self.name} {self.said} keeps {self.after:,}".replace("  ", " ")
        return f"{self.name} {self.said} drops {self.before - self.after:,}".replace("  ", " ")


@dataclass(frozen=True, kw_only=True)
class FilterChoice:
    """The samples that a filter left of a source.

    places: int64, rising. num_samples: of the source. missing: by setting, ids of its file that the source has not.
    """

    places: Ints
    num_samples: int
    steps: tuple[FilterStep, ...]
    missing: Mapping[str, pa.Array] = field(repr=False)

    def __str__(self) -> str:
        return f"{len(self.places):,} of {self.num_samples:,} samples ({', '.join(map(str, self.steps))})"

    def to_json(self) -> dict[str, Any]:
        """Returns what `forebay inspect CONFIG --json` says of it."""
        steps = [{"setting": s.name, "value": s.said, "before": s.before, "after": s.after} for s in self.steps]
        return {"samples": len(self.places), "of": self.num_samples, "steps": steps, "line": str(self)}


@dataclass(frozen=True, kw_only=True)
class Filter:
    """The settings of `[filter]`. ids, drop_ids: different ids of their files, large strings; None: no file named."""

    where: WhereClause | None = None
    ids: pa.Array | None = None
    drop_ids: pa.Array | None = None
    quota: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: FilterConfig) -> Filter:
        """Returns the filter of a section. Raises ConfigError for a condition or a file that cannot be read."""
        where = None if settings.where is None else parse_where(settings.where, setting=_WHERE)
        return cls(
            where=where,
            ids=None if settings.ids is None else read_ids(Path(settings.ids), setting="filter.ids").unique(),
            drop_ids=None
            if settings.drop_ids is None
            else read_ids(Path(settings.drop_ids), setting="filter.drop_ids", may_be_empty=True).unique(),
            quota=dict(settings.quota or {}),
        )

    @cached_property
    def key(self) -> str:
        """Digest of what decides which samples are left, 64 hex digits; of files only which ids they hold."""
        import pyarrow as pa

        from forebay.store.row_table import strings_digest

        document: dict[str, Any] = {"version": FILTER_VERSION, "quota": dict(sorted(self.quota.items()))}
        if self.where is not None:
            document["where"] = self.where.text
        for name, ids in (("ids", self.ids), ("drop_ids", self.drop_ids)):
            if ids is not None:
                document[name] = strings_digest(pa.chunked_array([ids.sort()]))
        return digest({"filter": document})

    def choose(self, source: SampleSource, *, name: str) -> FilterChoice:
        """Returns which samples of a source are left. name: what to call the source in messages.

        Raises ConfigError for a column that the source does not have or that does not fit, and where nothing is left.
        """
        return _Choosing(self, source, name).choice()


_WHERE = "filter.where"


class _Choosing:
    """One pass of a filter over a source."""

    def __init__(self, filter_: Filter, source: SampleSource, name: str) -> None:
        self._filter, self._source, self._name = filter_, source, name
        self._places: Ints = np.arange(len(source))
        self._steps: list[FilterStep] = []

    def choice(self) -> FilterChoice:
        filter_, missing = self._filter, {}
        if filter_.where is not None:
            self._keep(_WHERE.partition(".")[2], _short(filter_.where.text), self._where(filter_.where))
        for name, ids in (("ids", filter_.ids), ("drop_ids", filter_.drop_ids)):
            if ids is not None:
                listed, missing[name] = self._listed(ids)
                self._keep(name, "", listed if name == "ids" else ~listed)
        # All of them look at the same samples: a larger quota of one column takes none away from another one.
        quotas = [(column, most, self._within(column, most)) for column, most in filter_.quota.items()]
        for column, most, taken in quotas:
            self._keep("quota", f"{column} = {most:,}", taken[self._places])
        if not len(self._places):
            raise ConfigError(self._nothing_left())
        return FilterChoice(
            places=self._places, num_samples=len(self._source), steps=tuple(self._steps), missing=missing
        )

    @cached_property
    def _names(self) -> list[str]:
        """The columns that settings may name. Raw data has samples that a build leaves out, so indices differ."""
        names = self._source.column_names
        return names if self._source.slots is not None else [name for name in names if name != "index"]

    @cached_property
    def _ids(self) -> pa.ChunkedArray:
        if "sample_id" not in self._names:
            raise ConfigError(f"[filter]: {self._name} has no sample ids, so ids, drop_ids and quota cannot be used")
        return self._source.table(["sample_id"])["sample_id"]

    def _keep(self, name: str, said: str, mask: Array) -> None:
        """Leaves of the samples that are left those of a mask, bool [samples left]."""
        before = len(self._places)
        self._places = self._places[mask]
        self._steps.append(FilterStep(name=name, said=said, before=before, after=len(self._places)))

    def _where(self, where: WhereClause) -> Array:
        with self._known_without_a_cache():
            where.require_columns(self._names)
        return where.mask(self._table(where))

    def _table(self, where: WhereClause) -> pa.Table:
        """Returns the columns of a condition; without any, a table of as many rows."""
        import pyarrow as pa

        return self._source.table(where.columns) if where.columns else pa.table({"": np.arange(len(self._source))})

    @contextlib.contextmanager
    def _known_without_a_cache(self) -> Iterator[None]:
        """Adds to the ConfigError of a column that raw data lacks that a cache may have it."""
        try:
            yield
        except ConfigError as err:
            if self._source.slots is not None:
                raise
            raise ConfigError(
                f"{err}. These are the columns that are known without the cache; to have those of the cache, run: "
                "forebay preprocess CONFIG"
            ) from err

    def _listed(self, ids: pa.Array) -> tuple[Array, pa.Array]:
        """Returns which of the samples that are left are in a list, and the ids of the list that no sample has."""
        import pyarrow.compute as pc

        known = self._ids
        is_listed = pc.is_in(known, value_set=ids).to_numpy()
        # Few lists name everything: looking the found ones up costs less than to look up all.
        found = known.filter(is_listed)
        return is_listed[self._places], ids.filter(pc.invert(pc.is_in(ids, value_set=found.combine_chunks())))

    def _within(self, column: str, most: int) -> Array:
        """Returns which samples a quota takes, bool [num_samples], of those that are left."""
        codes = self._codes(column)[self._places]
        counts = np.bincount(codes)
        taken = np.zeros(len(self._source), bool)
        is_over = counts[codes] > most
        taken[self._places[~is_over]] = True
        places, codes = self._places[is_over], codes[is_over]
        order = np.lexsort((self._hashes[places], codes))
        starts = np.concatenate(([0], np.flatnonzero(np.diff(codes[order])) + 1)) if len(order) else np.zeros(0, int)
        ranks = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
        taken[places[order[ranks < most]]] = True
        return taken

    @cached_property
    def _hashes(self) -> Array:
        return id_hashes(self._ids, seed=_QUOTA_SEED)

    def _codes(self, column: str) -> Array:
        """Returns the number of the value that each sample has; a null is a value of its own."""
        import pyarrow as pa

        with self._known_without_a_cache():
            if column not in self._names:
                raise ConfigError(f"filter.quota: {column!r} {is_no_column(column, self._names)}")
        values = self._source.table([column])[column]
        kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ConfigError(
                f"filter.quota.{column}: the column holds {kind}, wanted texts or whole numbers, of which many samples "
                "have the same"
            )
        if not pa.types.is_dictionary(values.type):
            values = values.dictionary_encode(null_encoding="encode")
        return np.asarray(values.combine_chunks().indices.to_numpy(zero_copy_only=False))

    def _nothing_left(self) -> str:
        steps = "; ".join(map(str, self._steps))
        parts = "; ".join(self._parts())
        return (
            f"[filter] leaves none of the {len(self._source):,} samples of {self._name}: {steps}"
            + (f"; {parts}" if parts else "")
            + "; change [filter], or look at the columns: forebay inspect CONFIG --export rows.parquet"
        )

    def _parts(self) -> Iterator[str]:
        """Yields how many samples each part of a condition keeps by itself, and what the columns of text hold."""
        where = self._filter.where
        if where is None or not len(self._source):
            return
        table = self._table(where)
        parts = where.parts()
        if len(parts) > 1:
            for part in parts:
                yield f"{_short(part.text)} alone keeps {int(part.mask(table).sum()):,}"
        for column in where.columns:
            if (values := _commonest(table[column])) is not None:
                yield f"{column}: {values}"


def _commonest(column: pa.ChunkedArray) -> str | None:
    """Returns the commonest values of a column of text with their counts; None for another one, or one of many."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return None
    counts = sorted(pc.value_counts(column).to_pylist(), key=lambda row: -row["counts"])
    if len(counts) > len(column) // 2 and len(counts) > _SHOWN:
        return None
    return first_of([f"{row['values']!r:.40} {row['counts']:,}" for row in counts], _SHOWN)


def say_missing(missing: Mapping[str, pa.Array], *, name: str) -> None:
    """Logs a warning for each list that holds ids of no sample. missing: as of `FilterChoice`. name: of the source."""
    for setting, ids in missing.items():
        if len(ids):
            shown = ", ".join(map(repr, ids[:_SHOWN].to_pylist())) + (", ..." if len(ids) > _SHOWN else "")
            logger.warning("filter.%s: %s ids are of no sample of %s: %s", setting, f"{len(ids):,}", name, shown)


def missing_of_all(choices: Sequence[FilterChoice]) -> dict[str, pa.Array]:
    """Returns, by setting, the ids of a filter's files that none of the sources has to which it was applied."""
    import pyarrow.compute as pc

    missing = dict(choices[0].missing)
    for choice in choices[1:]:
        missing = {name: ids.filter(pc.is_in(ids, value_set=choice.missing[name])) for name, ids in missing.items()}
    return missing


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}..."
