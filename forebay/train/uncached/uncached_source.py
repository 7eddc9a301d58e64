"""Samples made on the fly, whatever they are of, by the very steps of a build.

A plain data set of them decodes items when they are asked for, and has texts with their fields.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.tree import Config
from forebay.errors import BuildError, ConfigError, ManifestError, SampleError
from forebay.preprocess.group import ItemGroup
from forebay.preprocess.groups import Groups, Listing
from forebay.preprocess.listing import listed
from forebay.rows.kept_columns import column_of, names_of
from forebay.rows.readers.python_inputs import list_inputs
from forebay.rows.segments import segment_columns, segment_of
from forebay.steps.recipe import recipe_of
from forebay.steps.text.row_encoder import RowEncoder
from forebay.store.key import digest
from forebay.store.layout import TEXT, Array, FieldSpec, Group, Ints, sorted_categories
from forebay.store.remote.raw.raw_sources import naming_urls
from forebay.store.row_table import as_texts, row_table, strings_digest
from forebay.store.source import Sample, SampleSource
from forebay.train.uncached.kept_listing import Rejected, counted_rows

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_SUBSTITUTES = 100


def uncached_source(config: Config, *, stored_probe: Mapping[str, str] | None = None) -> UncachedSource:
    """Returns the source that makes the samples of a config; see `UncachedSource`."""
    with naming_urls():
        return UncachedSource(config, stored_probe=stored_probe)


class UncachedSource(SampleSource):
    """Makes a sample whenever it is asked for. Threads may share it.

    fields, lengths, constants: as of a cache that compresses nothing; lengths as far as they are known without
    decoding. A sample that turns out to be bad is replaced by the next one that is good, and counted in `failed`. What
    stands in for one that lists items is no longer than that sample, so that it fits where the bad one stood.
    """

    def __init__(self, config: Config, *, stored_probe: Mapping[str, str] | None = None) -> None:
        """Lists the samples, reads the headers of their items and makes every text once, unless that was kept.

        stored_probe: of a cache that these samples stand beside; a difference in numerics is logged.
        Raises ConfigError or ManifestError where the config or its manifest cannot be used, ManifestError where no
        sample can be, BuildError where more rows are bad than a build would allow.
        """
        recipe = recipe_of(config)
        recipe.check()
        list_inputs(config)
        groups = Groups.of(config, recipe).under("raw")
        found = counted_rows(config, groups)
        self._groups = groups.keeping(found.rows)
        if not len(found.rows):
            raise ManifestError(
                f"no sample of {', '.join(config.source.manifests)} can be used ({found.rejected}); "
                f"run: forebay preprocess {config.named}"
            )
        self._substitutes = Substitutes(config, found.rejected, self.sample_id)
        self._listing = Listing(groups=self._groups, manifest=found.manifest, key="")
        self._rows, self._files, self._said = found.rows, self._listing.files, found.said
        self._names = self._files.all_names
        self._items = self._listing.items
        self._readers = self._listing.readers(config)
        self.fields: Mapping[str, FieldSpec] = {spec.name: spec for spec in self._groups.fields()}
        self.constants = self._groups.constants()
        self.lengths = found.lengths
        self.recipe_key = recipe.key
        self.key = digest({"uncached": recipe.key, "rows": self._rows["sample_id"].to_pylist()})
        self._may_stand_in: Array | None = None
        self._path = config.path
        for group in self._groups.names if stored_probe is not None else ():
            now = self._groups.probe(group)
            if stored_probe is not None and now != stored_probe.get(group):
                logger.warning(
                    "the %s steps give other values here than where the cache was built (probe %s, stored %s)",
                    group,
                    now,
                    stored_probe.get(group),
                )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def tokenizer(self) -> str | None:
        """Digest of the tokenizer, None without one."""
        return self._groups.text.steps.step.tokenizer_digest

    @property
    def processor(self) -> str | None:
        """Digest of the processor that makes the images."""
        image = self._groups.recipe.image
        return None if image is None else image.step.processor

    def read(self, index: int) -> dict[str, Any]:
        """Returns one sample, read-only, as `Cache.read` does; see `read_one`."""
        return self.read_one(index)[0]

    def read_one(self, index: int) -> tuple[dict[str, Any], int]:
        """See `SampleSource`.

        Raises SampleError where a hundred samples in a row are bad: then it is not the samples. Raises BuildError where
        more rows are bad than `run.max_failed_share` allows.
        """
        may = self._may_stand_in
        candidates = (place for place in self._candidates(index) if may is None or place == index or may[place])
        return self._substitutes.first_good(self._make, islice(candidates, MAX_SUBSTITUTES))

    def keep_to(self, places: Ints) -> None:
        self._may_stand_in = np.zeros(len(self), bool)
        self._may_stand_in[places] = True

    @property
    def place(self) -> str:
        return f"the raw data of {self._path}"

    @property
    def column_names(self) -> list[str]:
        """Columns of the row table that a cache of these samples has, as far as they are known without decoding."""
        return list(self._row_columns())

    def table(self, names: Collection[str] | None = None) -> pa.Table:
        columns = self._row_columns()
        if unknown := set(names or ()) - columns.keys():
            raise KeyError(f"{self.place} has no columns {', '.join(sorted(unknown))}; it has {', '.join(columns)}")
        return row_table(columns, names)

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """See `SampleSource`; of a column that texts are made of, all of them are made again."""
        if name == "source":
            return sorted_categories(self._names, _files_of(self._rows))
        if name not in self.fields or self.fields[name].role != "table" or name not in self._row_columns():
            return None
        column = as_texts(self._column(name)).dictionary_encode().combine_chunks()
        return sorted_categories(column.dictionary.to_pylist(), column.indices.to_numpy())

    @property
    def failed(self) -> Counter[str]:
        """Bad rows known so far, by reason: those of the listing, and those met since, each once."""
        return self._substitutes.rejected.failed

    def sample_id(self, index: int) -> str:
        """Returns the id of one sample."""
        return str(self._rows["sample_id"][index].as_py())

    def ids_digest(self) -> str:
        """Returns the digest of the samples' ids in their order."""
        return strings_digest(self._rows["sample_id"])

    def text_of(self, index: int) -> tuple[Sample, str]:
        """See `SampleSource`. Raises SampleError for a text that cannot be used."""
        row = self._text_row(index)
        return self._text_fields(row), str(row["text"])

    def _make(self, index: int) -> dict[str, Any]:
        """Returns one sample, read-only. Raises SampleError where it cannot be used."""
        own = [(group, self._made(group, index)) for group in self._groups.items if group.lists is None]
        sample: dict[str, Any] = self._text_fields(self._text_row(index))
        for group, made in own:
            group.check(made[0], self._rows.slice(index, 1))
        listed = [(group, self._made(group, index)) for group in self._groups.items if group.lists is not None]
        for group, made in (*own, *listed):
            stored = [
                {spec.name: self._as_stored(spec.name, one[spec.name]) for spec in self._tensors(group.name)}
                for one in made
            ]
            sample = group.joined(sample, stored)
        return sample

    def _text_row(self, index: int) -> dict[str, Any]:
        rows = self._groups.text_rows(self._listing, index, index + 1)
        return _good(next(iter(self._groups.text.samples(rows, self._names))))

    def _text_fields(self, row: Mapping[str, Any]) -> dict[str, Array]:
        return {spec.name: self._as_stored(spec.name, row[spec.name]) for spec in self._tensors(TEXT)}

    def _made(self, group: ItemGroup, index: int) -> list[dict[str, Any]]:
        """Returns what is made of the items of a row, each different one once."""
        items = self._items[group.name]
        _, places = items.of_rows(index, index + 1)
        used, inverse = np.unique(places, return_inverse=True)
        rows = group.task_rows(items.table.take(pa.array(used)), self._files)
        made = [_good(values) for values in group.samples(rows, self._readers[group.name])]
        return [made[place] for place in inverse.reshape(-1).tolist()]

    def _tensors(self, group: Group) -> list[FieldSpec]:
        return [spec for spec in self.fields.values() if (spec.role, spec.group) == ("tensor", group)]

    def _as_stored(self, name: str, value: Any) -> Array:
        array: Array = np.ascontiguousarray(value).reshape(-1, *self.fields[name].shape)
        array.flags.writeable = False
        return array

    def _candidates(self, index: int) -> Iterator[int]:
        """Yields a sample, then those that may stand in for it, around the end."""
        yield index
        others = ((index + step) % len(self) for step in range(1, len(self)))
        if all(group.lists is None for group in self._groups.items):
            yield from others
            return
        lengths = [length for name, length in self.lengths.items() if name not in ("num_images", "num_audios")]
        yield from (other for other in others if all(length[other] <= length[index] for length in lengths))

    def _row_columns(self) -> dict[str, Callable[[], Any]]:
        """Returns what makes each column of `table`, in the order of a cache's."""
        made: dict[str, Callable[[], Any]] = {"index": lambda: pa.array(np.arange(len(self)))}
        models = {group.name for group in self._groups.recipe.models}  # their columns are known to a cache alone
        own = {TEXT, *(group.name for group in self._groups.items if group.lists is None)} - models
        names = [spec.name for spec in self.fields.values() if spec.role == "table" and spec.group in own]
        made |= {name: partial(self._column, name) for name in sorted(names, key="sample_id".__ne__)}
        lengths = dict(self.lengths)
        if (audio := self._groups.recipe.audio) is not None:
            rate_hz = audio.decode.sample_rate_hz
            made["duration_s"] = lambda: pa.array(np.asarray(lengths["num_audio_samples"]) / rate_hz)
        return made | {name: partial(pa.array, np.asarray(values)) for name, values in lengths.items()}

    def _column(self, name: str) -> pa.ChunkedArray:
        rows = self._rows
        if name == "source":
            names = pa.array(self._names, pa.large_string())
            return pa.chunked_array([names.take(pa.array(_files_of(rows), pa.int32()))])
        if self._said is not None and name in self._said.column_names:
            return self._said[name]
        if name in names_of(rows):
            return column_of(rows, name)
        if name == "sample_id":
            return rows[name]
        if name in ("language", "prompt"):  # a cache has no null here
            return pc.fill_null(rows[name], "")
        kind = pa.large_string()
        made = self._groups.text.samples(self._groups.text_rows(self._listing, 0, len(self)), self._names)
        return pa.chunked_array([pa.array([row[name] for row in made], kind)], type=kind)


def _good(values: dict[str, Any]) -> dict[str, Any]:
    if "failure" in values:
        raise SampleError(values["failure"], values["message"])
    return values


def _files_of(rows: pa.Table) -> Array:
    """Returns the file that is the source of each row."""
    return np.asarray(rows["file" if "file" in rows.column_names else "group"].to_numpy())


class Substitutes:
    """Counts bad samples in `rejected`, each once; threads may share it."""

    def __init__(self, config: Config, rejected: Rejected, sample_id: Callable[[int], str]) -> None:
        """rejected: of the listing. sample_id: of a row. Raises BuildError where a build would not allow so many."""
        self._config, self.rejected, self._sample_id = config, rejected, sample_id
        self._known: set[int] = set()
        self._lock = threading.Lock()
        if rejected.failed or rejected.excluded:
            logger.warning("%s: %s", config.path, rejected)
        self._check()

    def first_good(self, make: Callable[[int], T], candidates: Iterable[int]) -> tuple[T, int]:
        """Returns `make` of the first candidate for which it does not raise SampleError, and the candidate.

        Raises the last SampleError where all are bad: then it is not the samples.
        """
        last: SampleError | None = None
        for index in candidates:
            try:
                return make(index), index
            except SampleError as err:
                self._note(index, err)
                last = err
        if last is None:
            raise ValueError("no candidate to read")
        raise last

    def _note(self, index: int, err: SampleError) -> None:
        with self._lock:
            if index in self._known:
                return
            is_first = not self._known
            self._known.add(index)
            self.rejected.add(err.reason)
        logger.warning("reading another sample instead of %s, %s: %s", self._sample_id(index), err.reason, err)
        self._check()
        if is_first:
            logger.warning(
                "the cache will leave such samples out, so its batches will be others: a state saved here goes on here "
                '(loader.cache = "off"), and is refused there'
            )

    def _check(self) -> None:
        count, rows = self.rejected.failed.total(), self.rejected.num_rows
        path, share = self._config.path, self._config.run.max_failed_share
        if count <= share * rows:
            return
        raise BuildError(
            f"{path}: {count} of {rows} rows are bad, run.max_failed_share = {share} allows {int(share * rows)} "
            f"({self.rejected}); forebay preprocess {self._config.named} lists them: mend them, or allow more: "
            f"--set run.max_failed_share={min(1.0, 2 * count / rows):.3g}",
            code="FB301",
        )


class PlainSamples:
    """The samples of a config by their ids: a data set for torch's DataLoader, whose workers may be forked."""

    def __init__(self, config: Config, ids: Sequence[str]) -> None:
        """Lists the manifest. ids: of the samples that are asked for; `self[i]` is that of `ids[i]`.

        Raises ConfigError or ManifestError where the config or its manifest cannot be used, or lacks an id.
        """
        groups = Groups.of(config, recipe_of(config))
        with naming_urls():
            manifest = listed(config, groups)
        self.groups = groups.keeping(manifest.rows)
        manifest = dataclasses.replace(manifest, rows=_rows_of(manifest.rows, ids, config=config))
        self._listing = Listing(groups=self.groups, manifest=manifest, key="")
        self._names, self._items = self._listing.files.all_names, self._listing.items
        for items in self._items.values():
            if "still" in items.table.column_names and items.table["still"].null_count < len(items.table):
                raise ConfigError(
                    f"{config.path}: rows ask for a size or a frame of one image, which plain samples have not; leave "
                    "these rows out"
                )
        self._texts: list[dict[str, Any]] = []
        self._readers = self._listing.readers(config)
        self.constants = self.groups.constants()
        self.fields = {spec.name: spec for spec in self.groups.fields()}

    @property
    def encoder(self) -> RowEncoder:
        """The writer of the texts."""
        return self.groups.text.encoder

    def write_texts(self) -> None:
        """Makes the fields of all texts, which say what of a sample is learnt: no plain data set has to find that."""
        self._texts = self._made(0, len(self))

    def __len__(self) -> int:
        return len(self._listing.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the decoded items of each group, by `ItemGroup.decoded_name`, and the text and its fields."""
        text = self._texts[index] if self._texts else self._made(index, index + 1)[0]
        names = {spec.name for spec in self.fields.values() if (spec.group, spec.role) == (TEXT, "tensor")}
        sample: dict[str, Any] = {name: value for name, value in text.items() if name in names or name == "text"}
        for group in self.groups.items:
            items = self._items[group.name]
            _, places = items.of_rows(index, index + 1)
            used, inverse = np.unique(places, return_inverse=True)
            rows = group.task_rows(items.table.take(pa.array(used)), self._listing.files)
            read = self._readers[group.name]
            # What a row shows twice is read once.
            made = [
                group.decoded(
                    read(row["file"], row["offset"], row["size"], segment_of(row)), sample_id=row["sample_id"]
                )
                for row in rows.select(["sample_id", "file", "offset", "size", *segment_columns(rows)]).to_pylist()
            ]
            shown = [made[place] for place in inverse.reshape(-1).tolist()]
            sample[group.decoded_name] = shown[0] if group.lists is None else shown
        return sample

    def _made(self, start: int, stop: int) -> list[dict[str, Any]]:
        rows = self.groups.text_rows(self._listing, start, stop)
        return list(self.groups.text.samples(rows, self._names))


def _rows_of(rows: pa.Table, ids: Sequence[str], *, config: Config) -> pa.Table:
    """Returns the listed rows with these ids, in their order. Raises ManifestError for an id that is not listed."""
    places = {sample_id: place for place, sample_id in enumerate(rows["sample_id"].to_pylist())}
    for sample_id in ids:
        if sample_id not in places:
            raise ManifestError(
                f"sample {sample_id!r} of the cache is not in {', '.join(config.source.manifests)}; "
                f"run: forebay preprocess {config.named}"
            )
    return rows.take(pa.array(np.array([places[sample_id] for sample_id in ids], np.int64)))
