"""Batches of values that forebay stores of a foreign class, beside what that class gives by itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.steps.batch import collate, fresh
from forebay.steps.form import BatchForm, FieldForm
from forebay.store.layout import Array

Outputs = Mapping[str, Any]
"""What a plain call of a class returned, by name: arrays, or what its caller cannot stack."""


_ROUNDING = 1e-4
"""Up to this difference of values, two batches are the same but for rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How a batch of forebay's compares with the class's own.

    limit: the largest difference of a value, 0 where all bits are equal, infinite where an array is another one. why:
    what differs, by field. left_out: names that only the class gives.
    """

    limit: float = 0.0
    why: str = ""
    left_out: tuple[str, ...] = ()
    but_padding: bool = False
    """Whether the clips' own values are equal all the same: what differs stands beside shorter ones."""
    where: str = ""
    """The mask that says padding where values differ, if one says it of all of them."""

    def __str__(self) -> str:
        if self.limit == 0:
            return "exact"
        if self.where:
            return f"exact where `{self.where}` is 1"
        if self.but_padding:
            return "exact but for padding"
        return f"within {rounded_up(self.limit):.0e}" if self.limit <= _ROUNDING else "no"

    @property
    def is_exact(self) -> bool:
        """Whether all values that both have are equal bit for bit."""
        return self.limit == 0


def rounded_up(value: float) -> float:
    """Returns a positive number as the next one of a single digit: 1.7e-06 is 2e-06."""
    unit = 10.0 ** np.floor(np.log10(value))
    return float(np.ceil(round(value / unit, 6)) * unit)


def own_values_are_equal(form: BatchForm, arrays: Sequence[Mapping[str, Array]], own: Outputs) -> bool:
    """Returns whether the class's own batch has each clip's or image's own values, whatever stands beside them."""
    for field in form.stored:
        rows = own.get(field.name)
        if field.join != "stack" or not is_array(rows) or rows is None:
            return False
        for row, unit in zip(rows, arrays, strict=True):
            array = unit[field.name]
            if row.ndim != array.ndim or any(n > room for n, room in zip(array.shape, row.shape, strict=True)):
                return False
            place = tuple(
                slice(0, n) if field.side == "right" else slice(room - n, room)
                for n, room in zip(array.shape, row.shape, strict=True)
            )
            if field.table is not None or not np.array_equal(row[place], array, equal_nan=array.dtype.kind == "f"):
                return False
    return True


def batch_of(form: BatchForm, samples: Sequence[Sequence[Mapping[str, Array]]]) -> dict[str, torch.Tensor]:
    """Returns the float32 batch of samples that went to disk and came back. samples: of each its clips or images."""
    stored = [[_through_disk(form, arrays) for arrays in units] for units in samples]
    joined = [{field.name: [unit[field.name] for unit in units] for field in form.stored} for units in stored]
    return collate(form, joined, dtype=torch.float32, allocate=fresh)


def _through_disk(form: BatchForm, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the arrays of what would be on disk: no memory is shared with what was given."""
    fields = {name: part for field in form.stored for name, part in field.stored(arrays[field.name]).items()}
    declared = {spec.name: spec.numpy_dtype for spec in form.specs()}
    if {name: part.dtype for name, part in fields.items()} != declared:
        raise ValueError(f"{form.made_by}: stored {fields.keys()} are not as declared: {declared}")
    return form.arrays(
        {name: np.frombuffer(part.tobytes(), part.dtype).reshape(part.shape) for name, part in fields.items()}
    )


def compared(ours: Mapping[str, torch.Tensor], own: Outputs, *, masks: Collection[str] = ()) -> Verdict:
    """Returns how a batch compares with a class's own outputs for the same clips or images.

    masks: fields that may be all ones where the class gives none: some classes give them only where they pad.
    """
    limits, reasons, left_out = [0.0], [], []
    for name, value in own.items():
        array = value if is_array(value) or name not in ours else _of_list(value)
        if name not in ours or not is_array(array):
            left_out.append(name)
            continue
        limit, why = _difference(ours[name].numpy(), _as_stored(array, ours[name]))
        limits.append(limit)
        if why:
            reasons.append(f"{name} {why}")
    only_ours = [name for name in ours if name not in own and not (name in masks and bool((ours[name] == 1).all()))]
    only_ours = [name for name in only_ours if ours[name].numel()]  # what some images have: no array, or an empty one
    reasons += [f"{name} is not given" for name in only_ours]
    limits += [np.inf] * bool(only_ours)
    return Verdict(limit=float(max(limits)), why="; ".join(reasons), left_out=tuple(left_out))


def _as_stored(own: Array, ours: torch.Tensor) -> Array:
    """Returns a class's array as a batch has it: float64 as float32, and one number for all images as one for each."""
    if own.dtype == np.float64 and ours.dtype == torch.float32:
        own = own.astype(np.float32)
    return np.broadcast_to(own, ours.shape) if own.ndim == 0 else own


def _of_list(value: Any) -> Any:
    """Returns the array of a list of lists of numbers; the list itself where it is ragged or of something else."""
    try:
        return np.asarray(value)
    except ValueError:
        return value


def is_array(value: Any) -> bool:
    """Whether a field of a batch can be made of this."""
    return isinstance(value, np.ndarray) and value.dtype != object and value.dtype.kind in "fiub"


def masking(ours: Mapping[str, torch.Tensor], own: Outputs) -> str:
    """Returns the name of a mask of the class's own that is 0 wherever a float of ours is not the class's; "" if none.

    A mask is [B, n] beside values [B, n, ...] or [B, ..., n].
    """
    apart = {name: tensor.numpy() != own[name] for name, tensor in ours.items() if _same_floats(tensor, own.get(name))}
    if any(not _same_floats(ours[name], own.get(name)) and not _same(ours[name], own.get(name)) for name in ours):
        return ""
    if not any(part.any() for part in apart.values()):
        return ""
    for name, mask in own.items():
        is_mask = is_array(mask) and mask.dtype.kind in "biu" and mask.ndim == 2 and mask.max() <= 1
        if is_mask and all(not part.any() or _is_behind(part, mask) for part in apart.values()):
            return name
    return ""


def _same(ours: torch.Tensor, own: Any) -> bool:
    return own is None or (is_array(own) and np.array_equal(ours.numpy(), own))


def _same_floats(ours: torch.Tensor, own: Any) -> bool:
    return is_array(own) and ours.is_floating_point() and ours.numpy().shape == own.shape


def _is_behind(apart: Array, mask: Array) -> bool:
    """Whether nothing differs where a mask is 1."""
    for moved in (apart, np.moveaxis(apart, -1, 1)):
        if moved.shape[:2] == mask.shape:
            return not moved[mask != 0].any()
    return False


def _difference(ours: Array, own: Array) -> tuple[float, str]:
    """Returns the largest difference and what it is; (0, "") for equal bits."""
    if ours.shape != own.shape:
        return np.inf, f"is {list(ours.shape)}, its own {list(own.shape)}"
    if ours.dtype != own.dtype:
        return np.inf, f"is {ours.dtype}, its own {own.dtype}"
    if np.array_equal(ours, own, equal_nan=ours.dtype.kind == "f"):
        return 0.0, ""
    apart = ours != own
    if ours.dtype.kind != "f":
        return np.inf, f"differs in {int(apart.sum())} of {apart.size} values"
    gap = float(np.abs(ours.astype(np.float64) - own).max())
    return gap, f"differs by up to {gap:.2g} in {100 * apart.mean():.2g} % of the values"


def stored_text(form: BatchForm) -> str:
    """Returns what is on disk of one clip or image, in a line: name, dtype and shape of each field."""
    return "; ".join(map(_field_text, form.fields))


def _field_text(field: FieldForm) -> str:
    if field.mask_of is not None:
        return f"`{field.name}` not stored"
    shape = ", ".join("n" if length is None else str(length) for length in field.shape)
    table = "" if field.table is None else f", table of {field.table.values.shape[1]}"
    return f"`{field.name}` {field.stored_dtype} [{shape}]{table}"


def stored_bytes(form: BatchForm, arrays: Mapping[str, Array]) -> int:
    """Returns how many bytes these arrays of one clip or image take on disk."""
    return sum(part.nbytes for field in form.stored for part in field.stored(arrays[field.name]).values())


def float32_bytes(own: Outputs) -> int:
    """Returns how many bytes the arrays of a class's own output take: floats as float32, masks as they are."""
    return sum(value.nbytes for value in own.values() if is_array(value))
