"""A folder of recordings, with transcripts beside them or none; and the layouts of LJSpeech and LibriSpeech."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from forebay.errors import ConfigError
from forebay.init.choose import Choice, Chooser
from forebay.init.columns import is_language
from forebay.init.found import Found, Reading, counted
from forebay.init.media import sounds_of
from forebay.init.readings.own import Own, above, own_files
from forebay.init.tree import TRANSCRIPTS, Tree, extension_of, spread
from forebay.steps.text.annotation import is_annotation

_TRANS = ".trans.txt"
_BESIDE = 0.5
_MAX_TEXT_BYTES = 64 * 1024
_TEXTS = 50


def folder_readings(tree: Tree) -> list[Reading]:
    """Returns the readings of a tree as recordings with files beside them."""
    if _is_ljspeech(tree):
        return [Reading(kind="ljspeech", label=_lj_label(tree.audio), score=85, settle=lambda _: _ljspeech(tree))]
    own = own_files(tree.audio)
    if not own.names:
        return []
    audio, beside = counted(len(own.names), "recordings"), _transcripts(tree, own.names)
    trans = [name for name in tree.by_extension.get(".txt", []) if name.endswith(_TRANS)]
    if trans:
        label, score = f"{audio}, texts in {counted(len(trans), 'files')} *{_TRANS}", 75.0
    elif len(beside) >= _BESIDE * len(own.names):
        label, score = f"{audio}, {counted(len(beside), 'texts')} beside them", 70.0
    else:
        label, score = f"{audio} without texts", 20.0
    texts = _librispeech_texts(tree, trans) if trans else beside

    def settle(chooser: Chooser) -> Found:
        return _folder(tree, own, texts, is_trans=bool(trans), chooser=chooser)

    return [Reading(kind="folder", label=label, score=score, settle=settle)]


def _transcripts(tree: Tree, audio: list[str]) -> list[str]:
    """Returns the names of transcripts that stand beside a recording of their name."""
    names = tree.names(TRANSCRIPTS)
    stems = {name.rpartition(".")[0] for name in audio} if names else set()
    return [name for name in names if name.rpartition(".")[0] in stems]


def _is_ljspeech(tree: Tree) -> bool:
    metadata = tree.path("metadata.csv")
    if "wavs" not in tree.folders or "metadata.csv" not in tree.by_extension.get(".csv", []):
        return False
    lines = [line for line in _head(metadata).splitlines()[:20] if line]
    return bool(lines) and all(line.count("|") in (1, 2) for line in lines)


def _lj_label(audio: list[str]) -> str:
    return f"LJSpeech: metadata.csv with | beside wavs/, {counted(len(audio), 'recordings')}"


def _ljspeech(tree: Tree) -> Found:
    lines = _head(tree.path("metadata.csv")).splitlines()
    audio = [name for name in tree.audio if name.startswith("wavs/")]
    return Found(
        kind="ljspeech",
        modality="speech",
        manifests=(tree.path("metadata.csv"),),
        noun=_noun(audio),
        count=len(audio),
        is_exact=tree.is_whole,
        sounds=sounds_of([tree.path(name) for name in spread(audio)]),
        texts=[line.rpartition("|")[2] for line in lines[:_TEXTS]],
    )


def _folder(tree: Tree, own: Own, texts: list[str], *, is_trans: bool, chooser: Chooser) -> Found:
    """Returns what is found of recordings. texts: names of transcripts beside them, or under `is_trans` some texts."""
    audio = own.names
    folders, languages = _languages(own)
    by_folder = _from_folders(languages, chooser)
    notes = [f"Other splits are left out: {', '.join(own.others)}."] if own.others else []
    heads = texts if is_trans else [_head(tree.path(name)).strip() for name in spread(texts, _TEXTS)]
    notes += [] if is_trans else _exports(spread(texts, _TEXTS), heads, chooser)
    return Found(
        kind="folder",
        modality="speech",
        manifests=tuple(tree.path(folder) for folder in (folders if by_folder else own.folders)),
        source={"languages_from_folders": True} if by_folder else {},
        noun=_noun(audio),
        count=len(audio),
        is_exact=tree.is_whole,
        sounds=sounds_of([tree.path(name) for name in spread(audio)]),
        texts=heads,
        languages=languages if by_folder else Counter(),
        notes=[*notes, *(_missing_texts(len(audio), len(texts)) if not is_trans else [])],
        has_text=bool(texts),
    )


def _from_folders(languages: Counter[str], chooser: Chooser) -> bool:
    """Returns whether recordings are of the languages that their folders are named after."""
    option, several = "languages-from-folders", len(languages) > 1
    if option not in chooser.given and (several or not languages):
        return several
    named = ", ".join(sorted(languages)[:5]) or "their folders' names"
    choices = [
        Choice(f"the languages of the recordings are {named}", "true", answer=True),
        Choice("the folders' names are no languages", "false", answer=False),
    ]
    return chooser.one("are the folders named after languages", choices, option=option)


def _languages(own: Own) -> tuple[list[str], Counter[str]]:
    """Returns folders right below which all folders are named after languages, and how many recordings each has.

    Nothing is counted where there are no such folders; the folders are then those of the recordings.
    """
    deepest = [above(own.counts)] if len(own.folders) == 1 else []
    for folders in (own.folders, deepest, [os.path.dirname(folder) for folder in deepest]):
        counts: Counter[str] = Counter()
        for folder, count in own.counts.items():
            counts[_below(folder, folders)] += count
        if folders and all(map(is_language, counts)):
            return folders, counts
    return own.folders, Counter()


def _below(folder: str, folders: list[str]) -> str:
    """Returns the first folder on the way to a folder from the one of `folders` above it; empty where there is none."""
    above = next((each for each in folders if not each or folder.startswith(f"{each}/")), None)
    return "" if above is None else folder[len(above) + 1 if above else 0 :].partition("/")[0]


def _missing_texts(count: int, found: int) -> list[str]:
    if not found:
        return ["No transcripts were found: a .txt or .lab of the same name beside a recording is its text."]
    if found < count:
        rest = count - found
        return [f"{rest:,} recordings have no text beside them; where a text is needed they fail, and are listed."]
    return []


def _exports(names: list[str], texts: list[str], chooser: Chooser) -> list[str]:
    """Returns what to say of texts that an annotation tool wrote, with their times.

    Raises ConfigError where most are such, unless the command line says that they are to be read.
    """
    found = [name for name, text in zip(names, texts, strict=True) if is_annotation(text)]
    if not found:
        return []
    said = f"{found[0]}: an annotation tool wrote this text ({len(found)} of {len(texts)} that were looked at have tabs"
    if 2 * len(found) > len(texts) and "kind" not in chooser.given:
        raise ConfigError(
            f"{said}, times or mostly digits), and all of it would be learnt; export the words alone, or write a table "
            "(csv, tsv, jsonl) of audio and text and run forebay init on that; to read them as they are: --kind folder",
            code="FB135",
        )
    return [f"{said}, times or mostly digits): forebay lint lists them."]


def _librispeech_texts(tree: Tree, trans: list[str]) -> list[str]:
    lines = [line for name in spread(trans, 10) for line in _head(tree.path(name)).splitlines()[:10]]
    return [line.partition(" ")[2] for line in lines[:_TEXTS]]


def _noun(audio: list[str]) -> str:
    kinds = Counter(extension_of(name)[1:] for name in audio)
    return f"{kinds.most_common(1)[0][0]} files" if len(kinds) == 1 else "recordings"


def _head(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_TEXT_BYTES).decode("utf-8-sig", "replace")
    except OSError:
        return ""
