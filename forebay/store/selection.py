"""Some samples of a source, as a source: those that a filter leaves, or the first ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from forebay.errors import ForebayError
from forebay.store.by_hand import ByHand
from forebay.store.key import digest
from forebay.store.layout import Array, Ints
from forebay.store.sample_filter import Filter, FilterChoice
from forebay.store.source import Sample, SampleBatch, SampleSource, SourceUnion

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
