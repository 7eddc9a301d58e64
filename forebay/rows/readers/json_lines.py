"""The lines of text manifests and the JSON objects in them, from bytes that may hold anything.

Objects stand a line each, or as the members of one array.

A file that was given for JSON lines and is something else is called what it is: a CSV a CSV.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forebay.errors import ManifestError
from forebay.store.remote.raw.raw_sources import at_hand
from forebay.visible import printable

REPEATED = "repeated_field"
BAD_ROW, BAD_TEXT = "bad_row", "bad_text"
"""Reasons of rows: of another form than the others, or with bytes that are no UTF-8."""
BOM = b"\xef\xbb\xbf"
# Of bytes as Latin-1, which leaves JSON's own marks as they are: it finds where a value ends.
_scan = json.JSONDecoder(strict=False)
_GAP = re.compile(r"[, \t\r\n]*")
_HEAD_BYTES = 64 * 1024


class JsonError(ValueError):
    """An object is wrong; the caller adds the file and the line. reason: of its own, if it has one."""

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


def parse_object(data: bytes) -> dict[str, Any]:
    """Returns a JSON object. Raises JsonError for anything else, deep nesting, NaN and infinities included.

    A field that stands twice in an object, at any depth, has the reason `repeated_field`: JSON says not which counts.
    """
    try:
        value = _flat.decode(data.decode("utf-8-sig"))
    except RecursionError as err:
        raise JsonError("is nested too deeply, wanted a flat object") from err
    except JsonError:
        raise
    except ValueError as err:  # JSONDecodeError, UnicodeDecodeError, integers of thousands of digits
        raise JsonError(f"is not JSON: {err}") from err
    if not isinstance(value, dict):
        raise JsonError(f"is {_named(value)}, wanted an object")
    return value


def parse_nested(text: str) -> Any:
    """Returns the value of JSON text inside a field. Raises JsonError for what is none, or has a field twice."""
    try:
        return _nested.decode(text)
    except JsonError:
        raise
    except (ValueError, RecursionError) as err:
        raise JsonError(f"is no JSON: {err}") from err


def string_of(fields: Mapping[str, Any], names: Sequence[str], *, required: bool = False) -> str | None:
    """Returns the first of several fields that is there and not null; None where none is.

    Raises JsonError where its value is no string that UTF-8 can hold, or where none is there and one is required.
    """
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise JsonError(f"field {name} is {_named(value)}, wanted a string")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as err:
            raise JsonError(f"field {name} holds half of a surrogate pair, wanted text") from err
        return value
    if required:
        raise JsonError(f"has no field {names[0]}, wanted a string")
    return None


def is_storable(value: str | None) -> bool:
    """Returns whether UTF-8 can hold a value; only escapes say what it cannot."""
    try:
        return value is None or value.encode("utf-8") is not None
    except UnicodeEncodeError:
        return False


def id_of(fields: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Returns the first of several fields that is there and not null, a number as its digits; None where none is.

    Raises JsonError for other types.
    """
    value = next((fields[name] for name in names if fields.get(name) is not None), None)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**30:
        return str(value)
    return string_of({"id": value}, ("id",))


def seconds_of(fields: Mapping[str, Any], names: Sequence[str]) -> float:
    """Returns the first of several fields that is there and not null as float; NaN where none is.

    Raises JsonError where its value is no number. A number that no duration is (-1) is returned as it is.
    """
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise JsonError(f"field {name} is {_named(value)}, wanted seconds as a number")
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return math.nan


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise JsonError(f'field "{printable(twice[:60])}" stands there twice, wanted it once', reason=REPEATED)
    return made


def refuse_constant(name: str) -> Any:
    """Raises ValueError: NaN and the infinities are no JSON."""
    raise ValueError(f"{name} is no JSON number")


# `json.loads` would make a decoder a call, which costs as much as decoding a line.
_flat = json.JSONDecoder(parse_constant=refuse_constant, object_pairs_hook=_object_of_pairs)
_nested = json.JSONDecoder(object_pairs_hook=_object_of_pairs)


def _named(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
    return f"{kinds.get(type(value), 'a number')} ({text[:60]})"


@contextlib.contextmanager
def reading(path: Path, *, what: str = "manifest ") -> Iterator[None]:
    """Raises ManifestError for an error of the machine while a file is read."""
    try:
        yield
    except OSError as err:
        raise ManifestError(
            f"cannot read {what}{path}: {err.strerror}; check the path and its permissions", code="FB201"
        ) from err


def manifest_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, line without its end) of every line that is not blank; a byte order mark is taken off.

    Lines end with LF or CRLF. Raises ManifestError where the file cannot be read.
    """
    yield from ((place.number, line) for place, line in _placed_lines(path, 0, 0, 1))


def _placed_lines(path: Path, start: int, stop: int, first: int) -> Iterator[tuple[LineWhere, bytes]]:
    with reading(path), at_hand(path) as local, open(local, "rb") as file:
        file.seek(start)
        end = start
        for number, whole in enumerate(io.BytesIO(file.read(stop - start)) if stop else file, first):
            end += len(whole)
            line = whole.removeprefix(BOM) if number == 1 else whole
            place = LineWhere(number, at=end - len(line))
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            if line.strip():
                yield place, line


class LineWhere(NamedTuple):
    """Which line of a file, or which object of an array, counted from 1. at: its first byte in the file."""

    number: int
    word: str = "line"
    at: int = 0

    def __str__(self) -> str:
        return f"{self.word} {self.number}"


def manifest_objects(path: Path, start: int = 0, stop: int = 0, first: int = 1) -> Iterator[tuple[LineWhere, bytes]]:
    """Yields the objects of a file with their places: its lines, or the members where it is one array of objects.

    start, stop: bytes of a run of them; left out: of all. first: the number of the first of them. Raises ManifestError
    as `manifest_lines` does, and for an array that ends too early.
    """
    if not is_array(path):
        yield from _placed_lines(path, start, stop, first)
        return
    members = enumerate(array_members(path, start, stop), first)
    yield from ((LineWhere(number, "object", at), data) for number, (at, data) in members)


def is_array(path: Path) -> bool:
    """Whether a file is one JSON array of objects, and no lines of them."""
    return _form_of(path, _head(path)) is _ARRAY


def array_members(path: Path, start: int = 0, stop: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields (first byte, bytes) of the members of an array, which is in memory meanwhile.

    start, stop: of some whole members; left out: of all. Raises ManifestError, with the number from there, for a member
    that is no JSON, and for an array that is not closed.
    """
    with reading(path), at_hand(path) as local, open(local, "rb") as file:
        file.seek(start)
        data = file.read(stop - start if stop else -1)
    at, end = (0, len(data)) if stop else (data.index(b"[") + 1, data.rstrip().rfind(b"]"))
    if data[end + 1 :].strip() or end < 0:
        raise ManifestError(f"{path}: its array is not closed: a ] is missing at its end; write it again", code="FB203")
    text, number = data[:end].decode("latin-1"), 1  # a character is a byte then, and JSON's own marks are the same
    while (at := _GAP.match(text, at).end()) < end:  # type: ignore[union-attr]
        try:
            after = _scan.raw_decode(text, at)[1]
        except (ValueError, RecursionError) as err:
            raise ManifestError(f"{path}, object {number}: is no JSON: {err}; write it again", code="FB203") from err
        yield start + at, data[at:after]
        at, number = after, number + 1


def decoded(line: bytes, path: Path, number: int) -> str:
    """Returns a line as text. Raises ManifestError where it is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as err:
        raise ManifestError(f"{path}, line {number}: is not UTF-8: {err}; correct the manifest", code="FB203") from err


class _Form(NamedTuple):
    """A form of file, and what to do with one; `{path}` and `{lines}` are the file and a place for its JSON lines."""

    name: str
    advice: str


def _unpacked(tool: str) -> _Form:
    return _Form(f"compressed ({tool})", f"unpack it: {tool} -dk {{path}}")


def _rewritten(name: str, rows: str, hint: str = "") -> _Form:
    command = f'python -c "import csv, json, sys; [print(json.dumps(row)) for row in {rows}]" < {{path}} > {{lines}}'
    return _Form(name, f"write its rows as lines: {command}{hint}")


_MAGICS = {
    b"PAR1": _Form("a parquet file", 'set source.kind = "hf", or "tar" where it names clips in tars'),
    b"ARROW1": _Form("an arrow file", 'save it as parquet, for source.kind = "hf"'),
    b"\xff\xff\xff\xff": _Form("an arrow stream", 'set source.kind = "hf"'),
    b"PK\x03\x04": _Form("a zip file", "unpack it"),
    b"\xff\xfe": _Form("text in UTF-16", "save it as UTF-8"),
    b"\xfe\xff": _Form("text in UTF-16", "save it as UTF-8"),
    b"\x1f\x8b": _unpacked("gzip"),
    b"BZh": _unpacked("bzip2"),
    b"\xfd7zXZ\0": _unpacked("xz"),
    b"\x28\xb5\x2f\xfd": _unpacked("zstd"),
}

_TAR = _Form("a tar", 'set source.kind = "webdataset"')
_ARRAY = _rewritten("a JSON array", "json.load(sys.stdin)")
_OBJECT = _rewritten("one JSON object over several lines", "[json.load(sys.stdin)]")

_TABLES = {
    "\t": _rewritten(
        "a TSV",
        "csv.DictReader(sys.stdin, delimiter='\\t')",
        ' (of shard, id, language, seconds it is source.kind = "filelist")',
    ),
    "|": _rewritten(
        'a table with "|"',
        "csv.DictReader(sys.stdin, delimiter='|')",
        ' (LJ Speech\'s metadata.csv is source.kind = "ljspeech")',
    ),
    ",": _rewritten("a CSV", "csv.DictReader(sys.stdin)"),
    ";": _rewritten('a CSV with ";"', "csv.DictReader(sys.stdin, delimiter=';')"),
}


def not_lines(path: Path, where: LineWhere | int, problem: str, *, head: bytes | None = None) -> ManifestError:
    """Returns the error for a line, or an object, of a manifest; for a file that is neither it names the form.

    head: the first bytes of a compressed file, unpacked.
    """
    place = where if isinstance(where, LineWhere) else LineWhere(where)
    form = _form_of(path, _head(path) if head is None else head) if place.word == "line" else None
    if form is None:
        return ManifestError(f"{path}, {place}: {problem}; correct the manifest", code="FB203")
    if head is not None:
        return ManifestError(
            f"{path}, unpacked, is {form.name}, wanted JSON lines, one object a line; unpack it, then run this again "
            "for what to do",
            code="FB205",
        )
    lines = path.with_suffix(".jsonl" if path.suffix != ".jsonl" else ".lines.jsonl")
    advice = form.advice.format(path=shlex.quote(str(path)), lines=shlex.quote(str(lines)))
    return ManifestError(f"{path} is {form.name}, wanted JSON lines, one object a line; {advice}", code="FB205")


def not_text(
    path: Path, *, wanted: str = "plain text in UTF-8, a text a line", head: bytes | None = None
) -> ManifestError | None:
    """Returns the error for a file that was given for plain text and whose first bytes are of another form.

    head: its first bytes, where they are not those on disk.
    """
    form = _magic_form(_head(path) if head is None else head)
    if form is None:
        return None
    advice = form.advice.format(path=shlex.quote(str(path)), lines="")
    return ManifestError(f"{path} is {form.name}, wanted {wanted}; {advice}", code="FB205")


def _form_of(path: Path, head: bytes) -> _Form | None:
    return _magic_form(head) or _text_form(
        head.removeprefix(BOM).strip().decode("utf-8", "replace"), is_table=path.suffix in frozenset((".csv", ".tsv"))
    )


def _head(path: Path) -> bytes:
    """Returns the first bytes of a file; none where it cannot be read, which others say."""
    try:
        with at_hand(path) as local, open(local, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def _magic_form(head: bytes) -> _Form | None:
    found = next((form for magic, form in _MAGICS.items() if head.startswith(magic)), None)
    return _TAR if found is None and head[257:262] == b"ustar" else found


def _text_form(text: str, *, is_table: bool) -> _Form | None:
    if text[:1] == "[":
        return _ARRAY if text[1:].lstrip()[:1] in ("{", "]") else None
    first, *rest = [line for line in text.splitlines() if line.strip()][:2] or [""]
    if text[:1] == "{":
        return _OBJECT if first.strip() == "{" and rest else None
    if "\0" in text or _is_json(first):
        return None
    for mark, form in _TABLES.items():
        # Prose has commas too, but seldom as many in the next line.
        columns = [len(row) for row in csv.reader([first, *rest], delimiter=mark)]
        if columns[0] > 1 and (is_table or columns[1:] == columns[:1]):
            return form
    return None


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
