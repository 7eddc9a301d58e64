"""Texts as a build takes them, with what they are on their way: behind every step, and as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.errors import SampleError, TextError
from forebay.preprocess.cut import NO_TEXT
from forebay.steps.text.line import Staged
from forebay.steps.text.normal.step import Problem
from forebay.steps.text.transcript import Encoded, TextEncoder, Transcript, label_too_long


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A text of a manifest. text: None where nothing gives one. language, prompt: "" where there is none."""

    sample_id: str
    text: str | None
    language: str = ""
    prompt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What a text became. carried: the language that it names itself, "" where it names none. body: the text without
    it. staged: its way through the steps.

    ids: all tokens, the first `prefix_len` of them given; none where it was not written. text_ids: those of the text,
    with control tokens. text: as it was tokenised, "" where it failed. failure: why a build leaves it out.
    """

    asked: Asked
    body: str
    staged: Staged
    text: str = ""
    carried: str = ""
    ids: Sequence[int] = ()
    text_ids: Sequence[int] = ()
    prefix_len: int = 0
    num_label_tokens: int = 0
    failure: SampleError | None = None

    @property
    def language(self) -> str:
        """The language that prompts use, "" where none is known."""
        return self.carried or self.staged.language or self.asked.language

    def changed(self) -> list[tuple[str, str, str | Problem]]:
        """Returns (step, text in front of it, text behind it or why it failed) of every step."""
        found, before = [], self.body
        for name, after in self.staged.steps:
            found.append((name, before, after))
            before = after if isinstance(after, str) else before
        return found


class Looker:
    """Looks at texts as a config's `[text]` has them."""

    def __init__(self, step: Transcript, folder: Path, *, needs_text: bool) -> None:
        """Loads tokenizer and steps; raises ConfigError as a build does. needs_text: None is no text."""
        self.limit = step.max_label_tokens
        self.detects = step.text_line().detects
        # Token ids that a column holds go through no step.
        self.step_names = () if step.reads_labels else tuple(each.name for each in step.text_line().steps)
        self._needs_text = needs_text
        # Without the limit: a label that is too long has tokens to show.
        self.encoder: TextEncoder = replace(step, max_label_tokens=None).encoder(folder)

    def look(self, texts: Sequence[Asked]) -> list[Look]:
        """Returns what every text became, in their order."""
        given, languages = [asked.text or "" for asked in texts], [asked.language for asked in texts]
        staged = self.encoder.stages(given, languages)
        made = self.encoder.encode_batch(
            given,
            languages,
            [asked.prompt for asked in texts],
            sample_ids=[asked.sample_id for asked in texts],
            prepared=[way.prepared for _, _, way in staged],
        )
        if self.encoder.reads_labels:
            staged = [(carried, body, replace(way, steps=())) for carried, body, way in staged]
        return [
            self._look(Look(asked=asked, carried=carried or "", body=body, staged=way), result)
            for asked, (carried, body, way), result in zip(texts, staged, made, strict=True)
        ]

    def _look(self, look: Look, result: Encoded | TextError) -> Look:
        asked = look.asked
        if asked.text is None and self._needs_text:
            failure = SampleError(NO_TEXT, f"sample {asked.sample_id}: nothing gives its text; add it, or remove it")
            return replace(look, failure=failure)
        if isinstance(result, TextError):
            return replace(look, failure=result)
        ids, count = result.fields["input_ids"], result.num_label_tokens
        is_long = self.limit is not None and count > self.limit
        text = result.prepared.text
        if self.encoder.reads_labels:
            text = self.encoder.row_text("", ids)
            look = replace(look, body=text)
        return replace(
            look,
            text=text,
            ids=ids.tolist(),
            text_ids=self.encoder.text_ids(ids),
            prefix_len=int(result.fields["prefix_len"][0]),
            num_label_tokens=count,
            failure=label_too_long(asked.sample_id, count, limit=self.limit or 0) if is_long else None,
        )
