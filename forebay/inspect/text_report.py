"""The report of `forebay text` on all texts of a source: the figures, gathered a batch at a time, and their report.

The figures are columns of numbers and a few examples, no texts. Texts are looked at as a build takes them, with what
they are on their way: behind every step, and as tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from forebay.errors import SampleError, TextError
from forebay.inspect.checks.limits import Misfits, misfits
from forebay.inspect.text_diff import KINDS, Count, around, changes, counted, marked, shortened, text_lines
from forebay.preprocess.group import NO_TEXT
from forebay.steps.text.line import Staged
from forebay.steps.text.normal.normal_step import Problem, entries
from forebay.steps.text.transcript import Encoded, TextEncoder, Transcript, label_too_long
from forebay.store.layout import Array, Ints
from forebay.terminal import counted as amount
from forebay.terminal import human_share, table, wrapped
from forebay.visible import from_here, named, printable


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedTexts:
    """A text of a manifest. text: None: none; language, prompt: "": none; spoken: of a window, see `EncodedRows`."""

    sample_id: str
    text: str | None
    language: str = ""
    prompt: str = ""
    spoken: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """A text and its way. carried: the language that it names itself, "" where it names none. body: the text without
    it. staged: its way through the steps.

    ids: all tokens, the first `prefix_len` of them given; none where it was not written. text_ids: those of the text,
    with control tokens. text: as it was tokenised, "" where it failed. failure: why a build leaves it out.
    """

    asked: AskedTexts
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
        self.step_names = () if step.reads_labels else entries(step.normalize)
        self._needs_text = needs_text
        # Without the limit: a label that is too long has tokens to show.
        self.encoder: TextEncoder = replace(step, max_label_tokens=None).opened(folder)

    def look(self, texts: Sequence[AskedTexts]) -> list[Look]:
        """Returns what every text became, in their order."""
        given, languages = [asked.text or "" for asked in texts], [asked.language for asked in texts]
        prompts, ids, spoken = ([getattr(asked, name) for asked in texts] for name in ("prompt", "sample_id", "spoken"))
        staged = self.encoder.stages(given, languages)
        done = [way.prepared for _, _, way in staged]
        made = self.encoder.encode_batch(given, languages, prompts, sample_ids=ids, prepared=done, spoken=spoken)
        looks = []
        for asked, (carried, body, way), result in zip(texts, staged, made, strict=True):
            # Steps are called as the config calls them: two functions have one name as steps.
            named = zip(self.step_names, way.steps, strict=False)
            way = replace(way, steps=tuple((entry, after) for entry, (_, after) in named))
            looks.append(self._look(Look(asked=asked, carried=carried or "", body=body, staged=way), result))
        return looks

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
        if self.encoder.step.reads_labels:
            text = self.encoder.prompt.row_text("", ids)
            look = replace(look, body=text)
        return replace(
            look,
            text=text,
            ids=ids.tolist(),
            text_ids=self.encoder.prompt.text_ids(ids.tolist()),
            prefix_len=int(result.fields["prefix_len"][0]),
            num_label_tokens=count,
            failure=label_too_long(asked.sample_id, count, limit=self.limit or 0) if is_long else None,
        )


EXAMPLES = 3  # of what a step changes


@dataclass(slots=True)
class StepFigures:
    """The figures of a step. texts: how many it changed. examples: sample id, text in front of it and behind it."""

    name: str
    seen: int = 0
    texts: int = 0
    removed: int = 0
    added: int = 0
    failed: int = 0
    examples: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass(slots=True)
class Failed:
    """Samples that a build leaves out for one reason; `sample_id` and `message` are the first one's."""

    reason: str
    count: int
    sample_id: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlier:
    """A text that does not fit its recording. row: of the tally. check: of `forebay lint`, which finds the same.

    characters: without white space. median_per_s, score: of its language, in characters and in robust deviations; None
    for a language of too few recordings.
    """

    row: int
    check: str
    characters: int
    seconds: float
    per_s: float
    median_per_s: float | None
    score: float | None


class TextTally:
    """The figures. Rows are counted from 0 in the order in which they are added."""

    def __init__(self, step_names: Sequence[str], codes: Array) -> None:
        """codes: the kind of each token, see `Pieces.codes`."""
        self.steps = {name: StepFigures(name) for name in step_names}
        self.failures: dict[str, Failed] = {}
        self._codes = codes
        self._languages: dict[str, int] = {}
        self._columns: dict[str, list[Array]] = {}
        self._kinds: dict[int, Array] = {}

    def add(self, looks: Sequence[Look], seconds: Array | None = None) -> None:
        """Adds texts. seconds: float64, the lengths of their recordings, NaN where one is not known."""
        changed: dict[tuple[str, str], Count] = {}
        for look in looks:
            self._add_steps(look, changed)
            if look.failure is not None:
                self.fail(look.failure.reason, look.asked.sample_id, str(look.failure))
        numbers = self._languages
        languages = np.array([numbers.setdefault(look.language, len(numbers)) for look in looks], np.int64)
        self._add_tokens(looks, languages)
        hashes = [xxhash.xxh3_64_intdigest(look.text.encode("utf-8", "surrogatepass")) for look in looks]
        columns: dict[str, Any] = {
            "language": languages,
            "is_usable": np.array([look.failure is None for look in looks], bool),
            "characters": np.array([len(look.text) for look in looks], np.int64),
            "spoken": np.array([sum(map(len, look.body.split())) for look in looks], np.int64),
            "labels": np.array([look.num_label_tokens for look in looks], np.int64),
            "hash": np.array(hashes, np.uint64),
            "seconds": np.full(len(looks), np.nan) if seconds is None else np.asarray(seconds, np.float64),
        }
        for name, column in columns.items():
            self._columns.setdefault(name, []).append(column)

    def _add_steps(self, look: Look, changed: dict[tuple[str, str], Count]) -> None:
        for name, before, after in look.changed():
            step = self.steps[name]
            step.seen += 1
            if not isinstance(after, str):
                step.failed += 1
            elif before != after:
                if (before, after) not in changed:
                    changed[before, after] = counted(before, after)
                removed, added = changed[before, after]
                step.texts, step.removed, step.added = step.texts + 1, step.removed + removed, step.added + added
                if len(step.examples) < EXAMPLES and before not in {known for _, known, _ in step.examples}:
                    step.examples.append((look.asked.sample_id, before, after))

    def fail(self, reason: str, sample_id: str, message: str) -> None:
        """Counts a sample that a build leaves out."""
        self.failures.setdefault(reason, Failed(reason, 0, sample_id, message)).count += 1

    def _add_tokens(self, looks: Sequence[Look], languages: Ints) -> None:
        """Counts the tokens of texts by language and kind."""
        lengths = [len(look.text_ids) for look in looks]
        ids = np.fromiter(itertools.chain.from_iterable(look.text_ids for look in looks), np.int64, sum(lengths))
        places = np.repeat(languages, lengths) * len(KINDS) + self._codes[ids]
        counts = np.bincount(places, minlength=len(self._languages) * len(KINDS)).reshape(-1, len(KINDS))
        for number, row in enumerate(counts):
            self._kinds[number] = self._kinds.get(number, np.zeros(len(KINDS), np.int64)) + row

    def column(self, name: str) -> Array:
        """Returns a column of all rows."""
        found = self._columns.get(name)
        return np.concatenate(found) if found else np.zeros(0)

    def __len__(self) -> int:
        return len(self.column("labels"))

    @property
    def languages(self) -> list[str]:
        """The languages by their numbers; "" where none is known."""
        return list(self._languages)

    def kinds(self, number: int) -> Mapping[str, int]:
        """Returns the tokens of a language's texts by kind."""
        return dict(zip(KINDS, self._kinds[number].tolist(), strict=True))

    def longest(self, most: int) -> list[int]:
        """Returns the rows of the longest labels, the longest first."""
        labels = self.column("labels")
        order = np.argsort(-labels, kind="stable")[:most]
        return [row for row in order.tolist() if labels[row]]

    def pace(self) -> Misfits:
        """Returns how fast the texts are spoken, and which do not fit their recordings, as `forebay lint` judges it."""
        usable = self.column("is_usable").astype(bool)
        seconds = np.where(usable, self.column("seconds"), np.nan)
        language = self.column("language").astype(np.int64)
        return misfits(self.column("spoken"), np.nan_to_num(seconds), language, usable=usable)

    def outliers(self) -> list[Outlier]:
        """Returns the texts that do not fit their recordings, those far from their language first."""
        pace, language = self.pace(), self.column("language").astype(np.int64)
        medians = {number: float(np.exp(middle)) for number, (middle, _) in pace.ranges.items()}
        found = [
            Outlier(
                row=row,
                check=check,
                characters=int(self.column("spoken")[row]),
                seconds=float(self.column("seconds")[row]),
                per_s=float(pace.per_s[row]),
                median_per_s=medians.get(int(language[row])),
                score=float(pace.scores[row]) if np.isfinite(pace.scores[row]) else None,
            )
            for check, rows in pace.rows()
            for row in rows.tolist()
        ]
        return sorted(found, key=lambda each: -abs(each.score or np.inf))

    def medians(self) -> dict[int, float]:
        """Returns the median of the characters a second by the number of the language."""
        language, per_s = self.column("language"), self.pace().per_s
        known = np.isfinite(per_s)
        return {number: float(np.median(per_s[known & (language == number)])) for number in np.unique(language[known])}

    def repeated(self) -> list[tuple[int, int]]:
        """Returns (row of the first sample, samples) of each text, as it is tokenised, of more than one usable sample.

        The most frequent texts come first.
        """
        rows = np.flatnonzero(self.column("is_usable"))
        if not len(rows):
            return []
        _, first, counts = np.unique(self.column("hash")[rows], return_index=True, return_counts=True)
        many = np.flatnonzero(counts > 1)
        order = many[np.lexsort((first[many], -counts[many]))]
        return [(int(rows[first[place]]), int(counts[place])) for place in order.tolist()]


SHOWN = 5
"""Samples of a section that are shown; --json has up to `MOST` of them."""
MOST = 100


@dataclass(frozen=True, kw_only=True)
class TextReport:
    """The figures of a source. is_part: whether `source.max_samples` ended the listing. rows: of the listing.

    excluded: samples by the setting that leaves them out. durations: where lengths of recordings come from, "" without.
    """

    config: str
    tally: TextTally
    rows: pa.Table
    max_label_tokens: int | None
    detects: bool
    is_part: bool = False
    durations: str = ""
    excluded: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON document, see docs/text.md."""
        tally = self.tally
        outliers, repeated, labels = tally.outliers(), tally.repeated(), tally.column("labels")
        return {
            "config": self.config,
            "read": "raw data",
            "num_texts": len(tally),
            "is_part": self.is_part,
            "detects": self.detects,
            "steps": [self._step_json(name) for name in tally.steps],
            "languages": [self._language_json(number) for number in range(len(tally.languages))],
            "labels": {
                "max_label_tokens": self.max_label_tokens,
                "longest": [{**self._sample(row), "label_tokens": int(labels[row])} for row in tally.longest(MOST)],
            },
            "pace": {
                "durations": self.durations or None,
                "num_outliers": len(outliers),
                "outliers": [
                    {**self._sample(each.row), **{k: v for k, v in asdict(each).items() if k != "row"}}
                    for each in outliers[:MOST]
                ],
            },
            "repeated": {
                "num_texts": len(repeated),
                "num_samples": sum(count for _, count in repeated),
                "top": [{"count": n, "text": self._text(row), **self._sample(row)} for row, n in repeated[:MOST]],
            },
            "excluded": dict(self.excluded),
            "failures": [asdict(each) for each in tally.failures.values()],
        }

    def lines(self) -> Iterator[str]:
        """Yields the lines."""
        count = len(self.tally)
        what = f"the first {amount(count, 'texts')}" if self.is_part else amount(count, "texts")
        yield from wrapped("", printable(f"{from_here(self.config)}: {what}, read from the raw data"))
        if self.excluded:
            counts = ", ".join(f"{reason} {number:,}" for reason, number in self.excluded.items())
            yield from wrapped("  excluded by settings: ", printable(counts))
        parts = (self._step_lines, self._token_lines, self._label_lines, self._pace_lines, self._repeated_lines)
        for part in parts if count else ():
            yield from part()
        yield from self._failure_lines()

    def _step_json(self, name: str) -> dict[str, Any]:
        step = asdict(self.tally.steps[name])
        step["examples"] = [dict(zip(("sample_id", "before", "after"), each, strict=True)) for each in step["examples"]]
        return {"step": step.pop("name"), **step}

    def _language_json(self, number: int) -> dict[str, Any]:
        tally, kinds = self.tally, self.tally.kinds(number)
        rows = tally.column("language") == number
        written = rows & (tally.column("labels") > 0)
        characters, tokens = int(tally.column("characters")[written].sum()), sum(kinds.values()) - kinds["control"]
        return {
            "language": tally.languages[number],
            "texts": int(rows.sum()),
            "characters": characters,
            "tokens": tokens,
            "tokens_per_character": tokens / characters if characters else None,
            "unknown": kinds["unknown"],
            "byte_fallback": kinds["byte"],
            "pieces_of_characters": kinds["piece"],
            "median_characters_per_s": tally.medians().get(number),
        }

    def _sample(self, row: int) -> dict[str, Any]:
        return {"sample_id": str(self.rows["sample_id"][row].as_py()), "row": self.rows["row"][row].as_py()}

    def _text(self, row: int) -> str:
        return str(self.rows["text"][row].as_py() or "")

    def _step_lines(self) -> Iterator[str]:
        steps = list(self.tally.steps.values())
        if not steps:
            yield from ("", 'steps: none (text.normalize = "none")')
            return
        rows = [
            (
                step.name,
                f"{step.texts:,}",
                human_share(step.texts / step.seen) if step.seen else "-",
                f"{step.removed:,}",
                f"{step.added:,}",
                f"{step.failed:,}" if step.failed else "",
            )
            for step in steps
        ]
        yield ""
        yield from _table(("steps", "texts changed", "share", "removed", "added", "failed"), rows)
        for step in steps:
            if step.examples:
                yield f"{step.name}, for example:"
            for sample_id, before, after in step.examples:
                said = marked(around(changes(before, after)))
                yield from text_lines("  ", f"{printable(sample_id)}: {said}")

    def _token_lines(self) -> Iterator[str]:
        found = [self._language_json(number) for number in range(len(self.tally.languages))]
        found.sort(key=lambda each: (-each["texts"], each["language"]))
        rows = [
            (
                printable(each["language"]) or "unknown",
                *(f"{each[name]:,}" for name in ("texts", "characters", "tokens")),
                "-" if each["tokens_per_character"] is None else f"{each['tokens_per_character']:.3f}",
                *(f"{each[name]:,}" for name in ("unknown", "byte_fallback", "pieces_of_characters")),
            )
            for each in found
        ]
        head = ("languages", "texts", "characters", "tokens", "per character", "unknown", "byte-fallback", "pieces")
        yield ""
        yield from _table(head, rows)
        if any(each["pieces_of_characters"] for each in found):
            yield from wrapped("  ", "pieces: byte-level tokens that are not whole characters")

    def _label_lines(self) -> Iterator[str]:
        labels, limit = self.tally.column("labels"), self.max_label_tokens
        most = "no text.max_label_tokens" if limit is None else f"text.max_label_tokens is {limit:,}"
        over = 0 if limit is None else int((labels > limit).sum())
        above = f", {amount(over, 'texts')} above" if over else ""
        yield ""
        yield from wrapped("", f"longest labels ({most}{above})")
        for row in self.tally.longest(SHOWN):
            yield from self._sample_lines(row, f"{int(labels[row]):,} tokens")

    def _pace_lines(self) -> Iterator[str]:
        yield ""
        if not self.durations:
            yield from wrapped("", "characters a second: the texts have no recordings of known length")
            return
        known = int(np.isfinite(self.tally.pace().per_s).sum())
        names = [printable(name) or "unknown" for name in self.tally.languages]
        said = ", ".join(f"{names[number]} {median:.1f}" for number, median in self.tally.medians().items())
        about = f"{said or 'none'} ({amount(known, 'recordings')}, {self.durations})"
        yield from wrapped("characters a second, medians: ", about)
        outliers = self.tally.outliers()
        if outliers:
            count = amount(len(outliers), "texts")
            yield from wrapped("  ", f"{count} may not be of their recording, see forebay lint")
        for each in outliers[:SHOWN]:
            text = f"{amount(each.characters, 'characters')} in {each.seconds:.2f} s, {each.per_s:.1f} a second"
            median = "" if each.median_per_s is None else f", the median is {each.median_per_s:.1f}"
            yield from self._sample_lines(each.row, f"{each.check}: {text}{median}")

    def _repeated_lines(self) -> Iterator[str]:
        repeated = self.tally.repeated()
        yield ""
        if not repeated:
            yield "repeated texts: none"
            return
        total = sum(count for _, count in repeated)
        yield f"repeated texts: {amount(len(repeated), 'texts')} of {amount(total, 'samples')}"
        for row, count in repeated[:SHOWN]:
            yield from self._sample_lines(row, f"{count:,} samples")

    def _failure_lines(self) -> Iterator[str]:
        failures = sorted(self.tally.failures.values(), key=lambda each: (-each.count, each.reason))
        if count := sum(each.count for each in failures):
            yield ""
            yield from wrapped("", f"left out: {amount(count, 'samples')}; forebay explain REASON says what to do")
        for each in failures:
            yield from wrapped(f"  {each.reason} {each.count:,}: ", printable(each.message))

    def _sample_lines(self, row: int, said: str) -> Iterator[str]:
        """Yields what is said of a sample and how its text begins, on a line where there is room."""
        sample = self._sample(row)
        place = f"{printable(sample['sample_id'])} (row {sample['row']}): {said}: "
        yield from text_lines("  ", place + named(shortened(self._text(row), most=60)))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a table without the columns that hold nothing."""
    full = [place for place in range(len(head)) if any(row[place] for row in rows)]
    return table([head[place] for place in full], [[row[place] for place in full] for row in rows], left=1)
