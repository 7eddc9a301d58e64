"""Which fields of text a whole processor gives, and how they become a batch: found by probes, compared with its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.errors import ConfigError, TextError
from forebay.steps.audio.extractor.extractor_probe import noise
from forebay.steps.form import BatchForm, FieldForm, Promise
from forebay.steps.form_values import Side
from forebay.steps.text.chat.conversation import NOUNS, Message, probe_turns
from forebay.steps.text.chat.processor_ids import Items, Writer, WrittenIds
from forebay.steps.text.row_encoder import Size
from forebay.store.layout import Array, Group

IDS = "input_ids"
MASK = "attention_mask"
LABELS = "labels"
"""Left out: what is learnt is what the assistant says."""
REFUSALS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)
"""What processors raise of a conversation."""
_SIZES: tuple[Size, ...] = ((64, 48), (48, 80), (150, 100))
_LENGTHS = (7_349, 11_960, 23_531)
"""Samples of the clips of probes."""
Counts = Mapping[Group, int]


@dataclass(frozen=True, slots=True)
class TextForm:
    """The fields of a conversation.

    fewest: items of one conversation. most: of them by group, a group that is not there any number. images: the outputs
    of the image processor that the whole processor hands on to a model; sounds: all that it may hand on of clips.
    """

    name: str
    batch: BatchForm
    fewest: int
    most: Counts
    images: tuple[str, ...]
    sounds: tuple[str, ...] = ()

    def stored(self, written: WrittenIds, *, sample_id: str) -> dict[str, Array]:
        """Returns the fields as they are stored. Raises TextError for values that their form does not take."""
        found: dict[str, Array] = {}
        known = {*self.images, *self.sounds, MASK, LABELS, *(field.name for field in self.batch.fields)}
        if new := sorted(set(written.fields) - known):
            raise TextError(
                "bad_conversation",
                f"{sample_id}: {self.name} gives {', '.join(new)}, which it gave for no item of the probe, so that "
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

    def check_counts(self, counts: Counts, *, sample_id: str) -> None:
        """Raises TextError for a conversation of fewer items than the processor takes, or more than can be stored."""
        if sum(counts.values()) < self.fewest:
            group = next(iter(counts))
            raise TextError(
                "audio_count_mismatch" if group == "audio" else "image_count_mismatch",
                f"{sample_id}: the conversation has {counts[group]} {NOUNS[group]}s, and {self.name} takes "
                f"{self.fewest} or more; leave it out",
            )
        for group, most in self.most.items():
            if counts[group] <= most:
                continue
            has, advice = (
                f"{sample_id}: the conversation has {counts[group]}",
                f"leave out samples with more than {most}",
            )
            if group == "audio":
                raise TextError("clips_together", f"{has} clips, and {self.name} takes no two: {advice}")
            raise TextError(
                "images_together",
                f"{has} images, and {self.name} makes other pixels of an image that stands beside others, or takes no "
                f"two; a cache stores each by itself: {advice}",
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
    images, sounds = _handed_on(writer) if "image" in writer.groups else set(), _of_items(writer, ["audio"])
    return TextForm(writer.name, form, fewest, most, tuple(sorted(images)), tuple(sorted(sounds)))


def _handed_on(writer: Writer) -> set[str]:
    """Returns the outputs for images that the processor hands on, also those that only large images have."""
    from forebay.steps.image.processor.processor_probe import SIZES  # with torch, which no lookup of a cache loads

    found: set[str] = set()
    for size in SIZES:
        with contextlib.suppress(*REFUSALS):  # it may take no image of this size
            written = writer.write(conversation_of({"image": 1}), [size])
            found |= set(written.fields) & set(writer.outputs["image"])
    return found


def _of_items(writer: Writer, groups: Sequence[Group]) -> set[str]:
    """Returns the last outputs of items of some groups."""
    return {name for group in groups for name in writer.outputs.get(group, ())}


def conversation_of(items: Counts, *, words: int = 1) -> list[Message]:
    """Returns a conversation of a question with items and its answer, for probes."""
    user, assistant = probe_turns(items)
    text = user["content"][-1]
    return [{**user, "content": [*user["content"][:-1], {**text, "text": " ".join([text["text"]] * words)}]}, assistant]


def _probes(writer: Writer) -> tuple[list[WrittenIds], int, dict[Group, int]]:
    """Returns what is written of conversations with one item a group, two and none, and how many there must and may be.

    A processor may take no conversation without an item, or have an output less then; or take no two of a group.
    """
    one = dict.fromkeys(writer.groups, 1)
    try:
        found = [_probe(writer, one)]
    except ConfigError:
        found = [_with_tensors(writer, one)]
    fewest, most = 0, {}
    of_items = _of_items(writer, writer.groups)
    try:
        without = _probe(writer, {})
    except ConfigError:
        fewest = 1
    else:
        if set(found[0].fields) - of_items > set(without.fields):
            fewest = 1
        else:
            found.insert(0, without)
    for group in writer.groups:
        try:
            found.append(_probe(writer, {**one, group: 2}))
            # A clip is stored as it is alone, whatever stands beside it: the promise of the clips says so.
            is_stored = group != "image" or _are_alone(writer)
        except ConfigError:
            is_stored = False
        if not is_stored:
            most[group] = 1
    return found, fewest, most


def _with_tensors(writer: Writer, counts: Counts) -> WrittenIds:
    """Returns what is written where a processor is called as most people call it."""
    try:
        writer.use_tensors()
        return _probe(writer, counts)
    except ConfigError:
        writer.use_tensors(throughout=True)
        return _probe(writer, counts)


def _probe(writer: Writer, counts: Counts) -> WrittenIds:
    """Returns what is written of a conversation with blank items, as black and silent ones and noise give it."""
    talk, images, clips = conversation_of(counts), _SIZES[: counts.get("image", 0)], _LENGTHS[: counts.get("audio", 0)]
    try:
        blank = writer.write(talk, [*clips, *images])
        dark = {"image": [*map(_black, images)], "audio": [np.zeros(length, np.float32) for length in clips]}
        black = writer.write_with(talk, dark)
        noise = writer.write_with(talk, noise_of(counts))
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError) as err:
        what = " and ".join(f"{count} {NOUNS[group]}s" for group, count in counts.items()) or "0 images"
        raise _unusable(writer, f"cannot write a conversation with {what}: {err!r:.300}") from err
    for name in (name for name in noise.fields if _is_per_token(noise, name)):
        if any(not np.array_equal(other.fields.get(name, ()), noise.fields[name]) for other in (blank, black)):
            raise _unusable(
                writer,
                "writes other tokens for another picture of the same size, or clip of the same length, so nothing can "
                "be stored",
            )
    return noise


def noise_of(counts: Counts) -> dict[Group, list[Any]]:
    """Returns so many images and clips of noise, of several sizes and lengths."""
    images, clips = _SIZES[: counts.get("image", 0)], _LENGTHS[: counts.get("audio", 0)]
    return {
        "image": [_noise(size, seed) for seed, size in enumerate(images)],
        "audio": [noise(length, seed=seed) for seed, length in enumerate(clips)],
    }


def _names(writer: Writer, probes: Sequence[WrittenIds]) -> list[str]:
    """Returns the outputs that stand beside the tokens, the ids first."""
    of_images = _of_items(writer, writer.groups)
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
    talks, items = _pair(writer)
    try:
        return writer.batch(talks, items)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError) as err:
        raise _unusable(writer, f"makes no batch of two conversations: {err!r:.300}") from err


def _pair(writer: Writer) -> tuple[list[list[Message]], list[Items]]:
    one = dict.fromkeys(writer.groups, 1)
    return [conversation_of(one, words=words) for words in (1, 9)], [noise_of(one) for _ in range(2)]


def _compare(writer: Writer, form: BatchForm) -> None:
    """Raises ConfigError where our batch of what is stored is not the processor's own batch."""
    import torch

    from forebay.steps.batch import collate

    own = _own_batch(writer)
    talks, items = _pair(writer)
    written = [writer.write_with(talk, shown) for talk, shown in zip(talks, items, strict=True)]
    samples = [{field.name: [_per_token(one, field.name)] for field in form.stored} for one in written]
    ours = collate(
        form, samples, dtype=torch.float32, allocate=lambda _, shape, *, dtype: torch.empty(shape, dtype=dtype)
    )
    for name, values in ours.items():
        if not np.array_equal(values.numpy(), np.asarray(own[name])):
            raise _unusable(writer, f"gives other {name} in a batch than alone")


def _check_options(writer: Writer) -> None:
    """Raises ConfigError where the whole processor's values are not those that its parts make of an item alone."""
    for group in writer.groups:
        items = noise_of({group: 3})
        item = items[group][2]
        writer.write_with(
            conversation_of({**dict.fromkeys(writer.groups, 1), group: 1}), {**_one(writer), group: [item]}
        )
        whole, alone = _floats(writer.outputs[group]), _floats(_ALONE[group](writer, item))
        if other := sorted(name for name in whole if not np.array_equal(whole[name], alone.get(name, ()))):
            part = "image processor" if group == "image" else "audio part"
            raise _unusable(writer, f"makes other {', '.join(other)} of an {group} than its {part} alone")


def _one(writer: Writer) -> dict[Group, list[Any]]:
    return noise_of(dict.fromkeys(writer.groups, 1))


_ALONE: Mapping[Group, Callable[[Writer, Any], Mapping[str, Any]]] = {
    "audio": lambda writer, clip: writer.sound_alone(clip),
    "image": lambda writer, image: writer.parts["image"]([image]),
}
"""What the part of a processor makes of an item by itself, as it is stored."""


def _are_alone(writer: Writer) -> bool:
    """Whether the pixels of an image are the same beside another image of its conversation."""
    one = dict.fromkeys(writer.groups, 1)
    beside, pair, parts = noise_of(one), [_noise(_SIZES[0], 1), _noise(_SIZES[0], 2)], []
    for image in pair:
        writer.write_with(conversation_of(one), {**beside, "image": [image]})
        parts.append(_floats(writer.outputs["image"]))
    writer.write_with(conversation_of({**one, "image": 2}), {**beside, "image": pair})
    both = _floats(writer.outputs["image"])
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
