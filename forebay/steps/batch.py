"""Helpers that batch forms share: copies into rows of a batch that change the dtype in the same pass, and text rows.

numpy's float16 casts take about 20 times as long as torch's (one EPYC core, 240,000 values: 390 us against 17), so
torch casts. It gets pieces below its parallel grain: a loader thread must not start an OpenMP team beside the training
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forebay.steps.step import Allocate, TextBatch
from forebay.store.layout import Array
from forebay.store.source import Sample

PIECE = 32_000
"""Elements; torch runs element-wise work of fewer than 32,768 in the calling thread."""

IGNORED = -100
"""Label that torch's cross entropy passes over, as in transformers."""


def fresh(name: str, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG001
    """Returns newly allocated memory; `name` does not matter."""
    return torch.empty(shape, dtype=dtype)


def raw(tensor: torch.Tensor) -> Array:
    """Returns the tensor's memory as an array; bfloat16, which numpy does not have, as its bits in int16."""
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def raw_values(values: Sequence[float], dtype: torch.dtype) -> list[float]:
    """Returns the values rounded to `dtype` as `raw` shows them."""
    rounded = torch.tensor(values, dtype=dtype)
    found: list[float] = raw(rounded).tolist()
    return found


def copy_values(values: Array, out: torch.Tensor, *, scratch: torch.Tensor) -> None:
    """Makes `out` equal to `values`, rounded to nearest even.

    values: float16 or float32, C-contiguous, read-only is fine. out: float16, float32 or bfloat16, contiguous, as many
    elements. scratch: float32 [PIECE], overwritten.
    """
    source = torch.from_numpy(_Writable.alias(values)).view(-1)
    target = out.view(-1)
    # Straight from float16 to bfloat16 torch takes 2.6 times as long as over float32.
    over_float32 = source.dtype == torch.float16 and target.dtype == torch.bfloat16
    if not over_float32 and torch.get_num_threads() == 1:
        target.copy_(source)
        return
    for piece, part in zip(torch.split(source, PIECE), torch.split(target, PIECE), strict=True):
        part.copy_(scratch[: len(piece)].copy_(piece) if over_float32 else piece)


class _Writable:
    """Alias of an array that does not say that it is read-only: torch warns of such arrays even where it only reads."""

    __slots__ = ("__array_interface__",)

    def __init__(self, values: Array) -> None:
        interface = values.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}

    @classmethod
    def alias(cls, values: Array) -> Array:
        """Returns the alias; it is to be read only, and only while `values` lives."""
        return np.asarray(cls(values))


def counted(name: str, values: Sequence[int], *, allocate: Allocate) -> torch.Tensor:
    """Returns int64 [batch]: a number a sample."""
    out = allocate(name, (len(values),), dtype=torch.int64)
    out.numpy()[:] = values
    return out


def filled(name: str, shape: tuple[int, int], value: int, *, allocate: Allocate) -> torch.Tensor:
    """Returns int64 of this shape with one value everywhere."""
    tensor = allocate(name, shape, dtype=torch.int64)
    tensor.numpy().fill(value)
    return tensor


@dataclass(frozen=True, slots=True)
class BatchesOfOne:
    """The row of a pack, made of the batches of its samples alone; their mask says nothing there."""

    text: TextBatch
    row_tokens: Callable[[int, int], int]
    """See `TextStep`."""

    def lengths(self, samples: Sequence[Sample]) -> list[int]:
        """Returns the tokens of each sample."""
        return [self.row_tokens(len(each["input_ids"]), len(each.get("input_features", ()))) for each in samples]

    def __call__(self, samples: Sequence[Sample]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the fields of tokens, int64, and those of one number a sample."""
        made = [self.text([sample], padding_side="right", allocate=fresh) for sample in samples]
        joined = {
            name: np.concatenate([batch[name].numpy().reshape(-1) for batch in made])
            for name in made[0]
            if name != "attention_mask"
        }
        tokens = {name for name in joined if made[0][name].ndim == 2}
        return {name: joined[name] for name in joined if name in tokens}, {
            name: joined[name] for name in joined if name not in tokens
        }


class MarkedText:
    """The row of a pack of conversations; labels are the ids that `label_mask` marks."""

    def lengths(self, samples: Sequence[Sample]) -> list[int]:
        """Returns the tokens of each sample."""
        return [len(sample["input_ids"]) for sample in samples]

    def __call__(self, samples: Sequence[Sample]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns `input_ids` and `labels`."""
        ids = np.concatenate([sample["input_ids"] for sample in samples])
        mask = np.concatenate([sample["label_mask"] for sample in samples])
        return {"input_ids": ids, "labels": np.where(mask != 0, ids, ids.dtype.type(IGNORED))}, {}
