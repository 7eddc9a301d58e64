"""Samples made on the fly, whatever they are of: what the two modalities share, and which one a config has."""

from __future__ import annotations

import logging
import pkgutil
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.errors import BuildError, ManifestError, SampleError
from forebay.preprocess.assemble import EXCLUDING
from forebay.preprocess.modality import Modality
from forebay.rows.kept_columns import column_of, names_of
from forebay.rows.manifest import Manifest
from forebay.rows.media_reader import MediaReader, sparse_files
from forebay.steps.image.choice import images_by
from forebay.steps.recipe import AnyRecipe
from forebay.store.key import digest
from forebay.store.layout import Array, FieldSpec, Ints
from forebay.store.remote.raw.sources import naming_urls
from forebay.store.row_table import row_table, sorted_categories, strings_digest
from forebay.store.source import SampleSource
from forebay.store.source_files import SourceFile

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SUBSTITUTES = 100

_SOURCES = {
    "speech": "forebay.train.uncached.speech:UncachedSpeech",
    "patches": "forebay.train.uncached.vision:UncachedVision",
    "processor": "forebay.train.uncached.images:UncachedImages",
}
"""Class of recordings and texts, and of images by what is stored of them."""


def uncached_source(config: Config, *, stored_probe: Mapping[str, str] | None = None) -> UncachedSource:
    """Returns the source that makes the samples of a config; see `UncachedSource`."""
    with naming_urls():
        kind = "speech" if config.vision is None else images_by(config) or "patches"
        source: UncachedSource = pkgutil.resolve_name(_SOURCES[kind])(config, stored_probe=stored_probe)
    return source


class UncachedSource(SampleSource):
    """Makes a sample whenever it is asked for. Threads may share it.

    A sample that turns out to be bad is replaced by the next one that is good, and counted in `failed`.
    """

    def __init__(
        self,
        config: Config,
        *,
        recipe: AnyRecipe,
        modality: Modality,
        files: tuple[SourceFile, ...],
        rows: pa.Table,
        rejected: Rejected,
        stored_probe: Mapping[str, str] | None,
    ) -> None:
        """files, rows: of the samples that can be used. rejected: the others.

        stored_probe: of a cache that these samples stand beside; a difference in numerics is logged.
        Raises ManifestError where no sample can be used, BuildError where more rows are bad than a build would allow.
        """
        if not len(rows):
            raise ManifestError(
                f"no sample of {', '.join(config.source.manifests)} can be used ({rejected}); "
                f"run: forebay preprocess {config.path}"
            )
        self._substitutes = Substitutes(config, rejected)
        self._rows, self._files, self._names = rows, files, [file.name for file in files]
        self._media = MediaReader(
            files,
            max_open=config.run.max_open_tars,
            max_bytes=config.source.max_sample_bytes,
            column=modality.media_column,
            as_listed=True,
            sparse=sparse_files(rows, files) if "size" in rows.column_names else frozenset(),
        )
        self.fields: Mapping[str, FieldSpec] = {spec.name: spec for spec in modality.fields()}
        self.constants = modality.constants()
        self.recipe_key = recipe.key
        self.key = digest({"uncached": recipe.key, "rows": rows["sample_id"].to_pylist()})
        self._may_stand_in: Array | None = None
        self._path = config.path
        _compare_probe(modality, stored_probe)

    def __len__(self) -> int:
        return len(self._rows)

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
        """See `SampleSource`."""
        self._may_stand_in = np.zeros(len(self), bool)
        self._may_stand_in[places] = True

    @property
    def place(self) -> str:
        """See `SampleSource`."""
        return f"the raw data of {self._path}"

    @property
    def column_names(self) -> list[str]:
        """Columns of the row table that a cache of these samples has, as far as they are known without decoding."""
        return list(self._row_columns())

    def table(self, names: Collection[str] | None = None) -> pa.Table:
        """See `SampleSource`."""
        columns = self._row_columns()
        if unknown := set(names or ()) - columns.keys():
            raise KeyError(f"{self.place} has no columns {', '.join(sorted(unknown))}; it has {', '.join(columns)}")
        return row_table(columns, names)

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

    @abstractmethod
    def _texts(self) -> Iterator[Mapping[str, Any]]:
        """Yields the text fields of every sample, table fields among them: all are tokenised again."""

    @abstractmethod
    def _make(self, index: int) -> dict[str, Any]:
        """Returns one sample, read-only. Raises SampleError where it cannot be used."""

    @abstractmethod
    def _candidates(self, index: int) -> Iterator[int]:
        """Yields a sample, then those that may stand in for it."""

    def _row_columns(self) -> dict[str, Callable[[], Any]]:
        """Returns what makes each column of `table`, in the order of a cache's."""
        made: dict[str, Callable[[], Any]] = {"index": lambda: pa.array(np.arange(len(self)))}
        kept = names_of(self._rows)
        for name in self._table_fields():
            if name == "sample_id":
                made[name] = partial(self._rows.column, name)
            else:
                made[name] = partial(column_of, self._rows, name) if name in kept else partial(self._text_column, name)
        return made | {name: partial(pa.array, np.asarray(values)) for name, values in self._counted().items()}

    def _counted(self) -> Mapping[str, Array]:
        """Returns what is known of the samples' lengths, by the names of its columns."""
        return self.lengths

    def _table_fields(self) -> list[str]:
        return [spec.name for spec in self.fields.values() if spec.role == "table"]

    def _text_column(self, name: str) -> pa.ChunkedArray:
        kind = pa.large_string()
        return pa.chunked_array([pa.array([row[name] for row in self._texts()], kind)], type=kind)

    def _file_names(self, column: str) -> pa.ChunkedArray:
        """Returns the name of the file of every row, by a column that numbers the files."""
        numbers = self._rows[column].combine_chunks().cast(pa.int32())
        names = pa.array(self._names, pa.large_string())
        return pa.chunked_array([names.take(numbers)])

    def _by_file(self, column: str) -> tuple[list[str], Array]:
        return sorted_categories(self._names, self._rows[column].to_numpy())


def _compare_probe(modality: Modality, stored: Mapping[str, str] | None) -> None:
    """Logs where the steps give other values here than where a cache was built; `stored` is its probe."""
    for group in modality.groups if stored is not None else ():
        now = modality.probe(group)
        if stored is not None and now != stored.get(group):
            logger.warning(
                "the %s steps give other values here than where the cache was built (probe %s, stored %s)",
                group,
                now,
                stored.get(group),
            )


@dataclass(frozen=True)
class Rejected:
    """What is left out of `num_rows` rows, by reason, as a build counts it: bad rows, and good ones not wanted."""

    num_rows: int
    failed: Counter[str]
    excluded: Counter[str]

    @classmethod
    def of(cls, manifest: Manifest) -> Rejected:
        """Returns what the listing left out."""
        counts = {kind: Counter(found) for kind, found in manifest.counts().items()}
        return cls(len(manifest.rows) + counts["failed"].total(), counts["failed"], counts["excluded"])

    def add(self, reason: str) -> None:
        """Counts a row that was listed and cannot be used."""
        (self.excluded if reason in EXCLUDING else self.failed)[reason] += 1

    def __str__(self) -> str:
        kinds = (("bad", self.failed), ("not wanted", self.excluded))
        told = [(kind, ", ".join(f"{reason} {count}" for reason, count in sorted(own.items()))) for kind, own in kinds]
        return "left out: " + ("; ".join(f"{kind}: {reasons}" for kind, reasons in told if reasons) or "none")


class Substitutes:
    """Counts bad samples in `rejected`, each once; threads may share it."""

    def __init__(self, config: Config, rejected: Rejected) -> None:
        """rejected: of the listing. Raises BuildError where a build would not allow so many bad rows."""
        self._config, self.rejected = config, rejected
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
        logger.warning("reading another sample instead, %s: %s", err.reason, err)
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
            f"({self.rejected}); forebay preprocess {path} lists them: mend them, or allow more: "
            f"--set run.max_failed_share={min(1.0, 2 * count / rows):.3g}",
            code="FB301",
        )
