"""Batches beside dicts of tensors: packs whose patches are still as stored, and fillers of weight 0.

A batch whose patches are uint8 is a `PatchBatch`, which is no mapping: a model would not notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch


def pixel_dtype(name: str) -> torch.dtype:
    """Returns the dtype of `pixel_values` under `loader.pixels`; of patches that are handed out as stored: float32."""
    return {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(name, torch.float32)


def model_inputs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a pack, `pixel_values` among them, as arguments of the model, `use_cache=False` with them.

    With a key-value cache transformers does not look for packed segments in the positions: the samples of a pack would
    see each other.
    """
    return {**fields, "use_cache": False}


_REMEDY = (
    "a batch of uint8 patches is not what a model takes: pass model(**forebay.train.to_model_inputs(batch, "
    'constants)), or set loader.pixels = "float32"'
)


class PatchBatch:
    """The fields of a batch with uint8 `patches`: `batch["labels"]`, `"labels" in batch`, `batch.fields`.

    transformers' models take any keyword: given `patches` they would pass over them and train on no image. So `**batch`
    raises TypeError and names `to_model_inputs`. accelerate and Lightning move the batch to a device by `to`;
    transformers' Trainer leaves it where it is, and stops at the model's call.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Keeps `fields`, tensors and numbers by name."""
        self.fields = dict(fields)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    __iter__ = None  # with `__getitem__` alone Python would try batch[0], batch[1], ...

    def __len__(self) -> int:
        return len(self.fields)

    def __repr__(self) -> str:
        return f"PatchBatch({', '.join(self.fields)})"

    def __getattr__(self, name: str) -> NoReturn:
        # `get`, `items`, `pop`: whoever asks for them takes the batch for a dict.
        raise AttributeError(f"PatchBatch has no attribute {name!r}: {_REMEDY}")

    def keys(self) -> NoReturn:
        """Raises TypeError: Python asks for it in `**batch` and `dict(batch)`."""
        raise TypeError(_REMEDY)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PatchBatch:
        """Returns the batch with its tensors on `device`; the patches stay uint8."""
        return type(self)(moved(self.fields, device, non_blocking=non_blocking))

    def pin_memory(self) -> PatchBatch:
        """Returns the batch with its tensors in pinned memory, as torch's DataLoader asks for."""
        return type(self)(
            {name: v.pin_memory() if isinstance(v, torch.Tensor) else v for name, v in self.fields.items()}
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.fields

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


class Filler(dict[str, Any]):
    """A batch of weight 0, which only keeps its rank in step. Its class goes with it from process to process."""

    weight = 0


class PatchFiller(PatchBatch):
    """The same with uint8 patches."""

    weight = 0


class FillerSamples(list[Any]):
    """The samples of such a batch, or their indices."""

    weight = 0


def weight_of(batch: object) -> int:
    """Returns what the loss of a batch is to be multiplied by: 1, or 0 where the batch only keeps its rank in step."""
    return int(getattr(type(batch), "weight", 1))


def as_filler(batch: PatchBatch | dict[str, Any]) -> PatchBatch | dict[str, Any]:
    """Returns the same batch with weight 0."""
    return PatchFiller(batch.fields) if isinstance(batch, PatchBatch) else Filler(batch)


def fields_of(batch: PatchBatch | Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a batch of any form as a mapping."""
    return batch.fields if isinstance(batch, PatchBatch) else batch


def moved(fields: Mapping[str, Any], device: torch.device | str, *, non_blocking: bool) -> dict[str, Any]:
    """Returns `fields` with the tensors on `device`; numbers stay as they are."""
    return {
        name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
        for name, value in fields.items()
    }
