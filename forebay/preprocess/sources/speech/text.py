"""`kind = "text"`: texts without audio, plain files of a text a line, or JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.errors import ConfigError, ManifestError, TextError
from forebay.preprocess.sources.json_lines import JsonError, manifest_lines, not_lines, not_text, parse_object
from forebay.preprocess.sources.kept import concatenated, parts_of_rows, require_values, values_in
from forebay.preprocess.sources.naming import manifest_files, path_stem
from forebay.preprocess.sources.rows import Manifest, Unused, require_rows, row_table, storable
from forebay.preprocess.sources.speech.jsonl import TEXT_FIELDS, texts_of
from forebay.preprocess.sources.speech.locate import Failures, Located, LocateTask, SpeechKind, located
from forebay.store.remote.raw.sources import at_hand
from forebay.store.source_files import SourceFile

PLAIN = ".txt"
"""How names of plain text end."""

_BLOCK_ROWS = 1 << 15
"""Rows that are Python objects at once; the others are columns, which hold little more than the texts."""

_SKIP_BYTES = 1 << 20

_TYPES = {
    "row": pa.int64(),
    "group": pa.int32(),
    "file": pa.int32(),
    "sample_id": pa.large_string(),
    "explicit_id": pa.bool_(),
    "duration_s": pa.float64(),
    **dict.fromkeys(("language", "prompt", "text"), pa.large_string()),
}


class Line(NamedTuple):
    """What a line says. kept: the values of `source.keep_columns`."""

    sample_id: str | None
    language: str | None
    prompt: str | None
    text: str | None
    kept: tuple[Any, ...] = ()


class _Form(NamedTuple):
    """How a file is read. parse: raises TextError for a line that costs its sample, JsonError for no such line."""

    lines: Iterator[tuple[int, bytes]]
    parse: Callable[[bytes], Line]


def list_text(source: SourceConfig) -> Manifest:
    """Returns the rows of texts without audio; each manifest is its own source file.

    A `.txt` file is a text a line, anything else JSON lines `{"text", "language"?, "prompt"?, "sample_id"?}`, as is a
    `.txt` file whose first line is such an object. `id` is taken for `sample_id`; other fields are counted by name. An
    id left out is the manifest's name without its extension and the line, `texts/17`. Blank lines are passed over, and
    numbered.
    A plain line that is not UTF-8 fails as `bad_text`, one of more than `source.max_sample_bytes` as `too_large`.
    With `max_samples` nothing is read behind the last line that is needed, except that languages which never occur
    can only be named when all was read.
    Raises ManifestError for a file that is no text, and with the line for what is no such object.
    """
    manifests = manifest_files(source)
    rows = _Rows(source)
    for group, manifest in enumerate(manifests):
        _list_file(manifest, group, rows, source)
        if rows.is_enough:
            break
    require_rows(rows.count, manifests)
    return Manifest(
        files=tuple(manifests), rows=rows.table(), rejected=rows.failures.table(), unused=rows.unused.counts
    )


def plain_lines(path: Path, *, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, line without its end) of every line that is not blank; a byte order mark is taken off.

    Lines end with LF or CRLF. Of a line of more than `max_bytes` the first `max_bytes` + 1 are yielded: a file without
    any line end costs no more memory than that. Raises ManifestError where the file cannot be read.
    """
    most = max_bytes + len(b"\r\n")
    try:
        with at_hand(path) as local, open(local, "rb") as file:
            number = 0
            while line := file.readline(most):
                number += 1
                if len(line) == most and not line.endswith(b"\n"):
                    _skip_line(file)
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                line = line.removesuffix(b"\n").removesuffix(b"\r")[: max_bytes + 1]
                if line.strip():
                    yield number, line
    except OSError as err:
        raise ManifestError(
            f"cannot read manifest {path}: {err.strerror}; check the path and its permissions", code="FB201"
        ) from err


def _skip_line(file: Any) -> None:
    while (part := file.readline(_SKIP_BYTES)) and not part.endswith(b"\n"):
        pass


def _list_file(manifest: SourceFile, group: int, rows: _Rows, source: SourceConfig) -> None:
    stem = storable(path_stem(manifest.name))
    form = _form(manifest.path, rows, source)
    for number, data in form.lines:
        try:
            rows.add(group, f"{stem}/{number}", form.parse(data))
        except (JsonError, TextError) as err:
            if err.reason is None:
                raise not_lines(manifest.path, number, str(err)) from err
            message = f"{manifest.path}, line {number}: {err}; correct the manifest"
            rows.fail(f"{stem}/{number}", err.reason, message)
        if rows.is_enough:
            return


def _form(path: Path, rows: _Rows, source: SourceConfig) -> _Form:
    limit = source.max_sample_bytes
    if path.suffix != PLAIN or _begins_with_object(path, limit):
        return _Form(manifest_lines(path), lambda line: _json_line(line, rows.unused, source.keep_columns))
    if source.keep_columns:
        raise ConfigError(
            f"{path} is plain text, whose lines have no fields, and source.keep_columns is "
            f"{list(source.keep_columns)}; leave keep_columns out, or write JSON lines",
            code="FB205",
        )
    if source.languages is not None:
        raise ManifestError(
            f"{path} is plain text, whose lines have no language, and source.languages is {list(source.languages)}; "
            "leave source.languages out, or write JSON lines of text and language"
        )
    if (problem := not_text(path)) is not None:
        raise problem
    return _Form(plain_lines(path, max_bytes=limit), lambda line: _plain_line(line, limit))


def _begins_with_object(path: Path, max_bytes: int) -> bool:
    """Whether the first line is a JSON object with a text: such a file is JSON lines, whatever its name says."""
    for _, line in plain_lines(path, max_bytes=max_bytes):
        try:
            return line.lstrip()[:1] == b"{" and "text" in parse_object(line)
        except JsonError:
            return False
    return False


def _json_line(data: bytes, unused: Unused, keep: Sequence[str]) -> Line:
    fields = parse_object(data)
    unused.add_of(fields, TEXT_FIELDS.union(keep))
    given, language, prompt, text = texts_of(fields)
    return Line(given, language, prompt, text, values_in(fields, keep))


def _plain_line(data: bytes, max_bytes: int) -> Line:
    if len(data) > max_bytes:
        raise TextError("too_large", f"has more than {max_bytes} bytes, which is source.max_sample_bytes")
    try:
        return Line(None, None, None, data.decode("utf-8"))
    except UnicodeDecodeError as err:
        raise TextError("bad_text", f"is not UTF-8: {err}") from err


@dataclass(slots=True)
class _Rows:
    """The rows of a listing, counted through all of its files, as columns."""

    source: SourceConfig
    count: int = 0
    failures: Failures = field(default_factory=Failures)
    unused: Unused = field(default_factory=Unused)
    _block: list[tuple[Any, ...]] = field(default_factory=list)
    _kept: list[tuple[Any, ...]] = field(default_factory=list)
    _tables: list[pa.Table] = field(default_factory=list)
    _ids: set[str] = field(default_factory=set)
    _num_repeated: int = 0
    _excluded: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._excluded = frozenset(self.source.exclude)

    @property
    def is_enough(self) -> bool:
        """Whether the first `max_samples` rows that the filters leave are among those that were added.

        A repeated id fails, or becomes another one that a later row may have: each counts as a row that is lost.
        """
        limit = self.source.max_samples
        return limit is not None and self.source.languages is None and len(self._ids) >= limit + self._num_repeated

    def add(self, group: int, derived_id: str, line: Line) -> None:
        """Adds the row of a line. derived_id: its id where the line gives none."""
        given, *texts, kept = line
        sample_id = given or derived_id
        self._block.append((self.count, group, group, sample_id, given is not None, 0.0, *texts))
        self._kept.append(kept)
        self.count += 1
        if self.source.max_samples is not None and sample_id not in self._excluded:
            self._num_repeated += sample_id in self._ids
            self._ids.add(sample_id)
        if len(self._block) == _BLOCK_ROWS:
            self._flush()

    def fail(self, sample_id: str, reason: str, message: str) -> None:
        """Notes a line that cannot be used, at its place among the rows."""
        self.failures.add(self.count, sample_id, reason, message)
        self.count += 1

    def table(self) -> pa.Table:
        """Returns all rows as a table of ROW_SCHEMA."""
        self._flush()
        table = concatenated(self._tables)
        require_values(table, self.unused.counts, where=", ".join(self.source.manifests))
        return table

    def _flush(self) -> None:
        values: Sequence[Any] = list(zip(*self._block, strict=True)) or [()] * len(_TYPES)
        columns = {name: pa.array(c, kind) for c, (name, kind) in zip(values, _TYPES.items(), strict=True)}
        kept = parts_of_rows(self._kept, self.source.keep_columns)
        self._tables.append(row_table(columns, num_rows=len(self._block), kept=kept))
        self._block, self._kept = [], []


def _as_listed(task: LocateTask) -> Located:
    """Returns the rows as they are: there is nothing to find."""
    return located(task, {}, Failures())


KIND = SpeechKind(list=list_text, locate=_as_listed)
