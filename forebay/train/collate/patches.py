"""Stored uint8 patches to the model's `pixel_values`, by the table of 256 values a channel of the processor.

A stored row is (channel, y, x), one temporal copy; a row of `pixel_values` is (channel, time, y, x), the copies equal.
The table is the definition. Arithmetic is no faster on the host: the processor's order of steps takes three passes over
float32 for one look into a table of 1 KB (4,096 patches on one core: 5.2 ms against 5.6 in float32, 4.2 against 4.2 in
bfloat16). A batch whose patches are still as stored is a `PatchBatch`, which is no mapping: a model would not notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from forebay.errors import ConfigError
from forebay.steps.batch import raw
from forebay.store.layout import Array

_HOST_ROWS = 64
"""Patches at a time: their values stay in the cache."""
_DEVICE_ROWS = 8192
"""Patches at a time: bounds the indices of a gather to 25 MB."""


def patch_table(constants: Mapping[str, Any]) -> torch.Tensor:
    """Returns the table of a vision cache, float32 [3, 256]: what the processor makes of each value of each channel."""
    return torch.tensor(constants["patch_table"], dtype=torch.float32)


def pixel_dtype(name: str) -> torch.dtype:
    """Returns the dtype of `pixel_values` under `loader.pixels`; of patches that are handed out as stored: float32."""
    return {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(name, torch.float32)


def to_model_inputs(
    batch: PatchBatch | Mapping[str, Any],
    constants: Mapping[str, Any],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Returns the model's arguments for a batch of packs, on `device`: `model(**to_model_inputs(batch, constants))`.

    batch: of `PackCollator`; its uint8 `patches` cross over as they are and become `pixel_values` in `dtype` there.
    A batch that has `pixel_values` is only moved. constants: of the cache.
    Raises ConfigError where `constants` are not those of a vision cache.
    """
    inputs = moved(fields_of(batch), device, non_blocking=True)
    return DeviceExpansion(constants, dtype=dtype)(inputs) if "patches" in inputs else model_inputs(inputs)


def model_inputs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a pack, `pixel_values` among them, as arguments of the model, `use_cache=False` with them.

    With a key-value cache transformers does not look for packed segments in the positions: the samples of a pack would
    see each other.
    """
    return {**fields, "use_cache": False}


class DeviceExpansion:
    """Makes the arguments of the model of batches whose uint8 patches lie on a device already."""

    def __init__(self, constants: Mapping[str, Any], *, dtype: torch.dtype) -> None:
        """Takes the table from the constants of a cache; ConfigError where they have none. dtype: of `pixel_values`."""
        if "patch_table" not in constants:
            raise ConfigError("patches need the patch_table of their cache; pass constants=loader.source.constants")
        self._table = patch_table(constants)
        self._dtype, self._copies = dtype, int(constants["temporal_patch_size"])

    def __call__(self, batch: PatchBatch | Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments, on the device of the patches."""
        fields = dict(fields_of(batch))
        patches = fields.pop("patches")
        self._table = self._table.to(patches.device)  # once a device: a copy from the host waits for the device
        values = expand_patches(patches, self._table, dtype=self._dtype, temporal_patch_size=self._copies)
        return model_inputs({**fields, "pixel_values": values})


def expand_patches(
    patches: torch.Tensor,
    table: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    temporal_patch_size: int = 2,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `pixel_values` [n, temporal_patch_size * w] in `dtype`, where `patches` are: `table[channel, value]`.

    patches: uint8 [n, w], w = 3 * patch_size^2. table: float32 [3, 256]; other dtypes are rounded from it.
    out: contiguous, of that shape, dtype and device, to write to.
    """
    if out is None:
        out = torch.empty(len(patches), temporal_patch_size * patches.shape[1], dtype=dtype, device=patches.device)
    if patches.device.type == "cpu":
        HostExpansion(table, dtype=dtype, temporal_patch_size=temporal_patch_size)(patches.numpy(), out)
    else:
        _gather(patches, table.to(device=patches.device, dtype=dtype), out=out, copies=temporal_patch_size)
    return out


def _gather(patches: torch.Tensor, table: torch.Tensor, *, out: torch.Tensor, copies: int) -> None:
    """Makes `out` the expanded patches by gathers, as devices do it; `table` has its dtype."""
    area = patches.shape[1] // 3
    channel = torch.arange(0, 768, 256, dtype=torch.int32, device=patches.device)[:, None]
    rows, targets = patches.view(len(patches), 3, area), out.view(len(patches), 3, copies, area)
    for start in range(0, len(rows), _DEVICE_ROWS):
        index = rows[start : start + _DEVICE_ROWS] + channel
        found = table.view(-1).index_select(0, index.view(-1)).view(index.shape)
        targets[start : start + _DEVICE_ROWS] = found[:, :, None]


class HostExpansion:
    """Expands patches on the CPU, in the calling thread, without temporaries of their size. Picklable."""

    def __init__(self, table: torch.Tensor, *, dtype: torch.dtype, temporal_patch_size: int = 2) -> None:
        """Takes the table, float32 [3, 256], and the dtype of what it makes."""
        self.dtype = dtype
        # As bits: numpy has no bfloat16.
        self._table = raw(table.to(dtype))
        self._copies = temporal_patch_size

    def __call__(self, patches: Array, out: torch.Tensor) -> None:
        """Makes `out`, contiguous [n, temporal_patch_size * w] in `dtype`, the expanded patches, uint8 [n, w]."""
        area = patches.shape[1] // 3
        rows = patches.reshape(len(patches), 3, area)
        copies = raw(out).reshape(len(patches), 3, self._copies, area)
        for start in range(0, len(rows), _HOST_ROWS):
            stop = start + _HOST_ROWS
            for channel, values in enumerate(self._table):
                # Every index is in range; "clip" only keeps numpy from buffering the result to say otherwise.
                copies[start:stop, channel] = values.take(rows[start:stop, channel], mode="clip")[:, None]


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
