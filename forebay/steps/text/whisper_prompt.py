"""`whisper`: Whisper's decoder sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from forebay.errors import TextError
from forebay.steps.step import Allocate, Batch, PaddingSide, Stored, TextBatch
from forebay.steps.text.normalize import whisper_code
from forebay.steps.text.transcript import Prompt, TokenSequence, Transcript, Utterance
from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.source import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Whisper(Transcript):
    """The whole decoder sequence, as `WhisperTokenizer` gives it."""

    name: ClassVar[str] = "whisper"
    stands_alone: ClassVar[bool] = True
    batch_names: ClassVar[frozenset[str]] = frozenset({"decoder_input_ids", "labels"})

    def writer(self, vocabulary: Vocabulary) -> Prompt:
        """Returns what writes the sequence."""
        return WhisperPrompt(vocabulary)

    @classmethod
    def batch(cls, stored: Stored) -> TextBatch:
        """Returns the form `decoder_input_ids`, `labels` [B, L], beside audio and without.

        A Whisper that is called with a batch without audio raises, because its encoder has no input: `forebay train`
        gives the decoder what `train.text_encoder` names. A loop of your own passes `encoder_outputs`, or calls
        `forebay.train.models.whisper.prepare_text_alone` once.
        """
        return partial(whisper_text, pad_token_id=int(stored.constant("pad_token_id")))

    @classmethod
    def row_tokens(cls, num_tokens: Any, num_frames: Any) -> Any:  # noqa: ARG003
        """Returns the tokens without the one that is fed or learnt alone."""
        return num_tokens - 1


class WhisperPrompt(Prompt):
    """`[<|startofprev|> prompt] <|startoftranscript|> [<|en|>] <|transcribe|> <|notimestamps|> text <|endoftext|>`.

    The whole decoder sequence, as `WhisperTokenizer` gives it: at load, all but the last id go in and all but the first
    are the labels, of which the prefix is masked. Source of the format: Radford et al. 2022, section 2.3.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._previous_id = vocabulary.require("<|startofprev|>", prompt="whisper")
        self._start_id = vocabulary.require("<|startoftranscript|>", prompt="whisper")
        self._task_ids = [
            vocabulary.require(token, prompt="whisper") for token in ("<|transcribe|>", "<|notimestamps|>")
        ]
        self._end_id = vocabulary.require("<|endoftext|>", prompt="whisper")

    def texts(self, utterance: Utterance) -> list[str]:
        """Returns the text, and the prompt where there is one."""
        return [utterance.text, _as_earlier(utterance.prompt)] if utterance.prompt else [utterance.text]

    def build(self, utterance: Utterance) -> TokenSequence:
        """Returns the sequence of an utterance; TextError `unknown_language` where the tokenizer has no such tag."""
        prefix = [*self._previous(utterance), self._start_id, *self._language(utterance), *self._task_ids]
        ids = [*prefix, *self._vocabulary.encode(utterance.text, sample_id=utterance.sample_id), self._end_id]
        # Labels are the sequence moved by one, prefix included: that is what Whisper's 448 positions hold.
        return TokenSequence(ids=ids, prefix_len=len(prefix), num_label_tokens=len(ids) - 1)

    def text_ids(self, ids: list[int]) -> list[int]:
        """Returns what follows the prompt, which is text too."""
        return ids[ids.index(self._start_id) :] if self._start_id in ids else ids

    def _previous(self, utterance: Utterance) -> list[int]:
        if not utterance.prompt:
            return []
        earlier = _as_earlier(utterance.prompt)
        return [self._previous_id, *self._vocabulary.encode(earlier, sample_id=utterance.sample_id)]

    def _language(self, utterance: Utterance) -> list[int]:
        if utterance.language is None:
            return []
        code = whisper_code(utterance.language)
        found = None if code is None else self._vocabulary.find(f"<|{code}|>")
        if found is None:
            raise TextError(
                "unknown_language",
                f"{utterance.sample_id}: language {utterance.language!r} has no tag in the tokenizer in "
                f'{self._vocabulary.folder}; correct the manifest, or set text.language_tag_mode = "none"',
            )
        return [found]


def _as_earlier(prompt: str) -> str:
    # The leading space is how text goes on from earlier text (WhisperTokenizer.get_prompt_ids).
    return f" {prompt}"


def whisper_text(
    samples: Sequence[Sample],
    *,
    pad_token_id: int,
    padding_side: PaddingSide,  # noqa: ARG001
    allocate: Allocate,
) -> Batch:
    """Returns `decoder_input_ids` and `labels`, both int64 [batch, longest - 1].

    `input_ids` of a sample are fed without their last token and learnt without their first, so the labels of position i
    are token i + 1, -100 where that is still one of the `prefix_len` prompt tokens. Padding stands right: Whisper's
    positions count from the left. Labels are masked by position, from the stored `prefix_len`, never by comparing ids:
    a pad token that is also the end of text stays a target.
    """
    from forebay.steps.batch import IGNORED, filled

    sequences = [sample["input_ids"] for sample in samples]
    shape = (len(samples), max(map(len, sequences)) - 1)
    inputs = filled("decoder_input_ids", shape, pad_token_id, allocate=allocate)
    labels = filled("labels", shape, IGNORED, allocate=allocate)
    for ids, sample, inputs_row, labels_row in zip(sequences, samples, inputs.numpy(), labels.numpy(), strict=True):
        prefix = max(sample["prefix_len"].item() - 1, 0)
        inputs_row[: len(ids) - 1] = ids[:-1]
        labels_row[prefix : len(ids) - 1] = ids[prefix + 1 :]
    return {"decoder_input_ids": inputs, "labels": labels}
