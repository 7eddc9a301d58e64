"""What `forebay text` says of all texts of a source: sections of lines, and the document of --json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.inspect.text_diff import around, changes, marked, shortened, text_lines
from forebay.inspect.text_tally import TextTally
from forebay.terminal import columns, human_share, table, wrapped
from forebay.visible import from_here, named, printable

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
        outliers, repeated = tally.outliers(), tally.repeated()
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
                "longest": [
                    {**self._sample(row), "label_tokens": int(tally.column("labels")[row])}
                    for row in tally.longest(MOST)
                ],
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
                "num_samples": sum(each.count for each in repeated),
                "top": [
                    {"count": each.count, "text": self._text(each.row), **self._sample(each.row)}
                    for each in repeated[:MOST]
                ],
            },
            "excluded": dict(self.excluded),
            "failures": [asdict(each) for each in tally.failures.values()],
        }

    def lines(self) -> Iterator[str]:
        """Yields the lines."""
        count = len(self.tally)
        what = f"the first {_counted(count, 'text')}" if self.is_part else _counted(count, "text")
        yield from wrapped("", printable(f"{from_here(self.config)}: {what}, read from the raw data"))
        if self.excluded:
            counts = ", ".join(f"{reason} {number:,}" for reason, number in self.excluded.items())
            yield from wrapped("  excluded by settings: ", printable(counts))
        if count:
            yield from self._step_lines()
            yield from self._token_lines()
            yield from self._label_lines()
            yield from self._pace_lines()
            yield from self._repeated_lines()
        yield from self._failure_lines()

    def _step_json(self, name: str) -> dict[str, Any]:
        step = asdict(self.tally.steps[name])
        return {
            "step": step.pop("name"),
            **step,
            "examples": [{"sample_id": i, "before": before, "after": after} for i, before, after in step["examples"]],
        }

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
        return {"sample_id": self._id(row), "row": self.rows["row"][row].as_py()}

    def _id(self, row: int) -> str:
        return str(self.rows["sample_id"][row].as_py())

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
                yield from text_lines("  ", f"{printable(sample_id)}: {said}", width=columns())

    def _token_lines(self) -> Iterator[str]:
        found = [self._language_json(number) for number in range(len(self.tally.languages))]
        found.sort(key=lambda each: (-each["texts"], each["language"]))
        rows = [
            (
                printable(each["language"]) or "unknown",
                f"{each['texts']:,}",
                f"{each['characters']:,}",
                f"{each['tokens']:,}",
                "-" if each["tokens_per_character"] is None else f"{each['tokens_per_character']:.3f}",
                f"{each['unknown']:,}",
                f"{each['byte_fallback']:,}",
                f"{each['pieces_of_characters']:,}",
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
        yield ""
        above = f", {_counted(over, 'text')} above" if over else ""
        yield from wrapped("", f"longest labels ({most}{above})")
        for row in self.tally.longest(SHOWN):
            yield from self._sample_lines(row, f"{int(labels[row]):,} tokens")

    def _pace_lines(self) -> Iterator[str]:
        yield ""
        if not self.durations:
            yield from wrapped("", "characters a second: the texts have no recordings of known length")
            return
        known = int(np.isfinite(self.tally.pace().per_s).sum())
        medians = self.tally.medians()
        said = ", ".join(
            f"{printable(self.tally.languages[number]) or 'unknown'} {median:.1f}" for number, median in medians.items()
        )
        yield from wrapped(
            "characters a second, medians: ", f"{said or 'none'} ({_counted(known, 'recording')}, {self.durations})"
        )
        outliers = self.tally.outliers()
        if outliers:
            yield from wrapped(
                "  ", f"{_counted(len(outliers), 'text')} may not be of their recording, see forebay lint"
            )
        for each in outliers[:SHOWN]:
            text = f"{_counted(each.characters, 'character')} in {each.seconds:.2f} s, {each.per_s:.1f} a second"
            median = "" if each.median_per_s is None else f", the median is {each.median_per_s:.1f}"
            yield from self._sample_lines(each.row, f"{each.check}: {text}{median}")

    def _repeated_lines(self) -> Iterator[str]:
        repeated = self.tally.repeated()
        yield ""
        if not repeated:
            yield "repeated texts: none"
            return
        total = sum(each.count for each in repeated)
        yield f"repeated texts: {_counted(len(repeated), 'text')} of {_counted(total, 'sample')}"
        for each in repeated[:SHOWN]:
            yield from self._sample_lines(each.row, f"{each.count:,} samples")

    def _failure_lines(self) -> Iterator[str]:
        failures = sorted(self.tally.failures.values(), key=lambda each: (-each.count, each.reason))
        if not failures:
            return
        yield ""
        count = sum(each.count for each in failures)
        yield from wrapped("", f"left out: {_counted(count, 'sample')}; forebay explain REASON says what to do")
        for each in failures:
            yield from wrapped(f"  {each.reason} {each.count:,}: ", printable(each.message))

    def _sample_lines(self, row: int, said: str) -> Iterator[str]:
        """Yields what is said of a sample and how its text begins, on a line where there is room."""
        place = f"{printable(self._id(row))} (row {self.rows['row'][row].as_py()}): {said}: "
        yield from text_lines("  ", place + named(shortened(self._text(row), most=60)), width=columns())


def _counted(count: int, unit: str) -> str:
    return f"{count:,} {unit}" if count == 1 else f"{count:,} {unit}s"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a table without the columns that hold nothing."""
    full = [place for place in range(len(head)) if any(row[place] for row in rows)]
    return table([head[place] for place in full], [[row[place] for place in full] for row in rows], left=1)
