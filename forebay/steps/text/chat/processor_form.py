"""Which fields of text a whole processor gives, and how they become a batch: found by probes, compared with its own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.errors import ConfigError, TextError
from forebay.steps.form import BatchForm, FieldForm, Promise, Side
from forebay.steps.text.chat.conversation import Message, probe_turns
from forebay.steps.text.chat.processor_ids import Writer, WrittenIds
from forebay.steps.text.row_encoder import Size
from forebay.store.layout import Array

IDS = "input_ids"
MASK = "attention_mask"
LABELS = "labels"
"""Left out: what is learnt is what the assistant says."""
REFUSALS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)
"""What processors raise of a conversation."""
_SIZES: tuple[Size, ...] = ((64, 48), (48, 80), (150, 100))


@dataclass(frozen=True, slots=True)
class TextForm:
    """The fields of a conversation.

    min_images, max_images: of one conversation, max_images None for any number. images: the outputs of the image
    processor that the whole processor hands on to a model.
    """

    name: str
    batch: BatchForm
    min_images: int
    max_images: int | None
    images: tuple[str, ...]

    def stored(self, written: WrittenIds, *, sample_id: str) -> dict[str, Array]:
        """Returns the fields as they are stored. Raises TextError for values that their form does not take."""
        found: dict[str, Array] = {}
        known = {*self.images, MASK, LABELS, *(field.name for field in self.batch.fields)}
        if new := sorted(set(written.fields) - known):
            raise TextError(
                "bad_conversation",
                f"{sample_id}: {self.name} gives {', '.join(new)}, which it gave for no image of the probe, so that "
                "batches would lack it; leave the sample out",
            )
        for field in self.batch.stored:
            try:
                found |= field.stored(_per_token(written, field.name))
            except (KeyError, ValueError) as err:
                raise TextError(
                    "bad_conversation",
                    f"{sample_id}: {self.name} gives no {field.name} as the cache stores it: {err}; leave the sample "
                    "out",
                ) from err
        return found

    def check_images(self, number: int, *, sample_id: str) -> None:
        """Raises TextError for a conversation of fewer images than the processor takes, or more than can be stored."""
        if number < self.min_images:
            raise TextError(
                "image_count_mismatch",
                f"{sample_id}: the conversation has {number} images, and {self.name} takes {self.min_images} or more; "
                "leave it out",
            )
        if self.max_images is not None and number > self.max_images:
            raise TextError(
                "images_together",
                f"{sample_id}: the conversation has {number} images, and {self.name} makes other pixels of an image "
                f"that stands beside others, or takes no two; a cache stores each by itself: leave out samples with "
                f"more than {self.max_images}",
            )


def find_text_form(writer: Writer) -> TextForm:
    """Returns the form of what a processor writes.

    Raises ConfigError, which names the processor, where ids depend on the pixels of images, where an output is of
    neither tokens nor images, or where our batch of two conversations is not the processor's.
    """
    probes, fewest, most = _probes(writer)
    names = _names(writer, probes)
    side, pads = _padding(writer, names)
    fields = [_field(name, probes, side=side, pad=pads[name]) for name in names]
    mask = FieldForm(name=MASK, dtype="int64", shape=(None,), stored_dtype="int64", side=side, mask_of=IDS)
    form = BatchForm(made_by=writer.name, fields=(fields[0], mask, *fields[1:]), promise=Promise(kind="exact"))
    _compare(writer, form)
    _check_options(writer)
    return TextForm(writer.name, form, fewest, most, tuple(sorted(_handed_on(writer))))


def _handed_on(writer: Writer) -> set[str]:
    """Returns the outputs for images that the processor hands on, also those that only large images have."""
    from forebay.steps.image.processor.processor_probe import SIZES  # with torch, which no lookup of a cache loads

    found: set[str] = set()
    for size in SIZES:
        with contextlib.suppress(*REFUSALS):  # it may take no image of this size
            found |= set(writer.write(conversation_of(1), [size]).fields) & set(writer.image_outputs)
    return found


def conversation_of(images: int, *, words: int = 1) -> list[Message]:
    """Returns a conversation of a question with images and its answer, for probes."""
    user, assistant = probe_turns(images=images)
    text = user["content"][-1]
    return [{**user, "content": [*user["content"][:-1], {**text, "text": " ".join([text["text"]] * words)}]}, assistant]


def _probes(writer: Writer) -> tuple[list[WrittenIds], int, int | None]:
    """Returns what is written of conversations with one image, two and none, and how many there must and may be.

    A processor may take no conversation without an image, or have an output less then; or take no two images.
    """
    try:
        found = [_probe(writer, 1)]
    except ConfigError:
        writer.use_tensors()  # as most people call it
        found = [_probe(writer, 1)]
    fewest, most = 0, None
    of_images = set(writer.image_outputs)
    try:
        without = _probe(writer, 0)
    except ConfigError:
        fewest = 1
    else:
        if set(found[0].fields) - of_images > set(without.fields):
            fewest = 1
        else:
            found.insert(0, without)
    try:
        found.append(_probe(writer, 2))
    except ConfigError:
        most = 1
    return found, fewest, most if most is not None or _are_alone(writer) else 1


def _probe(writer: Writer, images: int) -> WrittenIds:
    """Returns what is written of a conversation with blank images, as black ones and noise of their sizes give it."""
    talk, sizes = conversation_of(images), _SIZES[:images]
    try:
        blank = writer.write(talk, sizes)
        black = writer.write_with(talk, [_black(size) for size in sizes])
        noise = writer.write_with(talk, [_noise(size, seed) for seed, size in enumerate(sizes)])
    except (ValueError, TypeError, IndexError, KeyError, AttributeError) as err:
        raise _unusable(writer, f"cannot write a conversation with {images} images: {err!r:.300}") from err
    for name in (name for name in noise.fields if _is_per_token(noise, name)):
        if any(not np.array_equal(other.fields.get(name, ()), noise.fields[name]) for other in (blank, black)):
            raise _unusable(
                writer, "writes other tokens for another picture of the same size, so nothing can be stored"
            )
    return noise


def _names(writer: Writer, probes: Sequence[WrittenIds]) -> list[str]:
    """Returns the outputs that stand beside the tokens, the ids first."""
    of_images = set(writer.image_outputs)
    found: list[str] = [IDS]
    for probe in probes:
        for name in probe.fields:
            if name in (*found, MASK, LABELS) or name in of_images:
                continue
            if not _is_per_token(probe, name):
                raise _unusable(
                    writer, f"gives {name} of {list(probe.fields[name].shape)} for {probe.num_tokens} tokens"
                )
            found.append(name)
    if any(name not in probe.fields for name in found for probe in probes):
        raise _unusable(writer, f"gives not all of {', '.join(found)} for every conversation")
    if any(not probe.fields.get(MASK, np.ones(1)).all() for probe in probes):
        raise _unusable(writer, "masks tokens of a conversation that stands alone")
    return found


def _field(name: str, probes: Sequence[WrittenIds], *, side: Side, pad: float) -> FieldForm:
    rest = [probe.fields[name].shape[1:] for probe in probes]
    shape = tuple(axis[0] if len(set(axis)) == 1 else None for axis in zip(*rest, strict=True))
    values = np.concatenate([probe.fields[name].ravel() for probe in probes])
    are_bytes = values.min() >= 0 and values.max() <= np.iinfo(np.uint8).max
    return FieldForm(
        name=name,
        dtype="int64",
        shape=(None, *shape),
        stored_dtype="uint8" if name != IDS and are_bytes else "int32",
        pad=pad,
        side=side,
    )


def _padding(writer: Writer, names: Sequence[str]) -> tuple[Side, dict[str, float]]:
    """Returns on which side the processor pads conversations, and with what."""
    batch = _own_batch(writer)
    mask = np.asarray(batch[MASK])
    short = int(np.argmin(mask.sum(axis=1)))
    side: Side = "left" if not mask[short, 0] else "right"
    gap = mask[short] == 0
    if not gap.any():
        raise _unusable(writer, "does not pad conversations of different lengths")
    pads = {}
    for name in names:
        values = np.unique(np.asarray(batch[name])[short][gap])
        if len(values) != 1:
            raise _unusable(writer, f"pads {name} with {values.tolist()[:4]}, wanted one value")
        pads[name] = float(values[0])
    return side, pads


def _own_batch(writer: Writer) -> dict[str, Any]:
    talks, images = _pair()
    try:
        return writer.batch(talks, images)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError) as err:
        raise _unusable(writer, f"makes no batch of two conversations: {err!r:.300}") from err


def _pair() -> tuple[list[list[Message]], list[list[Any]]]:
    talks = [conversation_of(images, words=words) for images, words in ((1, 1), (1, 9))]
    return talks, [[_noise(_SIZES[0], 7)] for _ in talks]


def _compare(writer: Writer, form: BatchForm) -> None:
    """Raises ConfigError where our batch of what is stored is not the processor's own batch."""
    import torch

    from forebay.steps.batch import collate

    own = _own_batch(writer)
    talks, images = _pair()
    written = [writer.write_with(talk, shown) for talk, shown in zip(talks, images, strict=True)]
    samples = [{field.name: [_per_token(one, field.name)] for field in form.stored} for one in written]
    ours = collate(
        form, samples, dtype=torch.float32, allocate=lambda _, shape, *, dtype: torch.empty(shape, dtype=dtype)
    )
    for name, values in ours.items():
        if not np.array_equal(values.numpy(), np.asarray(own[name])):
            raise _unusable(writer, f"gives other {name} in a batch than alone")


def _check_options(writer: Writer) -> None:
    """Raises ConfigError where the whole processor's pixels are not those that its image processor makes alone."""
    image = _noise(_SIZES[2], 3)
    writer.write_with(conversation_of(1), [image])
    whole, alone = _floats(writer.image_outputs), _floats(writer.image_processor([image]))
    other = sorted(name for name in whole if not np.array_equal(whole[name], alone.get(name, ())))
    if other:
        raise _unusable(writer, f"makes other {', '.join(other)} of an image than its image processor alone")


def _are_alone(writer: Writer) -> bool:
    """Whether the pixels of an image are the same beside another image of its conversation."""
    first, second = _noise(_SIZES[0], 1), _noise(_SIZES[0], 2)
    parts = []
    for image in (first, second):
        writer.write_with(conversation_of(1), [image])
        parts.append(_floats(writer.image_outputs))
    writer.write_with(conversation_of(2), [first, second])
    both = _floats(writer.image_outputs)
    # In any order: arrays of images may stand beside each other along any axis.
    none = np.zeros(0, np.float32)
    alone = {name: np.concatenate([part.get(name, none) for part in parts]) for name in both}
    return all(np.array_equal(np.sort(both[name]), np.sort(alone[name])) for name in both)


def _floats(outputs: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the floats of each output one behind the other."""
    found = {name: np.concatenate([np.zeros(0, np.float32), *_flat(value)]) for name, value in outputs.items()}
    return {name: values for name, values in found.items() if values.size}


def _flat(value: Any) -> list[Array]:
    if isinstance(value, (list, tuple)):
        return [array for part in value for array in _flat(part)]
    array = np.asarray(value)
    return [array.ravel()] if array.dtype.kind == "f" else []


def _is_per_token(written: WrittenIds, name: str) -> bool:
    values = written.fields[name]
    return values.dtype.kind in "iub" and values.ndim > 0 and len(values) == written.num_tokens


def _per_token(written: WrittenIds, name: str) -> Array:
    return np.asarray(written.fields[name]).astype(np.int64, copy=False)


def _black(size: Size) -> Any:
    from PIL import Image

    return Image.new("RGB", size)


def _noise(size: Size, seed: int) -> Any:
    from PIL import Image

    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _unusable(writer: Writer, why: str) -> ConfigError:
    return ConfigError(
        f"vision.processor: {writer.name} {why}; conversations of this processor cannot be stored", code="FB126"
    )
