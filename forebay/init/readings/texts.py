"""Plain texts: `.txt` files of a text a line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from forebay.init.found import Found, Reading, counted
from forebay.init.tree import spread

_HEAD = 64 * 1024


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
