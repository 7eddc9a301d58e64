"""Which column of a table may hold what, by its name and by what stands in its rows; and the words of whole rows."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.init.folder_files import spread
from forebay.init.table_head import Row, TableHead, as_list
from forebay.rows.meanings.canonical_chat import IMAGES, MESSAGES

NAMES: dict[str, list[str]] = {
    role: names.split()
    for role, names in {
        "text": "text sentence transcription transcript normalized_text raw_text raw_transcription target utterance "
        "words label_text normalized caption",
        "language": "language lang locale language_code lang_code lang_id language_id",
        "id": "sample_id id clip_id utt_id utterance_id segment_id uid key audio_id utt",
        "question": "question query prompt instruction input problem",
        "answer": "answer response output caption solution label text",
        "messages": "messages conversations conversation dialogue",
        "label": "label labels class class_name class_label category categories target fine_label coarse_label tags "
        "species",
    }.items()
}
"""Usual names of what a column holds, the likeliest first."""

_FEW = 100
_ENOUGH = 0.5
_CODE = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{2,8}){0,2}")
_LANGUAGES = """
af am ar as az ba be bg bn bo br bs ca cs cy da de el en es et eu fa fi fil fo fr ga gl gu ha haw he hi hr ht hu hy id
ig is it ja jv jw ka kk km kn ko la lb ln lo lt lv mg mi mk ml mn mr ms mt my ne nl nn no oc or pa pl ps pt ro ru rw sa
sd si sk sl sn so sq sr su sv sw ta te tg th tk tl tr tt ug uk ur uz vi wo xh yi yo yue zh zu
"""


@dataclass(frozen=True, slots=True)
class LikelyColumn:
    """A column that may be what is looked for. score: the likelier the more. folder: its paths are relative to."""

    name: str
    score: float
    folder: Path | None = None


def path_columns(table: TableHead, extensions: Iterable[str], *, folders: Sequence[Path]) -> list[LikelyColumn]:
    """Returns the columns that hold paths of files that are there, the likeliest first.

    folders: where relative paths may begin, the table's own first.
    """
    ends, found = frozenset(extensions), []
    for name in table.names:
        values = written_paths(table, name)
        named = [value for value in values if os.path.splitext(value)[1].lower() in ends]
        if len(named) < _ENOUGH * len(values) or not named:
            continue
        best = max(((_share_there(named, folder), -number, folder) for number, folder in enumerate(folders)))
        if best[0] >= _ENOUGH:
            found.append(LikelyColumn(name, best[0], best[2]))
    return sorted(found, key=lambda each: -each.score)


def written_paths(table: TableHead, name: str) -> list[str]:
    """Returns the paths that a column holds, as they are written: texts, lists of texts, or `path` of mappings."""
    cells = (value.get("path") if isinstance(value, dict) else value for value in table.values(name))
    return [each for cell in cells for each in as_list(cell) if isinstance(each, str) and each and "\0" not in each]


def name_columns(table: TableHead, audio: Sequence[str]) -> list[LikelyColumn]:
    """Returns the columns that name recordings without their extensions. audio: the names that there are."""
    stems = {form.rpartition(".")[0] for name in audio for form in (name, name.rpartition("/")[2])}
    found = []
    for column in (name for name in table.names if name not in stems):
        values = [str(value) for value in table.values(column) if isinstance(value, str | int)]
        share = sum(value in stems for value in values) / max(1, len(values))
        if share >= _ENOUGH and len(set(values)) == len(values):
            found.append(LikelyColumn(column, share))
    return sorted(found, key=lambda each: -each.score)


def _share_there(values: Sequence[str], folder: Path) -> float:
    looked, there = spread(values, 40), 0
    for value in looked:
        with contextlib.suppress(OSError, ValueError):
            there += (folder / value).is_file()
    return there / len(looked)


def likely_columns(table: TableHead, role: str, *, taken: Iterable[str] = ()) -> list[LikelyColumn]:
    """Returns the columns that may hold a role, the likeliest first.

    Their scores are 1 to 2 for a usual name, the first of these most, and below 1 for the content alone: running text
    that seldom repeats, codes of languages that do. A ClassLabel has 3. Ids differ from row to row.
    """
    usual, by_content, not_taken = NAMES[role], _CONTENTS.get(role), {*taken}
    declared = [name for name in table.classes if role == "label" and name not in not_taken]
    found = [LikelyColumn(name, 3.0) for name in declared]
    for name in (name for name in table.names if name not in not_taken and name not in declared):
        values = table.values(name)
        if name.lower() in usual and (values or not table.rows) and _fits(role, values):
            if role != "id" or _are_ids(values, len(table.rows)):
                found.append(LikelyColumn(name, 2 - usual.index(name.lower()) / len(usual)))
        elif by_content is not None and len(values) >= _ENOUGH * len(table.rows) and by_content(values):
            found.append(LikelyColumn(name, 0.5))
    return sorted(found, key=lambda each: -each.score)


def _are_ids(values: list[Any], num_rows: int) -> bool:
    return all(isinstance(value, str | int) for value in values) and len(set(values)) == num_rows == len(values)


def _fits(role: str, values: list[Any]) -> bool:
    if role == "messages":
        return all(
            isinstance(value, list) or (isinstance(value, str) and value.lstrip()[:1] == "[") for value in values
        )
    if role == "label":
        return all(isinstance(each, str | int) for value in values for each in as_list(value))
    if role in ("text", "question", "answer"):
        return all(isinstance(value, str) for value in values)
    return all(isinstance(value, str | int | float) for value in values)


def _is_prose(texts: list[Any]) -> bool:
    if not texts or not all(isinstance(text, str) for text in texts) or len(set(texts)) < _ENOUGH * len(texts):
        return False
    spaced = sum(" " in text.strip() or _is_unspaced(text) for text in texts)
    return spaced >= _ENOUGH * len(texts) and not any("://" in text for text in texts[:20])


def _is_unspaced(text: str) -> bool:
    """Whether a text is of a script that writes no spaces: Chinese, Japanese, Thai, Lao, Khmer, Burmese."""
    return len(text) > 4 and any("\u0e00" <= c <= "\u0eff" or "\u1000" <= c <= "\u109f" or c >= "\u3040" for c in text)


def _are_languages(values: list[Any]) -> bool:
    different = {str(value) for value in values}
    return len(different) < _FEW and all(map(is_language, different))


_CONTENTS: Mapping[str, Callable[[list[Any]], bool]] = {"text": _is_prose, "language": _are_languages}


def is_language(text: str) -> bool:
    """Says whether a text looks like the code of a language: `hi`, `en-US`, `pt_br`."""
    return _CODE.fullmatch(text) is not None and re.split("[-_]", text.lower())[0] in _LANGUAGES.split()


def languages_of(tables: Iterable[TableHead], name: str | None) -> Counter[str]:
    """Returns how often each language stands in whole columns; of huge tables in the rows that were read."""
    return sum((table.counts(name) for table in tables), Counter()) if name else Counter()


def words_of(row: Row, columns: Mapping[str, str | None]) -> str | None:
    """Returns all words of a row's conversation, None where it holds none. columns: by role, those that are named."""
    for name in (columns["messages"],) if columns.get("messages") else MESSAGES:
        if (found := _words_of_messages(row.get(name or ""))) is not None:
            return found
    asked, answered = (row.get(columns.get(role) or role) for role in ("question", "answer"))
    return f"{asked}\n{answered}" if isinstance(asked, str) and isinstance(answered, str) else None


def _words_of_messages(value: Any) -> str | None:
    messages = [] if isinstance(value, dict) else as_list(value)
    if not all(isinstance(each, dict) for each in messages):
        return None
    if not any(each.get("role") or each.get("from") for each in messages):
        return None
    return "\n".join(_words(each.get("content") or each.get("value")) for each in messages)


def _words(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return " ".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def images_of_row(row: Row, column: str | None = None) -> list[str]:
    """Returns the names of images that a row has, in its fields and in the parts of its messages."""
    found: list[str] = []
    for name in (column,) if column else IMAGES:
        found += [each for each in as_list(row.get(name)) if isinstance(each, str) and each]
    for name in MESSAGES:
        messages = row.get(name)
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            parts = content if isinstance(content, list) else []
            found += [p["image"] for p in parts if isinstance(p, dict) and isinstance(p.get("image"), str)]
    return found


def classes_of(table: TableHead, name: str) -> Counter[str]:
    """Returns how often each class stands in the rows that were read; a row may have a list of them."""
    return Counter(str(each) for value in table.values(name) for each in as_list(value) if each is not None)
