"""What the pages need of all samples at once: ids, texts, languages and lengths as columns, no sample is read for them.

Times are in seconds, counts in tokens and characters, all of them arrays [num_samples].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.inspect.facts import durations_of
from forebay.store.cache import Cache
from forebay.store.layout import Array

LABEL = "label"
"""The prompt of images that have classes."""

OWN_LENGTHS = ("num_audio_samples", "num_frames", "num_tokens")
"""Lengths of a sample itself; others are sums over the items that it lists."""

_KNOWN = frozenset(("index", "sample_id", "text", "language", "prompt", "source", "duration_s"))


@dataclass(frozen=True)
class Columns:
    """The columns of a cache; each is read when it is first asked for."""

    cache: Cache

    def __len__(self) -> int:
        return len(self.cache)

    @cached_property
    def ids(self) -> pa.ChunkedArray:
        """The ids of all samples; their numbers as text where the cache has none."""
        found = self._column("sample_id")
        return pa.chunked_array([pa.array(map(str, range(len(self))), pa.large_string())]) if found is None else found

    @cached_property
    def texts(self) -> pa.ChunkedArray:
        """The transcripts, or the conversations as JSON; empty where the cache has no texts."""
        found = self._column("text")
        return pa.chunked_array([pa.array([""] * len(self), pa.large_string())]) if found is None else found

    @cached_property
    def languages(self) -> tuple[list[str], Array]:
        """The languages, and which one each sample has, int32; one without a name where none is known."""
        found = self.cache.categories("language")
        return ([""], np.zeros(len(self), np.int32)) if found is None else found

    @cached_property
    def classes(self) -> tuple[list[str], Array] | None:
        """The classes of images, and which one each sample has, int32; None of samples that have none, or several."""
        constants = self.cache.constants
        if constants.get("prompt") != LABEL or constants["text_form"]["fields"][0]["shape"]:
            return None
        return self.cache.categories("text")

    @cached_property
    def sources(self) -> tuple[list[str], Array]:
        """The files that samples came from, and which one each sample has, int32."""
        found = self.cache.categories("source")
        return ([""], np.zeros(len(self), np.int32)) if found is None else found

    @cached_property
    def seconds(self) -> Array | None:
        """float64; None for a cache without audio."""
        return durations_of(self.cache)

    @cached_property
    def tokens(self) -> Array:
        """int64: tokens of the text of each sample."""
        return np.asarray(self.cache.lengths["num_tokens"], np.int64)

    @property
    def has_tokens(self) -> bool:
        """Whether samples have texts that are counted by tokens: images with classes have none."""
        return "input_ids" in self.cache.fields

    @property
    def has_targets(self) -> bool:
        """Whether some tokens are learnt and others given: of a caption beside an image none is a target."""
        return self.has_tokens and (not self.cache.listed or "label_mask" in self.cache.fields)

    @cached_property
    def characters(self) -> Array:
        """int64: characters of each text."""
        return np.asarray(pc.utf8_length(self.texts).to_numpy(), np.int64)

    @cached_property
    def spoken(self) -> Array:
        """int64: characters of each text without white space, as `str.split` knows it."""
        spaces = pc.count_substring_regex(self.texts, r"[\t-\r\x1c-\x1f\x{85}\pZ]")
        return self.characters - np.asarray(spaces.to_numpy(), np.int64)

    @cached_property
    def rate(self) -> Array | None:
        """float64: spoken characters a second, NaN without text or sound; None for a cache without audio."""
        if self.seconds is None:
            return None
        known = (self.seconds > 0) & (self.spoken > 0)
        return np.where(known, self.spoken / np.where(known, self.seconds, 1.0), np.nan)

    @property
    def length(self) -> Array:
        """What a sample's length is: its seconds, or without audio its tokens."""
        return self.tokens if self.seconds is None else self.seconds

    @cached_property
    def kept(self) -> list[str]:
        """The names of the columns that the config asked to keep."""
        known = _KNOWN.union(self.cache.lengths, (f"{group}s" for group in self.cache.listed))
        return [name for name in self.cache.column_names if name not in known]

    @cached_property
    def kept_table(self) -> pa.Table:
        """The kept columns."""
        return self.cache.table(self.kept)

    def _column(self, name: str) -> Any:
        return self.cache.table([name])[name] if name in self.cache.column_names else None
