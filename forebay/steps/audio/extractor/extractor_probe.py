"""The probe of a feature extractor: the form in which its clips stand in batches, and how exactly they do.

Clips of several lengths go through the extractor alone, and as its own batches. The first show which axes grow; the
second what stands beside shorter clips, and whether a clip beside others is what it is alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from forebay.errors import ConfigError, DecodeError
from forebay.steps.audio.declared import interpolated
from forebay.steps.audio.extractor.extractor_call import Arrays, Call, OpenExtractor
from forebay.steps.audio.extractor.promise import Batch, LengthRule, is_mask, length_rule, promise_of
from forebay.steps.form import BatchForm, FieldForm, Promise
from forebay.steps.form_values import Side, place_in
from forebay.store.layout import Array

_SECONDS = (0.731, 1.153, 2.487, 1.909, 0.402)
"""Of the clips of the probe: no round numbers, so that no two lengths are the same in any unit; short ones and long."""
_BATCHES = ((0, 1, 2), (3, 1), (4, 2), (0, 3, 4, 1))
"""Which clips stand in batches of the extractor's own, in this order."""
_CHECKED = (2, 3, 5, 6, 9, 11, 13, 16)
"""Tenths of seconds of more clips, whose lengths are checked."""
Dtype = Literal["float16", "float32"]


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of the probe. lengths: (samples, frames) of its clips, frames of the form's main field, by samples.

    sizes: (samples, bytes that are stored) of them. rule: of the lengths, where there is one. call: of the extractor.
    longest: samples of the longest clip of which nothing is dropped, None where that is not known.
    """

    form: BatchForm
    call: Call
    lengths: tuple[tuple[int, int], ...]
    sizes: tuple[tuple[int, int], ...]
    rule: LengthRule | None = None
    longest: int | None = None

    def frames(self, num_samples: Array) -> Array:
        """Returns how many frames clips of these lengths have, int64; without a rule by a line through the probe's."""
        if self.rule is not None:
            found: Array = self.rule.frames(num_samples)
        else:
            found = interpolated((self.lengths[0], self.lengths[-1]), num_samples)
        return np.where(num_samples > 0, found, 0)

    def size_bytes(self, num_samples: Array) -> int:
        """Returns about how much is stored of clips of these lengths, by a line through the probe's."""
        return int(interpolated((self.sizes[0], self.sizes[-1]), num_samples).sum())


def probed(opened: OpenExtractor, *, dtype: Dtype) -> Probed:
    """Returns what the probe finds of an open extractor. dtype: in which floats are stored.

    Raises ConfigError for outputs that cannot be stored, and where a clip has other values when asked again.
    """
    clips = _clips(opened.sample_rate_hz)
    alone = _alone(opened, clips)
    batches = [Batch.of(opened, clips, alone, members) for members in _BATCHES]
    names = list(alone[0])
    fields = {name: _field(name, [each[name] for each in alone], batches, dtype) for name in names}
    for name in dict.fromkeys(name for batch in batches for name in batch.whole if name not in fields):
        if (mask := _new_mask(name, batches, fields)) is not None:
            fields[name] = mask
    fields = {name: _as_mask(field, fields, alone, batches) for name, field in fields.items()}
    form = BatchForm(made_by=opened.name, fields=tuple(fields.values()), promise=Promise(kind="exact"))
    form = replace(form, promise=promise_of(form, batches, odd=_odd_batches(opened)))
    pairs = sorted(zip(map(len, clips), alone, strict=True), key=lambda pair: pair[0])
    lengths = tuple((samples, _frames(form, each)) for samples, each in pairs)
    item_bytes = {field.name: np.dtype(field.stored_dtype).itemsize for field in form.stored}
    sizes = tuple((samples, sum(each[name].size * n for name, n in item_bytes.items())) for samples, each in pairs)
    return Probed(form, opened.call, lengths, sizes, _rule(form, lengths, opened))


def _clips(rate_hz: int) -> list[Array]:
    """Returns the clips of the probe: noise, quiet noise, a tone over quiet noise."""
    clips = [noise(round(seconds * rate_hz) + seed, seed=seed) for seed, seconds in enumerate(_SECONDS)]
    clips[1] = clips[1] / np.float32(64)
    period = max(rate_hz // 250, 4)
    tone = np.abs(np.arange(len(clips[2])) % period - period // 2) / np.float32(period)
    clips[2] = (tone + clips[2] / np.float32(256)).astype(np.float32)
    return clips


def _odd_batches(opened: OpenExtractor) -> list[Batch]:
    """Returns batches of what no recording of speech is: a band that hardly changes is divided by next to nothing.

    Signals of `ODD`, short and long, each behind a longer clip of noise.
    """
    found = []
    for odd in (signal for size in (opened.sample_rate_hz // 5, 3 * opened.sample_rate_hz) for signal in _odd(size)):
        clips = [odd, noise(len(odd) * 3 // 2, seed=4)]
        with contextlib.suppress(DecodeError):  # it makes NaN of silence: such a clip is not stored
            found.append(Batch.of(opened, clips, [opened.alone(clip) for clip in clips], (0, 1)))
    return found


def _odd(size: int) -> Iterator[Array]:
    step, places = np.float32(1 / (1 << 15)), np.arange(size)
    yield np.zeros(size, np.float32)
    yield np.full(size, np.float32(0.3))
    yield np.sin(places * 0.05).astype(np.float32)
    yield np.where(places // 20 % 2, np.float32(-1), np.float32(1)).astype(np.float32)
    yield from (np.sign(noise(size, seed=seed)) * step for seed in (3, 5))
    yield np.sign(noise(size, seed=6)) * step * (1 + places % 3).astype(np.float32)


def noise(num_samples: int, *, seed: int) -> Array:
    """Returns a clip float32 [num_samples] of noise under a slow envelope, from integers alone: the same everywhere."""
    state = np.arange(num_samples, dtype=np.uint64) + np.uint64((seed + 1) * 1_000_003)
    for shift in (13, 7, 17):
        state ^= state >> np.uint64(shift) if shift == 7 else state << np.uint64(shift)
        state *= np.uint64(0x9E3779B97F4A7C15)
    values = (state >> np.uint64(49)).astype(np.int64) - (1 << 14)
    envelope = 1 + (np.arange(num_samples) * 5 // num_samples + seed) % 4
    return ((values // envelope) / np.float32(1 << 15)).astype(np.float32)


def _alone(opened: OpenExtractor, clips: Sequence[Array]) -> list[Arrays]:
    """Returns what the extractor makes of each clip. Each is asked twice, the second time in another order."""
    try:
        first = [opened.alone(clip) for clip in clips]
        again = [opened.alone(clip) for clip in reversed(clips)][::-1]
    except DecodeError as err:
        raise ConfigError(f"audio.extractor: {err}: it cannot be probed", code="FB121") from err
    for clip, one, other in zip(clips, first, again, strict=True):
        opened.require_same(one, other, f"{len(clip) / opened.sample_rate_hz:.1f} s")
        if set(one) != set(first[0]):
            raise ConfigError(
                f"audio.extractor: {opened.name} gives {', '.join(first[0])} for one clip and {', '.join(one)} for "
                "another; leave out what not all have: audio.leave_out",
                code="FB122",
            )
    return first


def _field(name: str, alone: Sequence[Array], batches: Sequence[Batch], dtype: Dtype) -> FieldForm:
    """Returns the form of an output: the axes that grow, and what stands beside shorter clips."""
    if len({array.ndim for array in alone}) > 1 or len({array.dtype for array in alone}) > 1:
        raise ConfigError(
            f"audio.extractor: {name} has another rank or dtype for other clips: "
            f"{', '.join(f'{a.dtype} {list(a.shape)}' for a in alone)}; leave it out: audio.leave_out",
            code="FB122",
        )
    lengths = [{array.shape[axis] for array in alone} for axis in range(alone[0].ndim)]
    shape = tuple(None if len(found) > 1 else min(found) for found in lengths)
    kind = alone[0].dtype.name
    stored = dtype if kind == "float32" else "uint8" if kind == "bool" or is_mask(alone) else kind
    form = FieldForm(name=name, dtype=kind, shape=shape, stored_dtype=stored)
    return form if not form.grows else _padded(form, batches)


def _padded(form: FieldForm, batches: Sequence[Batch]) -> FieldForm:
    """Returns a growing form with side, padding value and lengths as batches of the extractor have them."""
    pairs = [
        (one[form.name], row)
        for batch in batches
        if form.name in batch.whole
        for one, row in zip(batch.alone, batch.whole[form.name], strict=False)
    ]
    pairs = [(one, row) for one, row in pairs if row.ndim == one.ndim]
    form = _with_rooms(form, batches)
    best, least = form, math.inf
    for side in _SIDES:
        outside = [row[_outside(one, row, side)] for one, row in pairs if _fits(one, row)]
        values = np.concatenate(outside) if outside else np.zeros(0)
        pad = 0.0
        if values.size:
            found, counts = np.unique(values, return_counts=True)
            pad = float(found[counts.argmax()]) + 0.0  # no -0.0
        off = sum(
            float(np.abs(row[place_in(one.shape, row.shape, side)] - one.astype(np.float64)).sum())
            for one, row in pairs
            if _fits(one, row)
        )
        if off < least:
            best, least = replace(form, side=side, pad=pad), off
    return best


_SIDES: tuple[Side, ...] = ("right", "left")


def _fits(one: Array, row: Array) -> bool:
    return all(length <= room for length, room in zip(one.shape, row.shape, strict=True))


def _outside(one: Array, row: Array, side: Side) -> Array:
    mask = np.ones(row.shape, bool)
    mask[place_in(one.shape, row.shape, side)] = False
    return mask


def _with_rooms(form: FieldForm, batches: Sequence[Batch]) -> FieldForm:
    """Returns the form with the multiple, or the one length, of the extractor's own batches."""
    axis = form.grows[0]
    rooms = [
        (max(one[form.name].shape[axis] for one in batch.alone), batch.whole[form.name].shape[axis + 1])
        for batch in batches
        if form.name in batch.whole and batch.whole[form.name].ndim == len(form.shape) + 1
    ]
    if all(longest == room for longest, room in rooms):
        return form
    if len({room for _, room in rooms}) == 1 and all(longest <= rooms[0][1] for longest, _ in rooms):
        return replace(form, length=rooms[0][1])
    multiple = math.gcd(*(room for _, room in rooms))
    if multiple > 1 and all(-(-longest // multiple) * multiple == room for longest, room in rooms):
        return replace(form, multiple=multiple)
    return form


def _new_mask(name: str, batches: Sequence[Batch], fields: dict[str, FieldForm]) -> FieldForm | None:
    """Returns the form of a mask that batches of the extractor have and a clip alone has not; None if it is none."""
    arrays = [batch.whole[name] for batch in batches if name in batch.whole]
    if any(array.ndim != 2 for array in arrays) or not is_mask(arrays):
        return None
    form = FieldForm(name=name, dtype=arrays[0].dtype.name, shape=(None,), stored_dtype="uint8")
    return next((replace(form, mask_of=of) for of, field in fields.items() if _marks(name, field, batches)), None)


def _as_mask(
    form: FieldForm, fields: dict[str, FieldForm], alone: Sequence[Arrays], batches: Sequence[Batch]
) -> FieldForm:
    """Returns a mask that is all ones of a clip alone as the mask of the field that it marks; it is not stored then."""
    if form.mask_of is not None or form.shape != (None,) or form.dtype == "float32":
        return form
    if any((each[form.name] != 1).any() for each in alone):
        return form
    marked = (
        of
        for of, field in fields.items()
        if of != form.name
        and len(field.grows) == 1
        and not (field.shape == (None,) and field.dtype != "float32")
        and all(each[of].shape[field.grows[0]] == len(each[form.name]) for each in alone)
        and _marks(form.name, field, batches)
    )
    of = next(marked, None)
    if of is None:
        return form
    return replace(form, mask_of=of, pad=0.0, side="right", multiple=1, length=None)


def _marks(name: str, field: FieldForm, batches: Sequence[Batch]) -> bool:
    """Whether a mask of the extractor's batches is 1 where a field has the values of its clips, and 0 elsewhere."""
    if len(field.grows) != 1 or field.mask_of is not None:
        return False
    axis = field.grows[0]
    for batch in batches:
        found = batch.whole.get(name)
        if found is None:
            continue
        lengths = [one[field.name].shape[axis] for one in batch.alone]
        if found.shape != (len(lengths), batch.whole[field.name].shape[axis + 1]):
            return False
        places = np.arange(found.shape[1]) if field.side == "right" else np.arange(found.shape[1])[::-1]
        if not np.array_equal(found, places < np.array(lengths)[:, None]):
            return False
    return True


def _frames(form: BatchForm, alone: Arrays) -> int:
    """Returns how many frames are stored of a clip: the length on disk of the field that frames are counted by."""
    main = form.main
    return len(main.stored(np.zeros(alone[main.name].shape, main.stored_dtype))[main.name])


def _rule(form: BatchForm, lengths: Sequence[tuple[int, int]], opened: OpenExtractor) -> LengthRule | None:
    """Returns the rule of the lengths of an extractor's clips; of those whose clips are all of one length that."""
    if len({frames for _, frames in lengths}) == 1:
        return LengthRule(0, 0, 1, least=lengths[0][1])

    def ask(samples: int) -> int | None:
        try:
            return _frames(form, opened.alone(noise(samples, seed=samples)))
        except (DecodeError, ValueError):
            return None

    rate = opened.sample_rate_hz
    return length_rule(
        lengths, ask, check=[rate // 20, *(rate * tenths // 10 + tenths for tenths in _CHECKED), rate * 3]
    )
