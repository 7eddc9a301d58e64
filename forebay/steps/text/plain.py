"""`plain`: text without a prompt; `whisper`: Whisper's decoder sequence; `given`: such labels of a data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from forebay.config.tree import Config
from forebay.errors import TextError
from forebay.steps.step import Allocate, Batch, PaddingSide, Stored, TextBatch
from forebay.steps.text.line import whisper_code
from forebay.steps.text.row_encoder import STEP_S
from forebay.steps.text.transcript import Part, Prompt, TokenSequence, Transcript, Utterance
from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.layout import Array
from forebay.store.source import Sample, column

_LAST_STEP = 1500
"""A Whisper's last timestamp is 30 s."""
_OF_WINDOWS = ("timestamps", "previous_text", "no_speech")
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
"""The token of a window without speech, as new and old tokenizers call it."""
_MOST_EARLIER = 223
"""Half of Whisper's 448 positions without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whisper(Transcript):
    """The whole decoder sequence, as `WhisperTokenizer` gives it."""

    name: ClassVar[str] = "whisper"
    stands_alone: ClassVar[bool] = True
    batch_names: ClassVar[frozenset[str]] = frozenset({"decoder_input_ids", "labels"})

    timestamps: bool = False
    """Of windows (`source.window_s`): the times of segments are written in steps of 20 ms, `<|0.00|> text<|1.20|>`; of
    a segment that only begins in the window its start. Other rows have `<|notimestamps|>`."""
    previous_text: float = 0.0
    """Of windows: the share of them, by a hash of their ids, that have the text of the window before behind
    `<|startofprev|>`, its last 223 tokens at most. It is not learnt."""
    no_speech: float = 0.0
    """Of windows: the share of those without speech that are kept, by a hash of their ids. They have the tokenizer's
    `<|nospeech|>` or `<|nocaptions|>`."""

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that super() was compiled for.
        Transcript.__post_init__(self)
        for name in ("previous_text", "no_speech"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise ValueError(f"{name} is {share}, wanted a share from 0 to 1")

    def document(self) -> dict[str, Any]:
        """Returns what keys say of the step; of windows only what is asked for."""
        own = Transcript.document(self)
        behind = {"no_speech_behind": True} if self.no_speech else {}  # windows behind the last segment came later
        return {name: value for name, value in own.items() if name not in _OF_WINDOWS or value} | behind

    @classmethod
    def own_contradictions(cls, config: Config) -> list[str]:
        settings, length_s = {} if config.text is None else config.text.settings, config.source.window_s
        given = [name for name in _OF_WINDOWS if settings.get(name)]
        if given and length_s is None:
            return [f"text.{given[0]} is of windows, and there is no source.window_s; set it to 30, or leave it out"]
        if settings.get("timestamps") and length_s is not None and length_s > _LAST_STEP * STEP_S:
            return [
                f"source.window_s is {length_s:g}, and text.timestamps go to {_LAST_STEP * STEP_S:g} s; set it to 30"
            ]
        return _moved(config) if settings.get("timestamps") else []

    def writer(self, vocabulary: Vocabulary) -> Prompt:
        return WhisperPrompt(vocabulary, timestamps=self.timestamps, no_speech=self.no_speech > 0)

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
        return num_tokens - 1


def _moved(config: Config) -> list[str]:
    """Returns which settings change at what time something is said."""
    source = config.source
    is_cut = source.overlong == "clip" and (source.max_duration_s or 0) < (source.window_s or 0)
    changes = {
        "audio.speeds": config.audio is not None and not {*config.audio.speeds} <= {1.0},
        '[[augment]] kind = "speed"': any(each.kind == "speed" for each in config.augment),
        "loader.crop_s": config.loader.crop_s is not None,
        'source.overlong = "clip"': is_cut,
    }
    said = "text.timestamps are of the sound as it is, and {} changes that; leave one of both out"
    return [said.format(name) for name, is_given in changes.items() if is_given]


class WhisperPrompt(Prompt):
    """`[<|startofprev|> prompt] <|startoftranscript|> [<|en|>] <|transcribe|> <|notimestamps|> text <|endoftext|>`.

    The whole decoder sequence, as `WhisperTokenizer` gives it: at load, all but the last id go in and all but the first
    are the labels, of which the prefix is masked. Source of the format: Radford et al. 2022, section 2.3. A window with
    timestamps has `<|0.00|> text<|1.20|><|1.20|> text<|2.50|><|28.40|><|endoftext|>` behind the task, one without
    speech is `<|startoftranscript|> <|nospeech|> <|endoftext|>`.
    """

    reads_parts: ClassVar[bool] = True

    def __init__(self, vocabulary: Vocabulary, *, timestamps: bool = False, no_speech: bool = False) -> None:
        """Takes the tokenizer. timestamps, no_speech: whether their tokens are needed."""
        super().__init__(vocabulary)
        self._steps: list[int] = []
        if timestamps:
            names = (f"<|{step * STEP_S:.2f}|>" for step in range(_LAST_STEP + 1))
            self._steps = [vocabulary.require(name, prompt="whisper") for name in names]
        silent = next((name for name in _NO_SPEECH if vocabulary.find(name) is not None), _NO_SPEECH[0])
        self._silent_id = vocabulary.require(silent, prompt="whisper") if no_speech else None
        self._previous_id = vocabulary.require("<|startofprev|>", prompt="whisper")
        self._start_id = vocabulary.require("<|startoftranscript|>", prompt="whisper")
        self._task_ids = [
            vocabulary.require(token, prompt="whisper") for token in ("<|transcribe|>", "<|notimestamps|>")
        ]
        self._end_id = vocabulary.require("<|endoftext|>", prompt="whisper")

    def texts(self, utterance: Utterance) -> list[str]:
        """Returns the text or its parts, and the prompt where there is one."""
        parts = utterance.spoken if self._steps else None
        texts = [utterance.text] if parts is None else [_as_earlier(text) for *_, text in parts if text]
        return [*texts, _as_earlier(utterance.prompt)] if utterance.prompt else texts

    def build(self, utterance: Utterance) -> TokenSequence:
        """Returns the sequence of an utterance; TextError `unknown_language` where the tokenizer has no such tag."""
        begin = [*self._previous(utterance), self._start_id]
        prefix = [*begin, *self._language(utterance), *self._task_ids]
        if utterance.spoken is not None and not utterance.spoken and self._silent_id is not None:
            prefix, ids = begin, [*begin, self._silent_id, self._end_id]
        elif utterance.spoken is not None and self._steps:
            prefix = prefix[:-1]  # without <|notimestamps|>
            ids = [*prefix, *self._timed(utterance.spoken, utterance.sample_id), self._end_id]
        else:
            ids = [*prefix, *self._vocabulary.encode(utterance.text, sample_id=utterance.sample_id), self._end_id]
        # Labels are the sequence moved by one, prefix included: that is what Whisper's 448 positions hold.
        return TokenSequence(ids=ids, prefix_len=len(prefix), num_label_tokens=len(ids) - 1)

    def _timed(self, parts: Sequence[Part], sample_id: str) -> Iterator[int]:
        for first, last, text in parts:
            yield self._steps[min(first, _LAST_STEP)]
            if last is not None:
                yield from self._vocabulary.encode(_as_earlier(text), sample_id=sample_id)
                yield self._steps[min(last, _LAST_STEP)]

    def text_ids(self, ids: list[int]) -> list[int]:
        return ids[ids.index(self._start_id) :] if self._start_id in ids else ids

    def _previous(self, utterance: Utterance) -> list[int]:
        if not utterance.prompt:
            return []
        ids = self._vocabulary.encode(_as_earlier(utterance.prompt), sample_id=utterance.sample_id)
        # Of an earlier window as much as Whisper itself goes on from; a prompt of the source is left as it is.
        return [self._previous_id, *(ids if utterance.spoken is None else ids[-_MOST_EARLIER:])]

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
    from forebay.steps.batch import ignore_to, rows_of_tokens

    sequences = column(samples, "input_ids")
    inputs = rows_of_tokens("decoder_input_ids", [ids[:-1] for ids in sequences], pad_token_id, allocate=allocate)
    labels = rows_of_tokens("labels", [ids[1:] for ids in sequences], _IGNORED, allocate=allocate)
    ignore_to(labels, [prefix.item() - 1 for prefix in column(samples, "prefix_len")])
    return {"decoder_input_ids": inputs, "labels": labels}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain(Transcript):
    """The text's own ids, with the end token where the tokenizer has one. Language and prompt are not written."""

    name: ClassVar[str] = "plain"
    stands_alone: ClassVar[bool] = True
    takes_symbols: ClassVar[bool] = True

    end_token: bool = True
    """The end token stands behind a text, where the tokenizer has one. `false` for CTC, which has none."""

    def document(self) -> dict[str, Any]:
        """Returns what keys say of the step; of the end token only where there is to be none."""
        own = Transcript.document(self)
        return {name: value for name, value in own.items() if name != "end_token" or not self.end_token}

    def writer(self, vocabulary: Vocabulary) -> Prompt:
        return PlainPrompt(vocabulary, end_token=self.end_token)

    @classmethod
    def batch(cls, stored: Stored) -> TextBatch:
        """Returns `labels` [B, L]; without audio `input_ids`, `attention_mask`, `labels`, for causal models."""
        if stored.constants.get("features") != "none":
            return label_text
        # Masked, so any id that has an embedding is right where the tokenizer names none.
        return partial(causal_text, pad_token_id=int(stored.constants.get("pad_token_id", 0)))


class PlainPrompt(Prompt):
    """The text's own ids, with the end token where the tokenizer has one and the settings want it."""

    def __init__(self, vocabulary: Vocabulary, *, end_token: bool = True) -> None:
        """Takes the tokenizer."""
        super().__init__(vocabulary)
        self._has_end = end_token

    @property
    def constants(self) -> dict[str, int]:
        """`end_token` 0 where texts have none although the tokenizer may have one."""
        return {} if self._has_end else {"end_token": 0}

    def texts(self, utterance: Utterance) -> list[str]:
        return [utterance.text]

    def build(self, utterance: Utterance) -> TokenSequence:
        """Returns the sequence of an utterance; nothing of it is prefix."""
        end = self._vocabulary.eos_token_id if self._has_end else None
        ids = self._vocabulary.encode(utterance.text, sample_id=utterance.sample_id)
        ids += [] if end is None else [end]
        return TokenSequence(ids=ids, prefix_len=0, num_label_tokens=len(ids))


def label_text(samples: Sequence[Sample], *, padding_side: PaddingSide, allocate: Allocate) -> Batch:  # noqa: ARG001
    """Returns `labels` int64 [batch, longest], -100 on the `prefix_len` prompt tokens and on padding, right."""
    from forebay.steps.batch import ignore_to, rows_of_tokens

    labels = rows_of_tokens("labels", column(samples, "input_ids"), _IGNORED, allocate=allocate)
    ignore_to(labels, [prefix.item() for prefix in column(samples, "prefix_len")])
    return {"labels": labels}


def causal_text(
    samples: Sequence[Sample], *, pad_token_id: int, padding_side: PaddingSide, allocate: Allocate
) -> Batch:
    """Returns `input_ids`, `attention_mask` and `labels`, all int64 [batch, longest].

    Labels are the ids, -100 on padding and on the `prefix_len` prompt tokens, by position, so that any padding side is
    right; a causal model moves them by one itself.
    """
    from forebay.steps.batch import filled, ignore_to, rows_of_tokens

    sequences, prefixes = column(samples, "input_ids"), column(samples, "prefix_len")
    inputs = rows_of_tokens("input_ids", sequences, pad_token_id, side=padding_side, allocate=allocate)
    labels = rows_of_tokens("labels", sequences, _IGNORED, side=padding_side, allocate=allocate)
    mask = filled("attention_mask", (len(sequences), inputs.shape[1]), 0, allocate=allocate)
    starts = [inputs.shape[1] - len(ids) if padding_side == "left" else 0 for ids in sequences]
    for row, start, ids in zip(mask.numpy(), starts, sequences, strict=True):
        row[start : start + len(ids)] = 1
    ignore_to(labels, [start + int(prefix[0]) for start, prefix in zip(starts, prefixes, strict=True)])
    return {"input_ids": inputs, "attention_mask": mask, "labels": labels}


_IGNORED = -100
"""`forebay.steps.batch.IGNORED`, without torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenLabels(Transcript):
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

    @classmethod
    def own_contradictions(cls, config: Config) -> list[str]:
        said = 'source.window_s joins texts, and prompt = "given" takes token ids; leave one of both out'
        return [] if config.source.window_s is None else [said]

    def writer(self, vocabulary: Vocabulary) -> Prompt:
        """Returns what reads the labels."""
        return GivenPrompt(vocabulary)

    @classmethod
    def batch(cls, stored: Stored) -> TextBatch:
        return Whisper.batch(stored)

    @classmethod
    def row_tokens(cls, num_tokens: Any, num_frames: Any) -> Any:
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
        return self._vocabulary.decode(ids.tolist())

    def _unpadded(self, labels: list[int]) -> list[int]:
        """Returns the labels without the -100 at their end, or the end tokens behind the first of those there."""
        end = len(labels)
        while end and labels[end - 1] == _IGNORED:
            end -= 1
        while end > 1 and labels[end - 2 : end] == [self._end_id] * 2:
            end -= 1
        return labels[:end]
