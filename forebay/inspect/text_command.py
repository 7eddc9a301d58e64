"""`forebay text`: one text, one sample of a source, or the report over all of them.

What `forebay text` says of one text: what it was, what every step makes of it, its tokens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import SOURCE_KINDS
from forebay.config.tree import Config
from forebay.errors import ConfigError, SampleError
from forebay.inspect.sample import number_of
from forebay.inspect.text_diff import TextPart, VocabularyPieces, changes, counted, first_of, marked, wrapped_parts
from forebay.inspect.text_report import AskedTexts, Look, Looker, TextReport, TextTally
from forebay.preprocess.groups import Groups
from forebay.preprocess.listing import listed
from forebay.preprocess.pool import Pool
from forebay.rows.manifest import Manifest, storable
from forebay.rows.named_files import shown_name
from forebay.rows.windows import SPOKEN
from forebay.steps.recipe import Recipe, recipe_of
from forebay.steps.text.normal.normal_step import Problem
from forebay.steps.text.transcript import Transcript
from forebay.store.layout import Array
from forebay.store.remote.raw.raw_sources import naming_urls
from forebay.terminal import LABEL, Progress, columns, table, wrapped
from forebay.visible import VisibleStream, from_here, has_colours, named, printable

MOST_CHARACTERS, MOST_TOKENS = 10_000, 2_000
"""The most that is shown of one text; --json has all."""
Line = Sequence[TextPart]
"""A line of parts; parts that changed have a colour, or marks."""


@dataclass(frozen=True, kw_only=True)
class TextView:
    """One text. source: the file that it came from, "" for a text of the command line. row: of the listing.

    is_diff: whether steps show what they changed instead of the whole text.
    """

    look: Look
    pieces: VocabularyPieces
    max_label_tokens: int | None
    detects: bool
    source: str = ""
    row: int | None = None
    is_diff: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON document, see docs/text.md."""
        look, staged, failure = self.look, self.look.staged, self.look.failure
        return {
            "sample_id": look.asked.sample_id if self.source else None,
            "source": self.source or None,
            "row": self.row,
            "text": look.asked.text,
            "language": {
                "given": look.asked.language,
                "used": look.language,
                "detected": staged.detected if self.detects else None,
                "confidence": staged.confidence if self.detects else None,
            },
            "steps": [self._step_json(*change) for change in look.changed()],
            "tokens": self._tokens(),
            "num_tokens": len(look.ids),
            "prefix_len": look.prefix_len,
            "num_label_tokens": look.num_label_tokens,
            "max_label_tokens": self.max_label_tokens,
            "failure": None if failure is None else {"reason": failure.reason, "message": str(failure)},
        }

    def _step_json(self, name: str, before: str, after: str | Problem) -> dict[str, Any]:
        if isinstance(after, Problem):
            return {"step": name, "text": None, "removed": 0, "added": 0, "failure": after.reason}
        parts = {"changes": [part._asdict() for part in changes(before, after)]} if self.is_diff else {}
        return {"step": name, "text": after, **counted(before, after)._asdict(), "failure": None, **parts}

    def _tokens(self, most: int | None = None) -> list[dict[str, Any]]:
        found = []
        for place, number in enumerate(self.look.ids[:most]):
            piece = self.pieces.piece(number)
            role = "prefix" if place < self.look.prefix_len else "label"
            found.append({"id": number, "piece": piece.shown(), "role": role, "kind": piece.kind})
        return found

    def lines(self, *, has_marks: bool = True) -> Iterator[Line]:
        """Yields the lines. has_marks: changes are written `[-removed-]{+added+}`, else they are parts of their own."""
        look = self.look
        if self.source:
            place = f"sample {look.asked.sample_id}: {self.source}, row {self.row} of the listing"
            yield from _plain(wrapped("", printable(place)))
        yield from _plain(wrapped(_head("language"), printable(self._language())))
        yield from _text("text", [TextPart("kept", look.asked.text or "")])
        if look.body != (look.asked.text or ""):
            yield from _text("transcript", [TextPart("kept", look.body)])
        for name, before, after in look.changed():
            if isinstance(after, Problem):
                yield from _plain(wrapped(_head(name), f"fails: {after.reason}"))
            elif before == after:
                yield from _plain([_head(name) + "unchanged"])
            else:
                parts = changes(before, after) if self.is_diff else [TextPart("kept", after)]
                yield from _text(name, parts, has_marks=has_marks)
        if look.ids:
            yield from _plain(self._token_lines())
        if look.failure is not None:
            yield from _plain(wrapped(_head("left out"), f"{look.failure.reason}: {printable(str(look.failure))}"))
            yield from _plain([_head("") + f"forebay explain {look.failure.reason}"])

    def _language(self) -> str:
        look, staged = self.look, self.look.staged
        given = look.asked.language
        if look.carried:
            return f"{look.carried}, named by the text"
        if not self.detects:
            return given or "none"
        if not staged.detected:
            said = f"nothing was detected (confidence {staged.confidence:.2f})" if not given else "as it was given"
            return f"{look.language or 'none'}, {said}"
        other = f"; {given} was given" if given and given != staged.detected else ""
        return f"{look.language}, detected with confidence {staged.confidence:.2f}{other}"

    def _token_lines(self) -> Iterator[str]:
        look = self.look
        most = self.max_label_tokens
        limit = "no limit is set" if most is None else f"text.max_label_tokens is {most:,}"
        given = f"the first {look.prefix_len:,} given; {look.num_label_tokens:,} label tokens"
        yield from wrapped(_head("tokens"), f"{len(look.ids):,}, {given}, {limit}")
        kinds = {"text": "", "byte": "byte-fallback", "piece": "piece of a character"}
        rows = [
            (
                str(each["id"]),
                each["piece"],
                ", ".join(filter(None, (each["role"], kinds.get(each["kind"], each["kind"])))),
            )
            for each in self._tokens(MOST_TOKENS)
        ]
        yield from (line.rstrip() for line in table(("id", "token", "what it is"), rows, left=3))
        if len(look.ids) > MOST_TOKENS:
            yield f"  ... and {len(look.ids) - MOST_TOKENS:,} more tokens: --json"


def _head(name: str) -> str:
    return f"{printable(name):<{LABEL}}" if len(name) < LABEL else f"{printable(name)} "


def _plain(lines: Sequence[str] | Iterator[str]) -> Iterator[Line]:
    return ([TextPart("kept", line)] for line in lines)


def _text(name: str, parts: Sequence[TextPart], *, has_marks: bool = False) -> Iterator[Line]:
    """Yields a text behind its name, what is not seen by name, no character of the first `MOST_CHARACTERS` left out."""
    head, first = _head(name), first_of(parts, MOST_CHARACTERS)
    shown = [TextPart("kept", marked(first))] if has_marks else [part._replace(text=named(part.text)) for part in first]
    for place, line in enumerate(wrapped_parts(shown, max(16, columns() - len(head)))):
        yield [TextPart("kept", head if not place else " " * len(head)), *line]
    more = sum(len(part.text) for part in parts) - sum(len(part.text) for part in first)
    if more:
        yield [TextPart("kept", f"{'':{len(head)}}... and {more:,} more characters: --json")]


_BATCH = 2048
"""Texts that are looked at together."""
_STYLES = {"removed": "30;41", "added": "30;42"}
"""Black on red and on green, so that spaces are seen."""


@dataclass(frozen=True)
class _Opened:
    """A config's text section with its tokenizer and steps loaded."""

    config: Config
    recipe: Recipe
    looker: Looker
    pieces: VocabularyPieces

    @classmethod
    def of(cls, config: Config) -> _Opened:
        recipe = recipe_of(config)
        step = recipe.text.step
        if config.text is None:
            raise ConfigError(
                f"{config.path} has no [text] section, so nothing becomes of texts; add it: [text] tokenizer = ..."
            )
        if not isinstance(step, Transcript):
            raise ConfigError(
                f'{config.path} has text.prompt = "{step.name}", and forebay text shows transcripts; for samples: '
                f"forebay inspect {config.named} --sample 0"
            )
        looker = Looker(step, Path(config.text.tokenizer), needs_text=SOURCE_KINDS[config.source.kind].needs_text)
        return cls(config, recipe, looker, VocabularyPieces(looker.encoder.vocabulary))

    def manifest(self, *, progress: bool) -> Manifest:
        """Returns the listing of the source; no recording is decoded."""
        groups = Groups.of(self.config, self.recipe)
        with naming_urls(), Pool(self.config.run.num_workers or os.cpu_count() or 1, shows=progress) as pool:
            return listed(self.config, groups, map_=pool.map if groups.items else map)

    def view(self, look: Look, *, is_diff: bool, source: str = "", row: int | None = None) -> TextView:
        return TextView(
            look=look,
            pieces=self.pieces,
            max_label_tokens=self.looker.limit,
            detects=self.looker.detects,
            source=source,
            row=row,
            is_diff=is_diff,
        )


def view_text(config: Config, text: str, *, language: str = "", is_diff: bool = False) -> TextView:
    """Returns what becomes of a text that is given. Raises ConfigError where the config cannot be used."""
    opened = _Opened.of(config)
    (look,) = opened.looker.look([AskedTexts(sample_id="--text", text=text, language=language)])
    return opened.view(look, is_diff=is_diff)


def view_sample(config: Config, wanted: str, *, is_diff: bool = False, progress: bool = True) -> TextView:
    """Returns what becomes of a sample of the source. wanted: its row of the listing, or its id.

    Raises ConfigError where there is no such sample, ManifestError where the manifest cannot be used.
    """
    opened = _Opened.of(config)
    manifest = opened.manifest(progress=progress)
    rows = manifest.rows
    if (place := _place(rows, wanted)) is None:
        raise _absent(manifest, wanted, config)
    (look,) = opened.looker.look(_asked(rows.slice(place, 1)))
    source = shown_name(manifest.files[rows["file"][place].as_py()])
    return opened.view(look, is_diff=is_diff, source=source, row=rows["row"][place].as_py())


def report_texts(config: Config, *, progress: bool = True) -> TextReport:
    """Returns the report over all texts that a config lists. No recording is decoded, no cache is read.

    Raises ConfigError or ManifestError where the config or its manifest cannot be used.
    """
    opened = _Opened.of(config)
    manifest = opened.manifest(progress=progress)
    rows = manifest.rows
    tally = TextTally(opened.looker.step_names, opened.pieces.codes)
    for sample_id, reason, message in manifest.failed():
        tally.fail(reason, sample_id, message)
    # As manifest or headers say; NaN where neither does.
    seconds = rows["duration_s"].to_numpy().astype(np.float64) if opened.recipe.audio is not None else None
    with Progress(len(rows), desc="text", unit="text", is_shown=progress) as bar:
        for start in range(0, len(rows), _BATCH):
            looks = opened.looker.look(_asked(rows.slice(start, _BATCH)))
            tally.add(looks, None if seconds is None else seconds[start : start + _BATCH])
            bar.update(len(looks))
    return TextReport(
        config=config.path,
        tally=tally,
        rows=rows,
        max_label_tokens=opened.looker.limit,
        detects=opened.looker.detects,
        is_part=config.source.max_samples is not None and len(rows) >= config.source.max_samples,
        durations=_durations(rows, seconds),
        excluded=manifest.counts()["excluded"],
    )


def print_view(view: TextView) -> None:
    """Prints a text to standard output: what changed in colour on a terminal, elsewhere with marks."""
    has_colour = has_colours(sys.stdout)
    for line in view.lines(has_marks=not has_colour):
        for part in line:
            if part.change in _STYLES and isinstance(sys.stdout, VisibleStream) and has_colour:
                sys.stdout.write_styled(part.text, _STYLES[part.change])
            else:
                sys.stdout.write(part.text)
        sys.stdout.write("\n")


def _place(rows: pa.Table, wanted: str) -> int | None:
    """Returns where a sample stands: a number without leading zeros is a row first, all else an id."""
    number = number_of(wanted)
    if number is not None and len(found := np.flatnonzero(rows["row"].to_numpy() == number)):
        return int(found[0])
    place = int(rows["sample_id"].index(pa.scalar(storable(wanted), pa.large_string())).as_py())
    return None if place < 0 else place


def _absent(manifest: Manifest, wanted: str, config: Config) -> SampleError | ConfigError:
    """Returns why a sample is not among the rows: it was left out, or nothing is called that."""
    rejected, number, name = manifest.rejected, number_of(wanted), storable(wanted)
    same = pc.or_(pc.equal(rejected["row"], number), pc.equal(rejected["sample_id"], name))
    for each in rejected.filter(same).to_pylist():
        return SampleError(each["reason"], f"--sample {wanted}: {each['message']}")
    rows = manifest.rows
    span = f", rows 0 to {pc.max(rows['row']).as_py()}" if len(rows) else ""
    return ConfigError(
        f"--sample {wanted}: {from_here(config.path)} lists {len(rows)} samples{span}, and none with that id; "
        "the ids stand in the manifest"
    )


def _asked(rows: pa.Table) -> list[AskedTexts]:
    columns = [rows[name].to_pylist() for name in ("sample_id", "text", "language", "prompt")]
    spoken = rows[SPOKEN].to_pylist() if SPOKEN in rows.column_names else ["null"] * len(rows)
    return [
        AskedTexts(
            sample_id=sample_id, text=text, language=language or "", prompt=prompt or "", spoken=json.loads(said)
        )
        for sample_id, text, language, prompt, said in zip(*columns, spoken, strict=True)
    ]


def _durations(rows: pa.Table, seconds: Array | None) -> str:
    """Returns where the lengths are from, "" where there are none."""
    if seconds is None or not np.isfinite(seconds).any():
        return ""
    stated = int(np.isfinite(rows["stated_s"].to_numpy(zero_copy_only=False).astype(np.float64)).sum())
    if stated == len(rows):
        return "by the manifest"
    return "by their headers" if not stated else "by the manifest or their headers"
