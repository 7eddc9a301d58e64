"""How batches by a declared form compare with those of the feature extractor itself: what a cache can promise.

How many frames clips have, as a rule in integers that a few questions find: frames = step * ((n + shift) // hop).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forebay.steps.audio.extractor.extractor_call import Arrays, OpenExtractor
from forebay.steps.form import BatchForm, FieldForm, Promise
from forebay.steps.form_values import place_in
from forebay.store.layout import Array

_WITHIN = 5e-4
"""Up to this difference of any value batches are the same but for rounding."""
_MARGIN = 2.0
"""Other clips than those of the probe differ more. Quiet ones and tones are among these, because they differ most."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch by the extractor itself. alone: of each of its clips. whole: the batch."""

    alone: tuple[Arrays, ...]
    whole: Arrays

    @classmethod
    def of(
        cls, opened: OpenExtractor, clips: Sequence[Array], alone: Sequence[Arrays], members: Sequence[int]
    ) -> Batch:
        """Returns the extractor's batch of some of the clips, in this order."""
        return cls(tuple(alone[i] for i in members), opened.batch([clips[i] for i in members]))


def promise_of(form: BatchForm, batches: Sequence[Batch], *, odd: Sequence[Batch] = ()) -> Promise:
    """Returns how batches by the form compare with the extractor's own.

    What an extractor's own mask says is padding does not count. odd: batches of signals of `ODD`, in which rounding is
    large: the promise says so where it does not hold for them, with what was seen; it is no limit there.
    """
    found = _found(form, batches)
    limit = max(max(each.values, each.padding) for each in found)
    masks = dict.fromkeys(each.mask for each in found if each.masked > 0)
    where = f"where {' and '.join(masks)} is 1" if masks else ""
    if limit > _WITHIN:
        return Promise(kind="alone", why=_why(found))
    limit = _rounded_up(limit * _MARGIN) if limit else 0.0
    beyond = max((max(each.values, each.padding) for each in _found(form, odd)), default=0.0)
    if beyond > limit:
        where += f"{', ' if where else ''}but {_rounded_up(beyond):g} was seen {ODD}"
    return Promise(kind="within" if limit else "exact", limit=limit, why=where)


ODD = "in digital silence, constants, steady tones, squares and noise of a few steps"


def _found(form: BatchForm, batches: Sequence[Batch]) -> list[_Compared]:
    names = list(dict.fromkeys([*(field.name for field in form.fields), *(n for each in batches for n in each.whole)]))
    pairs = [(batch, collated(form, batch.alone)) for batch in batches]
    return [_compared(name, form, batch, ours.get(name)) for batch, ours in pairs for name in names]


@dataclass(frozen=True, slots=True)
class _Compared:
    """The largest differences of one field of one batch: in what clips hold, beside that, and where `mask` is 0."""

    name: str
    values: float = 0.0
    padding: float = 0.0
    masked: float = 0.0
    mask: str = ""


def _compared(name: str, form: BatchForm, batch: Batch, ours: Array | None) -> _Compared:
    theirs = batch.whole.get(name)
    if ours is None or theirs is None:
        # A mask that a batch of the extractor lacks is all ones where it says nothing.
        there = ours if theirs is None else theirs
        is_said = there is not None and not (there.dtype.kind != "f" and (there == 1).all())
        return _Compared(name, values=math.inf if is_said else 0.0)
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return _Compared(name, values=math.inf)
    differences = np.abs(ours.astype(np.float64) - theirs)
    if not differences.any():
        return _Compared(name)
    field = next(field for field in form.fields if field.name == name)
    if field.dtype != "float32":
        return _Compared(name, values=math.inf)
    held = _held(field, batch, ours.shape)
    mask = _mask_beside(field, batch, ours.shape)
    counted = np.ones(ours.shape, bool) if mask is None else _spread(batch.whole[mask] == 1, field, ours.shape)
    return _Compared(
        name,
        values=_most(differences[held]),
        padding=_most(differences[~held & counted]),
        masked=_most(differences[~held & ~counted]),
        mask=mask or "",
    )


def _most(differences: Array) -> float:
    most = float(differences.max()) if differences.size else 0.0
    return most if math.isfinite(most) else math.inf


def _held(field: FieldForm, batch: Batch, shape: tuple[int, ...]) -> Array:
    """Returns where a batch holds what its clips are alone, bool."""
    held = np.zeros(shape, bool)
    for row, one in zip(held, batch.alone, strict=True):
        row[place_in(one[field.name].shape, row.shape, field.side)] = True
    return held


def _mask_beside(field: FieldForm, batch: Batch, shape: tuple[int, ...]) -> str | None:
    """Returns the output of the extractor that marks the values of a field along its axis that grows, if one does."""
    if len(field.grows) != 1:
        return None
    wanted = (shape[0], shape[field.grows[0] + 1])
    for name, array in batch.whole.items():
        if name != field.name and array.shape == wanted and is_mask([array]):
            return name
    return None


def _spread(marks: Array, field: FieldForm, shape: tuple[int, ...]) -> Array:
    """Returns marks [rows, places] over the other axes of a field, bool."""
    axis = field.grows[0] + 1
    inner = [1] * len(shape)
    inner[0], inner[axis] = marks.shape
    return np.broadcast_to(marks.reshape(inner), shape)


def _why(found: Sequence[_Compared]) -> str:
    """Returns what a clip beside others differs in from the clip alone."""
    said = []
    for name in dict.fromkeys(each.name for each in found):
        values = max(each.values for each in found if each.name == name)
        most = max(values, max(each.padding for each in found if each.name == name))
        if most > _WITHIN:
            by = "" if most == math.inf else f" (by up to {most:.2g})"
            said.append(f"{'other values' if values > _WITHIN else 'another padding'} in {name}{by}")
    return f"its own batches have {', '.join(said)}"


def collated(form: BatchForm, alone: Sequence[Arrays]) -> Arrays:
    """Returns the batch that a form makes of clips, its floats in float32: not yet rounded to what is stored."""
    import torch

    from forebay.steps.batch import collate, fresh

    whole = replace(
        form, fields=tuple(replace(f, stored_dtype="float32") if f.dtype == "float32" else f for f in form.fields)
    )
    stored = [{k: v for field in whole.stored for k, v in field.stored(each[field.name]).items()} for each in alone]
    samples = [{name: (array,) for name, array in whole.arrays(each).items()} for each in stored]
    batch = collate(whole, samples, dtype=torch.float32, allocate=fresh)
    return {name: tensor.numpy() for name, tensor in batch.items()}


def _rounded_up(value: float) -> float:
    """Returns a number with one digit that is no smaller."""
    unit = 10.0 ** math.floor(math.log10(value))
    return float(f"{math.ceil(value / unit) * unit:.0e}")


def is_mask(arrays: Sequence[Array]) -> bool:
    """Whether integers are all 0 or 1 and several, so that a byte holds each."""
    return all(array.dtype.kind in "biu" and array.size > 1 and ((array == 0) | (array == 1)).all() for array in arrays)


Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LengthRule:
    """Clips of n samples, n at least 1, have max(least, step * ((n + shift) // hop)) frames."""

    step: int
    shift: int
    hop: int
    least: int = 0

    def frames(self, num_samples: npt.NDArray[np.integer]) -> Integers:
        """Returns the frames of clips, int64."""
        found = self.step * ((np.asarray(num_samples, np.int64) + self.shift) // self.hop)
        return np.maximum(found, self.least)


def length_rule(
    lengths: Sequence[tuple[int, int]], ask: Callable[[int], int | None], *, check: Sequence[int]
) -> LengthRule | None:
    """Returns the one rule that answers all questions; None where no rule does, or several.

    lengths: (samples, frames) of clips, by samples. ask: returns the frames of a clip of so many samples, None where
    there are none. check: samples of clips that are asked for at last, short ones too.
    """
    rules = _possible(lengths)
    first, last = lengths[0][0], lengths[-1][0]
    for _ in range(24):
        if len(rules) < 2:
            break
        asked = _splitting(rules, first, last)
        answer = None if asked is None else ask(asked)
        if asked is None or answer is None:
            return None
        rules = rules[_answers(rules, asked) == answer]
    if len(rules) != 1:
        return None
    step, shift, hop = rules[0].tolist()
    return _checked(LengthRule(step, shift, hop), ask, check)


def _checked(rule: LengthRule, ask: Callable[[int], int | None], check: Sequence[int]) -> LengthRule | None:
    least = 0
    for samples in sorted(check):
        found, said = ask(samples), int(rule.frames(np.array(samples)))
        if found is None or found == max(said, least):
            continue
        if found < said or least:
            return None
        least = found  # of the shortest clips, which some extractors pad
    return LengthRule(rule.step, rule.shift, rule.hop, least)


def _possible(lengths: Sequence[tuple[int, int]]) -> Integers:
    """Returns every rule [step, shift, hop] that answers for these clips, int64 [num_rules, 3]."""
    samples, frames = (np.array(column, np.int64) for column in zip(*lengths, strict=True))
    step = math.gcd(*frames.tolist())
    if frames[0] == frames[-1] or step == 0:
        return np.zeros((0, 3), np.int64)
    units = frames // step
    slope = (samples[-1] - samples[0]) / (units[-1] - units[0])
    slack = 2 * slope / (units[-1] - units[0]) + 1e-9
    hops = range(max(1, math.ceil(slope - slack)), math.floor(slope + slack) + 1)
    if step in hops:  # samples that are padded to a multiple
        hops = range(step, step + 1)
    found: list[Integers] = [np.zeros((0, 3), np.int64)]
    for hop in hops:
        low, high = int((units * hop - samples).max()), int((units * hop - samples).min()) + hop
        if high - low + sum(map(len, found)) > (1 << 14):
            return found[0]
        shifts = np.arange(low, high)
        found.append(np.stack([np.full_like(shifts, step), shifts, np.full_like(shifts, hop)], axis=1))
    return np.concatenate(found)


def _answers(rules: Integers, samples: int) -> Integers:
    answers: Integers = rules[:, 0] * ((samples + rules[:, 1]) // rules[:, 2])
    return answers


def _splitting(rules: Integers, first: int, last: int) -> int | None:
    """Returns the samples of a clip for which about half of the rules answer the same; None where all agree."""
    middle = rules[len(rules) // 2]
    # Where the rule in the middle has a new frame, some others have one more.
    edge = int((-middle[1]) % middle[2])
    hop = int(middle[2])
    places = [first + (edge - first) % hop, (first + last) // 2, last - (last - edge) % hop]
    tried = [place for n in places for place in (n, n - 1) if place >= 1]
    best, most = None, len(rules)
    for place in tried:
        _, counts = np.unique(_answers(rules, place), return_counts=True)
        if len(counts) > 1 and counts.max() < most:
            best, most = place, int(counts.max())
    return best
