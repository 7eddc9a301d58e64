"""`given`: the labels that a data set holds already, as Whisper's sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from forebay.errors import TextError
from forebay.steps.step import Stored, TextBatch
from forebay.steps.text.transcript import Prompt, TokenSequence, Transcript, Utterance
from forebay.steps.text.vocabulary import Vocabulary
from forebay.steps.text.whisper import Whisper, WhisperPrompt
from forebay.store.layout import Array

_IGNORED = -100
"""`forebay.steps.batch.IGNORED`, without torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given(Transcript):
    """Token ids of a column of the source, as a Trainer's `labels` have them; no text is tokenised.

    All of them are learnt, the prompt in them too, as transformers' Whisper does it. Batches are those of `whisper`:
    `labels` are the column's without a start token in front and without padding, `decoder_input_ids` the same moved
    right by one, behind `<|startoftranscript|>`.
    """

    name: ClassVar[str] = "given"
    stored_as: ClassVar[str] = Whisper.name
    reads_labels: ClassVar[bool] = True
    batch_names: ClassVar[frozenset[str]] = Whisper.batch_names

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that super() was compiled for.
        Transcript.__post_init__(self)
        if self.language_tag_mode != "auto" or self.normalize != "nfkc" or self.language != "manifest":
            raise ValueError(
                'language_tag_mode, normalize and language are for texts, and prompt = "given" takes ids as they are'
            )

    def writer(self, vocabulary: Vocabulary) -> Prompt:
        """Returns what reads the labels."""
        return GivenPrompt(vocabulary)

    @classmethod
    def batch(cls, stored: Stored) -> TextBatch:
        """Returns the form of `whisper`."""
        return Whisper.batch(stored)

    @classmethod
    def row_tokens(cls, num_tokens: Any, num_frames: Any) -> Any:
        """Returns the tokens of `whisper`."""
        return Whisper.row_tokens(num_tokens, num_frames)


class GivenPrompt(WhisperPrompt):
    """Ids in decimal, parted by spaces, as the listing has a row's labels."""

    def texts(self, utterance: Utterance) -> list[str]:  # noqa: ARG002
        """Returns none: the ids are there."""
        return []

    def build(self, utterance: Utterance) -> TokenSequence:
        """Returns the start token and the labels. Raises TextError `bad_labels` for ids that the tokenizer lacks."""
        labels = self._unpadded([int(label) for label in utterance.text.split(" ")])
        labels = labels[1:] if labels[:1] == [self._start_id] else labels
        wrong = [label for label in labels if not 0 <= label < self._vocabulary.size]
        if wrong:
            masked = "; a prompt that is masked cannot be rebuilt: give its ids" if wrong[0] == _IGNORED else ""
            raise TextError(
                "bad_labels",
                f"{utterance.sample_id}: label {wrong[0]} is no id of the tokenizer in {self._vocabulary.folder}, "
                f"which has 0 to {self._vocabulary.size - 1}{masked}",
            )
        if not labels:
            raise TextError("empty_text", f"{utterance.sample_id}: the labels hold nothing but padding")
        return TokenSequence(ids=[self._start_id, *labels], prefix_len=1, num_label_tokens=len(labels))

    def row_text(self, text: str, ids: Array) -> str:  # noqa: ARG002
        """Returns what the labels say, without control tokens."""
        return self._vocabulary.decode(ids.tolist())

    def _unpadded(self, labels: list[int]) -> list[int]:
        """Returns the labels without the -100 at their end, or the end tokens behind the first of those there."""
        end = len(labels)
        while end and labels[end - 1] == _IGNORED:
            end -= 1
        while end > 1 and labels[end - 2 : end] == [self._end_id] * 2:
            end -= 1
        return labels[:end]
