"""Files that are samples themselves, or texts in lines: recordings and images with texts beside them, LJSpeech."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from forebay.config.data import PICTURES, TEXT_OF_IMAGE
from forebay.errors import ConfigError, ManifestError
from forebay.init.candidate import Candidate, Pictures, Sounds, files_noun
from forebay.init.column_roles import is_language
from forebay.init.config_sections import RECORDINGS, TEXTS
from forebay.init.folder_files import TRANSCRIPTS, TrainFiles, Tree, spread, text_head
from forebay.init.image_sections import IMAGES
from forebay.init.questions import Choice, Chooser, prompt_of
from forebay.rows.readers.json_lines import BOM, JsonError, parse_object
from forebay.rows.readers.line_blocks import codec_of, head_of, plain_name
from forebay.steps.text.line import is_annotation
from forebay.terminal import counted
from forebay.visible import from_here

_TRANS = ".trans.txt"
_MOST = 0.5
"""The share of files that has to have a text, or a class."""
_TEXTS = 50
_HEAD = 64 * 1024
_SHOWN = 3
_TEXT_FILES, _TEXTS_A_FILE = 20, 20
_LINES = (".txt", ".jsonl")
"""How names of texts in lines end, before the ending of a compression."""


def recordings_of(tree: Tree) -> Candidate | None:
    """Returns the candidate of a tree as recordings with files beside them; None where it holds none."""
    if (ljspeech := _ljspeech_of(tree)) is not None:
        return ljspeech
    own = TrainFiles.among(tree.audio)
    if not own.names:
        return None
    beside = own.with_text(tree.names(TRANSCRIPTS))
    trans = [name for name in tree.by_extension.get(".txt", []) if name.endswith(_TRANS)]
    has, score = " without texts", 20
    if trans:
        has, score = f", texts in {counted(len(trans), 'files')} *{_TRANS}", 75
    elif len(beside) >= _MOST * len(own.names):
        has, score = f", {counted(len(beside), 'texts')} beside them", 70

    def look(found: Candidate, chooser: Chooser) -> None:
        folders, languages = _languages(own)
        if _are_languages(languages, chooser):
            found.manifests = tuple(map(tree.path, folders))
            found.source, found.languages = {"languages_from_folders": True}, languages
        _take_sounds(found, tree, own.names)
        found.notes += own.notes
        if trans:
            lines = [line for name in spread(trans, 10) for line in text_head(tree.path(name)).splitlines()[:10]]
            found.texts = [line.partition(" ")[2] for line in lines[:_TEXTS]]
        else:
            names = spread(beside, _TEXTS)
            found.texts = [text_head(tree.path(name)).strip() for name in names]
            found.notes += _exports(tree, names, found.texts, chooser)
            rest = len(own.names) - len(beside)
            lack = f"{rest:,} recordings have no text beside them; where a text is needed they fail, and are listed."
            none = "No transcripts were found: a .txt or .lab of the same name beside a recording is its text."
            found.notes += [lack if beside else none] if rest > 0 or not beside else []
        found.has_text = bool(found.texts)

    label = f"{counted(len(own.names), Sounds.noun)}{has}"
    return Candidate("folder", tuple(map(tree.path, own.folders)), RECORDINGS, label, score, look)


def _ljspeech_of(tree: Tree) -> Candidate | None:
    table = tree.path("metadata.csv")
    if "wavs" not in tree.folders or "metadata.csv" not in tree.by_extension.get(".csv", []):
        return None
    lines = text_head(table).splitlines()
    if not any(lines[:20]) or any(line.count("|") not in (1, 2) for line in lines[:20] if line):
        return None

    def look(found: Candidate, chooser: Chooser) -> None:  # noqa: ARG001
        _take_sounds(found, tree, [name for name in tree.audio if name.startswith("wavs/")])
        found.texts = [line.rpartition("|")[2] for line in lines[:_TEXTS]]

    label = f"LJSpeech: metadata.csv with | beside wavs/, {counted(len(tree.audio), Sounds.noun)}"
    return Candidate("ljspeech", (table,), RECORDINGS, label, 85, look)


def _take_sounds(found: Candidate, tree: Tree, names: Sequence[str]) -> None:
    found.noun, found.count, found.is_exact = files_noun(names, Sounds.noun), len(names), tree.is_whole
    found.sounds = Sounds.of(map(tree.path, spread(names)))


def _languages(own: TrainFiles) -> tuple[list[str], Counter[str]]:
    """Returns folders right below which all folders are named after languages, and how many recordings each has.

    Nothing is counted where there are no such folders; the folders are then those of the recordings.
    """
    deepest = own.deepest if len(own.folders) == 1 else []
    for folders in (own.folders, deepest, [os.path.dirname(folder) for folder in deepest]):
        counts = own.by_first(folders)
        if folders and all(map(is_language, counts)):
            return folders, counts
    return own.folders, Counter()


def _are_languages(languages: Counter[str], chooser: Chooser) -> bool:
    """Returns whether recordings are of the languages that their folders are named after."""
    option, several = "languages-from-folders", len(languages) > 1
    if option not in chooser.given and (several or not languages):
        return several
    named = ", ".join(sorted(languages)[:5]) or "their folders' names"
    yes = Choice(f"the languages of the recordings are {named}", "true", answer=True)
    no = Choice("the folders' names are no languages", "false", answer=False)
    return chooser.one("are the folders named after languages", [yes, no], option=option)


def _exports(tree: Tree, names: Sequence[str], texts: Sequence[str], chooser: Chooser) -> list[str]:
    """Returns what to say of texts that an annotation tool wrote, with their times.

    Raises ConfigError where most are such, unless the command line says that they are to be read.
    """
    found = [name for name, text in zip(names, texts, strict=True) if is_annotation(text)]
    if not found:
        return []
    said = f": an annotation tool wrote this text ({len(found)} of {len(texts)} that were looked at have tabs"
    if 2 * len(found) > len(texts) and "kind" not in chooser.given:
        raise ConfigError(
            f"{from_here(tree.path(found[0]))}{said}, times or mostly digits), and all of it would be learnt; export "
            "the words alone, or write a table (csv, tsv, jsonl) of audio and text and run forebay init on that; to "
            "read them as they are: --kind folder",
            code="FB135",
        )
    return [f"{found[0]}{said}, times or mostly digits): forebay lint lists them."]


def pictures_of(tree: Tree) -> Candidate | None:
    """Returns the candidate of a tree as images; None where it holds none, or more recordings than images.

    They are of classes where there are several folders, and most images lie in one.
    """
    names = tree.names(frozenset(PICTURES))
    if not names or len(tree.audio) > len(names):
        return None
    own = TrainFiles.among(names)
    classes, texts = own.by_first(own.deepest), own.with_text(tree.names(frozenset(TEXT_OF_IMAGE)))
    del classes[""]
    possible = []
    if len(texts) >= _MOST * len(own.names):
        possible.append(Choice(f"{counted(len(texts), 'files')} NAME.txt beside them", "plain", "plain"))
    if len(classes) > 1 and classes.total() >= _MOST * len(own.names):
        shown = ", ".join(sorted(classes)[:_SHOWN]) + ", ..." * (len(classes) > _SHOWN)
        possible.append(Choice(f"folders of {len(classes)} classes: {shown}", "label", "label"))

    def look(found: Candidate, chooser: Chooser) -> None:
        found.prompt, notes = prompt_of(from_here(tree.root), possible, chooser)
        found.noun, found.count, found.is_exact = files_noun(own.names, Pictures.noun), len(own.names), tree.is_whole
        found.has_all_classes, found.has_text = tree.is_whole, found.prompt != "none"
        found.notes += own.notes
        if found.prompt == "label":
            found.classes, lacking, lack = classes, len(own.names) - classes.total(), "class"
        elif found.prompt == "plain":
            found.texts = [text_head(tree.path(name)).strip() for name in spread(texts, _TEXTS)]
            lacking, lack = len(own.names) - len(texts), "text"
        else:
            lacking, lack = 0, ""
        found.notes += [f"{lacking:,} images have no {lack} and are left out."] * bool(lacking) + notes
        found.pictures = Pictures.of(map(tree.path, spread(own.names)))

    label = f"{counted(len(own.names), Pictures.noun)}, {' and '.join(each.label for each in possible) or 'alone'}"
    places, score = tuple(map(tree.path, own.deepest)), 34 if possible else 5
    return Candidate("folder", places, IMAGES, label, score, look, name=Pictures.noun)


def is_text_lines(path: Path) -> bool:
    """Whether a name is one of texts in lines: plain text, or compressed."""
    suffix = Path(plain_name(path.name)).suffix
    return suffix in _LINES if codec_of(path) is not None else suffix.lower() == ".txt"


def text_lines(paths: Sequence[Path], folders: tuple[Path, ...] | None, problems: list[str]) -> Candidate | None:
    """Returns the candidate of texts in lines; None where the first of compressed files holds something else.

    folders: that hold them, to be named whole. problems: why they are of no use is added. Compressed bytes do not say
    how many texts they are of.
    """
    is_packed = codec_of(paths[0]) is not None
    texts, count, read, total = [], 0, 0, sum(map(os.path.getsize, paths))
    for path in paths[:1] if is_packed else spread(paths, _TEXT_FILES):
        try:
            head = head_of(path)
            found = _texts_in(path, head)
        except (ManifestError, JsonError) as err:
            problems.append(f"{path.name}: {err}")
            return None
        count, read = count + len(found), read + len(head)
        texts += found[:_TEXTS_A_FILE]
    if is_packed and not texts:
        problems.append(f"{paths[0].name} holds no texts")
        return None
    is_all = len(paths) == 1 and read < _HEAD if is_packed else read >= total

    def look(found: Candidate, chooser: Chooser) -> None:  # noqa: ARG001
        found.noun, found.texts, found.is_exact = "texts", texts, is_all
        found.count = count if is_all or is_packed else round(count * total / max(1, read))
        if is_packed and not is_all:
            found.notes.append("Only the first lines were looked at: there are more texts than that.")

    label = f"{counted(len(paths), 'compressed text files' if is_packed else 'text files')}, a text a line"
    return Candidate("text", folders or tuple(paths), TEXTS, label, 10, look)


def _texts_in(path: Path, head: bytes) -> list[str]:
    """Returns the texts of the whole lines of a head. Raises JsonError for lines that are objects without one."""
    data = head if len(head) < _HEAD else head.rpartition(b"\n")[0]
    lines = [line for line in data.removeprefix(BOM).split(b"\n") if line.strip()]
    if Path(plain_name(path.name)).suffix.lower() == ".txt":
        return [line.decode("utf-8", "replace") for line in lines]
    texts = [parse_object(line).get("text") for line in lines]
    return [text for text in texts if isinstance(text, str)]
