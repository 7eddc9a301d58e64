"""Batches beside dicts of tensors: packs whose patches are still as stored, and fillers of weight 0.

A batch whose patches are uint8 is a `PatchBatch`, which is no mapping: a model would not notice. Codes cross over to a
device as they are stored, and become there the values that the host would have made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from forebay.errors import ConfigError
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.image.qwen2_vl import CODES, patch_form, video_form
from forebay.steps.image.tables import expand_on_device
from forebay.store.image.codec import VIDEO_PATCHES


def pixel_dtype(name: str) -> torch.dtype:
    """Returns the dtype of `pixel_values` under `loader.pixels`; of patches that are handed out as stored: float32."""
    return {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(name, torch.float32)


def model_inputs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a pack, `pixel_values` among them, as arguments of the model, `use_cache=False` with them.

    With a key-value cache transformers does not look for packed segments in the positions: the samples of a pack would
    see each other.
    """
    return {**fields, "use_cache": False}


class PatchBatch:
    """The fields of a batch with uint8 `patches`: `batch["labels"]`, `"labels" in batch`, `batch.fields`.

    transformers' models take any keyword: given `patches` they would pass over them and train on no image. So `**batch`
    raises TypeError and names `to_model_inputs`. accelerate and Lightning move the batch to a device by `to`;
    transformers' Trainer leaves it where it is, and stops at the model's call.
    """

    remedy: ClassVar[str] = (
        "a batch of uint8 patches is not what a model takes: pass model(**forebay.train.to_model_inputs(batch, "
        'constants)), or set loader.pixels = "float32"'
    )
    """What to do instead, for whoever takes it for a dict."""

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
        return f"{type(self).__name__}({', '.join(self.fields)})"

    def __getattr__(self, name: str) -> NoReturn:
        # `get`, `items`, `pop`: whoever asks for them takes the batch for a dict.
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}: {self.remedy}")

    def keys(self) -> NoReturn:
        """Raises TypeError: Python asks for it in `**batch` and `dict(batch)`."""
        raise TypeError(self.remedy)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PatchBatch:
        """Returns the batch with its tensors on `device`; the patches stay uint8."""
        return type(self)(moved(self.fields, device, non_blocking=non_blocking))

    def pin_memory(self) -> PatchBatch:
        """Returns the batch with its tensors in pinned memory, as torch's DataLoader asks for."""
        return type(self)(
            {name: v.pin_memory() if isinstance(v, torch.Tensor) else v for name, v in self.fields.items()}
        )

    @classmethod
    def filler(cls) -> type[PatchBatch]:
        """Returns the class of such a batch of weight 0."""
        return PatchFiller

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
    return batch.filler()(batch.fields) if isinstance(batch, PatchBatch) else Filler(batch)


def as_arrays(batch: PatchBatch | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a batch as numpy arrays of the same memory."""
    return {
        name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in fields_of(batch).items()
    }


def fields_of(batch: PatchBatch | Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a batch of any form as a mapping."""
    return batch.fields if isinstance(batch, PatchBatch) else batch


def moved(fields: Mapping[str, Any], device: torch.device | str, *, non_blocking: bool) -> dict[str, Any]:
    """Returns `fields` with the tensors on `device`; numbers stay as they are."""
    return {
        name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
        for name, value in fields.items()
    }


def as_codes(form: BatchForm) -> BatchForm:
    """Returns the form of batches that hold codes where `DeviceExpansion` makes values of them."""
    coded = {one.field.name: one for one in _coded(form)}
    fields = (coded[field.name].on_host() if field.name in coded else field for field in form.fields)
    return replace(form, fields=tuple(fields))


def has_patches(form: BatchForm) -> bool:
    """Returns whether a form is of patches, whose codes can stand in packs."""
    return any(one.name == CODES for one in _coded(form))


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
    if CODES in inputs or VIDEO_PATCHES in inputs:
        if "patch_table" not in constants:
            raise ConfigError("patches need the patch_table of their cache; pass constants=loader.source.constants")
        forms = (patch_form(constants), video_form(constants))
        inputs = DeviceExpansion(*(form for form in forms if form is not None), dtype=dtype)(inputs)
    return model_inputs(inputs)


class DeviceExpansion:
    """Makes values of the codes of a batch on the device where it lies: what the host would have made of them."""

    def __init__(self, *forms: BatchForm, dtype: torch.dtype) -> None:
        """Takes the tables of the forms of a batch. dtype: of what are floats."""
        self._dtype, self._fields = dtype, [one for form in forms for one in _coded(form)]
        self._tables = {one.name: torch.from_numpy(one.values) for one in self._fields}

    @property
    def has_fields(self) -> bool:
        """Whether any field is made of codes."""
        return bool(self._fields)

    def __call__(self, batch: PatchBatch | Mapping[str, Any]) -> dict[str, Any]:
        """Returns the batch with values in place of codes; of a `PatchBatch` the arguments of the model."""
        values = dict(fields_of(batch))
        for one in self._fields:
            if one.name not in values:
                continue
            codes = values[one.name] if one.name == one.field.name else values.pop(one.name)
            # Once a device: a copy from the host waits for the device.
            table = self._tables[one.name] = self._tables[one.name].to(codes.device)
            values[one.field.name] = one.expanded(codes, table, dtype=self._dtype)
        return model_inputs(values) if isinstance(batch, PatchBatch) else values


@dataclass(frozen=True, slots=True, eq=False)
class _Coded:
    """A field that crosses over to a device as codes. Padding is a code of its own, behind those of the table."""

    field: FieldForm
    values: npt.NDArray[np.float32]
    """Of the table, and behind them what stands in the padding."""
    pad: int | None
    """The code of the padding. None: there is none."""

    @classmethod
    def of(cls, field: FieldForm) -> _Coded | None:
        """Returns a field's codes; None for a field that has none, or no room for one of the padding."""
        table = field.table
        if table is None or (field.join == "nest" and field.pad is None):
            return None
        values, pad = table.values.copy(), None
        if _may_be_padded(field):
            pad = values.shape[1]
            column = np.full((len(values), 1), field.pad or 0, np.float32)
            values = np.concatenate([values, column], axis=1)
        return cls(field, values, pad) if values.shape[1] <= 1 << 16 else None

    @property
    def name(self) -> str:
        """The name of the codes in a batch: that on disk."""
        return self.field.on_disk

    def on_host(self) -> FieldForm:
        """Returns the form of the codes. Two bytes are held as int16, because devices hardly know uint16."""
        dtype, pad = ("uint8" if self.values.shape[1] <= 256 else "int16"), self.pad
        if pad is not None and dtype == "int16":
            pad = int(np.uint16(pad).view(np.int16))
        return replace(self.field, name=self.name, dtype=dtype, table=None, pad=self.field.pad if pad is None else pad)

    def expanded(self, codes: torch.Tensor, values: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        """Returns the values of the codes of a batch."""
        table = self.field.table
        assert table is not None
        axis = table.axis + (self.field.join != "cat")
        return expand_on_device(codes, values, axis, dtype=dtype, inner=table.inner, copies=table.copies)


def _coded(form: BatchForm) -> list[_Coded]:
    return [one for one in map(_Coded.of, form.stored) if one is not None]


def _may_be_padded(field: FieldForm) -> bool:
    if field.join == "nest":
        return True
    return field.pad is not None and len(field.grows) > (1 if field.join == "cat" else 0)
