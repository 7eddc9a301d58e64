"""A folder of recordings, with transcripts beside them or none; and the layouts of LJSpeech and LibriSpeech."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from forebay.init.choose import Choice, Chooser
from forebay.init.columns import is_language
from forebay.init.found import Found, Reading, counted
from forebay.init.media import sounds_of
from forebay.init.tree import TRANSCRIPTS, Tree, spread

_TRANS = ".trans.txt"
_BESIDE = 0.5
_MAX_TEXT_BYTES = 64 * 1024
_TEXTS = 50


def folder_readings(tree: Tree) -> list[Reading]:
    """Returns the readings of a tree as recordings with files beside them."""
    audio = tree.audio
    if not audio:
        return []
    if _is_ljspeech(tree):
        return [Reading(kind="ljspeech", label=_lj_label(audio), score=85, settle=lambda _: _ljspeech(tree))]
    beside = _transcripts(tree, audio)
    trans = [name for name in tree.by_extension.get(".txt", []) if name.endswith(_TRANS)]
    if trans:
        label, score = f"{counted(len(audio), 'recordings')}, texts in {counted(len(trans), 'files')} *{_TRANS}", 75.0
    elif len(beside) >= _BESIDE * len(audio):
        label, score = f"{counted(len(audio), 'recordings')}, {counted(len(beside), 'texts')} beside them", 70.0
    else:
        label, score = f"{counted(len(audio), 'recordings')} without texts", 20.0
    texts = _librispeech_texts(tree, trans) if trans else beside

    def settle(chooser: Chooser) -> Found:
        return _folder(tree, texts, is_trans=bool(trans), chooser=chooser)

    return [Reading(kind="folder", label=label, score=score, settle=settle)]


def _transcripts(tree: Tree, audio: list[str]) -> list[str]:
    """Returns the names of transcripts that stand beside a recording of their name."""
    stems = {os.path.splitext(name)[0] for name in audio}
    return [name for name in tree.names(TRANSCRIPTS) if os.path.splitext(name)[0] in stems]


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


def _folder(tree: Tree, texts: list[str], *, is_trans: bool, chooser: Chooser) -> Found:
    """Returns what is found of recordings. texts: names of transcripts beside them, or under `is_trans` some texts."""
    audio = tree.audio
    languages, level = _languages(audio)
    source: dict[str, object] = {}
    if level is not None:
        choices = [
            Choice(f"the folders' names are languages ({', '.join(sorted(languages)[:5])})", "true", answer=True),
            Choice("the folders' names are no languages", "false", answer=False),
        ]
        is_sure = all(map(is_language, languages)) and len(languages) > 1
        option = "languages-from-folders"
        if option in chooser.given or not is_sure:
            is_sure = chooser.one("are the folders named after languages", choices, option=option)
        if is_sure:
            source["languages_from_folders"] = True
    return Found(
        kind="folder",
        modality="speech",
        manifests=(tree.root,),
        source=source,
        noun=_noun(audio),
        count=len(audio),
        is_exact=tree.is_whole,
        sounds=sounds_of([tree.path(name) for name in spread(audio)]),
        texts=texts if is_trans else [_head(tree.path(name)).strip() for name in spread(texts, _TEXTS)],
        languages=languages if source else Counter(),
        notes=_missing_texts(len(audio), len(texts)) if not is_trans else [],
        has_text=bool(texts),
    )


def _languages(audio: list[str]) -> tuple[Counter[str], int | None]:
    """Returns how many recordings lie in each folder of a language, and how deep these folders lie; None: nowhere."""
    folders = [name.split("/")[:-1] for name in audio]
    parents = Counter(parts[-1] for parts in folders if parts)
    if parents and len(folders) == parents.total() and all(map(is_language, parents)):
        return parents, -1
    return Counter(), None


def _missing_texts(count: int, found: int) -> list[str]:
    if not found:
        return ["No transcripts were found: a .txt or .lab of the same name beside a recording is its text."]
    if found < count:
        rest = count - found
        return [f"{rest:,} recordings have no text beside them; where a text is needed they fail, and are listed."]
    return []


def _librispeech_texts(tree: Tree, trans: list[str]) -> list[str]:
    lines = [line for name in spread(trans, 10) for line in _head(tree.path(name)).splitlines()[:10]]
    return [line.partition(" ")[2] for line in lines[:_TEXTS]]


def _noun(audio: list[str]) -> str:
    kinds = Counter(os.path.splitext(name)[1].lower()[1:] for name in audio)
    return f"{kinds.most_common(1)[0][0]} files" if len(kinds) == 1 else "recordings"


def _head(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_TEXT_BYTES).decode("utf-8-sig", "replace")
    except OSError:
        return ""
