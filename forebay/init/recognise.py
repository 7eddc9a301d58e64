"""Names on the command line become what was found there; if several readings fit, one is chosen."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from forebay.config.pretrained_folder import hub_advice
from forebay.config.remote import is_url, url_or_path
from forebay.errors import ConfigError
from forebay.init.candidate import Candidate
from forebay.init.folder_files import MAX_TABLES, TABLES, TRANSCRIPTS, Tree, extension_of, spread, text_head, walk
from forebay.init.media_tables import dataset_of, media_tables_of, tables_of
from forebay.init.questions import Choice, Chooser
from forebay.init.sample_files import is_text_lines, pictures_of, recordings_of, speech_set_of, tars_of, text_lines
from forebay.init.table_head import read_table
from forebay.rows.reader import IMAGE_EXTENSIONS
from forebay.rows.readers.line_blocks import CODECS
from forebay.store.source_files import COMPRESSED_TARS
from forebay.terminal import counted
from forebay.visible import from_here

_NEAR = 35
"""A candidate whose score is lower by more is no second possibility."""
_MOST_PROBLEMS = 5
_DATA = (".parquet", ".arrow")
_DEPTH = 3
"""Folders above a table, at most."""
_FORMS = """
.textgrid .eaf .srt .vtt .stm .ctm .trs .trn .trans .cha .mlf .ass .sbv .ttml .antx .exb .flextext .xlsx .ods
"""
"""Forms of annotation tools and subtitles, and tables of office programs."""
_NAMES = "text texts segments transcript transcripts transcription transcriptions trans trn"
_LOOKED_INTO = frozenset(("", ".txt", ".json", ".jsonl", ".csv", ".tsv", ".list", ".lst", ".xml"))
_FILES = 60
_PARTS = re.compile(r"[\s|,;:\"'/\\=<>()\[\]{}]+")
_WORD = re.compile(r"[^\W\d_]+")
_KEY = re.compile(r'"\w*(text|transcri|sentence|utterance|words)\w*"\s*:', re.IGNORECASE)

NEEDS = """forebay init knows:
  recordings (wav, flac, ogg, mp3, opus) with a .txt or .lab of the same name beside each, or *.trans.txt;
  a table (csv, tsv, jsonl, json, parquet, arrow) with a column of paths of recordings that are there;
  recordings with subtitles of the same name beside each (.srt, .vtt, .TextGrid);
  a data folder of Kaldi (wav.scp), a manifest of NeMo with offsets, cuts or supervisions of lhotse;
  LJSpeech (metadata.csv beside wavs/), Common Voice (train.tsv beside clips/);
  a save_to_disk folder of the datasets library, or parquet files with recordings or images in their rows;
  tars of recordings, or of images, each with a .json, .txt or .cls of its name;
  images in folders of their classes, with a .txt of the same name beside each, or alone;
  a table with a column of paths of images, and a question and answer (or messages), a class or a text beside it;
  a table of messages, or of questions and answers, with clips: their paths in a column or in the messages;
  plain texts, a text a line;
  texts alone as JSON lines, compressed lines (.gz, .zst), or a column of parquet"""


def recognise(data: Sequence[str], chooser: Chooser) -> list[Candidate]:
    """Returns what was found in some folders and files; what one config can read is one entry.

    Raises ConfigError for a path that is not there or a URL, and where nothing is recognised: with what was seen.
    """
    found: list[Candidate] = []
    for paths in _groups(data):
        one = _settled(paths, chooser)
        like = next((number for number, each in enumerate(found) if each.is_like(one)), None)
        if like is None:
            found.append(one)
        else:
            found[like] = found[like].with_rows_of(one)
    return found


def _groups(data: Sequence[str]) -> list[list[Path]]:
    """Returns folders each for itself, and files of one extension together: a shell writes out `train-*.tar`."""
    groups: dict[str, list[Path]] = {}
    for text in data:
        path = _there(text)
        key = str(path) if path.is_dir() else f"*{path.suffix.lower()}"
        groups.setdefault(key, []).append(path)
    return [list(dict.fromkeys(paths)) for paths in groups.values()]


def _there(text: str) -> Path:
    place = url_or_path(text)
    if is_url(place):
        raise ConfigError(
            f"{place} is a URL, and forebay init looks at files of this machine; copy a few of them here, run init on "
            "those, and write the URL into source.manifest"
        )
    path = Path(os.path.abspath(place))
    if not os.path.exists(path):
        raise ConfigError(f"{text} does not exist; name a folder or a file of data{hub_advice(path, 'dataset')}")
    return path


def _settled(paths: list[Path], chooser: Chooser) -> Candidate:
    problems: list[str] = []
    tree = walk(paths[0]) if paths[0].is_dir() else None
    place = Path(os.path.abspath(chooser.given["audio-dir"])) if "audio-dir" in chooser.given else None
    made = _of_files(paths, problems, place) if tree is None else _of_folder(paths[0], tree, problems, place)
    candidates = sorted((each for each in made if each is not None), key=lambda each: -each.score)
    if not candidates:
        raise ConfigError(_nothing(paths, tree, problems))
    near = [each for each in candidates if each.score > candidates[0].score - _NEAR]
    names = Counter(each.kind for each in candidates)
    choices = [
        Choice(f"{each.kind}: {each.label}", each.kind if names[each.kind] == 1 else f"{each.kind}:{each.name}", each)
        for each in (candidates if "kind" in chooser.given else near)
    ]
    found = chooser.one(f"what is {from_here(paths[0])}", choices, option="kind")
    found.look(found, chooser)
    if tree is not None and not tree.is_whole:
        found.notes.append("The folder holds more than was looked at, so numbers are too low.")
    found.notes += [] if tree is None else tree.cut
    if place is not None and (names["table"] or "texts" in found.source):
        chooser.used.add("audio-dir")
    if found.meaning.may_miss and not found.has_text and "kind" not in chooser.given:
        unread = [*found.unread, *(_unread_texts(tree, found) if tree is not None else [])]
        _refuse_unread(paths[0], unread, found, problems)
    if not found.has_text or tree is None:  # a file that was named is never left out without a word
        found.notes += [f"{problem}." for problem in problems[:_MOST_PROBLEMS]]
    return found


def _refuse_unread(path: Path, names: Sequence[str], found: Candidate, problems: Sequence[str]) -> None:
    """Raises ConfigError where recordings would be read without texts, and something beside them looks like texts."""
    if not names:
        return
    shown = f"{', '.join(names[:_MOST_PROBLEMS])}{', ...' * (len(names) > _MOST_PROBLEMS)}"
    count = counted(found.count, found.noun, is_exact=found.is_exact)
    said = (
        f"{from_here(path)}: {count} without texts, and {shown} looks like texts, which is not read; write a table "
        "(csv, tsv, jsonl) of audio and text, a row a recording, and run forebay init on that, or take the recordings "
        f"alone: --kind {found.kind}"
    )
    raise ConfigError("\n".join([said, *(f"  {problem}" for problem in problems[:_MOST_PROBLEMS])]), code="FB134")


def _of_files(paths: list[Path], problems: list[str], place: Path | None) -> list[Candidate | None]:
    if (known := speech_set_of(paths, problems)) is not None:
        return [known]
    suffix = paths[0].suffix.lower()
    if suffix == ".tar":
        return [tars_of(paths, None)]
    if suffix in _DATA and (held := media_tables_of(paths, None, problems)) is not None:
        return [held]
    if suffix in TABLES:
        return [*tables_of(paths, None, problems, place)]
    return [text_lines(paths, None, problems)] if is_text_lines(paths[0]) else []


def _of_folder(folder: Path, tree: Tree, problems: list[str], place: Path | None) -> list[Candidate | None]:
    if (data_set := dataset_of(folder)) is not None:
        return [data_set]
    if (known := speech_set_of([folder], problems)) is not None:
        return [known]
    tars = tree.paths(".tar")
    data, tables = _data_files(tree, problems)
    found = [
        recordings_of(tree),
        tars_of(tars, _parents(tars)),
        media_tables_of(data, _parents(data), problems) if data else None,
        *tables_of(tables, tree, problems, place),
        pictures_of(tree),
    ]
    if any(found):
        return found
    plain = [] if tree.audio or tree.names(IMAGE_EXTENSIONS) else tree.paths(".txt")
    packed = [path for path in tree.paths(*CODECS) if is_text_lines(path)]
    texts = plain or packed
    return [text_lines(texts, _parents(texts), problems)] if texts else []


def _parents(paths: Sequence[Path]) -> tuple[Path, ...]:
    return tuple(sorted({path.parent for path in paths}))


def _data_files(tree: Tree, problems: list[str]) -> tuple[list[Path], list[Path]]:
    """Returns the parquet and arrow files that hold media in themselves, and the tables."""
    data: list[Path] = []
    # Many of them are of a recording or an image each.
    left = frozenset((*_DATA, *([".json"] if (count := len(tree.names(frozenset((".json",))))) > MAX_TABLES else [])))
    if ".json" in left:
        problems.append(
            f"{count} .json files, more than {MAX_TABLES}, were not looked into: name those that are tables"
        )
    tables = [tree.path(name) for name in tree.names(TABLES - left) if name.count("/") <= _DEPTH]
    by_folder: dict[Path, list[Path]] = {}
    for path in tree.paths(*_DATA):
        by_folder.setdefault(path.parent, []).append(path)
    folders = list(by_folder.values())
    if len(folders) > MAX_TABLES:
        names = from_here(folders[MAX_TABLES][0].parent)
        tree.cut.append(
            f"Of {len(folders)} folders with parquet or arrow files the first {MAX_TABLES} were looked into, and those "
            f"from {names} on are left out: name them (forebay init FOLDER ...)."
        )
    for paths in folders[:MAX_TABLES]:
        try:
            head = read_table(paths[0])
        except ConfigError as err:
            problems.append(str(err))
            continue
        (data if head.blobs or head.matrices else tables).extend(paths)
    return data, tables


def _nothing(paths: Sequence[Path], tree: Tree | None, problems: Sequence[str]) -> str:
    """Returns the message for data of no known form: what was seen, what stopped each table, what is known."""
    lines = [f"{from_here(paths[0])}: nothing here is data that forebay knows"]
    if tree is not None:
        most = sorted(tree.by_extension.items(), key=lambda each: -len(each[1]))[:10]
        counts = ", ".join(f"{len(names):,} {extension or 'without extension'}" for extension, names in most)
        lines.append(f"  seen: {counts or 'no files'}{'' if tree.is_whole else ' (a part of the folder)'}")
        lines += [*(f"  {said}" for said in tree.cut), *_hints(tree)]
    lines += [f"  {problem}" for problem in problems[:_MOST_PROBLEMS]]
    return "\n".join([*lines, *(f"  {line}" for line in NEEDS.splitlines())])


def _hints(tree: Tree) -> list[str]:
    hints = [f"  {name} looks like texts, which forebay init does not read" for name in _unread_texts(tree)[:1]]
    packed = [name for names in tree.by_extension.values() for name in names[:1] if name.endswith(COMPRESSED_TARS)]
    if packed:
        hints.append(f"  {packed[0]} is a compressed tar, whose members cannot be read by place: decompress it")
    unknown = [extension for extension in (".m4a", ".aac", ".wma", ".mp4", ".webm") if extension in tree.by_extension]
    if unknown:
        hints.append(f"  {unknown[0]} is not read: convert it, for example with ffmpeg -i x{unknown[0]} x.flac")
    return hints


def _unread_texts(tree: Tree, found: Candidate | None = None) -> list[str]:
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
    form = extension_of(name)
    stem = name.rpartition("/")[2].removesuffix(name[len(name) - len(form) :])
    is_named = form in _LOOKED_INTO and stem.lower() in _NAMES.split()
    return form in _FORMS.split() or is_named or (form in TRANSCRIPTS and stem in stems)


def _names_recordings(tree: Tree, name: str, stems: set[str]) -> bool:
    head = text_head(tree.path(name))
    if name.endswith(".json") and name.rpartition("/")[2].rpartition(".")[0] in stems:
        return _KEY.search(head) is not None
    return any(len(list(_words(line, stems))) >= 2 for line in head.splitlines()[:200])


def _words(line: str, stems: set[str]) -> Iterator[str]:
    """Yields the words beside the name of a recording; none of a line that names none."""
    parts = [part for part in _PARTS.split(line) if part]
    named = [part for part in parts if part in stems or (extension_of(part) and part.rpartition(".")[0] in stems)]
    if named:
        yield from (part for part in parts if part not in named and _WORD.search(part))
