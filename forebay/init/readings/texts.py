"""Plain texts, a text a line, and lines of either form that are compressed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from forebay.errors import ManifestError
from forebay.init.found import Found, Reading, counted
from forebay.init.tree import spread
from forebay.rows.readers.json_lines import JsonError, parse_object
from forebay.rows.readers.line_blocks import codec_of, head_of, plain_name

_HEAD = 64 * 1024
LINES = frozenset((".txt", ".jsonl"))
"""How names of texts in lines end, before the ending of a compression."""


def is_packed_text(path: Path) -> bool:
    """Whether a name is one of texts in lines that are compressed."""
    return codec_of(path) is not None and Path(plain_name(path.name)).suffix in LINES


def packed_reading(paths: Sequence[Path], folders: tuple[Path, ...] | None, problems: list[str]) -> Reading | None:
    """Returns the reading of compressed texts in lines; None where the first of them holds something else.

    problems: why it is of no use is added.
    """
    path = paths[0]
    try:
        head = head_of(path)
        texts = _texts_in(path, head)
    except (ManifestError, JsonError) as err:
        problems.append(f"{path.name}: {err}")
        return None
    if not texts:
        problems.append(f"{path.name} holds no texts")
        return None
    label = f"{counted(len(paths), 'compressed text files')}, a text a line"
    manifests = folders or tuple(paths)
    is_all = len(paths) == 1 and len(head) < _HEAD
    found = Found(
        kind="text",
        modality="text",
        manifests=manifests,
        noun="texts",
        count=len(texts),
        is_exact=is_all,
        texts=texts[:20],
        notes=[] if is_all else ["Only the first lines were looked at: there are more texts than that."],
    )
    return Reading(kind="text", label=label, score=10, settle=lambda _: found, modality="text")


def _texts_in(path: Path, head: bytes) -> list[str]:
    """Returns the texts of the whole lines of a head. Raises JsonError for lines that are objects without one."""
    data = head if len(head) < _HEAD else head.rpartition(b"\n")[0]
    lines = [line for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    if Path(plain_name(path.name)).suffix == ".txt":
        return [line.decode("utf-8", "replace") for line in lines]
    texts = [parse_object(line).get("text") for line in lines]
    return [text for text in texts if isinstance(text, str)]


def text_reading(paths: Sequence[Path], folders: tuple[Path, ...] | None) -> Reading:
    """Returns the reading of plain texts. folders: that hold nothing else of this kind, to be named whole."""
    label = f"{counted(len(paths), 'text files')}, a text a line"
    manifests = folders or tuple(paths)
    return Reading(kind="text", label=label, score=10, settle=lambda _: _found(manifests, paths), modality="text")


def _found(manifests: tuple[Path, ...], paths: Sequence[Path]) -> Found:
    texts: list[str] = []
    read, lines, total = 0, 0, sum(os.path.getsize(path) for path in paths)
    for path in spread(paths, 20):
        with open(path, "rb") as file:
            data = file.read(_HEAD)
        read += len(data)
        found = [line for line in data.decode("utf-8-sig", "replace").splitlines() if line.strip()]
        lines += len(found)
        texts += found[:20]
    return Found(
        kind="text",
        modality="text",
        manifests=manifests,
        noun="texts",
        count=lines if read >= total else round(lines * total / max(1, read)),
        is_exact=read >= total,
        texts=texts,
    )
