"""Sources that samples are read from: an opened cache, the same steps done on the fly, or several sources as one."""

from __future__ import annotations

import bisect
import itertools
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from forebay.errors import CacheMismatchError, ForebayError
from forebay.store.image.codec import FIELDS
from forebay.store.key import digest
from forebay.store.layout import ROW_BITS, TEXT, Array, Constants, FieldSpec, Group, Ints

if TYPE_CHECKING:
    import pyarrow as pa

Sample = Mapping[str, Any]
"""Tensor fields of one sample, arrays [n, *shape] and read-only; `patches` of images are a tuple of arrays."""


class SampleBatch(Sequence[Sample]):
    """Samples that were read together: `columns` has of each field an array a sample."""

    __slots__ = ("_length", "columns")

    def __init__(self, columns: Mapping[str, list[Array]], length: int) -> None:
        self.columns, self._length = columns, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self._length))]
        return {name: values[index] for name, values in self.columns.items()}


def column(samples: Sequence[Sample], name: str) -> list[Any]:
    """Returns one field of some samples, in their order. Raises KeyError where they have none of that name."""
    return samples.columns[name] if isinstance(samples, SampleBatch) else [sample[name] for sample in samples]


SECONDS, RATE = "num_audio_samples", "sample_rate_hz"
"""The length by which samples have seconds, and the constant that makes seconds of it."""
SECTIONS: Mapping[Group, str] = {"audio": "audio", "image": "vision"}
"""The section of a config that says how the items of a group are made."""


class SampleSource(ABC):
    """Samples by index, and all that is known of them. Threads share it; a forked child goes on using its copy.

    key: hash that names the values of all samples, 64 hex digits. recipe_key: digest of how samples are made, which
    does not depend on where they come from, 64 hex digits. fields: specification by field name. lengths: integers
    [num_samples] by name: `num_audio_samples`, `num_frames` (stored frames), `num_tokens`; of images and text
    `num_tokens`, `num_patches`, `num_images`. constants: what collating needs and is equal for all samples, by group:
    `features`, `prompt`, `n_mels`, `pad_token_id`, ...
    """

    key: str
    recipe_key: str
    fields: Mapping[str, FieldSpec]
    lengths: Mapping[str, Array]
    constants: Constants
    filter_key: str | None = None
    """Digest of what the samples were chosen by, see `Selection`; None: they are all that there are."""
    are_whole: bool = True
    """Whether samples are as they were made, see `CutSamples`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample_id(self, index: int) -> str:
        """Returns the id of one sample, as its manifest names it: what its crops are drawn by."""

    @abstractmethod
    def read(self, index: int) -> Sample:
        """Returns the sample's tensor fields, read-only; views of a mapping where the source is a cache."""

    def read_one(self, index: int) -> tuple[Sample, int]:
        """Returns what `read` returns, and the index of the sample that it is: of a bad one another stands in."""
        return self.read(index), index

    def text_of(self, index: int) -> tuple[Sample, str]:
        """Returns the fields of one sample's text, and that text; no item that it lists is decoded."""
        raise NotImplementedError(f"{self.place} has no texts beside their fields")

    def read_batch(self, indices: Sequence[int]) -> SampleBatch | None:  # noqa: ARG002
        """Returns samples as `read_one` has each; None where they are to be read one by one, for errors too."""
        return None

    @abstractmethod
    def ids_digest(self) -> str:
        """Returns the digest of the samples' ids in their order."""

    @property
    def tokenizer(self) -> str | None:
        """Digest of the tokenizer that made the texts, None without one."""
        return None

    @property
    def processor(self) -> str | None:
        """Digest of the processor that made the images, None without one."""
        return None

    @property
    def slots(self) -> Array | None:
        """int64 [num_samples]: where each sample lies, `shard << 32 | row`; None where samples lie in no shards."""
        return None

    @property
    def place(self) -> str:
        """The name of it in messages."""
        return f"the source {self.key[:16]}"

    @property
    def column_names(self) -> list[str]:
        """The columns that `table` has, none of which is read."""
        return []

    def table(self, names: Collection[str] | None = None) -> pa.Table:
        """Returns columns, None: all, a row a sample; KeyError for a name that is none of `column_names`."""
        raise KeyError(f"{self.place} has no columns, {', '.join(names or ())} among them")

    def categories(self, name: str) -> tuple[list[str], Array] | None:  # noqa: ARG002
        """Returns a text field's values, sorted, and which each sample has, int32 [num_samples]; None without it."""
        return None

    def keep_to(self, places: Ints) -> None:  # noqa: B027  doing nothing is the default
        """Says that these samples alone are used, int64; where one stands in for a bad one, it is of these."""

    def will_need(self, indices: Iterable[int]) -> None:  # noqa: B027  doing nothing is the default
        """Asks for these samples' bytes ahead, without waiting for them; a source that cannot does nothing."""


class SourceUnion(SampleSource):
    """The samples of several sources, in their order. Threads share it as far as they share those.

    sources, names: what it was made of. key, recipe_key: digests of the sources' own. fields, constants, tokenizer:
    those that all sources have alike, and the sample rate of those with audio.
    """

    def __init__(
        self,
        sources: Sequence[SampleSource],
        names: Sequence[str],
        *,
        shares_batches: bool = True,
        shares_variants: bool = True,
    ) -> None:
        """names: of the sources, for messages. shares_batches: whether samples of two sources may stand in one batch,
        or are made into batches by one collator; then shares_variants: whether they may really.

        Raises CacheMismatchError, naming field and both sources, where they may and cannot; where each batch is of one
        source, for two tokenizers or sample rates alone: all batches go into one model, and one plan.
        """
        self.sources, self.names = list(sources), list(names)
        for (one, first), (two, other) in itertools.combinations(zip(self.names, self.sources, strict=True), 2):
            shares = {"shares_batches": shares_batches, "shares_variants": shares_variants}
            _require_equal(first, other, names=(one, two), **shares)
        fields, *others = [source.fields for source in self.sources]
        self.fields: Mapping[str, FieldSpec] = {
            name: spec for name, spec in fields.items() if all(other.get(name) == spec for other in others)
        }
        self.constants = _shared(self.sources)
        self.key = digest({"union": [source.key for source in self.sources]})
        self.recipe_key = digest([source.recipe_key for source in self.sources])
        self.offsets = [0, *itertools.accumulate(len(source) for source in self.sources)]

    def __len__(self) -> int:
        return self.offsets[-1]

    @cached_property
    def lengths(self) -> Mapping[str, Array]:  # type: ignore[override]  # mypy takes it for read-only
        """int32 [num_samples] by name; 0 of the samples of a source that has no items of the kind."""
        names = sorted({name for source in self.sources for name in source.lengths})
        return {name: np.concatenate([length_of(source, name) for source in self.sources]) for name in names}

    @cached_property
    def tokenizer(self) -> str | None:
        """Digest of the tokenizer, where all sources have one and the same."""
        found = {source.tokenizer for source in self.sources}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def slots(self) -> Array | None:
        """int64 [num_samples]: where each sample lies, `shard << 32 | row`; shards of all sources counted through."""
        parts, first = [], 0
        for source in self.sources:
            slots = source.slots
            if slots is None:
                return None
            parts.append(slots + (first << ROW_BITS))
            first += int(np.max(slots, initial=-1) >> ROW_BITS) + 1
        return np.concatenate(parts)

    @property
    def source_of(self) -> Array:
        """uint16 [num_samples]: which source each sample is of."""
        numbers = np.arange(len(self.sources), dtype=np.uint16)
        return np.repeat(numbers, np.diff(self.offsets))

    def read(self, index: int) -> Sample:
        """Returns the sample's tensor fields, as its source does; notes of a failure name source and index there."""
        return self.read_one(index)[0]

    def read_one(self, index: int) -> tuple[Sample, int]:
        """See `SampleSource`."""
        number, inside = self._place(index)
        try:
            sample, read = self.sources[number].read_one(inside)
            return sample, self.offsets[number] + read
        except ForebayError as err:
            err.add_note(f"sample {inside} of {self.names[number]}")
            raise

    def read_batch(self, indices: Sequence[int]) -> SampleBatch | None:
        """See `SampleSource`; of one source alone."""
        number = bisect.bisect_right(self.offsets, min(indices, default=0)) - 1
        if not indices or max(indices) >= self.offsets[-1] or max(indices) >= self.offsets[number + 1]:
            return None
        first = self.offsets[number]
        return self.sources[number].read_batch([index - first for index in indices])

    def will_need(self, indices: Iterable[int]) -> None:
        """Asks the kernel to read these samples' pages ahead, of the sources that can, see `Cache.will_need`."""
        for index in indices:
            number, inside = self._place(index)
            self.sources[number].will_need([inside])

    def ids_digest(self) -> str:
        """Returns the digest of the digests of the sources' ids."""
        return digest([source.ids_digest() for source in self.sources])

    def sample_id(self, index: int) -> str:
        """Returns the id of one sample in its source."""
        number, inside = self._place(index)
        return self.sources[number].sample_id(inside)

    def part(self, index: int) -> int:
        """Returns the number of the source that a sample is of."""
        return self._place(index)[0]

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """See `SampleSource`; None where a source has no such field."""
        found = [source.categories(name) for source in self.sources]
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


def parts_of(source: SampleSource) -> list[SampleSource]:
    """Returns the sources that one is made of: those of a union, else itself alone."""
    return source.sources if isinstance(source, SourceUnion) else [source]


def length_of(source: SampleSource, name: str) -> Array:
    """Returns how long each sample is, int32 [num_samples]: 0 where samples have no items that are counted so."""
    found = source.lengths.get(name)
    return np.zeros(len(source), np.int32) if found is None else np.asarray(found)


def without_audio(source: SampleSource) -> Array | None:
    """Returns which samples are texts alone, bool [num_samples]; None where all have items."""
    return _flags(source, lambda part: not part.constants.has_items)


def without_seconds(source: SampleSource) -> Array | None:
    """Returns which samples have no seconds to be planned by, bool [num_samples]; None where all have."""
    return _flags(source, lambda part: SECONDS not in part.lengths)


def has_untimed_items(source: SampleSource) -> bool:
    """Returns whether the samples of a source have items, and none of them has seconds."""
    return all(part.constants.has_items and SECONDS not in part.lengths for part in parts_of(source))


def _flags(source: SampleSource, flag: Callable[[SampleSource], bool]) -> Array | None:
    parts = parts_of(source)
    flags = [flag(part) for part in parts]
    return np.repeat(flags, [len(part) for part in parts]) if any(flags) else None


def _shared(sources: Sequence[SampleSource]) -> Constants:
    """Returns the constants that sources have alike, and the sample rate of those that have one."""
    common = Constants.common([source.constants for source in sources]).groups
    owners = [(group, values) for part in sources for group, values in part.constants.groups.items() if RATE in values]
    rates = {group: {**common.get(group, {}), RATE: values[RATE]} for group, values in reversed(owners)}
    return Constants({**common, **rates})


_OF_VARIANTS = ("crops", "varied", "variants")
"""Constants of them."""


def _require_equal(
    first: SampleSource, other: SampleSource, *, names: tuple[str, str], shares_batches: bool, shares_variants: bool
) -> None:
    wanted = _differences(first, other) if shares_batches else _differences_of_models(first, other)
    for field, one, two in wanted:
        if not shares_variants and field.partition("[")[0] in _OF_VARIANTS:
            continue
        sections = " ".join(f"[{SECTIONS[group]}]" for group in first.constants.groups if group in SECTIONS)
        advice = f"build both with the same {sections or '[audio]'} and [text]: forebay preprocess CONFIG"
        if shares_batches and first.constants.has_items != other.constants.has_items:
            advice = 'one has no audio, so no batch can hold both; set mixture.batches = "per_source"'
        if field.partition("[")[0] in ("classes", "num_classes"):
            advice = "give both configs the same text.classes, then: forebay preprocess CONFIG"
        raise CacheMismatchError(
            f"cannot mix {names[0]} and {names[1]}: {field} is {one} in the former and {two} in the latter; {advice}",
            code="FB414",
        )


def _differences_of_models(first: SampleSource, other: SampleSource) -> list[tuple[str, Any, Any]]:
    """Returns what two sources may not differ in where no batch holds samples of both."""
    pairs = [pair for pair in _models(first, other) if None not in pair]
    for group, name in _OF_ONE_MODEL:
        one, two = first.constants.of(group), other.constants.of(group)
        pairs += [_inner(name, one[name], two[name])] if name in one and name in two else []
    return [pair for pair in pairs if pair[1] != pair[2]]


_OF_ONE_MODEL = (("audio", RATE), ("image", "form"), (TEXT, "num_classes"), (TEXT, "classes"))
"""Constants that are the same for all that goes into a model, where no batch holds samples of two sources either."""


_PATCHES = frozenset(FIELDS.values())
"""Fields of which every codec gives the same samples."""


def _differences(first: SampleSource, other: SampleSource) -> list[tuple[str, Any, Any]]:
    pairs: list[tuple[str, Any, Any]] = [
        (f"field {name}", _described(first.fields.get(name)), _described(other.fields.get(name)))
        for name in sorted({*_tensor_fields(first), *_tensor_fields(other)})
        if name.partition("~")[0] not in _PATCHES
    ]
    constants = sorted({*first.constants, *other.constants})
    pairs += [_inner(name, first.constants.get(name), other.constants.get(name)) for name in constants]
    pairs += _models(first, other)
    return [pair for pair in pairs if pair[1] != pair[2]]


def _models(first: SampleSource, other: SampleSource) -> list[tuple[str, Any, Any]]:
    # Ids of two tokenizers mean different texts, and no field or constant need show it; nor of two processors.
    return [
        ("text.tokenizer", _short(first.tokenizer), _short(other.tokenizer)),
        ("vision.processor", _short(first.processor), _short(other.processor)),
    ]


def _inner(name: str, one: Any, two: Any) -> tuple[str, Any, Any]:
    """Returns the first value inside of two that differs, with its name and both as they are shown, cut short."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        inner = [(f"{name}.{key}", one.get(key), two.get(key)) for key in sorted({*one, *two})]
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        inner = [(f"{name}[{place}]", *both) for place, both in enumerate(zip(one, two, strict=True))]
    else:
        shown = [reprlib.repr(value) if isinstance(value, list) else repr(value) for value in (one, two)]
        return name, shown[0], shown[1]
    return next((_inner(*each) for each in inner if each[1] != each[2]), (name, repr(None), repr(None)))


def _tensor_fields(source: SampleSource) -> list[str]:
    return [name for name, spec in source.fields.items() if spec.role == "tensor"]


def _described(spec: FieldSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype} {['n', *spec.shape]}".replace("'", "")


def _short(digest_: str | None) -> str | None:
    return digest_ and digest_[:16]


def source_kind(source: SampleSource) -> Literal["cache", "uncached"]:
    """Returns whether all samples of a source come from sealed caches."""
    return "uncached" if source.slots is None else "cache"
