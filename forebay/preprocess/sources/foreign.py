"""What a file is that was given for JSON lines and holds none: a CSV is called a CSV."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path
from typing import NamedTuple

from forebay.errors import ManifestError

_HEAD_BYTES = 64 * 1024
_BOM = b"\xef\xbb\xbf"
_TABLE_SUFFIXES = frozenset((".csv", ".tsv"))


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


def not_lines(path: Path, number: int, problem: str) -> ManifestError:
    """Returns the error for line `number` of a manifest of JSON lines, which names the file's form where it is another one."""
    form = _form_of(path)
    if form is None:
        return ManifestError(f"{path}, line {number}: {problem}; correct the manifest")
    lines = path.with_suffix(".jsonl" if path.suffix != ".jsonl" else ".lines.jsonl")
    advice = form.advice.format(path=shlex.quote(str(path)), lines=shlex.quote(str(lines)))
    return ManifestError(f"{path} is {form.name}, wanted JSON lines, one object a line; {advice}")


def _form_of(path: Path) -> _Form | None:
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    for magic, form in _MAGICS.items():
        if head.startswith(magic):
            return form
    if head[257:262] == b"ustar":
        return _TAR
    return _text_form(
        head.removeprefix(_BOM).strip().decode("utf-8", "replace"), is_table=path.suffix in _TABLE_SUFFIXES
    )


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
