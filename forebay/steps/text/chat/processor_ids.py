"""The ids of a conversation by a whole processor, and the arrays beside them, with blank images and clips.

The image processor is asked once for images of the same sizes, the audio part for clips of lengths of equal tokens.
What the tokenizer is given is heard, with the place of each token in it, so that turns are found in the very text that
became the ids.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.errors import ConfigError
from forebay.steps.audio.extractor.conversation_sound import SoundPart
from forebay.steps.audio.extractor.extractor_call import OpenExtractor
from forebay.steps.image.processor.whole import audio_part, image_processor_of, sound_extractor_of, whole_processor
from forebay.steps.text.chat.conversation import Message, with_items
from forebay.steps.text.row_encoder import ShownVideo, Size
from forebay.steps.text.vocabulary import Vocabulary, render_chat, tools_apart
from forebay.store.layout import Array, Group

VIDEO = "video"
_LARGE = 1024
"""Values of an array above which its shape alone is remembered."""
_NO_WAY = (TypeError, ValueError, IndexError, AttributeError, KeyError, RuntimeError)
_SETS: tuple[tuple[Size, ...], ...] = (
    ((64, 48), (48, 80)),
    ((300, 200), (64, 48), (120, 400)),
    ((640, 200), (90, 500)),
)
"""Of these, outputs put together are compared with those that are asked for; of no row: what becomes of a row must not
depend on the rows before it."""

Outputs = dict[str, Any]
Put = Callable[[Sequence[Any]], Any]


class BlankImages:
    """An image processor that is asked once for blank images of a size; anything else it hands on.

    Outputs for the images of a conversation are put together of those of each, in the way that the processor itself was
    seen to do that, output by output. Where it does so in no such way (it pads to the largest), it is asked again.
    """

    def __init__(self, processor: Any) -> None:
        """processor: an image processor of transformers."""
        self._processor = processor
        self._made: OrderedDict[Any, Outputs] = OrderedDict()
        self._puts: dict[str, dict[str, list[Put]]] = {}
        self.last: Outputs = {}

    def __getattr__(self, name: str) -> Any:
        """Returns what the processor has under a name."""
        return getattr(self._processor, name)

    def __call__(self, images: Any, *args: Any, **options: Any) -> Any:
        """Returns the outputs for images; `last` has them too."""
        from transformers import BatchFeature

        sizes = _sizes(images)
        if sizes is None:
            made = self._processor(images, *args, **options)
            self.last = dict(made)
            return made
        ask = functools.partial(self._asked, args, options)
        several = len(sizes) == 1 and isinstance(sizes[0][0], tuple) and len(sizes[0]) > 1
        self.last = self._put_together(sizes[0], ask, repr((args, options))) if several else ask(sizes)
        # The processor may take things out of what it is given.
        return BatchFeature(
            {name: list(value) if isinstance(value, list) else value for name, value in self.last.items()}
        )

    def _asked(self, args: Sequence[Any], options: Outputs, sizes: Any) -> Outputs:
        """Returns the outputs for blank images of these sizes, nested as they are."""
        key = (sizes, repr(args), repr(sorted(options.items())))
        found = self._made.get(key)
        if found is None:
            made = self._processor(_blanks(sizes), *args, **options)
            found = self._made[key] = {name: _thin(value) for name, value in made.items()}
            if len(self._made) > 4096:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return found

    def _put_together(self, sizes: Sequence[Size], ask: Callable[[Any], Outputs], options: str) -> Outputs:
        """Returns the outputs for the images of one conversation."""
        if options not in self._puts:
            self._puts[options] = _ways(ask)
        with contextlib.suppress(*_NO_WAY):  # of what was padded to the same shape before, or is taken beside others
            if puts := self._puts[options]:
                alone = [ask(((size,),)) for size in sizes]
                return {name: put([outputs[name] for outputs in alone]) for name, (put, *_) in puts.items()}
        return ask((sizes,))


def _ways(ask: Callable[[Any], Outputs]) -> dict[str, list[Put]]:
    """Returns in which ways the outputs of each image make those of all; empty where one is made in no way."""
    found: dict[str, list[Put]] = {}
    try:
        for sizes in _SETS:
            alone, wanted = [ask(((size,),)) for size in sizes], ask((sizes,))
            for name, value in wanted.items():
                parts = [outputs.get(name) for outputs in alone]
                found[name] = [put for put in found.get(name, _PUTS) if _makes(put, parts, value)]
    except _NO_WAY:
        return {}
    return found if all(found.values()) else {}


def blank_image(size: Size) -> Any:
    """Returns a black image of PIL that has no pixels before somebody looks."""
    made = _blank_class()()
    made._size, made._mode = size, "RGB"
    return made


@functools.cache
def _blank_class() -> Any:
    from PIL import Image

    class Blank(Image.Image):
        def load(self) -> Any:
            if self._im is None:
                self.im = Image.new("RGB", self.size).im
            return super().load()

    return Blank


def _sizes(images: Any) -> Any:
    """Returns the sizes of blank images, nested as they are; None where one is another image."""
    if isinstance(images, (list, tuple)):
        found = [_sizes(image) for image in images]
        return None if None in found else tuple(found)
    return images.size if isinstance(images, _blank_class()) else None


def _blanks(sizes: Any) -> Any:
    """Returns blank images of these sizes, nested as they are."""
    if isinstance(sizes[0], tuple):
        return [_blanks(size) for size in sizes]
    return blank_image(sizes)


def _thin(value: Any) -> Any:
    """Returns a value whose floats, where they are many, are all the same one: their shape is what is asked for."""
    if isinstance(value, list):
        return [_thin(part) for part in value]
    if isinstance(value, np.ndarray):
        if value.dtype.kind != "f" or value.size < _LARGE:
            return value
        return np.broadcast_to(np.zeros((), value.dtype), value.shape)
    if hasattr(value, "new_zeros") and value.is_floating_point() and value.numel() >= _LARGE:
        return value.new_zeros(()).expand(value.shape)
    return value


def _lists(parts: Sequence[Any]) -> Any:
    return list(chain.from_iterable(parts))


def _along(axis: int, parts: Sequence[Any]) -> Any:
    """Returns arrays or tensors one behind the other along an axis, thin if they are."""
    shapes = [list(part.shape) for part in parts]
    if any(shape[:axis] + shape[axis + 1 :] != shapes[0][:axis] + shapes[0][axis + 1 :] for shape in shapes):
        raise ValueError(f"shapes {shapes} along {axis}")
    shape = (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])
    first = parts[0]
    if isinstance(first, np.ndarray):
        is_thin = first.dtype.kind == "f" and not any(first.strides) and first.size > 1
        return np.broadcast_to(first.ravel()[:1].reshape(()), shape) if is_thin else np.concatenate(parts, axis)
    if first.is_floating_point() and not any(first.stride()) and first.numel() > 1:
        return first.new_zeros(()).expand(shape)
    import torch

    return torch.cat(list(parts), axis)


_PUTS: list[Put] = [
    _lists,
    lambda parts: [_lists([part[0] for part in parts])],
    lambda parts: [_along(0, [part[0] for part in parts])],
    *(functools.partial(_along, axis) for axis in range(5)),
]
"""The ways in which processors put outputs of images together."""


def _makes(put: Put, parts: Sequence[Any], wanted: Any) -> bool:
    with contextlib.suppress(*_NO_WAY):
        return _same(put(parts), wanted)
    return False


def _same(found: Any, wanted: Any) -> bool:
    """Whether two outputs are the same; of many floats, whether their shapes are."""
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(_same(one, other) for one, other in zip(found, wanted, strict=True))
    if not hasattr(wanted, "shape"):
        return bool(found == wanted)
    same_kind = found.dtype == wanted.dtype and tuple(found.shape) == tuple(wanted.shape)
    return same_kind and np.array_equal(np.asarray(found), np.asarray(wanted))


@dataclass(frozen=True, slots=True)
class WrittenIds:
    """A conversation as the processor writes it.

    text: what the tokenizer was given, image tokens in it. offsets: int64 [tokens, 2], of each token in characters.
    fields: what the processor gave for the conversation, each without the axis of the batch.
    """

    text: str
    offsets: npt.NDArray[np.int64]
    fields: dict[str, Array]

    @property
    def num_tokens(self) -> int:
        """How many ids there are."""
        return len(self.offsets)


class BlankClips:
    """The audio part of a processor, which is asked once for silence of a length: what a clip becomes in the text.

    Tokens grow with the length of a clip: what is written of two lengths alike, is written of those between too.
    """

    def __init__(self, process: Callable[..., Any]) -> None:
        self._process = process
        self._lengths: list[int] = []
        self._texts: list[str] = []
        self.told: Sequence[int] | None = None
        """Samples of the clips that are blank, in their order; None: they are real."""
        self.token = ""
        """That of a clip, where some are the sound of videos, in which such tokens are counted."""
        self.last: Outputs = {}

    def __call__(self, audio: Any, **options: Any) -> tuple[Outputs, list[str]]:
        """Returns the outputs, none of blank clips, and the text in the place of each clip."""
        if self.told is not None:
            texts = [self._text(length, options) for length in self.told]
            return {"num_audio_tokens": [text.count(self.token) for text in texts]} if self.token else {}, texts
        self.last, texts = self._process(audio, **options)
        return self.last, texts

    def _text(self, length: int, options: Outputs) -> str:
        at = bisect.bisect_left(self._lengths, length)
        around = self._texts[max(at - 1, 0) : at + 1]
        if (len(around) == 2 and around[0] == around[1]) or self._lengths[at : at + 1] == [length]:
            return self._texts[at]
        text = str(self._process([np.zeros(length, np.float32)], **options)[1][0])
        self._lengths.insert(at, length)
        self._texts.insert(at, text)
        return text


class BlankVideos:
    """The part of a processor of the omni family for videos, by grids alone: what a video becomes in the text.

    It stands where the video processor does, which needs torchvision, and where the processor asks it.
    """

    def __init__(self, processor: Any, images: Any) -> None:
        """images: the image processor, which cuts patches as that of videos does."""
        self.merge_size, self.temporal_patch_size = images.merge_size, images.temporal_patch_size
        self._replaced = processor.replace_video_token
        self.told: Sequence[ShownVideo] = ()
        """The videos that are asked for, in their order."""

    def write(self, videos: Any, **options: Any) -> tuple[Outputs, list[str]]:  # noqa: ARG002  strings, see `told`
        """Returns no outputs, and the text in the place of each video."""
        found = {
            "video_grid_thw": np.array([each[:3] for each in self.told], np.int64),
            "video_second_per_grid": [each.second_per_grid for each in self.told],
        }
        return {}, [self._replaced(found, video_idx=place, **options) for place in range(len(self.told))]


Told = Size | ShownVideo | int
"""What is known of an item: width and height of an image, of a video its grid too, the samples of a clip."""
Items = Mapping[Group, Sequence[Any]]


def by_group(told: Sequence[Told]) -> dict[Group, list[Any]]:
    """Returns what is told of the items of a row, by group, those of videos apart."""
    seen = [each for each in told if not isinstance(each, int)]
    return {
        "audio": [each for each in told if isinstance(each, int)],
        "image": [each for each in seen if len(each) < len(ShownVideo._fields)],
        VIDEO: [ShownVideo(*each) for each in seen if len(each) == len(ShownVideo._fields)],
    }


class Writer:
    """The whole processor of a folder, which writes conversations with items of some groups."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        folder: Path,
        groups: Sequence[Group] = ("image",),
        *,
        videos: bool = False,
        sound: bool = False,
    ) -> None:
        """Builds the processor. Raises ConfigError where that cannot be, or nothing says how it shows an item.

        videos: whether conversations have some among their images. sound: theirs is among the clips.
        """
        tokenizer = vocabulary.tokenizer
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
            tokenizer.pad_token = tokenizer.eos_token
        self.groups, self._folder = tuple(groups), folder
        makers = {"audio": sound_extractor_of, "image": image_processor_of}
        self.parts = {group: makers[group](folder) for group in groups}
        processor = whole_processor(folder, tokenizer=tokenizer, tokenizer_folder=vocabulary.folder, parts=self.parts)
        self.name = type(processor).__name__
        self._options: dict[str, Any] = {}
        self._vocabulary, self.processor = vocabulary, processor
        vocabulary.renders(processor)
        self._images, self._clips = None, None
        self._videos = BlankVideos(processor, processor.image_processor) if videos else None
        if self._videos is not None:
            processor.video_processor, processor._process_videos = self._videos, self._videos.write
        if "image" in groups:
            self._images = processor.image_processor = BlankImages(processor.image_processor)
        if "audio" in groups:
            self._clips = processor._process_audio = BlankClips(processor._process_audio)
        self.hears_videos = sound
        if sound and self._clips is not None:
            self._clips.token = processor.audio_token
            processor._multimodal_inputs_from_conversations = _WithSound(
                processor._multimodal_inputs_from_conversations
            )
        self._heard = processor.tokenizer = _Hearing(tokenizer)
        self.kinds = (*groups, *([VIDEO] if videos else []))
        self.placeholders = {kind: self._placeholder(folder, kind) for kind in self.kinds}

    @property
    def control_tokens(self) -> set[str]:
        """The tokens that no message may write: special ones, and those that the processor looks for."""
        added = self._vocabulary.tokenizer.added_tokens_decoder.values()
        own = [value for name, value in vars(self.processor).items() if name.endswith("_token")]
        return {str(token) for token in added if token.special} | {t for t in own if isinstance(t, str) and t}

    def render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        """Returns the conversation as the chat template writes it; ValueError where the template refuses it."""
        return render_chat(self.processor, messages, add_generation_prompt=add_generation_prompt)

    def write(self, conversation: Sequence[Message], told: Sequence[Told]) -> WrittenIds:
        """Returns the conversation with blank images and clips. told: of each group in their order."""
        known = by_group(told)
        sounds = len(known[VIDEO]) if self.hears_videos else 0
        blank = {"image": [*map(blank_image, known["image"])], "audio": [*map(_silence, known["audio"][sounds:])]}
        if self._videos is not None:
            self._videos.told, blank[VIDEO] = known[VIDEO], [f"video {n}" for n in range(len(known[VIDEO]))]
        if self._clips is None:
            return self.write_with(conversation, blank)
        self._clips.told = known["audio"]
        try:
            return self.write_with(conversation, blank)
        finally:
            self._clips.told = None

    def write_with(self, conversation: Sequence[Message], items: Items) -> WrittenIds:
        """Returns the conversation with these images of PIL and clips. Raises what the processor raises."""
        out = self._call([with_items(conversation, items)])
        ids = np.asarray(out["input_ids"][0])
        text, offsets = self._heard.last()
        if len(offsets) != len(ids):
            raise ValueError(f"{len(ids)} ids of {len(offsets)} tokens of the text")
        fields = {name: _first(value) for name, value in out.items()}
        return WrittenIds(text, offsets, fields | {"input_ids": ids})

    def batch(self, conversations: Sequence[Sequence[Message]], items: Sequence[Items]) -> dict[str, Any]:
        """Returns the processor's own batch of some conversations, padded as it does."""
        made = [with_items(talk, each) for talk, each in zip(conversations, items, strict=True)]
        return self._call(made, padding=True)

    def sound_alone(self, clip: Array) -> dict[str, Any]:
        """Returns what the audio part makes of a clip by itself, by the steps of a build."""
        part = SoundPart.of(audio_part(self._folder, self.parts["audio"]), self.parts["audio"])
        return OpenExtractor.of(part).alone(clip)

    def use_tensors(self, *, throughout: bool = False) -> None:
        """Makes the processors of items give tensors from now on, without which some processors cannot go on.

        throughout: the tokenizer as well.
        """
        tensors = {"return_tensors": "pt"}
        self._options = tensors if throughout else {"images_kwargs": tensors, "audio_kwargs": tensors}

    @property
    def outputs(self) -> dict[Group, dict[str, Any]]:
        """The last outputs of the processor's part of each group."""
        held = {"image": self._images, "audio": self._clips}
        return {group: part.last for group, part in held.items() if part is not None}

    def _call(self, conversations: list[list[Message]], **options: Any) -> dict[str, Any]:
        self._heard.forget()
        tools = tools_apart(conversations[0])[1]
        out = self.processor.apply_chat_template(
            [tools_apart(talk)[0] for talk in conversations],
            tokenize=True,
            return_dict=True,
            processor_kwargs={**self._options, **options} or None,
            **tools,
            **({"load_audio_from_video": True} if self.hears_videos else {}),
        )
        return dict(out)

    def _placeholder(self, folder: Path, group: Group) -> str:
        found = getattr(self.processor, f"{group}_token", None)
        if not isinstance(found, str) or not found:
            raise ConfigError(
                f"vision.processor: {self.name} of {folder} has no {group}_token, so nothing says how its chat "
                f"template shows {_ARTICLES[group]}; use a model whose processor has one",
                code="FB126",
            )
        return found


_ARTICLES: Mapping[Group, str] = {"audio": "a clip", "image": "an image", VIDEO: "a video"}


def _silence(samples: int) -> Array:
    """Returns a clip of zeros that takes no memory."""
    return np.broadcast_to(np.float32(0), (samples,))


class _WithSound:
    """The way in which a processor finds the items of conversations, a silence in the place of each video's sound.

    It would decode that itself, by torchcodec; how long each clip is says `BlankClips.told`.
    """

    def __init__(self, finds: Callable[..., tuple[Any, Any, list[Any], dict[str, Any]]]) -> None:
        self._finds = finds

    def __call__(self, *args: Any, **options: Any) -> tuple[Any, Any, list[Any], dict[str, Any]]:
        images, videos, clips, more = self._finds(*args, **options)
        rest = iter(clips)
        slots = more["audio_from_video_indices"]
        return images, videos, [next(rest) if video is None else _silence(1) for video in slots], more


class _Hearing:
    """A tokenizer that keeps what it was given, and where its tokens lie in that."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: list[tuple[str, npt.NDArray[np.int64]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
        made = self._tokenizer(text, *args, **{**options, "return_offsets_mapping": True})
        offsets = made.pop("offset_mapping")
        texts = [text] if isinstance(text, str) else list(text)
        if len(texts) == 1 and isinstance(texts[0], str):
            self._texts.append((texts[0], np.asarray(offsets, np.int64).reshape(-1, 2)))
        return made

    def forget(self) -> None:
        self._texts.clear()

    def last(self) -> tuple[str, npt.NDArray[np.int64]]:
        """Returns the one text that was tokenised, and the places of its tokens."""
        if len(self._texts) != 1:
            raise ValueError(f"the processor tokenised {len(self._texts)} texts of one conversation")
        return self._texts[0]


def _first(value: Any) -> Array:
    """Returns what a batch of one holds; ragged values as objects, which no form takes."""
    try:
        return np.asarray(value)[0] if len(value) == 1 else np.asarray(value)
    except (ValueError, TypeError):
        return np.empty(0, object)
