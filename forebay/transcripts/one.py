"""What `forebay text` says of one text: what it was, what every step makes of it, its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.steps.text.normal.step import Problem
from forebay.terminal import LABEL, columns, table, wrapped
from forebay.transcripts.diff import Part, changes, counted, first_of, marked, wrapped_parts
from forebay.transcripts.look import Look
from forebay.transcripts.pieces import Pieces
from forebay.visible import named, printable

MOST_CHARACTERS, MOST_TOKENS = 10_000, 2_000
"""Of one text, as lines; --json has all."""

Line = Sequence[Part]
"""A line of parts; parts that changed have a colour, or marks."""


@dataclass(frozen=True, kw_only=True)
class TextView:
    """One text. source: the file that it came from, "" for a text of the command line. row: of the listing.

    is_diff: whether steps show what they changed instead of the whole text.
    """

    look: Look
    pieces: Pieces
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
        yield from _text("text", [Part("kept", look.asked.text or "")])
        if look.body != (look.asked.text or ""):
            yield from _text("transcript", [Part("kept", look.body)])
        for name, before, after in look.changed():
            yield from self._step_lines(name, before, after, has_marks=has_marks)
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
            said = (
                f"nothing was detected (confidence {staged.confidence:.2f})" if not given else "as the manifest has it"
            )
            return f"{look.language or 'none'}, {said}"
        other = f"; the manifest has {given}" if given and given != staged.detected else ""
        return f"{look.language}, detected with confidence {staged.confidence:.2f}{other}"

    def _step_lines(self, name: str, before: str, after: str | Problem, *, has_marks: bool) -> Iterator[Line]:
        if isinstance(after, Problem):
            yield from _plain(wrapped(_head(name), f"fails: {after.reason}"))
        elif before == after:
            yield from _plain([_head(name) + "unchanged"])
        else:
            parts = changes(before, after) if self.is_diff else [Part("kept", after)]
            yield from _text(name, parts, has_marks=has_marks)

    def _token_lines(self) -> Iterator[str]:
        look = self.look
        limit = (
            "no limit is set"
            if self.max_label_tokens is None
            else f"text.max_label_tokens is {self.max_label_tokens:,}"
        )
        said = (
            f"{len(look.ids):,}, the first {look.prefix_len:,} given; {look.num_label_tokens:,} label tokens, {limit}"
        )
        yield from wrapped(_head("tokens"), said)
        rows = [
            (str(each["id"]), each["piece"], ", ".join(filter(None, (each["role"], _KIND[each["kind"]]))))
            for each in self._tokens(MOST_TOKENS)
        ]
        yield from (line.rstrip() for line in table(("id", "token", "what it is"), rows, left=3))
        if len(look.ids) > MOST_TOKENS:
            yield f"  ... and {len(look.ids) - MOST_TOKENS:,} more tokens: --json"


_KIND = {
    "text": "",
    "control": "control",
    "unknown": "unknown",
    "byte": "byte-fallback",
    "piece": "piece of a character",
}


def _head(name: str) -> str:
    return f"{printable(name):<{LABEL}}" if len(name) < LABEL else f"{printable(name)} "


def _plain(lines: Sequence[str] | Iterator[str]) -> Iterator[Line]:
    return ([Part("kept", line)] for line in lines)


def _text(name: str, parts: Sequence[Part], *, has_marks: bool = False) -> Iterator[Line]:
    """Yields a text behind its name, what is not seen by name, no character of the first `MOST_CHARACTERS` left out."""
    head, first = _head(name), first_of(parts, MOST_CHARACTERS)
    shown = [Part("kept", marked(first))] if has_marks else [Part(part.change, named(part.text)) for part in first]
    for place, line in enumerate(wrapped_parts(shown, max(16, columns() - len(head)))):
        yield [Part("kept", head if not place else " " * len(head)), *line]
    more = sum(len(part.text) for part in parts) - sum(len(part.text) for part in first)
    if more:
        yield [Part("kept", f"{'':{len(head)}}... and {more:,} more characters: --json")]
