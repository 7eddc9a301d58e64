"""The first samples of a source, as a source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from forebay.store.key import digest
from forebay.store.layout import Array
from forebay.store.source import Sample, SampleSource, SourceUnion


class FirstSamples(SampleSource):
    """The first `count` samples of one source, no union; everything else is the source's own."""

    def __init__(self, source: SampleSource, count: int) -> None:
        """count: at most as many as the source has."""
        self.source, self._count = source, count
        self.recipe_key, self.fields, self.constants = source.recipe_key, source.fields, source.constants
        self.key = digest({"of": source.key, "first": count})
        self.lengths: Mapping[str, Array] = {name: column[:count] for name, column in source.lengths.items()}

    def __len__(self) -> int:
        return self._count

    @property
    def tokenizer(self) -> str | None:
        """See `SampleSource`."""
        return self.source.tokenizer

    @property
    def slots(self) -> Array | None:
        """See `SampleSource`."""
        slots = self.source.slots
        return None if slots is None else slots[: self._count]

    def read(self, index: int) -> Sample:
        """See `SampleSource`."""
        return self.source.read(self._place(index))

    def sample_id(self, index: int) -> str:
        """See `SampleSource`."""
        return self.source.sample_id(self._place(index))

    def ids_digest(self) -> str:
        """Returns the digest of these samples' ids in their order."""
        return digest([self.sample_id(index) for index in range(self._count)])

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """See `SampleSource`; the values are those of these samples."""
        found = self.source.categories(name)
        if found is None:
            return None
        used, codes = np.unique(found[1][: self._count], return_inverse=True)
        return [found[0][value] for value in used.tolist()], codes.astype(np.int32)

    def will_need(self, indices: Iterable[int]) -> None:
        """See `SampleSource`."""
        self.source.will_need(indices)

    def _place(self, index: int) -> int:
        if not -self._count <= index < self._count:
            raise IndexError(f"sample {index} of the first {self._count}")
        return index % self._count


def first_samples(source: SampleSource, count: int | None) -> SampleSource:
    """Returns the first `count` samples of a source; the source itself where it has no more, or `count` is None.

    Of a union they are those of its sources in their order; sources of which none is taken are not in the result.
    """
    if count is None or count >= len(source):
        return source
    if not isinstance(source, SourceUnion):
        return FirstSamples(source, count)
    parts, names, left = [], [], count
    for part, name in zip(source.sources, source.names, strict=True):
        if left:
            parts.append(first_samples(part, min(left, len(part))))
            names.append(name)
            left -= len(parts[-1])
    return SourceUnion(parts, names, shares_batches=False)
