"""Qwen3-ASR's chat: a system turn with the prompt, a user turn with the audio, the transcript as the answer."""

from __future__ import annotations

import re

from forebay.config.steps import Tokens
from forebay.errors import ConfigError, TextError
from forebay.steps.text.normalize import qwen3_asr_name
from forebay.steps.text.sequence import TokenSequence, Utterance
from forebay.steps.text.vocabulary import Vocabulary

AUDIO_TOKEN = "<|audio_pad|>"


TEXT_TOKEN = "<asr_text>"


_CARRIED = re.compile(r"\s*language (?P<name>[^<>\s][^<>\n]*)<asr_text>(?P<text>.*)", re.DOTALL)


_MARK = "forebay-prompt-goes-here"


def split_carried(text: str) -> tuple[str | None, str]:
    """Returns language name and transcript of a text that carries `language English<asr_text>...`; else None and the text."""
    match = _CARRIED.fullmatch(text)
    return (match["name"], match["text"]) if match else (None, text)


class Qwen3AsrPrompt:
    """The folder's chat template around prompt and audio, then `language English<asr_text>text` and the end token.

    One `<|audio_pad|>` stands for the clip; `forebay.train.collate.text` says how many it becomes at load. A language
    that is absent, or that Qwen3-ASR does not name, is `language None`, the form of its fine-tuning data. A language
    that the text carries is taken as it stands.
    """

    def __init__(self, vocabulary: Vocabulary, step: Tokens) -> None:
        """Renders the chat template once; ConfigError where it does not show prompt and audio exactly once each."""
        self._vocabulary = vocabulary
        self._must_name = step.language_tag_mode == "always"
        self._audio_id = vocabulary.require(AUDIO_TOKEN, prompt="qwen3_asr")
        self._text_id = vocabulary.require(TEXT_TOKEN, prompt="qwen3_asr")
        end = vocabulary.eos_token_id
        if end is None:
            raise ConfigError(f'text.prompt = "qwen3_asr": the tokenizer in {vocabulary.folder} names no eos_token')
        self._end_id = end
        head, tail = _render(vocabulary)
        self._head, self._tail = vocabulary.split(head), vocabulary.split(tail)
        self._bare_prefix = self._prefix(Utterance(sample_id="chat template", text=""))

    def build(self, utterance: Utterance) -> TokenSequence:
        """Returns the sequence of an utterance; TextError `unknown_language` where a language must be named and has none."""
        prefix = self._prefix(utterance) if utterance.prompt else self._bare_prefix
        name = utterance.carried or self._language_name(utterance)
        target = self._vocabulary.encode_parts(
            [f"language {name}", self._text_id, utterance.text, self._end_id], sample_id=utterance.sample_id
        )
        return TokenSequence(
            ids=[*prefix, *target],
            prefix_len=len(prefix),
            num_label_tokens=len(target),
            audio_index=prefix.index(self._audio_id),
        )

    def text_ids(self, ids: list[int]) -> list[int]:
        """Returns what follows the mark of the transcript."""
        return ids[ids.index(self._text_id) :] if self._text_id in ids else ids

    def _prefix(self, utterance: Utterance) -> list[int]:
        # One run of text from `system` on: the template's words and the prompt are tokenised together, as rendered.
        parts = [*self._head, utterance.prompt, *self._tail]
        return self._vocabulary.encode_parts(parts, sample_id=utterance.sample_id)

    def _language_name(self, utterance: Utterance) -> str:
        name = None if utterance.language is None else qwen3_asr_name(utterance.language)
        if name is None and self._must_name:
            raise TextError(
                "unknown_language",
                f"{utterance.sample_id}: Qwen3-ASR has no name for language {utterance.language!r}; correct the manifest, "
                'or set text.language_tag_mode = "auto" (it then writes "language None")',
            )
        return name or "None"


def _render(vocabulary: Vocabulary) -> tuple[str, str]:
    """Returns the chat up to the answer, as what stands before and after the prompt."""
    from jinja2 import TemplateError  # comes with transformers

    messages = [
        {"role": "system", "content": [{"type": "text", "text": _MARK}]},
        {"role": "user", "content": [{"type": "audio", "audio": ""}]},
    ]
    try:
        chat = vocabulary.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (ValueError, TemplateError) as err:
        raise ConfigError(
            f'text.prompt = "qwen3_asr" needs a chat template in {vocabulary.folder} (chat_template.jinja): {err}'
        ) from err
    if chat.count(_MARK) != 1 or chat.count(AUDIO_TOKEN) != 1:
        raise ConfigError(
            f"text.tokenizer: the chat template of {vocabulary.folder} shows the system text {chat.count(_MARK)} times and "
            f"{AUDIO_TOKEN} {chat.count(AUDIO_TOKEN)} times for one clip, wanted 1 and 1; use the model's own template"
        )
    head, _, tail = chat.partition(_MARK)
    return head, tail
