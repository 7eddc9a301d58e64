"""What samples are read from: an opened cache, or the same steps done on the fly.

Several sources as one: their samples one behind the other.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from forebay.errors import CacheMismatchError, ForebayError
from forebay.store.cache import Cache
from forebay.store.key import digest
from forebay.store.layout import ROW_BITS, Array, FieldSpec

Sample = Mapping[str, Any]
"""Tensor fields of one sample, arrays [n, *shape] and read-only; `patches` of images are a tuple of arrays."""


class SampleSource(Protocol):
    """Samples by index. Threads share it; a forked child goes on using its copy."""

    @property
    def key(self) -> str:
        """Hash that names the values of all samples, 64 hex digits."""
        ...

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """Specification by field name."""
        ...

    @property
    def lengths(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Integers [num_samples] by name: `num_audio_samples`, `num_frames` (stored frames), `num_tokens`.

        Of images and text: `num_tokens`, `num_patches`, `num_images`.
        """
        ...

    @property
    def constants(self) -> Mapping[str, Any]:
        """What collating needs and is equal for all samples: `features`, `prompt`, `n_mels`, `pad_token_id`, ..."""
        ...

    def __len__(self) -> int: ...

    def sample_id(self, index: int) -> str:
        """Returns the id of one sample, as its manifest names it: what its crops are drawn by."""
        ...

    def read(self, index: int) -> Sample:
        """Returns the sample's tensor fields, read-only; views of a mapping where the source is a cache."""
        ...


@runtime_checkable
class Identified(Protocol):
    """A source that says which samples it has, and how they are made, in words that do not depend on where they come from."""

    @property
    def recipe_key(self) -> str:
        """Digest of how samples are made, 64 hex digits."""
        ...

    def ids_digest(self) -> str:
        """Returns the digest of the samples' ids in their order."""
        ...


class SourceUnion:
    """The samples of several sources, in their order; satisfies `SampleSource`. Threads share it as far as they share those.

    sources, names: what it was made of. key: digest of the sources' keys. fields, constants: those that all sources have
    alike, and the sample rate of those with audio.
    """

    def __init__(self, sources: Sequence[SampleSource], names: Sequence[str], *, shares_batches: bool = True) -> None:
        """names: of the sources, for messages. shares_batches: whether samples of two sources may stand in one batch.

        Raises CacheMismatchError, naming field and both sources, where they may and cannot; where each batch is of one
        source, for two tokenizers or sample rates alone: all batches go into one model, and one plan.
        """
        self.sources, self.names = list(sources), list(names)
        for (one, first), (two, other) in itertools.combinations(zip(self.names, self.sources, strict=True), 2):
            _require_equal(first, other, names=(one, two), shares_batches=shares_batches)
        self.fields: Mapping[str, FieldSpec] = _common([source.fields for source in self.sources])
        self.constants: Mapping[str, Any] = _common([source.constants for source in self.sources]) | _rate(self.sources)
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

    def will_need(self, indices: Iterable[int]) -> None:
        """Asks the kernel to read these samples' pages ahead, of the sources that can, see `Cache.will_need`."""
        for index in indices:
            number, inside = self._place(index)
            source = self.sources[number]
            if isinstance(source, ReadsAhead):
                source.will_need([inside])

    def sample_id(self, index: int) -> str:
        """Returns the id of one sample in its source."""
        number, inside = self._place(index)
        return self.sources[number].sample_id(inside)

    def part(self, index: int) -> int:
        """Returns the number of the source that a sample is of."""
        return self._place(index)[0]

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


def has_audio(source: SampleSource) -> bool:
    """Returns whether the samples of one source, no union, have audio."""
    return source.constants.get("features") != "none"


def parts_of(source: SampleSource) -> list[SampleSource]:
    """Returns the sources that one is made of: those of a union, else itself alone."""
    return source.sources if isinstance(source, SourceUnion) else [source]


def without_audio(source: SampleSource) -> Array | None:
    """Returns which samples have no audio, bool [num_samples]; None where all have."""
    parts = parts_of(source)
    flags = [not has_audio(part) for part in parts]
    return np.repeat(flags, [len(part) for part in parts]) if any(flags) else None


def _common(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in found[0].items() if all(other.get(name) == value for other in found[1:])}


def _rate(sources: Sequence[SampleSource]) -> dict[str, Any]:
    rates = [
        part.constants["sample_rate_hz"] for part in sources if has_audio(part) and "sample_rate_hz" in part.constants
    ]
    return {"sample_rate_hz": rates[0]} if rates else {}


def _require_equal(first: SampleSource, other: SampleSource, *, names: tuple[str, str], shares_batches: bool) -> None:
    wanted = _differences(first, other) if shares_batches else _differences_of_models(first, other)
    for field, one, two in wanted:
        advice = "build both with the same [audio] and [text]: forebay preprocess CONFIG"
        if shares_batches and has_audio(first) != has_audio(other):
            advice = 'one has no audio, so no batch can hold both; set mixture.batches = "per_source"'
        raise CacheMismatchError(
            f"cannot mix {names[0]} and {names[1]}: {field} is {one} in the former and {two} in the latter; {advice}"
        )


def _differences_of_models(first: SampleSource, other: SampleSource) -> list[tuple[str, Any, Any]]:
    """Returns what two sources may not differ in where no batch holds samples of both."""
    pairs: list[tuple[str, Any, Any]] = [("text.tokenizer", _tokenizer(first), _tokenizer(other))]
    if has_audio(first) and has_audio(other):
        pairs.append(("sample_rate_hz", first.constants.get("sample_rate_hz"), other.constants.get("sample_rate_hz")))
    return [pair for pair in pairs if pair[1] != pair[2] and None not in pair]


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
    return "cache" if all(isinstance(part, Cache) for part in parts_of(source)) else "uncached"


@runtime_checkable
class Categorised(Protocol):
    """A source that knows text fields of its samples; caches and the uncached steps do."""

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """Returns the different values of a field, and which one each sample has, int32 [num_samples]; None: no such field."""
        ...


@runtime_checkable
class Sharded(Protocol):
    """A source whose samples lie in shards; caches are."""

    @property
    def slots(self) -> Array:
        """int64 [num_samples]: where each sample lies, `shard << 32 | row`."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A source that can ask for pages ahead; caches do."""

    def will_need(self, indices: Iterable[int]) -> None:
        """Asks the kernel to read these samples' pages, without waiting for them."""
        ...
