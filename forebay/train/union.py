"""Several sources as one: their samples one behind the other."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from forebay.errors import CacheMismatchError, ForebayError
from forebay.store.cache import ROW_BITS, Cache
from forebay.store.canonical import digest
from forebay.store.layout import FieldSpec
from forebay.train.source import Sample, SampleSource
from forebay.train.usage import Categorised, Sharded

Array = np.ndarray[Any, Any]


class SourceUnion:
    """The samples of several sources, in their order; satisfies `SampleSource`. Threads share it as far as they share those.

    sources, names: what it was made of. key: digest of the sources' keys. fields, constants: of all sources alike.
    """

    def __init__(self, sources: Sequence[SampleSource], names: Sequence[str]) -> None:
        """names: of the sources, for messages.

        Raises CacheMismatchError, naming field and both sources, where samples of two cannot stand in one batch.
        """
        self.sources, self.names = list(sources), list(names)
        for name, source in zip(self.names[1:], self.sources[1:], strict=True):
            _require_equal(self.sources[0], source, names=(self.names[0], name))
        self.fields: Mapping[str, FieldSpec] = self.sources[0].fields
        self.constants: Mapping[str, Any] = self.sources[0].constants
        self.key = digest({"union": [source.key for source in self.sources]})
        self.offsets = [0, *itertools.accumulate(len(source) for source in self.sources)]

    def __len__(self) -> int:
        return self.offsets[-1]

    @cached_property
    def lengths(self) -> Mapping[str, Array]:
        """int32 [num_samples] by name, of what all sources know."""
        names = set(self.sources[0].lengths).intersection(*(source.lengths for source in self.sources))
        return {name: np.concatenate([source.lengths[name] for source in self.sources]) for name in sorted(names)}

    @cached_property
    def slots(self) -> Array:
        """int64 [num_samples]: where each sample lies, `shard << 32 | row`, the shards of all sources counted through.

        AttributeError, as if it were not here, where a source is not sharded.
        """
        parts, first = [], 0
        for source in self.sources:
            if not isinstance(source, Sharded):
                raise AttributeError("slots")
            parts.append(np.asarray(source.slots) + (first << ROW_BITS))
            first += int(np.max(source.slots, initial=-1) >> ROW_BITS) + 1
        return np.concatenate(parts)

    @property
    def source_of(self) -> Array:
        """uint16 [num_samples]: which source each sample is of."""
        numbers = np.arange(len(self.sources), dtype=np.uint16)
        return np.repeat(numbers, np.diff(self.offsets))

    def read(self, index: int) -> Sample:
        """Returns the sample's tensor fields, as its source does; a failure's notes name the source and the index there."""
        number, inside = self._place(index)
        try:
            return self.sources[number].read(inside)
        except ForebayError as err:
            err.add_note(f"sample {inside} of {self.names[number]}")
            raise

    def sample_id(self, index: int) -> str:
        """Returns the id of one sample in its source."""
        number, inside = self._place(index)
        return self.sources[number].sample_id(inside)

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """Returns the different values of a field, sorted, and which one each sample has, int32; see `Cache.categories`.

        None where a source has no such field.
        """
        found = [source.categories(name) if isinstance(source, Categorised) else None for source in self.sources]
        known = [part for part in found if part is not None]
        if len(known) < len(found):
            return None
        names = sorted({value for values, _ in known for value in values})
        place = {value: number for number, value in enumerate(names)}
        moved = [np.array([place[value] for value in values], np.int32)[codes] for values, codes in known]
        return names, np.concatenate(moved)

    def _place(self, index: int) -> tuple[int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} samples in {len(self.sources)} sources")
        index %= len(self)
        number = bisect.bisect_right(self.offsets, index) - 1
        return number, index - self.offsets[number]


def _require_equal(first: SampleSource, other: SampleSource, *, names: tuple[str, str]) -> None:
    for field, one, two in _differences(first, other):
        raise CacheMismatchError(
            f"cannot mix {names[0]} and {names[1]}: {field} is {one} in the former and {two} in the latter; build both with "
            "the same [audio] and [text]: forebay preprocess CONFIG"
        )


def _differences(first: SampleSource, other: SampleSource) -> list[tuple[str, Any, Any]]:
    pairs: list[tuple[str, Any, Any]] = [
        (f"field {name}", _described(first.fields.get(name)), _described(other.fields.get(name)))
        for name in sorted({*_tensor_fields(first), *_tensor_fields(other)})
    ]
    constants = sorted({*first.constants, *other.constants})
    pairs += [(name, repr(first.constants.get(name)), repr(other.constants.get(name))) for name in constants]
    # Ids of two tokenizers mean different texts, and no field or constant need show it.
    pairs.append(("text.tokenizer", _tokenizer(first), _tokenizer(other)))
    return [pair for pair in pairs if pair[1] != pair[2]]


def _tensor_fields(source: SampleSource) -> list[str]:
    return [name for name, spec in source.fields.items() if spec.role == "tensor"]


def _described(spec: FieldSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype} {['n', *spec.shape]}".replace("'", "")


def _tokenizer(source: SampleSource) -> str | None:
    if isinstance(source, Cache):
        found = (source.metadata["recipe"]["text"] or {}).get("tokenizer")
    else:
        found = getattr(source, "tokenizer", None)
    return found[:16] if isinstance(found, str) else None


def source_kind(source: SampleSource) -> Literal["cache", "uncached"]:
    """Returns whether all samples of a source come from sealed caches."""
    parts = source.sources if isinstance(source, SourceUnion) else [source]
    return "cache" if all(isinstance(part, Cache) for part in parts) else "uncached"
