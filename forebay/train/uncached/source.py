"""Samples made on the fly, whatever they are of: what the two modalities share, and which one a config has."""

from __future__ import annotations

import logging
import pkgutil
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.errors import ManifestError, SampleError
from forebay.preprocess.modality import Modality
from forebay.preprocess.sources.kept import column_of, names_of
from forebay.preprocess.sources.media import MediaReader
from forebay.preprocess.sources.sparse import sparse_files
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
        failed: Mapping[str, int],
        stored_probe: Mapping[str, str] | None,
    ) -> None:
        """files, rows: of the samples that can be used. failed: the others, by reason.

        stored_probe: of a cache that these samples stand beside; a difference in numerics is logged.
        Raises ManifestError where no sample can be used.
        """
        if not len(rows):
            raise ManifestError(
                f"no sample of {', '.join(config.source.manifests)} can be used ({dict(failed)}); "
                f"run: forebay preprocess {config.path}"
            )
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
        self._substitutes = Substitutes()
        self._may_stand_in: Array | None = None
        self._path = config.path
        _compare_probe(modality, stored_probe)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> dict[str, Any]:
        """Returns one sample, read-only, as `Cache.read` does.

        Raises SampleError where a hundred samples in a row are bad: then it is not the samples.
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
        """Bad samples met so far, by reason."""
        return self._substitutes.failed

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


class Substitutes:
    """Counts bad samples by reason in `failed`; threads may share it."""

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._is_told = False

    def first_good(self, make: Callable[[int], T], candidates: Iterable[int]) -> T:
        """Returns `make` of the first candidate for which it does not raise SampleError.

        Raises the last SampleError where all are bad: then it is not the samples.
        """
        last: SampleError | None = None
        for index in candidates:
            try:
                return make(index)
            except SampleError as err:
                self._note(err)
                last = err
        if last is None:
            raise ValueError("no candidate to read")
        raise last

    def _note(self, err: SampleError) -> None:
        logger.warning("reading another sample instead, %s: %s", err.reason, err)
        with self._lock:
            self.failed[err.reason] += 1
            is_first, self._is_told = not self._is_told, True
        if is_first:
            logger.warning(
                "the cache will leave such samples out, so its batches will be others: a state saved here goes on here "
                '(loader.cache = "off"), and is refused there'
            )
