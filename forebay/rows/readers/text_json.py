"""Texts in JSON lines: of a block of lines to rows."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from forebay.errors import ConfigError, TextError
from forebay.rows.kept_columns import parts_of_rows, values_in
from forebay.rows.reader import IDS
from forebay.rows.readers.json_lines import JsonError, not_lines, parse_object, string_of
from forebay.rows.readers.line_blocks import Block, codec_of, head_of
from forebay.rows.readers.text_rows import BAD_TEXT, TOO_LARGE, Line, LineFile, named_columns
from forebay.store.layout import Array

_STRINGS = {str, type(None)}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


class _Names(NamedTuple):
    """The fields that are read. ids: one or two, of which the first that has a value is taken. taken: all of them."""

    text: str
    language: str
    prompt: str
    ids: tuple[str, ...]
    taken: frozenset[str]


@dataclass(slots=True)
class JsonLines:
    """Lines that are objects."""

    file: LineFile
    _names: _Names = field(init=False)
    _unseen: set[str] = field(init=False)

    def __post_init__(self) -> None:
        source = self.file.rows.source
        own = source.columns
        ids = IDS if own.id is None else (own.id,)
        named = (own.text, own.language, own.prompt or "prompt")
        self._unseen = set(named_columns(source).values())
        self._names = _Names(*named, ids, frozenset((*named, *ids, *source.keep_columns)))

    def take(self, block: Block, lines: Array, rows: Array) -> None:
        """Adds lines as rows; where only the first samples are wanted, no more than these.

        A line of too many bytes, that is no UTF-8, or whose text is none costs itself. Raises ManifestError for one
        that is no object with a text.
        """
        found, kept = [], []
        starts, stops = block.starts[lines].tolist(), block.stops[lines].tolist()
        for line, row, start, stop in zip(lines.tolist(), rows.tolist(), starts, stops, strict=True):
            number = block.place.line + line
            if (made := self._made(block.data[start:stop], row, number)) is None:
                continue
            found.append((row, number, *made[:4]))
            kept.append(made.kept)
            self.file.rows.note(made.sample_id or f"{self.file.stem}/{number}")
            if self.file.rows.is_enough:
                break
        self._add(found, kept)

    def finish(self) -> None:
        """Raises ConfigError where a field that the config names was in no line."""
        rows = self.file.rows
        for setting, name in named_columns(rows.source).items():
            if name in self._unseen and rows.num_taken:
                near = difflib.get_close_matches(name, rows.unused.counts, n=1)
                raise ConfigError(
                    f"{self.file.path}: no line has a field {name} (source.columns.{setting})"
                    f"{f'; did you mean {near[0]}?' if near else ''}; correct the name, or leave it out",
                    code="FB202",
                )

    def _made(self, data: bytes, row: int, number: int) -> Line | None:
        """Returns what a line says; None where it costs its sample, which is noted."""
        most = self.file.rows.source.max_sample_bytes
        try:
            if len(data) > most:
                raise TextError(TOO_LARGE, f"has more than {most} bytes, which is source.max_sample_bytes")
            return self._quickly(data) or self._line(data)
        except (JsonError, TextError) as err:
            if err.reason is None:
                path = self.file.path
                head = None if codec_of(path) is None else head_of(path)
                raise not_lines(path, number, str(err), head=head) from err
            self.file.fail(row, number, err.reason, str(err))
            return None

    def _quickly(self, data: bytes) -> Line | None:
        """Returns what a plain line says; None for a line that has to be looked at more closely.

        An object has a colon a field, so one with as many colons as it has different fields has none of them twice and
        nothing inside of them. Of a line that is no JSON the closer look says what it is.
        """
        try:
            text = data.decode("utf-8")
            fields, end = _decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return None
        names = self._names
        if end != len(text) or type(fields) is not dict or data.count(b":") != len(fields) or names.text not in fields:
            return None
        given = fields.get(names.ids[0])
        if given is None and len(names.ids) > 1:
            given = fields.get(names.ids[1])
        values = (given, fields.get(names.language), fields.get(names.prompt), fields[names.text])
        if given == "" or not {*map(type, values)} <= _STRINGS:
            return None
        if b"\\u" in data and not all(map(_is_text, values)):
            return None
        return self._counted(fields, values)

    def _line(self, data: bytes) -> Line:
        try:
            fields = parse_object(data)
        except JsonError as err:
            if isinstance(err.__cause__, UnicodeDecodeError) and data.lstrip().startswith(b"{"):
                raise TextError(BAD_TEXT, f"is not UTF-8: {err.__cause__}") from err
            raise
        names = self._names
        if names.text not in fields:
            raise JsonError(f"has no field {names.text}, wanted a string or null")
        _require_text(names.text, fields[names.text])
        given = string_of(fields, names.ids)
        if given == "":
            raise JsonError(f"field {names.ids[0]} is empty, wanted an id")
        others = (string_of(fields, (name,)) for name in (names.language, names.prompt, names.text))
        return self._counted(fields, (given, *others))

    def _counted(self, fields: dict[str, Any], values: tuple[Any, ...]) -> Line:
        """Returns what a line says, its other fields counted."""
        rows = self.file.rows
        kept = values_in(fields, rows.source.keep_columns) if rows.source.keep_columns else ()
        rows.unused.add_of(fields, self._names.taken)
        if self._unseen:
            self._unseen -= fields.keys()
        given, language, prompt, text = values
        return Line(given, language, prompt, text, kept)

    def _add(self, found: list[tuple[Any, ...]], kept: list[tuple[Any, ...]]) -> None:
        if not found:
            return
        rows, numbers, given, languages, prompts, texts = zip(*found, strict=True)
        stem, names = self.file.stem, self.file.rows.source.keep_columns
        strings = {
            "sample_id": [own or f"{stem}/{number}" for own, number in zip(given, numbers, strict=True)],
            "language": languages,
            "prompt": prompts,
            "text": texts,
        }
        columns = {
            "row": pa.array(rows, pa.int64()),
            "explicit_id": pa.array([own is not None for own in given], pa.bool_()),
            **{name: pa.array(values, pa.large_string()) for name, values in strings.items()},
        }
        self.file.rows.add_columns(columns, group=self.file.group, kept=parts_of_rows(kept, names) if names else None)


def _is_text(value: str | None) -> bool:
    """Whether UTF-8 can hold a value; only escapes say what it cannot."""
    try:
        return value is None or value.encode("utf-8") is not None
    except UnicodeEncodeError:
        return False


def _require_text(name: str, value: Any) -> None:
    """Raises TextError for half of a surrogate pair, which costs the sample."""
    if isinstance(value, str) and not _is_text(value):
        raise TextError(BAD_TEXT, f"field {name} holds half of a surrogate pair, wanted text")
