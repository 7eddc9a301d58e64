"""Transcripts to tokens: what the steps of every prompt share above the cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np

from forebay.config.code import not_allowed
from forebay.config.tree import Config
from forebay.errors import SampleError, TextError
from forebay.spans import TOKENS, span
from forebay.steps.step import Fields, RowText, Stored, TextBatch, TextStep, no_such_column
from forebay.steps.text.line import OpenLine, PreparedTexts, Staged, TextLine, is_unseen
from forebay.steps.text.normal.normal_step import NOWHERE, SIMPLE, Problem, code_in, made_steps
from forebay.steps.text.row_encoder import EncodedRow, EncodedRows, Spoken
from forebay.steps.text.tokenizer_files import ALONE
from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.layout import Array, FieldSpec, Group
from forebay.store.texts import TextStore

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript(TextStep):
    """`input_ids` int32 [tokens] and `prefix_len` int32 [1]: normalised text in its prompt, tokenised.

    A prompt is a subclass with a `name`, a `writer` and a `batch`; settings of its own are further fields.
    stands_alone: whether text without audio can have this prompt. reads_labels: whether rows hold token ids and no
    text. audio_features: the only audio that its tokens can stand beside; None for any.
    """

    axes: ClassVar[dict[str, str | int]] = {"input_ids": "tokens", "prefix_len": 1}
    given: ClassVar[frozenset[str]] = frozenset({"tokenizer", "line"})
    stands_alone: ClassVar[bool] = False
    beside: ClassVar[frozenset[str]] = frozenset()
    can_pack: ClassVar[bool] = True
    is_of_texts: ClassVar[bool] = True
    reads_labels: ClassVar[bool] = False
    audio_features: ClassVar[str | None] = None
    batch_names: ClassVar[frozenset[str]] = frozenset({"labels"})
    libraries: ClassVar[tuple[str, ...]] = ALONE

    tokenizer: str
    prompt: str = field(init=False)
    language_tag_mode: Literal["auto", "always", "none"] = "auto"
    """`auto`: the manifest's language, if it has one. `always`: a row without a language fails. `none`: no language."""
    normalize: Literal["nfkc", "none"] | tuple[str, ...] = "nfkc"
    """Steps that a text goes through before it is tokenised, by name, in their order. `nfkc`: Unicode NFKC, and runs of
    white space become one space; a text of nothing else is empty, counted. `"none"` is the empty list. All names are
    in the table below; `"file.py:function"` is a function of yours."""
    language: Literal["manifest", "detect", "detect_missing"] = "manifest"
    """Where the language of a text comes from. `detect`: from the text (extra `text`), and from the manifest where
    nothing can be said. `detect_missing`: from the text where the manifest has none."""
    languages: tuple[str, ...] = ()
    """Codes of the languages among which is detected. Left out: all that are known."""
    min_confidence: float | None = None
    """Below this confidence, from 0 to 1, nothing is said of a language. Left out: 0.5, by which a language is likelier
    than all others together."""
    phones: Mapping[str, Any] | None = field(default=None, hash=False)
    """Settings of the step `phones` of `normalize`: `{backend = "espeak"}`."""
    max_label_tokens: int | None = None
    """Longer labels exclude the sample, reason `label_too_long`. Whisper's limit is 448."""
    version: int = 2
    line: TextLine | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", self.name)
        if self.line is None and self.normalize in SIMPLE and self.language == "manifest":
            object.__setattr__(self, "line", TextLine(steps=made_steps(self.normalize, NOWHERE)))
        if self.language == "manifest" and (self.languages or self.min_confidence is not None):
            raise ValueError('languages and min_confidence are of language = "detect" or "detect_missing"')
        if self.min_confidence is not None and not 0 <= self.min_confidence <= 1:
            raise ValueError(f"min_confidence is {self.min_confidence}, wanted 0 to 1")
        if self.max_label_tokens is not None and self.max_label_tokens < 1:
            raise ValueError(f"max_label_tokens is {self.max_label_tokens}, wanted 1 or more")

    def identity(self) -> dict[str, Any]:
        """Returns the canonical description of the step, in which all prompts have one name."""
        return {"step": "Tokens", **self.document()}

    def document(self) -> dict[str, Any]:
        """Returns what keys say of the step: its settings, and the line's steps by what they are."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _OF_THE_LINE}
        return {**own, **self.text_line().document()}

    def text_line(self) -> TextLine:
        """Returns the line. Raises ValueError for settings that name files which nobody has looked up."""
        if self.line is None:
            raise ValueError(f"{self.name}: normalize = {self.normalize} needs the files of a config")
        return self.line

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the fields of the text group: `input_ids` [num_tokens], `prefix_len` [1]."""
        return tuple(FieldSpec(name=name, dtype="int32", group="text") for name in ("input_ids", "prefix_len"))

    @classmethod
    def columns_read(cls, settings: Mapping[str, Any]) -> dict[str, str]:  # noqa: ARG003
        """Returns the columns of `source.keep_columns` that samples are made of, by the settings that name them."""
        return {}

    def writer(self, vocabulary: Vocabulary) -> Prompt:
        """Returns what writes the prompt. Raises ConfigError where the tokenizer lacks what the prompt needs."""
        raise NotImplementedError

    @classmethod
    def batch(cls, stored: Stored) -> TextBatch:
        raise NotImplementedError

    @classmethod
    def stands_beside(cls, items: Mapping[Group, str]) -> bool:
        """Whether there is sound to be transcribed, whatever else there is, or nothing for a prompt that needs none."""
        return "audio" in items or (cls.stands_alone and not items)

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:
        source, settings = config.source, {} if config.text is None else config.text.settings
        mode = settings.get("language", "manifest")
        taken = {spec.name for spec in DETECTED_FIELDS}.intersection(source.keep_columns)
        if mode != "manifest" and taken:
            return [
                f'source.keep_columns has {", ".join(sorted(taken))}, and text.language = "{mode}" writes columns of '
                "these names; leave them out, or rename them in the source"
            ]
        if not config.run.allow_code and (code := code_in(settings)):
            return [not_allowed("text.normalize", entry) for entry in code]
        found = [
            f'text.{setting} is "{column}", and source.keep_columns does not name it; add it there'
            for setting, column in cls.columns_read(settings).items()
            if column not in source.keep_columns
        ]
        if cls.reads_labels == (source.columns.labels is None):
            found.append(no_such_column("labels", source.columns.labels, "text.prompt", cls.name))
        return [*found, *cls.own_contradictions(config)]

    @classmethod
    def own_contradictions(cls, config: Config) -> list[str]:  # noqa: ARG003
        """Returns what the prompt's own settings and the rest of a config do not agree in."""
        return []

    def without_code(self) -> Self:
        """Returns the step without the functions of the text line; see `TextLine.without_code`."""
        return replace(self, line=self.text_line().without_code())

    def check(self) -> None:
        self.text_line().check()

    def opened(self, folder: Path, *, merge_size: int | None = None) -> TextEncoder:  # noqa: ARG002
        """Returns what writes transcripts with the tokenizer of a local folder; loads it (and with it transformers).

        Raises ConfigError where the folder's files are not those of `tokenizer`, or lack what the prompt needs.
        """
        return TextEncoder(self, Vocabulary(folder, digest=self.tokenizer))

    @classmethod
    def row(cls, stored: Stored) -> RowText:
        from forebay.steps.batch import BatchesOfOne

        return BatchesOfOne(cls.batch(stored), cls.row_tokens)


DETECTED_FIELDS = (
    FieldSpec(name="language_detected", dtype="str", group="text", role="table"),
    FieldSpec(name="language_confidence", dtype="float64", group="text", role="table"),
    FieldSpec(name="language_manifest", dtype="str", group="text", role="table"),
)
"""What rows hold beside `language`, the one that prompts use, where languages are detected."""

_OF_THE_LINE = frozenset({"normalize", "language", "languages", "min_confidence", "phones", "line"})
"""Fields of which `TextLine.document` says what is in keys."""


Part = tuple[int, int | None, str]
"""A part of a window: first and last step of 20 ms, and text; None and "" of one that only begins in the window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Utterance:
    """One transcript, ready to be written: `text` is normalised, `language` None where none is to be named.

    prompt: normalised; empty where there is none. carried: the language that the text named itself (Qwen3-ASR's form).
    spoken: of a window its parts, each with its first and last step of 20 ms, or without text and end where it only
    begins in it; None of other rows.
    """

    sample_id: str
    text: str
    language: str | None = None
    prompt: str = ""
    carried: str | None = None
    spoken: Sequence[Part] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """Token ids of one sample; the first `prefix_len` of them are given, the rest is learnt.

    num_label_tokens: what `max_label_tokens` limits. more: values of the prompt's fields beside the common ones.
    """

    ids: list[int]
    prefix_len: int
    num_label_tokens: int
    more: dict[str, list[int]] = field(default_factory=dict)


class Prompt:
    """A model's way to write transcript, language and prompt as one sequence. A new one has `build`.

    reads_parts: what is spoken when in a window makes a difference.
    """

    reads_parts: ClassVar[bool] = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @property
    def constants(self) -> dict[str, int]:
        """Facts that a collator must know of this prompt beside the vocabulary."""
        return {}

    @property
    def languages(self) -> tuple[str, ...]:
        """The only languages that texts may have; none where any is right."""
        return ()

    def split(self, text: str) -> tuple[str | None, str]:
        """Returns the language that a text carries itself, None where it carries none, and its transcript."""
        return None, text

    def texts(self, utterance: Utterance) -> list[str]:  # noqa: ARG002
        """Returns the texts that `build` will want tokenised. Those that are named here are tokenised in batches."""
        return []

    def build(self, utterance: Utterance) -> TokenSequence:
        """Returns the sequence of an utterance; raises TextError where it cannot be written."""
        raise NotImplementedError

    def of_row(self, kept: Mapping[str, Any], sample_id: str) -> dict[str, list[int]]:  # noqa: ARG002
        """Returns values of fields that are made of kept columns; raises TextError where they cannot be."""
        return {}

    def row_text(self, text: str, ids: Array) -> str:  # noqa: ARG002
        """Returns what a row says that it is a transcript of. text: of the source. ids: what was made of it."""
        return text

    def text_ids(self, ids: list[int]) -> list[int]:
        """Returns the ids from which on only the transcript and control tokens come."""
        return ids


@dataclass(frozen=True, slots=True)
class Encoded:
    """The encoding of a text: the arrays of the step's fields, the text as tokenised, and the name of its limit."""

    fields: Fields
    prepared: PreparedTexts
    num_label_tokens: int


class TextEncoder:
    """Writes transcripts as a step says, with a vocabulary. prompt: of the step."""

    def __init__(self, step: Transcript, vocabulary: Vocabulary) -> None:
        self.step, self.vocabulary = step, vocabulary
        self.prompt = step.writer(vocabulary)

    @cached_property
    def _line(self) -> OpenLine:
        # Opened for the first text: training decodes where a program that texts need is not installed.
        return self.step.text_line().open()

    @property
    def constants(self) -> dict[str, Any]:
        """Facts that a collator must know: prompt, `vocab_size`, `pad_token_id` and `eos_token_id` if any, its own."""
        found = {
            "prompt": self.step.form(),
            "vocab_size": self.vocabulary.size,
            "pad_token_id": self.vocabulary.pad_token_id,
            "eos_token_id": self.vocabulary.eos_token_id,
        }
        return {name: value for name, value in found.items() if value is not None} | self.prompt.constants

    def found(self, rows: EncodedRows) -> dict[str, Any]:
        """Returns what the line makes of texts on this machine, and what its steps find; empty for quick steps alone.

        Tokens do not show it: a symbol table has none for a text of symbols that it lacks.
        """
        texts, languages = ([value or "" for value in values] for values in (rows.texts, rows.languages))
        steps = self.step.text_line().steps
        if all(step.is_quick for step in steps):
            return {}
        made = self._line.prepare(texts, languages)
        return {
            "found": {step.name: dict(step.found()) for step in steps},
            "made": [each.reason if isinstance(each, Problem) else each.text for each in made],
        }

    def encode_rows(self, rows: EncodedRows, *, store: TextStore | None = None) -> Iterator[EncodedRow]:
        """See `RowEncoder`."""
        with span(TOKENS):
            made = self.encode_batch(
                [text or "" for text in rows.texts],
                rows.languages,
                rows.prompts,
                sample_ids=rows.ids,
                store=store,
                spoken=rows.spoken,
            )
        for sample_id, text, language, kept, result in zip(
            rows.ids, rows.texts, rows.languages, rows.kept, made, strict=True
        ):
            said = _languages(language or "", result) if self.step.text_line().detects else {}
            try:
                if isinstance(result, TextError):
                    raise result
                of_row = self.of_row(kept, sample_id=sample_id)
                shown = self.prompt.row_text(text or "", result.fields["input_ids"])
                yield EncodedRow({**result.fields, **of_row, "text": shown, **said})
            except SampleError as err:
                yield EncodedRow(said, err)
        self.keep()

    def encode(self, text: str, language: str | None, prompt: str | None, *, sample_id: str) -> Fields:
        """Returns the int32 arrays of the step's `fields` of one text. Raises TextError, see `encode_batch`."""
        (result,) = self.encode_batch([text], [language], [prompt], sample_ids=[sample_id])
        if isinstance(result, TextError):
            raise result
        return result.fields

    def encode_batch(
        self,
        texts: Sequence[str],
        languages: Sequence[str | None],
        prompts: Sequence[str | None],
        *,
        sample_ids: Sequence[str],
        store: TextStore | None = None,
        prepared: Sequence[PreparedTexts | Problem] | None = None,
        spoken: Sequence[Spoken | None] = (),
    ) -> list[Encoded | TextError]:
        """Returns what every text became, or why it cannot be used, in their order; one does not depend on another.

        languages: code or English name in any case; empty is absent. prompts: earlier text or hot words; empty is
        absent. store: of detection and normalisation, see `OpenLine.prepare`. prepared: what `stages` found already.
        spoken: of windows, see `EncodedRows`.
        Errors: `bad_text`, `empty_text`, `missing_language`, `unknown_language`, `label_too_long`, and what the steps
        of `text.normalize` say.
        """
        # Before normalisation: NFKC turns full-width brackets into those of a header, and nobody meant them as one.
        parts = [self.prompt.split(text) for text in texts]
        stated = [(language or "").strip() for language in languages]
        bodies = self._line.prepare([body for _, body in parts], stated, store=store) if prepared is None else prepared
        windows = self._windows([body for _, body in parts], bodies, spoken or [None] * len(bodies), store)
        utterances = [
            _tried(self._utterance, body, carried, prompt or "", sample_id, window)
            for (carried, _), body, prompt, sample_id, window in zip(
                parts, bodies, prompts, sample_ids, windows, strict=True
            )
        ]
        wanted = (self.prompt.texts(each) for each in utterances if isinstance(each, Utterance))
        with self.vocabulary.together(itertools.chain.from_iterable(wanted)):
            return [
                each if isinstance(each, TextError) else _tried(self._encoded, each, body)
                for each, body in zip(utterances, bodies, strict=True)
            ]

    def _windows(
        self,
        texts: Sequence[str],
        bodies: Sequence[PreparedTexts | Problem],
        spoken: Sequence[Spoken | None],
        store: TextStore | None,
    ) -> Iterator[list[Part] | Problem | None]:
        """Yields the parts of windows, each normalised for itself; one of which nothing is left is none.

        A window of which nothing is left is no window without speech.
        """
        for text, body, said in zip(texts, bodies, spoken, strict=True):
            if said is None or isinstance(body, Problem) or not self.prompt.reads_parts:
                yield None
                continue
            raw = [text[slice(*each[2:])] for each in said if len(each) > 1]
            made = self._line.parts(raw, [body.language] * len(raw), store=store)
            if problem := next((each for each in made if isinstance(each, Problem)), None):
                yield problem
                continue
            clean = [str(each) for each in made] + [""] * (len(said) - len(made))
            timed = [(each[0], each[1] if len(each) > 1 else None) for each in said]
            left = [(*at, part) for at, part in zip(timed, clean, strict=True) if at[1] is None or not is_unseen(part)]
            yield left if left or not said else Problem("empty_text", "the transcript is empty after normalisation")

    def stages(self, texts: Sequence[str], languages: Sequence[str | None]) -> list[tuple[str | None, str, Staged]]:
        """Returns the language that every text carries itself, the text without it, and its way through the line."""
        parts = [self.prompt.split(text) for text in texts]
        stated = [(language or "").strip() for language in languages]
        staged = self._line.stages([body for _, body in parts], stated)
        return [(carried, body, way) for (carried, body), way in zip(parts, staged, strict=True)]

    def of_row(self, kept: Mapping[str, Any], *, sample_id: str) -> Fields:
        """Returns the int32 arrays of the fields of kept columns. Raises TextError, as `Prompt.of_row`."""
        made = self.prompt.of_row(kept, sample_id)
        return {name: np.array(value, dtype=np.int32) for name, value in made.items()}

    def keep(self) -> None:
        """Writes what stores were given and have not written yet."""
        self._line.keep()

    def decode(self, input_ids: Iterable[int] | np.ndarray) -> str:
        """Returns the transcript in the ids of a sample: without prompt, language and control tokens.

        Ids below zero (masked labels) are left out.
        """
        return self.vocabulary.decode(self.prompt.text_ids([int(i) for i in input_ids]))

    def _encoded(self, utterance: Utterance, prepared: PreparedTexts) -> Encoded:
        sequence = self.prompt.build(utterance)
        limit = self.step.max_label_tokens
        if limit is not None and sequence.num_label_tokens > limit:
            raise label_too_long(utterance.sample_id, sequence.num_label_tokens, limit=limit)
        values = {"input_ids": sequence.ids, "prefix_len": [sequence.prefix_len], **sequence.more}
        arrays = {name: np.array(value, dtype=np.int32) for name, value in values.items()}
        return Encoded(arrays, prepared, sequence.num_label_tokens)

    def _utterance(
        self,
        body: PreparedTexts | Problem,
        carried: str | None,
        prompt: str,
        sample_id: str,
        spoken: Sequence[Part] | Problem | None,
    ) -> Utterance:
        for each in (body, spoken):
            if isinstance(each, Problem):
                raise TextError(each.reason, f"{sample_id}: {each.message}")
        assert not isinstance(body, Problem)
        assert not isinstance(spoken, Problem)
        is_silence = spoken is not None and not spoken
        if is_unseen(body.text) and not is_silence:
            raise TextError("empty_text", f"{sample_id}: the transcript is empty after normalisation")
        language = body.language or None
        if self.step.language_tag_mode == "always" and language is None and carried is None and not is_silence:
            raise TextError(
                "missing_language",
                f'{sample_id}: no language, but text.language_tag_mode = "always"; '
                'add it to the manifest, or use "auto"',
            )
        return Utterance(
            sample_id=sample_id,
            text=body.text,
            language=None if self.step.language_tag_mode == "none" else language,
            prompt=self._normalized(prompt, body.language, sample_id).strip() if prompt else "",
            carried=carried and self._normalized(carried, "", sample_id),
            spoken=spoken,
        )

    def _normalized(self, text: str, language: str, sample_id: str) -> str:
        (result,) = self._line.prompts([text], [language])
        if isinstance(result, Problem):
            raise TextError(result.reason, f"{sample_id}: {result.message}")
        return result


def _languages(stated: str, result: Encoded | SampleError) -> dict[str, Any]:
    """Returns the language of a row and its `DETECTED_FIELDS`. Of a text that cannot be used nothing is said."""
    said = (stated, "", 0.0)
    if isinstance(result, Encoded):
        said = (result.prepared.language, result.prepared.detected, result.prepared.confidence)
    language, detected, confidence = said
    return {
        "language": language,
        "language_detected": detected,
        "language_confidence": np.float64(confidence),
        "language_manifest": stated,
    }


def label_too_long(sample_id: str, num_label_tokens: int, *, limit: int) -> TextError:
    """Returns the error for a text of more label tokens than `max_label_tokens` allows."""
    return TextError(
        "label_too_long",
        f"{sample_id}: {num_label_tokens} label tokens, text.max_label_tokens is {limit}; "
        "split the clip, or raise the limit where the model allows it",
    )


def _tried(make: Callable[..., T], *arguments: Any) -> T | TextError:
    """Returns what a function gives, or the TextError that it raises."""
    try:
        return make(*arguments)
    except TextError as err:
        return err
