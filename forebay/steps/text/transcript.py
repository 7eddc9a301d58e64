"""Transcripts to tokens: what the steps of every prompt share above the cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from forebay.errors import TextError
from forebay.steps.step import Fields, Stored, TextBatch, TextStep
from forebay.steps.text.normalize import is_unseen, normalize_text
from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.layout import FieldSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript(TextStep):
    """`input_ids` int32 [tokens] and `prefix_len` int32 [1]: normalised text in its prompt, tokenised.

    A prompt is a subclass with a `name`, a `writer` and a `batch`; settings of its own are further fields.
    stands_alone: whether text without audio can have this prompt. reads_labels: whether rows hold token ids and no
    text. audio_features: the only audio that its tokens can stand beside; None for any.
    """

    axes: ClassVar[dict[str, str | int]] = {"input_ids": "tokens", "prefix_len": 1}
    stands_alone: ClassVar[bool] = False
    reads_labels: ClassVar[bool] = False
    audio_features: ClassVar[str | None] = None

    prompt: str = field(init=False)
    language_tag_mode: Literal["auto", "always", "none"] = "auto"
    """`auto`: the manifest's language, if it has one. `always`: a row without a language fails. `none`: no language."""
    normalize: Literal["nfkc", "none"] = "nfkc"
    """`nfkc`: Unicode NFKC, and runs of white space become one space. A text of nothing else is empty, counted."""
    max_label_tokens: int | None = None
    """Longer labels exclude the sample, reason `label_too_long`. Whisper's limit is 448."""
    version: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", self.name)
        if self.max_label_tokens is not None and self.max_label_tokens < 1:
            raise ValueError(f"max_label_tokens is {self.max_label_tokens}, wanted 1 or more")

    def identity(self) -> dict[str, Any]:
        """Returns the canonical description of the step, in which all prompts have one name."""
        return {"step": "Tokens", **asdict(self)}

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the fields of the text group: `input_ids` [num_tokens], `prefix_len` [1]."""
        return tuple(FieldSpec(name=name, dtype="int32", group="text") for name in ("input_ids", "prefix_len"))

    def writer(self, vocabulary: Vocabulary) -> Prompt:
        """Returns what writes the prompt. Raises ConfigError where the tokenizer lacks what the prompt needs."""
        raise NotImplementedError

    @classmethod
    def batch(cls, stored: Stored) -> TextBatch:
        """Returns the form in which batches have the stored tokens."""
        raise NotImplementedError

    def encoder(self, folder: Path) -> TextEncoder:
        """Returns what writes transcripts with the tokenizer of a local folder; loads it (and with it transformers).

        Raises ConfigError where the folder's files are not those of `tokenizer`, or lack what the prompt needs.
        """
        return TextEncoder(self, Vocabulary(folder, digest=self.tokenizer))


@dataclass(frozen=True, kw_only=True, slots=True)
class Utterance:
    """One transcript, ready to be written: `text` is normalised, `language` None where none is to be named.

    prompt: normalised; empty where there is none. carried: the language that the text named itself (Qwen3-ASR's form).
    """

    sample_id: str
    text: str
    language: str | None = None
    prompt: str = ""
    carried: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """Token ids of one sample; the first `prefix_len` of them are given, the rest is learnt.

    num_label_tokens: what `max_label_tokens` limits. more: values of the fields that the prompt has beside the common
    ones.
    """

    ids: list[int]
    prefix_len: int
    num_label_tokens: int
    more: dict[str, list[int]] = field(default_factory=dict)


class Prompt:
    """A model's way to write transcript, language and prompt as one sequence. A new one has `build`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @property
    def constants(self) -> dict[str, int]:
        """What a collator must know of this prompt beside the vocabulary."""
        return {}

    def split(self, text: str) -> tuple[str | None, str]:
        """Returns the language that a text carries itself, None where it carries none, and its transcript."""
        return None, text

    def build(self, utterance: Utterance) -> TokenSequence:
        """Returns the sequence of an utterance; raises TextError where it cannot be written."""
        raise NotImplementedError

    def row_text(self, text: str, ids: Sequence[int]) -> str:  # noqa: ARG002
        """Returns what a row says that it is a transcript of. text: of the source. ids: what was made of it."""
        return text

    def text_ids(self, ids: list[int]) -> list[int]:
        """Returns the ids from which on only the transcript and control tokens come."""
        return ids


class TextEncoder:
    """Writes transcripts as a step says, with a vocabulary."""

    def __init__(self, step: Transcript, vocabulary: Vocabulary) -> None:
        self._step, self._vocabulary = step, vocabulary
        self._prompt = step.writer(vocabulary)

    @property
    def constants(self) -> dict[str, int]:
        """What a collator must know: `vocab_size`, `pad_token_id` and `eos_token_id` if any, the prompt's own."""
        found = {
            "vocab_size": self._vocabulary.size,
            "pad_token_id": self._vocabulary.pad_token_id,
            "eos_token_id": self._vocabulary.eos_token_id,
        }
        return {name: value for name, value in found.items() if value is not None} | self._prompt.constants

    @property
    def reads_labels(self) -> bool:
        """Whether texts are token ids, see `Transcript`."""
        return self._step.reads_labels

    def encode(self, text: str, language: str | None, prompt: str | None, *, sample_id: str) -> Fields:
        """Returns the int32 arrays that the step's `fields` names.

        language: code or English name in any case; empty is absent. prompt: earlier text or hot words; empty is absent.
        Raises TextError: `bad_text`, `empty_text`, `missing_language`, `unknown_language`, `label_too_long`.
        """
        sequence = self._prompt.build(self._utterance(text, language, prompt, sample_id))
        limit = self._step.max_label_tokens
        if limit is not None and sequence.num_label_tokens > limit:
            raise TextError(
                "label_too_long",
                f"{sample_id}: {sequence.num_label_tokens} label tokens, text.max_label_tokens is {limit}; "
                "split the clip, or raise the limit where the model allows it",
            )
        values = {"input_ids": sequence.ids, "prefix_len": [sequence.prefix_len], **sequence.more}
        return {name: np.array(value, dtype=np.int32) for name, value in values.items()}

    def row_text(self, text: str, input_ids: np.ndarray) -> str:
        """Returns the transcript that stands beside the ids of a row. text: of the source."""
        return self._prompt.row_text(text, input_ids.tolist())

    def decode(self, input_ids: Iterable[int] | np.ndarray) -> str:
        """Returns the transcript in the ids of a sample: without prompt, language and control tokens.

        Ids below zero (masked labels) are left out.
        """
        return self._vocabulary.decode(self._prompt.text_ids([int(i) for i in input_ids]))

    @property
    def end_id(self) -> int | None:
        """Id of the token that ends a transcript."""
        return self._vocabulary.eos_token_id

    def transcript(self, text: str, *, sample_id: str) -> str:
        """Returns the transcript of a manifest's text as the model learns it: normalised, without a language in it."""
        return self._normalize(self._prompt.split(text)[1], sample_id)

    def _utterance(self, text: str, language: str | None, prompt: str | None, sample_id: str) -> Utterance:
        # Before normalisation: NFKC turns full-width brackets into those of a header, and nobody meant them as one.
        carried, body = self._prompt.split(text)
        body = self._normalize(body, sample_id)
        if is_unseen(body):
            raise TextError("empty_text", f"{sample_id}: the transcript is empty after normalisation")
        language = (language or "").strip() or None
        if self._step.language_tag_mode == "always" and language is None and carried is None:
            raise TextError(
                "missing_language",
                f'{sample_id}: no language, but text.language_tag_mode = "always"; '
                'add it to the manifest, or use "auto"',
            )
        return Utterance(
            sample_id=sample_id,
            text=body,
            language=None if self._step.language_tag_mode == "none" else language,
            prompt=self._normalize(prompt or "", sample_id).strip(),
            carried=carried and self._normalize(carried, sample_id),
        )

    def _normalize(self, text: str, sample_id: str) -> str:
        return normalize_text(text, self._step.normalize, sample_id=sample_id)
