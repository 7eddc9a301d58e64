"""What looks like texts of recordings in a folder, and is read by nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from forebay.init.found import Found
from forebay.init.tree import TRANSCRIPTS, Tree, extension_of, spread

_FORMS = frozenset(
    (
        *(".textgrid", ".eaf", ".srt", ".vtt", ".stm", ".ctm", ".trs", ".trn", ".trans", ".cha", ".mlf", ".ass"),
        *(".sbv", ".ttml", ".antx", ".exb", ".flextext", ".xlsx", ".ods"),
    )
)
"""Forms of annotation tools and subtitles, and tables of office programs."""
_NAMES = frozenset(
    ("text", "texts", "segments", "transcript", "transcripts", "transcription", "transcriptions", "trans", "trn")
)
_LOOKED_INTO = frozenset(("", ".txt", ".json", ".jsonl", ".csv", ".tsv", ".list", ".lst", ".xml"))
_FILES, _HEAD = 60, 64 * 1024
_PARTS = re.compile(r"[\s|,;:\"'/\\=<>()\[\]{}]+")
_WORD = re.compile(r"[^\W\d_]+")
_MIN_WORDS = 2
_KEY = re.compile(r'"\w*(text|transcri|sentence|utterance|words)\w*"\s*:', re.IGNORECASE)


def unread_texts(tree: Tree, found: Found | None = None) -> list[str]:
    """Returns the names of files that look like texts of a folder's recordings and are none of what was found.

    By their names, as annotation tools, Kaldi and ESPnet have them; as texts of a recording's name in another folder;
    as JSON of its name with a text; and by lines that name a recording and have words beside it.
    """
    stems = {name.rpartition("/")[2].rpartition(".")[0] for name in tree.audio}
    read = set() if found is None else {str(path) for path in (*found.manifests, found.source.get("texts"))}
    names = [name for names in tree.by_extension.values() for name in names if str(tree.path(name)) not in read]
    sure = [name for name in names if _is_text_by_name(name, stems)]
    left = sorted({*names} - {*sure})
    looked = spread([name for name in left if extension_of(name) in _LOOKED_INTO], _FILES)
    return sorted([*sure, *(name for name in looked if _names_recordings(tree, name, stems))])


def _is_text_by_name(name: str, stems: set[str]) -> bool:
    own, form = name.rpartition("/")[2], extension_of(name)
    stem = own[: len(own) - len(form)]
    is_named = form in _LOOKED_INTO and stem.lower() in _NAMES
    return form in _FORMS or is_named or (form in TRANSCRIPTS and stem in stems)


def _names_recordings(tree: Tree, name: str, stems: set[str]) -> bool:
    try:
        with open(tree.path(name), "rb") as file:
            data = file.read(_HEAD)
    except OSError:
        return False
    head = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", "replace")
    if name.endswith(".json") and name.rpartition("/")[2].rpartition(".")[0] in stems:
        return _KEY.search(head) is not None
    return any(len(list(_words(line, stems))) >= _MIN_WORDS for line in head.splitlines()[:200])


def _words(line: str, stems: set[str]) -> Iterator[str]:
    """Yields the words beside the name of a recording; none of a line that names none."""
    parts = [part for part in _PARTS.split(line) if part]
    named = [part for part in parts if part in stems or (extension_of(part) and part.rpartition(".")[0] in stems)]
    if named:
        yield from (part for part in parts if part not in named and _WORD.search(part))
