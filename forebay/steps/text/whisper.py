"""Whisper's decoder sequence."""

from __future__ import annotations

from forebay.errors import TextError
from forebay.steps.text.normalize import whisper_code
from forebay.steps.text.sequence import TokenSequence, Utterance
from forebay.steps.text.vocabulary import Vocabulary


class WhisperPrompt:
    """`[<|startofprev|> prompt] <|startoftranscript|> [<|en|>] <|transcribe|> <|notimestamps|> text <|endoftext|>`.

    The whole decoder sequence, as `WhisperTokenizer` gives it: at load, all but the last id go in and all but the first
    are the labels, of which the prefix is masked. Source of the format: Radford et al. 2022, section 2.3.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._previous_id = vocabulary.require("<|startofprev|>", prompt="whisper")
        self._start_id = vocabulary.require("<|startoftranscript|>", prompt="whisper")
        self._task_ids = [
            vocabulary.require(token, prompt="whisper") for token in ("<|transcribe|>", "<|notimestamps|>")
        ]
        self._end_id = vocabulary.require("<|endoftext|>", prompt="whisper")

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
        # The leading space is how text goes on from earlier text (WhisperTokenizer.get_prompt_ids).
        return [self._previous_id, *self._vocabulary.encode(f" {utterance.prompt}", sample_id=utterance.sample_id)]

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
