"""The collate function of a source: which fields its batches have, in which dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from forebay.errors import ConfigError
from forebay.steps.batch import fresh
from forebay.steps.step import Allocate, Batch, PaddingSide, Stored
from forebay.store.source import Sample, SampleSource, SourceUnion
from forebay.train.collate.crop import Crops
from forebay.train.collate.device_codes import as_codes as coded
from forebay.train.collate.forms import items_of, text_of
from forebay.train.collate.patches import Filler, weight_of


class BatchMaker(Protocol):
    """Samples to a batch; threads share it."""

    def collate(self, samples: Sequence[Sample], *, allocate: Allocate) -> Any:
        """Returns the batch of these samples in tensors that `allocate` makes: a dict, or a `PatchBatch`."""
        ...

    def count_frames(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns (frames, or tokens, of the samples, those that their batch has room for)."""
        ...


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Collator:
    """Makes the batch of a list of samples. Picklable, without state: DataLoader workers and threads may share it.

    Its fields are those of the items' form, then those of the prompt's: `batch` of each step in `forebay.steps` says
    which, or the cache itself. All fields of text are int64.

    With `crop_s` the fields are those of `Crops`, and no text: a transcript is that of the whole clip.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        dtype: torch.dtype = torch.float32,
        padding_side: PaddingSide = "right",
        crop_s: float | None = None,
        as_codes: bool = False,
    ) -> None:
        """Takes from `source` its constants and field specifications only.

        source: of a union whose sources have other fields, each its own collator, as `Loader` has.
        dtype: of floating-point fields: float32, float16 or bfloat16. padding_side: of `input_ids`.
        crop_s: length of random crops; samples then have the draw of their crop beside them (`CropDraws.beside`).
        as_codes: fields with a table are codes, of which `DeviceExpansion` makes values.
        Raises ConfigError for features, prompts or dtypes that have no batch form, or constants that are missing.
        """
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype of batches is {dtype}, wanted one of {', '.join(map(str, _DTYPES))}")
        if padding_side not in ("left", "right"):
            raise ConfigError(f"padding_side is {padding_side!r}, wanted 'left' or 'right'")
        if isinstance(source, SourceUnion) and "features" not in source.constants:
            raise ConfigError(
                f"samples of {', '.join(source.names)} stand in no common batch; make a Collator of each of "
                "`source.sources`, as forebay.train.make_loader does"
            )
        stored = Stored(f"cache {source.key[:16]}", source.constants, source.fields)
        self.dtype, self.padding_side = dtype, padding_side
        self._items = items_of(stored)
        self._text = text_of(stored, self._items)
        if as_codes:
            self._items = replace(self._items, form=coded(self._items.form))
        self._crops = None if crop_s is None else Crops.of(stored, crop_s=crop_s)

    def __call__(self, samples: Sequence[Sample | Mapping[str, torch.Tensor]]) -> Batch:
        """Returns the batch of these samples in memory of its own; a `collate_fn` for torch's DataLoader."""
        batch = self.collate([_as_arrays(sample) for sample in samples], allocate=fresh)
        return batch if weight_of(samples) else Filler(batch)

    def collate(self, samples: Sequence[Sample], *, allocate: Allocate) -> Batch:
        """Returns the batch of these samples in tensors that `allocate` makes; every element of them is written."""
        if not samples:
            raise ValueError("a batch needs at least one sample")
        if self._crops is not None:
            return self._crops.collate(samples, dtype=self.dtype, allocate=allocate)
        batch = self._items.collate(samples, dtype=self.dtype, allocate=allocate)
        if self._text is None:
            return batch
        return batch | self._text(samples, padding_side=self.padding_side, allocate=allocate)

    def count_frames(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns (frames, of text tokens, of the samples; those that their batch has room for)."""
        if self._crops is not None:
            return self._crops.count_frames(samples)
        return self._items.count(samples)

    @property
    def has_rows(self) -> bool:
        """Whether the first dimension of every field of batches is that of the samples."""
        return self._items.has_rows


def _as_arrays(sample: Sample | Mapping[str, torch.Tensor]) -> Sample:
    return {name: _as_array(value) for name, value in sample.items()}


def _as_array(value: Any) -> Any:
    """Returns a tensor as an array; what is a tuple, an array an image, as a tuple of arrays."""
    if isinstance(value, tuple):
        return tuple(map(_as_array, value))
    return value.numpy() if isinstance(value, torch.Tensor) else value
