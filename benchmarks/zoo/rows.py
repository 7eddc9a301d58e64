"""A row of the page for each foreign class: what forebay stores, and how its batches compare with the class's own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL.Image import Image

from benchmarks.zoo import cost
from benchmarks.zoo.classes import CannotError, Known, save, usable
from benchmarks.zoo.compare import (
    Outputs,
    Verdict,
    batch_of,
    compared,
    float32_bytes,
    is_array,
    masking,
    own_values_are_equal,
    stored_bytes,
    stored_text,
)
from benchmarks.zoo.inputs import call_extractor, call_processor, clips, one_a_row, photos, rate_of
from benchmarks.zoo.ours import Ours, our_extractor, our_processor
from forebay.steps.form import Promise
from forebay.store.layout import Array

ONE_SIZE = "of images of one size; it makes no batch of others"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The facts that the page says of a class. cannot: why it is not used; then nothing else is known."""

    known: Known
    cannot: str = ""
    stored: str = ""
    bytes_share: float = 0.0
    """Bytes on disk for one byte of the class's own output, floats as float32."""
    alone: Verdict = field(default_factory=Verdict)
    batch: Verdict | None = None
    """None: the class makes no batch."""
    batch_note: str = ""
    promise: Promise | None = None
    """Of forebay, for batches."""
    left_out: tuple[str, ...] = ()
    """Outputs of the class that are not stored."""
    native: str = ""
    """What forebay uses for such a folder instead, where it can: a setting that names a step of its own."""
    cpu_times: float = 0.0
    """CPU of calling the class, for one second of CPU of reading the cache and making the batch; 0: not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answers:
    """The answers of both sides to the same clips or images. note: of the class's own batch."""

    arrays: Sequence[Mapping[str, Array]]
    own_alone: Sequence[Outputs]
    own_batch: Outputs | None
    note: str = ""


def row_of(known: Known, *, rounds: int = 0, full: bool = True) -> Row:
    """Returns the row of a class.

    rounds: of timing, by default none. full: data of the demo are timed; else a few small inputs.
    """
    try:
        made = usable(known)
        with tempfile.TemporaryDirectory() as place:
            folder = save(known, Path(place))
            if known.kind == "extractor":
                return _extractor_row(known, made, folder, rounds=rounds, full=full)
            return _processor_row(known, made, folder, rounds=rounds, full=full)
    except CannotError as err:
        return Row(known=known, cannot=str(err))


def _extractor_row(known: Known, extractor: Any, folder: Path, *, rounds: int, full: bool) -> Row:
    rate_hz = rate_of(extractor)
    waveforms = clips(rate_hz)
    call_extractor(extractor, waveforms[:1])  # a class that fails here has a reason of its own
    ours = our_extractor(folder, dtype="float32")
    own_batch, note = None, ""
    try:
        own_batch = padded_call(extractor, waveforms, **ours.options)
    except CannotError as err:
        note = str(err)
    answers = _Answers(
        arrays=[ours.make(clip) for clip in waveforms],
        own_alone=[call_extractor(extractor, [clip], **ours.options) for clip in waveforms],
        own_batch=own_batch,
        note=note,
    )
    row = _compared(known, ours, answers)
    if not rounds:
        return row
    sounds = cost.recordings(rate_hz) if full else waveforms[:2]
    made = [ours.make(clip) for clip in sounds]
    times = cost.cpu_times(ours.form, made, lambda: padded_call(extractor, sounds, **ours.options), rounds=rounds)
    return replace(row, cpu_times=times)


def padded_call(extractor: Any, waveforms: Sequence[Array], **options: Any) -> dict[str, Any]:
    """Returns an extractor's own batch: with these options, and where these do not pad, with `padding=True`."""
    try:
        found = call_extractor(extractor, waveforms, **options)
    except CannotError:
        found = {}
    if any(is_array(value) for value in found.values()):
        return found
    return call_extractor(extractor, waveforms, **{**options, "padding": True})


def _processor_row(known: Known, processor: Any, folder: Path, *, rounds: int, full: bool) -> Row:
    call_processor(processor, photos()[:1])
    ours = our_processor(folder)
    call: Callable[..., dict[str, Any]] = one_a_row if ours.nests else call_processor
    row = _compared(known, ours, _answers_of_images(processor, ours, call))
    if not rounds:
        return row
    pictures = cost.pictures() if full else photos()[:2]
    made = [ours.make(image) for image in pictures]
    times = cost.cpu_times(
        ours.form, made, lambda: [call_processor(processor, [image]) for image in pictures], rounds=rounds
    )
    return replace(row, cpu_times=times)


def _answers_of_images(processor: Any, ours: Ours, call: Callable[..., dict[str, Any]]) -> _Answers:
    """Returns answers for images of three sizes; of one size where the class makes no batch of others."""
    images, note = photos(), ""
    own_batch = _own_batch(call, processor, images)
    if own_batch is None:
        images, note = photos(sizes=((80, 60),) * 3), ONE_SIZE
        own_batch = _own_batch(call, processor, images)
    return _Answers(
        arrays=[ours.make(image) for image in images],
        own_alone=[call_processor(processor, [image]) for image in images],
        own_batch=own_batch,
        note=note,
    )


def _own_batch(call: Callable[..., dict[str, Any]], processor: Any, images: Sequence[Image]) -> Outputs | None:
    try:
        found = call(processor, images)
    except CannotError:
        return None
    return found if any(is_array(value) for value in found.values()) else None


def _compared(known: Known, ours: Ours, answers: _Answers) -> Row:
    masks = {each.name for each in ours.form.fields if each.mask_of is not None}
    alone = [
        compared(batch_of(ours.form, [[unit]]), own, masks=masks)
        for unit, own in zip(answers.arrays, answers.own_alone, strict=True)
    ]
    worst = max(alone, key=lambda verdict: verdict.limit)
    return Row(
        known=known,
        stored=stored_text(ours.form),
        bytes_share=stored_bytes(ours.form, answers.arrays[0]) / max(float32_bytes(answers.own_alone[0]), 1),
        alone=worst,
        left_out=tuple(dict.fromkeys([*ours.left_out, *worst.left_out])),
        batch=None if answers.own_batch is None else _batch_verdict(ours, answers, masks, answers.own_batch),
        batch_note=answers.note,
        promise=ours.form.promise,
        native=ours.native,
    )


def _batch_verdict(ours: Ours, answers: _Answers, masks: set[str], own: Outputs) -> Verdict:
    try:
        batch = batch_of(ours.form, [[unit] for unit in answers.arrays])
    except ValueError as err:
        return Verdict(limit=float("inf"), why=str(err))
    verdict = compared(batch, own, masks=masks)
    if verdict.is_exact:
        return verdict
    equal = own_values_are_equal(ours.form, answers.arrays, own)
    return replace(verdict, but_padding=equal, where=masking(batch, own))
