"""What samples are read from: an opened cache, or the same steps done on the fly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from forebay.store.layout import FieldSpec

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
        """Integers [num_samples] by name: `num_samples` (audio samples), `num_frames` (stored frames), `num_tokens`.

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
