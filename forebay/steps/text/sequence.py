"""What goes into a prompt, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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

    num_label_tokens: what `max_label_tokens` limits. audio_index: position of the one audio placeholder.
    """

    ids: list[int]
    prefix_len: int
    num_label_tokens: int
    audio_index: int | None = None


class Prompt(Protocol):
    """A model's way to write transcript, language and prompt as one sequence."""

    def build(self, utterance: Utterance) -> TokenSequence:
        """Returns the sequence of an utterance; raises TextError where it cannot be written."""

    def text_ids(self, ids: list[int]) -> list[int]:
        """Returns the ids from which on only the transcript and control tokens come."""
