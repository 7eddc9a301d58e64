"""The text step: rows of a manifest to the fields of the text group."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from forebay.config.steps import Tokens
from forebay.errors import TextError
from forebay.steps.text.normalize import is_unseen, normalize_text
from forebay.steps.text.plain import PlainPrompt
from forebay.steps.text.qwen3_asr import AUDIO_TOKEN, Qwen3AsrPrompt, split_carried
from forebay.steps.text.sequence import Prompt, Utterance
from forebay.steps.text.vocabulary import Vocabulary
from forebay.steps.text.whisper import WhisperPrompt
from forebay.store.layout import FieldSpec


def field_specs(step: Tokens) -> tuple[FieldSpec, ...]:
    """Returns the fields of the text group: `input_ids` [num_tokens], `prefix_len` [1], with Qwen3-ASR `audio_index` [1]."""
    names = ["input_ids", "prefix_len"] + (["audio_index"] if step.prompt == "qwen3_asr" else [])
    return tuple(FieldSpec(name=name, dtype="int32", group="text") for name in names)


class TextEncoder:
    """Writes transcripts as `step` says, with the tokenizer of a local folder."""

    def __init__(self, step: Tokens, folder: Path) -> None:
        """Loads the tokenizer (and with it transformers).

        Raises ConfigError where the folder's files are not those of `step.tokenizer`, or lack what the prompt needs.
        """
        self._step = step
        self._vocabulary = Vocabulary(folder, digest=step.tokenizer)
        self._prompt = _prompt_of(step, self._vocabulary)

    @property
    def constants(self) -> dict[str, int]:
        """What a collator must know: `vocab_size`, and where they exist `pad_token_id`, `eos_token_id`, `audio_token_id`."""
        found = {
            "vocab_size": self._vocabulary.size,
            "pad_token_id": self._vocabulary.pad_token_id,
            "eos_token_id": self._vocabulary.eos_token_id,
            "audio_token_id": self._vocabulary.find(AUDIO_TOKEN) if self._step.prompt == "qwen3_asr" else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def encode(self, text: str, language: str | None, prompt: str | None, *, sample_id: str) -> dict[str, np.ndarray]:
        """Returns the int32 arrays that `field_specs` names.

        language: code or English name in any case; empty is absent. prompt: earlier text or hot words; empty is absent.
        Raises TextError: `bad_text`, `empty_text`, `missing_language`, `unknown_language`, `label_too_long`.
        """
        utterance = self._utterance(text, language, prompt, sample_id)
        sequence = self._prompt.build(utterance)
        limit = self._step.max_label_tokens
        if limit is not None and sequence.num_label_tokens > limit:
            raise TextError(
                "label_too_long",
                f"{sample_id}: {sequence.num_label_tokens} label tokens, text.max_label_tokens is {limit}; "
                "split the clip, or raise the limit where the model allows it",
            )
        fields = {"input_ids": sequence.ids, "prefix_len": [sequence.prefix_len]}
        if sequence.audio_index is not None:
            fields["audio_index"] = [sequence.audio_index]
        return {name: np.array(values, dtype=np.int32) for name, values in fields.items()}

    def decode(self, input_ids: Iterable[int] | np.ndarray) -> str:
        """Returns the transcript in the ids of a sample: without prompt, language and control tokens.

        Ids below zero (masked labels) are left out.
        """
        ids = [int(i) for i in input_ids]
        return self._vocabulary.decode(self._prompt.text_ids(ids))

    def _utterance(self, text: str, language: str | None, prompt: str | None, sample_id: str) -> Utterance:
        # Before normalisation: NFKC turns full-width brackets into these, and nobody meant those as a header.
        carried, body = split_carried(text) if self._step.prompt == "qwen3_asr" else (None, text)
        body = normalize_text(body, self._step, sample_id=sample_id)
        if is_unseen(body):
            raise TextError("empty_text", f"{sample_id}: the transcript is empty after normalisation")
        language = (language or "").strip() or None
        if self._step.language_tag_mode == "always" and language is None and carried is None:
            raise TextError(
                "missing_language",
                f'{sample_id}: no language, but text.language_tag_mode = "always"; add it to the manifest, or use "auto"',
            )
        return Utterance(
            sample_id=sample_id,
            text=body,
            language=None if self._step.language_tag_mode == "none" else language,
            prompt=normalize_text(prompt or "", self._step, sample_id=sample_id).strip(),
            carried=carried and normalize_text(carried, self._step, sample_id=sample_id),
        )


def _prompt_of(step: Tokens, vocabulary: Vocabulary) -> Prompt:
    if step.prompt == "whisper":
        return WhisperPrompt(vocabulary)
    return Qwen3AsrPrompt(vocabulary, step) if step.prompt == "qwen3_asr" else PlainPrompt(vocabulary)
