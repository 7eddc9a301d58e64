"""`qwen3_asr`: a system turn with the prompt, a user turn with the audio, the transcript as the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np

from forebay.errors import ConfigError, TextError
from forebay.steps.audio.log_mel import CHUNK_FRAMES
from forebay.steps.step import Allocate, Batch, PaddingSide, Stored, TextBatch
from forebay.steps.text.line import qwen3_asr_name
from forebay.steps.text.plain import causal_text
from forebay.steps.text.tokenizer_files import TRANSFORMERS
from forebay.steps.text.transcript import Prompt, TokenSequence, Transcript, Utterance
from forebay.steps.text.vocabulary import Vocabulary, joined, render_chat
from forebay.store.layout import Array, FieldSpec
from forebay.store.source import Sample, column

Count = TypeVar("Count", int, np.ndarray)
AUDIO_TOKEN = "<|audio_pad|>"
TEXT_TOKEN = "<asr_text>"
_CARRIED = re.compile(r"\s*language (?P<name>[^<>\s][^<>\n]*)<asr_text>(?P<text>.*)", re.DOTALL)
_MARK = "forebay-prompt-goes-here"
_CHUNK_TOKENS = 13


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3AsrChat(Transcript):
    """The folder's chat template around prompt and audio, then the transcript; beside it `audio_index` int32 [1]."""

    name: ClassVar[str] = "qwen3_asr"
    libraries: ClassVar[tuple[str, ...]] = TRANSFORMERS
    axes: ClassVar[dict[str, str | int]] = {**Transcript.axes, "audio_index": 1}
    audio_features: ClassVar[str | None] = "qwen3_asr"

    def fields(self) -> tuple[FieldSpec, ...]:
        return (*Transcript.fields(self), FieldSpec(name="audio_index", dtype="int32", group="text"))

    def writer(self, vocabulary: Vocabulary) -> Prompt:
        return Qwen3AsrPrompt(vocabulary, self)

    @classmethod
    def batch(cls, stored: Stored) -> TextBatch:
        """Returns the form `input_ids`, `attention_mask`, `labels` [B, L]."""
        return partial(qwen3_asr_text, pad_token_id=int(stored.constant("pad_token_id")))

    @classmethod
    def row_tokens(cls, num_tokens: Any, num_frames: Any) -> Any:
        return num_tokens - 1 + num_audio_tokens(num_frames)


class Qwen3AsrPrompt(Prompt):
    """The folder's chat template around prompt and audio, then `language English<asr_text>text` and the end token.

    One `<|audio_pad|>` stands for the clip; `num_audio_tokens` says how many it becomes at load. A language
    that is absent, or that Qwen3-ASR does not name, is `language None`, the form of its fine-tuning data. A language
    that the text carries is taken as it stands.
    """

    def __init__(self, vocabulary: Vocabulary, step: Transcript) -> None:
        """Renders the chat template once; ConfigError where it does not show prompt and audio exactly once each."""
        super().__init__(vocabulary)
        self._must_name = step.language_tag_mode == "always"
        self._audio_id = vocabulary.require(AUDIO_TOKEN, prompt="qwen3_asr")
        self._text_id = vocabulary.require(TEXT_TOKEN, prompt="qwen3_asr")
        end = vocabulary.eos_token_id
        if end is None:
            raise ConfigError(
                f'text.prompt = "qwen3_asr": the tokenizer in {vocabulary.folder} names no eos_token', code="FB106"
            )
        self._end_id = end
        head, tail = _render(vocabulary)
        self._head, self._tail = vocabulary.split(head), vocabulary.split(tail)
        self._bare_prefix = self._prefix(Utterance(sample_id="chat template", text=""))

    @property
    def constants(self) -> dict[str, int]:
        return {"audio_token_id": self._audio_id}

    def split(self, text: str) -> tuple[str | None, str]:
        """Returns name and transcript of a text that is `language English<asr_text>...`; else None and the text."""
        match = _CARRIED.fullmatch(text)
        return (match["name"], match["text"]) if match else (None, text)

    def texts(self, utterance: Utterance) -> list[str]:
        """Returns the text, the words before it, and those of the chat where there is a prompt."""
        chat = joined(self._chat(utterance)) if utterance.prompt else []
        named = _named(utterance.carried or self._found_name(utterance) or "None")
        return [named, utterance.text, *(part for part in chat if isinstance(part, str))]

    def build(self, utterance: Utterance) -> TokenSequence:
        """Returns the sequence; TextError `unknown_language` where a language must be named and has no name."""
        prefix = self._prefix(utterance) if utterance.prompt else self._bare_prefix
        name = utterance.carried or self._language_name(utterance)
        target = self._vocabulary.encode_parts(
            [_named(name), self._text_id, utterance.text, self._end_id], sample_id=utterance.sample_id
        )
        return TokenSequence(
            ids=[*prefix, *target],
            prefix_len=len(prefix),
            num_label_tokens=len(target),
            more={"audio_index": [prefix.index(self._audio_id)]},
        )

    def text_ids(self, ids: list[int]) -> list[int]:
        """Returns what follows the mark of the transcript."""
        return ids[ids.index(self._text_id) :] if self._text_id in ids else ids

    def _prefix(self, utterance: Utterance) -> list[int]:
        return self._vocabulary.encode_parts(self._chat(utterance), sample_id=utterance.sample_id)

    def _chat(self, utterance: Utterance) -> list[str | int]:
        # One run of text from `system` on: the template's words and the prompt are tokenised together, as rendered.
        return [*self._head, utterance.prompt, *self._tail]

    def _found_name(self, utterance: Utterance) -> str | None:
        return None if utterance.language is None else qwen3_asr_name(utterance.language)

    def _language_name(self, utterance: Utterance) -> str:
        name = self._found_name(utterance)
        if name is None and self._must_name:
            raise TextError(
                "unknown_language",
                f"{utterance.sample_id}: Qwen3-ASR has no name for language {utterance.language!r}; "
                'correct the manifest, or set text.language_tag_mode = "auto" (it then writes "language None")',
            )
        return name or "None"


def _named(name: str) -> str:
    return f"language {name}"


def _render(vocabulary: Vocabulary) -> tuple[str, str]:
    """Returns the chat up to the answer, as what stands before and after the prompt."""
    vocabulary.renders(vocabulary.tokenizer)
    messages = [
        {"role": "system", "content": [{"type": "text", "text": _MARK}]},
        {"role": "user", "content": [{"type": "audio", "audio": ""}]},
    ]
    try:
        chat = render_chat(vocabulary.tokenizer, messages, add_generation_prompt=True)
    except ValueError as err:
        raise ConfigError(
            f'text.prompt = "qwen3_asr" needs a chat template in {vocabulary.folder} (chat_template.jinja): {err}',
            code="FB106",
        ) from err
    if chat.count(_MARK) != 1 or chat.count(AUDIO_TOKEN) != 1:
        raise ConfigError(
            f"text.tokenizer: the chat template of {vocabulary.folder} shows the system text {chat.count(_MARK)} "
            f"times and {AUDIO_TOKEN} {chat.count(AUDIO_TOKEN)} times for one clip, wanted 1 and 1; "
            "use the model's own template",
            code="FB106",
        )
    head, _, tail = chat.partition(_MARK)
    return head, tail


def qwen3_asr_text(
    samples: Sequence[Sample], *, pad_token_id: int, padding_side: PaddingSide, allocate: Allocate
) -> Batch:
    """Returns `input_ids`, `attention_mask` and `labels`, all int64 [batch, longest].

    A sample's `input_ids` hold one audio placeholder, at `audio_index`; it is repeated once for each audio token
    that the model makes of the sample's feature frames. Labels begin behind the `prefix_len` stored tokens of the
    prompt.
    """
    names = ("input_ids", "prefix_len", "audio_index", "input_features")
    whole = list(map(_with_audio, *(column(samples, name) for name in names)))
    return causal_text(whole, pad_token_id=pad_token_id, padding_side=padding_side, allocate=allocate)


def _with_audio(ids: Array, prefix_len: Array, audio_index: Array, frames: Array) -> dict[str, Array]:
    """Returns the ids with all audio tokens, and how many of them are the prompt."""
    index, count = audio_index.item(), num_audio_tokens(len(frames))
    audio = np.full(count, ids[index], ids.dtype)
    prefix = prefix_len + (count - 1 if index < prefix_len[0] else 0)
    return {"input_ids": np.concatenate((ids[:index], audio, ids[index + 1 :])), "prefix_len": prefix}


def num_audio_tokens(num_frames: Count) -> Count:
    """Returns the number of audio tokens of clips with so many valid mel frames, as an int or elementwise.

    The encoder works on chunks of 100 frames (`n_window` 50) and halves each three times, rounding up: a whole chunk
    gives 13 tokens. Equal to `Qwen3ASRProcessor._get_audio_token_length` and to the lengths that the encoder gives.
    """
    tokens = num_frames % CHUNK_FRAMES
    for _ in range(3):
        tokens = (tokens + 1) // 2
    total: Count = num_frames // CHUNK_FRAMES * _CHUNK_TOKENS + tokens
    return total
