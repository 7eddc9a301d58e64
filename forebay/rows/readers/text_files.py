"""`kind = "text"`: texts without audio, of lines (plain or JSON, compressed or not) or of a parquet column."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import SOURCE_KINDS, SourceConfig
from forebay.errors import ConfigError, ManifestError, TextError
from forebay.rows.audio_facts import as_listed
from forebay.rows.kept_columns import parts_of_rows, values_in
from forebay.rows.manifest import ROW_SCHEMA, Manifest, columns_of, joined, require_rows, storable
from forebay.rows.meanings.recordings import said
from forebay.rows.named_files import manifest_files, path_stem
from forebay.rows.reader import RecordingLister, RowReader, id_names
from forebay.rows.readers.arrow_files import HfFile
from forebay.rows.readers.json_lines import (
    BAD_TEXT,
    JsonError,
    is_storable,
    not_lines,
    not_text,
    parse_object,
    refuse_constant,
)
from forebay.rows.readers.line_blocks import LINES, LineBlock, codec_of, head_of, line_blocks, line_index, plain_name
from forebay.rows.readers.text_rows import LineFile, TextRows, WantedRows, good_texts, list_parquet, problem_of
from forebay.store.layout import Array
from forebay.store.remote.raw.raw_sources import files_in, is_folder
from forebay.store.source_files import SourceFile
from forebay.terminal import first_of
from forebay.visible import did_you_mean

PLAIN = ".txt"
"""How names of plain text end."""
_STRINGS = {str, type(None)}

_FOUND = {
    name: ROW_SCHEMA.field(name).type for name in ("row", "sample_id", "explicit_id", "language", "prompt", "text")
}
_Said = tuple[tuple[str | None, ...], tuple[Any, ...]]
"""Id, language, prompt and text of a line, and the values of `source.keep_columns`."""
_decoder = json.JSONDecoder(parse_constant=refuse_constant)
logger = logging.getLogger(__name__)


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
        rows, own = self.file.rows, self.file.rows.source.columns
        named = (own.text, own.language, own.prompt or "prompt")
        self._unseen = set(rows.named_columns.values())
        ids = id_names(own)
        self._names = _Names(*named, ids, frozenset((*named, *ids, *rows.source.keep_columns)))

    def take(self, block: LineBlock, lines: Array, rows: Array) -> None:
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
            (given, language, prompt, text), of_line = made
            sample_id = given or f"{self.file.stem}/{number}"
            found.append((row, sample_id, given is not None, language, prompt, text))
            kept.append(of_line)
            self.file.rows.note(sample_id)
            if self.file.rows.is_enough:
                break
        if found:
            parts = parts_of_rows(kept, self.file.rows.source.keep_columns)
            self.file.rows.add_columns(columns_of(found, _FOUND), group=self.file.group, kept=parts)

    def finish(self) -> None:
        """Raises ConfigError where a field that the config names was in no line."""
        rows = self.file.rows
        for setting, name in rows.named_columns.items():
            if name in self._unseen and rows.num_taken:
                raise ConfigError(
                    f"{self.file.path}: no line has a field {name} (source.columns.{setting})"
                    f"{did_you_mean(name, rows.unused.counts)}; correct the name, or leave it out",
                    code="FB202",
                )

    def _made(self, data: bytes, row: int, number: int) -> _Said | None:
        """Returns what a line says; None where it costs its sample, which is noted."""
        most = self.file.rows.source.max_sample_bytes
        try:
            if len(data) > most and (problem := problem_of(data, most)) is not None:
                raise TextError(*problem)
            return self._quickly(data) or self._line(data)
        except (JsonError, TextError) as err:
            if err.reason is None:
                path = self.file.path
                head = None if codec_of(path) is None else head_of(path)
                raise not_lines(path, number, str(err), head=head) from err
            self.file.fail(row, number, err.reason, str(err))
            return None

    def _quickly(self, data: bytes) -> _Said | None:
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
        if b"\\u" in data and not all(map(is_storable, values)):
            return None
        return self._counted(fields, values)

    def _line(self, data: bytes) -> _Said:
        try:
            fields = parse_object(data)
        except JsonError as err:
            if isinstance(err.__cause__, UnicodeDecodeError) and data.lstrip().startswith(b"{"):
                raise TextError(BAD_TEXT, f"is not UTF-8: {err.__cause__}") from err
            raise
        names = self._names
        text = fields.get(names.text)
        if isinstance(text, str) and not is_storable(text):  # which costs the sample
            raise TextError(BAD_TEXT, f"field {names.text} holds half of a surrogate pair, wanted text")
        return self._counted(fields, said(fields, (names.language, names.prompt, names.text), names.ids))

    def _counted(self, fields: dict[str, Any], values: tuple[str | None, ...]) -> _Said:
        """Returns what a line says, its other fields counted."""
        rows = self.file.rows
        kept = values_in(fields, rows.source.keep_columns) if rows.source.keep_columns else ()
        rows.unused.add_of(fields, self._names.taken)
        if self._unseen:
            self._unseen -= fields.keys()
        return values, kept


def list_lines(file: LineFile, wanted: WantedRows, *, cache_root: Path | None) -> None:
    """Adds the rows of a file that are wanted; nothing behind the last one is looked at.

    Raises ManifestError for a file that is no text, and with the line for what is no such object.
    """
    rows, path = file.rows, file.path
    max_bytes, base, place = rows.source.max_sample_bytes, rows.count, None
    first = wanted.next_from(base)
    if first is None:
        return
    taker = _taker(file)
    if first - base > LINES and codec_of(path) is None:
        index = line_index(path, first - base, max_bytes=max_bytes, cache_root=cache_root)
        if index.num_rows is not None and first - base >= index.num_rows:
            rows.count += index.num_rows
            return
        place = index.mark_of(first - base)
    for block in line_blocks(path, max_bytes=max_bytes, place=place):
        before, lines = base + block.place.rows, np.flatnonzero(block.is_row)
        chosen = wanted.among(before, len(lines))
        if len(chosen):
            taker.take(block, lines[chosen], before + chosen)
        rows.count = base + block.after.rows
        if rows.is_enough or wanted.next_from(rows.count) is None:
            break
    taker.finish()


def _taker(file: LineFile) -> JsonLines | PlainLines:
    path = file.path
    if Path(plain_name(path.name)).suffix != PLAIN or _begins_with_object(path, file.rows.source):
        return JsonLines(file)
    _require_no_fields(path, file.rows)
    head = None if codec_of(path) is None else head_of(path)
    if (problem := not_text(path, head=head)) is not None:
        raise problem
    return PlainLines(file)


def _require_no_fields(path: Path, rows: TextRows) -> None:
    """Raises ConfigError or ManifestError where settings ask for what lines of plain text do not have."""
    named, source = rows.named_columns, rows.source
    if named or source.keep_columns:
        setting, value = ("columns", named) if named else ("keep_columns", list(source.keep_columns))
        raise ConfigError(
            f"{path} is plain text, whose lines have no fields, and source.{setting} is {value}; leave {setting} out, "
            "or write JSON lines",
            code="FB205",
        )
    if source.languages is not None:
        raise ManifestError(
            f"{path} is plain text, whose lines have no language, and source.languages is {list(source.languages)}; "
            "leave source.languages out, or write JSON lines of text and language"
        )


def _begins_with_object(path: Path, source: SourceConfig) -> bool:
    """Whether the first line is a JSON object with a text: such a file is JSON lines, whatever its name says."""
    for block in line_blocks(path, max_bytes=source.max_sample_bytes):
        for line in np.flatnonzero(block.is_row).tolist():
            data = block.data[block.starts[line] : block.stops[line]]
            try:
                return data.lstrip()[:1] == b"{" and source.columns.text in parse_object(data)
            except JsonError:
                return False
    return False


@dataclass(frozen=True, slots=True)
class PlainLines:
    """Lines that are texts: columns are made of a whole block, one by one only where some of it is no text."""

    file: LineFile

    def take(self, block: LineBlock, lines: Array, rows: Array) -> None:
        """Adds lines as rows; a line that is too long or no UTF-8 costs itself."""
        texts, numbers = _packed(block, lines), block.place.line + lines
        is_good = good_texts(
            texts,
            self.file.rows.source.max_sample_bytes,
            lambda at, *problem: self.file.fail(int(rows[at]), int(numbers[at]), *problem),
        )
        columns = {
            "row": pa.array(rows[is_good]),
            "sample_id": joined(f"{self.file.stem}/", pa.array(numbers[is_good])),
            "text": pc.cast(texts if is_good.all() else texts.filter(pa.array(is_good)), pa.large_string()),
        }
        self.file.rows.add_columns(columns, group=self.file.group)
        self.file.rows.note_all(columns["sample_id"])

    def finish(self) -> None:
        """Does nothing: lines of plain text have no fields that could be missing."""


def _packed(block: LineBlock, lines: Array) -> pa.ChunkedArray:
    """Returns lines of a block as large_binary: their bytes without what is in between."""
    starts, stops = block.starts[lines], block.stops[lines]
    offsets = np.concatenate([[0], np.cumsum(stops - starts)])
    edges = np.zeros(len(block.data) + 1, np.int8)
    edges[starts] += 1  # a line is not empty, so no two edges of a kind are at one place
    edges[stops] -= 1
    letters = np.frombuffer(block.data, np.uint8)[np.cumsum(edges[:-1], dtype=np.int8).view(bool)]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(letters)]
    return pa.chunked_array([pa.Array.from_buffers(pa.large_binary(), len(lines), buffers)])


def list_text(source: SourceConfig, cache_root: Path | None = None) -> Manifest:
    """Returns the rows of texts without audio; each manifest is its own source file.

    A `.txt` file is a text a line, a `.parquet` file a text a row, anything else JSON lines, as is a `.txt` file whose
    first line is an object with a text; lines may be compressed. An id left out is the manifest's name without its
    extensions and the line or row, `texts/17`. Blank lines are passed over, and numbered. A text that is no UTF-8 fails
    as `bad_text`, one of more than `source.max_sample_bytes` as `too_large`.
    `source.rows` counts the rows of all manifests, blank lines left out; it and `max_samples` read no more than they
    need, except that languages which never occur can only be named when all was read. cache_root: where the index of a
    large file is kept, by which a slice finds its lines.
    Raises ManifestError for a file that is no text, and with the line for what is no such object.
    """
    manifests = manifest_files(source)
    _tell_what_is_beside(source, manifests)
    wanted = WantedRows.early(source.rows)
    if wanted is None:
        wanted = WantedRows.of(source.rows or ":", _num_rows(source, manifests, cache_root))
    rows = TextRows(source)
    for group, manifest in enumerate(manifests):
        file = LineFile(manifest, group, storable(path_stem(plain_name(manifest.name))), rows)
        if manifest.path.suffix == ".parquet":
            list_parquet(file, wanted)
        else:
            list_lines(file, wanted, cache_root=cache_root)
        if rows.is_enough or wanted.next_from(rows.count) is None:
            break
    _require_some(rows, manifests, cache_root)
    return Manifest(files=manifests, rows=rows.table(), rejected=rows.failures.table(), unused=rows.unused.counts)


def _num_rows(source: SourceConfig, manifests: Sequence[SourceFile], cache_root: Path | None) -> int:
    """Returns how many rows the manifests have, by their indexes where these know it."""
    most = source.max_sample_bytes
    count = 0
    for path in (manifest.path for manifest in manifests):
        if path.suffix == ".parquet":
            count += len(HfFile(path))
        elif codec_of(path) is None:
            count += line_index(path, max_bytes=most, cache_root=cache_root).num_rows or 0
        else:
            count += sum(int(block.is_row.sum()) for block in line_blocks(path, max_bytes=most))
    return count


def _require_some(rows: TextRows, manifests: Sequence[SourceFile], cache_root: Path | None) -> None:
    """Raises ManifestError where there is no row, or `source.rows` selects none."""
    if rows.num_taken:
        return
    source = rows.source
    total = 0 if source.rows is None else _num_rows(source, manifests, cache_root)
    require_rows(total, manifests)
    raise ManifestError(
        f"{', '.join(source.manifests)}: source.rows is {source.rows}, which selects none of {total} rows; correct it",
        code="FB204",
    )


def _tell_what_is_beside(source: SourceConfig, manifests: Sequence[SourceFile]) -> None:
    """Logs which files of texts in a folder are not read, since others go first: a licence may be a `.txt` too."""
    kind = SOURCE_KINDS[source.kind]
    read = {manifest.path for manifest in manifests}
    for entry in map(Path, source.manifests):
        if not is_folder(entry):
            continue
        patterns = itertools.chain(kind.files[1:], *kind.else_files)
        beside = [path.name for pattern in patterns for path in files_in(entry, pattern) if path not in read]
        beside = [name for name in beside if not name.endswith(".txt")]
        if beside:
            names = ", ".join(path.name for path in sorted(read)[:3])
            logger.warning(
                "%s: of this folder %s%s is read, and not %s; name what is meant by a glob",
                entry,
                names,
                " ..." if len(read) > 3 else "",
                first_of(beside, 3),
            )


READER = RowReader(recordings=RecordingLister(list=list_text, locate=as_listed, group=None, has_index=True))
