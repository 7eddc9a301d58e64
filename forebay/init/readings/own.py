"""Which files of a folder are read: those of the train split, where folders are called after splits."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

from forebay.init.readings.splits import split_of


@dataclass(frozen=True, slots=True)
class Own:
    """The files that are read: those below `folders`, which are relative to the root. others: of other splits.

    counts: how many files lie in each folder.
    """

    names: list[str]
    counts: Counter[str]
    folders: list[str]
    others: list[str]


def own_files(names: list[str]) -> Own:
    """Returns the files of the train split where the first folders are called after splits, else all.

    names: of files, relative to the root.
    """
    counts = Counter(name.rpartition("/")[0] for name in names)
    firsts = {first_below(folder, above(counts)) for folder in counts}
    splits = {folder: split_of(folder.rpartition("/")[2]) for folder in firsts}
    own = sorted(folder for folder, split in splits.items() if split == "train")
    if not own or set(splits.values()) == {"train"}:
        return Own(names, counts, [""], [])
    kept = Counter({folder: count for folder, count in counts.items() if first_below(folder, above(counts)) in own})
    rest = sorted(folder for folder in splits if folder not in own)
    return Own([name for name in names if name.rpartition("/")[0] in kept], kept, own, rest)


def above(counts: Counter[str]) -> str:
    """Returns the deepest folder that all files lie below."""
    return os.path.commonpath(list(counts)) if counts else ""


def first_below(folder: str, top: str) -> str:
    """Returns the first folder on the way to a folder from one above it; that one where there is none."""
    rest = folder[len(top) + 1 :] if top else folder
    return os.path.join(top, rest.partition("/")[0]) if rest else top
