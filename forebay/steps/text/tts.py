"""`tts`: texts, or the phones that `text.normalize` made of them, as models of speech synthesis take them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from forebay.errors import ConfigError, TextError
from forebay.steps.step import Allocate, Batch, PaddingSide, Stored, TextBatch
from forebay.steps.text.transcript import Prompt, TokenSequence, Transcript, Utterance
from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.layout import FieldSpec
from forebay.store.source import Sample

if TYPE_CHECKING:
    import pyarrow as pa

_LISTED = 200
"""Speakers that a message lists, to be pasted into a config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tts(Transcript):
    """The text's ids; beside them `speaker_id` and `language_id` int32 [1] where speakers or languages are listed.

    Batches have `input_ids` [B, L], padded on the right with the tokenizer's pad token, `input_lengths` [B], and
    `speaker_ids` and `language_ids` [B], all int64.
    """

    name: ClassVar[str] = "tts"
    takes_symbols: ClassVar[bool] = True
    axes: ClassVar[dict[str, str | int]] = {**Transcript.axes, "speaker_id": 1, "language_id": 1}
    batch_names: ClassVar[frozenset[str]] = frozenset({"input_ids", "input_lengths", "speaker_ids", "language_ids"})

    blank_token: str = ""
    """This token of the tokenizer stands before, between and behind all others, as VITS wants it (`add_blank`).
    Left out: none does."""
    add_bos: bool = False
    """Begin with the tokenizer's begin token."""
    add_eos: bool = False
    """End with the tokenizer's end token."""
    speaker_column: str = ""
    """The column of `source.keep_columns` that names a sample's speaker. Left out: there are no speaker ids."""
    speakers: tuple[str, ...] = ()
    """The speakers in the order of their ids, the first is 0. A sample of another speaker is left out, reason
    `unknown_speaker`. Left out with a `speaker_column`: the error lists all that there are."""
    language_codes: tuple[str, ...] = ()
    """The languages in the order of their ids, `["en", "de"]`; `en` is `en-US` too. A sample of another language is
    left out, reason `unknown_language`. Left out: there are no language ids."""

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that super() was compiled for.
        Transcript.__post_init__(self)
        for setting, names in (("speakers", self.speakers), ("language_codes", tuple(map(_code, self.language_codes)))):
            if len(set(names)) != len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"{setting} names {twice!r} twice; name it once")
        if self.speakers and not self.speaker_column:
            raise ValueError("speakers need speaker_column, the column of source.keep_columns that names them")
        if self.language_codes and self.language_tag_mode == "none":
            raise ValueError('language_codes need a language, and language_tag_mode is "none"; leave it out')

    def fields(self) -> tuple[FieldSpec, ...]:
        ids = [("speaker_id", self.speaker_column), ("language_id", self.language_codes)]
        more = tuple(FieldSpec(name=name, dtype="int32", group="text") for name, wanted in ids if wanted)
        return (*Transcript.fields(self), *more)

    @classmethod
    def columns_read(cls, settings: Mapping[str, Any]) -> dict[str, str]:
        column = settings.get("speaker_column")
        return {"speaker_column": column} if column else {}

    def of_rows(self, rows: pa.Table, different: Callable[[str], list[str]]) -> Self:  # noqa: ARG002
        """Returns the step where speakers are listed. Raises ConfigError, with all there are, where they are to be."""
        if not self.speaker_column or self.speakers:
            return self
        found = different(self.speaker_column)
        shown = ", ".join(json.dumps(name, ensure_ascii=False) for name in found[:_LISTED])
        more = f" (the first {_LISTED} of {len(found)})" if len(found) > _LISTED else ""
        raise ConfigError(
            f"text.speakers is empty, and the order of speakers is the order of their ids; column "
            f"{self.speaker_column} holds {len(found)}: put this under [text]{more}:\n  speakers = [{shown}]"
        )

    def writer(self, vocabulary: Vocabulary) -> Prompt:
        return TtsPrompt(vocabulary, self)

    @classmethod
    def batch(cls, stored: Stored) -> TextBatch:
        """Returns the form `input_ids`, `input_lengths`, and `speaker_ids` and `language_ids` where they are stored."""
        ids = tuple(name for name in ("speaker_id", "language_id") if name in stored.fields)
        return partial(tts_text, pad_token_id=int(stored.constant("pad_token_id")), ids=ids)


class TtsPrompt(Prompt):
    """The ids of the text between begin and end token, a blank around each."""

    def __init__(self, vocabulary: Vocabulary, step: Tts) -> None:
        """Looks the tokens up. Raises ConfigError where the tokenizer has no such."""
        super().__init__(vocabulary)
        self._step = step
        self._blank = _token(vocabulary, step.blank_token, "blank_token") if step.blank_token else None
        self._before = _named(vocabulary, "bos") if step.add_bos else []
        self._behind = _named(vocabulary, "eos") if step.add_eos else []
        if vocabulary.pad_token_id is None:
            raise ConfigError(
                f'text.prompt = "tts": the tokenizer in {vocabulary.folder} names no pad_token, which fills up batches',
                code="FB106",
            )
        self._speakers = {name: number for number, name in enumerate(step.speakers)}
        self._languages = {_code(name): number for number, name in enumerate(step.language_codes)}

    @property
    def languages(self) -> tuple[str, ...]:
        return self._step.language_codes

    def texts(self, utterance: Utterance) -> list[str]:
        return [utterance.text]

    def build(self, utterance: Utterance) -> TokenSequence:
        """Returns the sequence; nothing of it is prefix. Raises TextError `unknown_language`."""
        ids = self._vocabulary.encode(utterance.text, sample_id=utterance.sample_id)
        ids = [*self._before, *ids, *self._behind]
        if self._blank is not None:
            spaced = [self._blank] * (2 * len(ids) + 1)
            spaced[1::2] = ids
            ids = spaced
        more = {"language_id": [self._language_id(utterance)]} if self._languages else {}
        return TokenSequence(ids=ids, prefix_len=0, num_label_tokens=len(ids), more=more)

    def of_row(self, kept: Mapping[str, Any], sample_id: str) -> dict[str, list[int]]:
        """Returns the speaker's id. Raises TextError `unknown_speaker` where the row's speaker is not listed."""
        column = self._step.speaker_column
        if column not in kept:  # the probe's texts have no columns
            return {}
        speaker = kept[column]
        number = self._speakers.get(str(speaker)) if speaker is not None else None
        if number is None:
            said = "nothing" if speaker is None else repr(str(speaker))
            raise TextError(
                "unknown_speaker",
                f"{sample_id}: column {column} says {said}, which is not among the {len(self._speakers)} of "
                "text.speakers; add it at their end, or correct the row",
            )
        return {"speaker_id": [number]}

    def text_ids(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token != self._blank]

    def _language_id(self, utterance: Utterance) -> int:
        language = _code(utterance.language or "")
        number = self._languages.get(language, self._languages.get(language.partition("-")[0]))
        if number is None:
            raise TextError(
                "unknown_language",
                f"{utterance.sample_id}: language {utterance.language!r} is not among text.language_codes "
                f"({', '.join(self._step.language_codes)}); add it at their end, or correct the row",
            )
        return number


def tts_text(
    samples: Sequence[Sample],
    *,
    pad_token_id: int,
    ids: tuple[str, ...],
    padding_side: PaddingSide,  # noqa: ARG001
    allocate: Allocate,
) -> Batch:
    """Returns `input_ids` [batch, longest], padded on the right, `input_lengths` and each of `ids` [batch], int64."""
    from forebay.steps.batch import counted, filled

    sequences = [sample["input_ids"] for sample in samples]
    lengths = [len(sequence) for sequence in sequences]
    inputs = filled("input_ids", (len(samples), max(lengths)), pad_token_id, allocate=allocate)
    for sequence, row in zip(sequences, inputs.numpy(), strict=True):
        row[: len(sequence)] = sequence
    batch = {"input_ids": inputs, "input_lengths": counted("input_lengths", lengths, allocate=allocate)}
    for name in ids:
        batch[f"{name}s"] = counted(f"{name}s", [sample[name].item() for sample in samples], allocate=allocate)
    return batch


def _code(language: str) -> str:
    return language.strip().lower().replace("_", "-")


def _token(vocabulary: Vocabulary, token: str, setting: str) -> int:
    found = vocabulary.open.backend.token_to_id(token)
    if found is None:
        raise ConfigError(
            f"text.{setting} is {token!r}, which the tokenizer in {vocabulary.folder} does not have; name one of its "
            "tokens",
            code="FB106",
        )
    return int(found)


def _named(vocabulary: Vocabulary, kind: str) -> list[int]:
    found = vocabulary.open.id_of(f"{kind}_token")
    if found is None:
        raise ConfigError(
            f"text.add_{kind} is true, and the tokenizer in {vocabulary.folder} names no {kind}_token; leave it out",
            code="FB106",
        )
    return [found]
