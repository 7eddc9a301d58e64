"""What a whole processor writes of a conversation: ids and what stands beside them, with blank images of given sizes.

The image processor is asked once for images of the same sizes. What the tokenizer is given is heard, with the place of
each token in it, so that turns are found in the very text that became the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.errors import ConfigError
from forebay.steps.image.processor.whole import image_processor_of, whole_processor
from forebay.steps.text.chat.blank_images import BlankImages, blank_image
from forebay.steps.text.chat.conversation import Message, with_images
from forebay.steps.text.row_encoder import Size
from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.layout import Array


@dataclass(frozen=True, slots=True)
class Written:
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


class Writer:
    """The whole processor of a folder, which writes conversations."""

    def __init__(self, vocabulary: Vocabulary, folder: Path) -> None:
        """Builds the processor. Raises ConfigError where that cannot be, or nothing says how it shows an image."""
        tokenizer = vocabulary.tokenizer
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
            tokenizer.pad_token = tokenizer.eos_token
        self.image_processor = image_processor_of(folder)
        processor = whole_processor(
            folder, tokenizer=tokenizer, tokenizer_folder=vocabulary.folder, image_processor=self.image_processor
        )
        self.name = type(processor).__name__
        self._options: dict[str, Any] = {}
        self._vocabulary, self.processor = vocabulary, processor
        vocabulary.renders(processor)
        self._images = processor.image_processor = BlankImages(processor.image_processor)
        self._heard = processor.tokenizer = _Hearing(tokenizer)
        self.placeholder = self._placeholder(folder)

    @property
    def control_tokens(self) -> set[str]:
        """The tokens that no message may write: special ones, and those that the processor looks for."""
        added = self._vocabulary.tokenizer.added_tokens_decoder.values()
        own = [value for name, value in vars(self.processor).items() if name.endswith("_token")]
        return {str(token) for token in added if token.special} | {t for t in own if isinstance(t, str) and t}

    def render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        """Returns the conversation as the chat template writes it; ValueError where the template refuses it."""
        from jinja2 import TemplateError

        try:
            made = self.processor.apply_chat_template(
                [messages], tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TypeError, TemplateError) as err:
            raise ValueError(str(err)) from err
        return str(made[0])

    def count_images(self, rendered: str) -> int:
        """Returns how many images a rendered text shows."""
        return rendered.count(self.placeholder)

    def write(self, conversation: Sequence[Message], sizes: Sequence[Size]) -> Written:
        """Returns the conversation with blank images of these sizes (width, height)."""
        return self.write_with(conversation, [blank_image(size) for size in sizes])

    def write_with(self, conversation: Sequence[Message], images: Sequence[Any]) -> Written:
        """Returns the conversation with these images of PIL. Raises what the processor raises."""
        out = self._call([with_images(conversation, images)])
        ids = _rows(out["input_ids"])[0]
        text, offsets = self._heard.last()
        if len(offsets) != len(ids):
            raise ValueError(f"{len(ids)} ids of {len(offsets)} tokens of the text")
        fields = {name: _first(value) for name, value in out.items()}
        return Written(text, offsets, fields | {"input_ids": np.asarray(ids)})

    def batch(self, conversations: Sequence[Sequence[Message]], images: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Returns the processor's own batch of some conversations, padded as it does."""
        made = [with_images(talk, shown_) for talk, shown_ in zip(conversations, images, strict=True)]
        return self._call(made, padding=True)

    def use_tensors(self) -> None:
        """Makes the image processor give tensors from now on, without which some processors cannot go on."""
        self._options = {"images_kwargs": {"return_tensors": "pt"}}

    @property
    def image_outputs(self) -> dict[str, Any]:
        """What the image processor gave last."""
        return self._images.last

    def _call(self, conversations: list[list[Message]], **options: Any) -> dict[str, Any]:
        self._heard.forget()
        out = self.processor.apply_chat_template(
            conversations, tokenize=True, return_dict=True, processor_kwargs={**self._options, **options} or None
        )
        return dict(out)

    def _placeholder(self, folder: Path) -> str:
        found = getattr(self.processor, "image_token", None)
        if not isinstance(found, str) or not found:
            raise ConfigError(
                f"vision.processor: {self.name} of {folder} has no image_token, so nothing says how its chat template "
                "shows an image; use a model whose processor has one",
                code="FB126",
            )
        return found


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


def _rows(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _first(value: Any) -> Array:
    """Returns what a batch of one holds; ragged values as objects, which no form takes."""
    try:
        return np.asarray(value)[0] if len(value) == 1 else np.asarray(value)
    except (ValueError, TypeError):
        return np.empty(0, object)
