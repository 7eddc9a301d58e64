"""Text without a prompt."""

from __future__ import annotations

from forebay.steps.text.sequence import TokenSequence, Utterance
from forebay.steps.text.vocabulary import Vocabulary


class PlainPrompt:
    """The text's own ids, with the end token where the tokenizer has one. Language and prompt are not written."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def build(self, utterance: Utterance) -> TokenSequence:
        """Returns the sequence of an utterance; nothing of it is prefix."""
        end = self._vocabulary.eos_token_id
        ids = self._vocabulary.encode(utterance.text, sample_id=utterance.sample_id)
        ids += [] if end is None else [end]
        return TokenSequence(ids=ids, prefix_len=0, num_label_tokens=len(ids))

    def text_ids(self, ids: list[int]) -> list[int]:
        """Returns all ids."""
        return ids
