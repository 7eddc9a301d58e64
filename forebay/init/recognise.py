"""From what is named on the command line to what was found; where several readings fit, one is chosen."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from forebay.config.digest import hub_advice
from forebay.config.url import is_url, url_or_path
from forebay.errors import ConfigError
from forebay.init.choose import Choice, Chooser
from forebay.init.found import Found, Reading, counted
from forebay.init.media import Pictures, Sounds
from forebay.init.readings.datasets import dataset_reading, parquet_reading
from forebay.init.readings.folders import folder_readings
from forebay.init.readings.pictures import picture_reading
from forebay.init.readings.tables import table_readings
from forebay.init.readings.tars import tar_readings
from forebay.init.readings.texts import is_packed_text, packed_reading, text_reading
from forebay.init.subjects import subject_of
from forebay.init.table import read_table
from forebay.init.tree import MAX_TABLES, TABLES, Tree, walk
from forebay.init.unread import unread_texts
from forebay.rows.readers.line_blocks import CODECS
from forebay.store.source_files import COMPRESSED_TARS
from forebay.visible import from_here

_NEAR = 35
"""A reading whose score is lower by more is no second possibility."""
_MOST_PROBLEMS = 5
_DATA = (".parquet", ".arrow")
NEEDS = """forebay init knows:
  recordings (wav, flac, ogg, mp3, opus) with a .txt or .lab of the same name beside each, or *.trans.txt;
  a table (csv, tsv, jsonl, json, parquet, arrow) with a column of paths of recordings that are there;
  LJSpeech (metadata.csv beside wavs/), Common Voice (train.tsv beside clips/);
  a save_to_disk folder of the datasets library, or parquet files with recordings or images in their rows;
  tars of recordings, or of images, each with a .json, .txt or .cls of its name;
  images in folders of their classes, with a .txt of the same name beside each, or alone;
  a table with a column of paths of images, and a question and answer (or messages), a class or a text beside it;
  plain texts, a text a line;
  texts alone as JSON lines, compressed lines (.gz, .zst), or a column of parquet"""


def recognise(data: Sequence[str], chooser: Chooser) -> list[Found]:
    """Returns what was found in some folders and files; what one config can read is one entry.

    Raises ConfigError for a path that is not there or a URL, and where nothing is recognised: with what was seen.
    """
    found: list[Found] = []
    for paths in _groups(data):
        one = _settled(paths, chooser)
        like = next((number for number, each in enumerate(found) if each.is_like(one)), None)
        if like is None:
            found.append(one)
        else:
            found[like] = joined(found[like], one)
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


def _settled(paths: list[Path], chooser: Chooser) -> Found:
    problems: list[str] = []
    tree = walk(paths[0]) if paths[0].is_dir() else None
    place = Path(os.path.abspath(chooser.given["audio-dir"])) if "audio-dir" in chooser.given else None
    readings = _of_files(paths, problems, place) if tree is None else _of_folder(paths[0], tree, problems, place)
    if not readings:
        raise ConfigError(_nothing(paths, tree, problems))
    readings.sort(key=lambda reading: -reading.score)
    near = [reading for reading in readings if reading.score > readings[0].score - _NEAR]
    names = Counter(reading.kind for reading in readings)
    offered = readings if "kind" in chooser.given else near
    choices = [Choice(f"{each.kind}: {each.label}", _value(each, names), each) for each in offered]
    found = chooser.one(f"what is {from_here(paths[0])}", choices, option="kind").settle(chooser)
    if tree is not None and not tree.is_whole:
        found.notes.append("The folder holds more than was looked at, so numbers are too low.")
    found.notes += [] if tree is None else tree.cut
    if place is not None and any(reading.kind == "table" or "texts" in found.source for reading in readings):
        chooser.used.add("audio-dir")
    if subject_of(found).may_miss and not found.has_text and "kind" not in chooser.given:
        unread = [*found.unread, *(unread_texts(tree, found) if tree is not None else [])]
        _refuse_unread(paths[0], unread, found, problems)
    if not found.has_text:
        found.notes += [f"{problem}." for problem in problems[:_MOST_PROBLEMS]]
    return found


def _refuse_unread(path: Path, names: Sequence[str], found: Found, problems: Sequence[str]) -> None:
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


def _value(reading: Reading, names: Counter[str]) -> str:
    return reading.kind if names[reading.kind] == 1 else f"{reading.kind}:{reading.name}"


def _of_files(paths: list[Path], problems: list[str], place: Path | None) -> list[Reading]:
    suffix = paths[0].suffix.lower()
    if suffix == ".tar":
        return tar_readings(paths, None)
    if suffix in _DATA and (reading := parquet_reading(paths, None, problems)) is not None:
        return [reading]
    if suffix in TABLES:
        return table_readings(paths, None, problems, place)
    if is_packed_text(paths[0]) and (reading := packed_reading(paths, None, problems)) is not None:
        return [reading]
    return [text_reading(paths, None)] if suffix == ".txt" else []


def _of_folder(folder: Path, tree: Tree, problems: list[str], place: Path | None) -> list[Reading]:
    if (reading := dataset_reading(folder)) is not None:
        return [reading]
    tars = [tree.path(name) for name in tree.by_extension.get(".tar", [])]
    readings = [*folder_readings(tree), *tar_readings(tars, _parents(tars))]
    data, tables = _data_files(tree, problems)
    if data and (reading := parquet_reading(data, _parents(data), problems)) is not None:
        readings.append(reading)
    readings += table_readings(tables, tree, problems, place)
    if (pictures := picture_reading(tree)) is not None:
        readings.append(pictures)
    names = [] if readings or tree.audio or tree.images else tree.by_extension.get(".txt", [])
    if texts := [tree.path(name) for name in names]:
        readings.append(text_reading(texts, _parents(texts)))
    packed = (
        [] if readings else [path for path in map(tree.path, tree.names(frozenset(CODECS))) if is_packed_text(path)]
    )
    if packed and (reading := packed_reading(packed, _parents(packed), problems)) is not None:
        readings.append(reading)
    return readings


def _parents(paths: Sequence[Path]) -> tuple[Path, ...]:
    return tuple(sorted({path.parent for path in paths}))


def _data_files(tree: Tree, problems: list[str]) -> tuple[list[Path], list[Path]]:
    """Returns the parquet and arrow files that hold media in themselves, and the tables."""
    data: list[Path] = []
    # Many of them are of a recording or an image each.
    left = frozenset((*_DATA, *([".json"] if (count := tree.counts()[".json"]) > MAX_TABLES else [])))
    if ".json" in left:
        problems.append(
            f"{count} .json files, more than {MAX_TABLES}, were not looked into: name those that are tables"
        )
    tables = [tree.path(name) for name in tree.names(TABLES - left) if name.count("/") <= 3]
    by_folder: dict[Path, list[Path]] = {}
    for name in tree.names(frozenset(_DATA)):
        by_folder.setdefault(tree.path(name).parent, []).append(tree.path(name))
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
        counts = ", ".join(f"{count:,} {extension or 'without extension'}" for extension, count in _most(tree))
        lines.append(f"  seen: {counts or 'no files'}{'' if tree.is_whole else ' (a part of the folder)'}")
        lines += [*(f"  {said}" for said in tree.cut), *_hints(tree)]
    lines += [f"  {problem}" for problem in problems[:_MOST_PROBLEMS]]
    return "\n".join([*lines, *(f"  {line}" for line in NEEDS.splitlines())])


def _most(tree: Tree) -> list[tuple[str, int]]:
    return tree.counts().most_common(10)


def _hints(tree: Tree) -> list[str]:
    hints = [f"  {name} looks like texts, which forebay init does not read" for name in unread_texts(tree)[:1]]
    packed = [name for names in tree.by_extension.values() for name in names[:1] if name.endswith(COMPRESSED_TARS)]
    if packed:
        hints.append(f"  {packed[0]} is a compressed tar, whose members cannot be read by place: decompress it")
    unknown = [extension for extension in (".m4a", ".aac", ".wma", ".mp4", ".webm") if extension in tree.by_extension]
    if unknown:
        hints.append(f"  {unknown[0]} is not read: convert it, for example with ffmpeg -i x{unknown[0]} x.flac")
    return hints


def joined(first: Found, second: Found) -> Found:
    """Returns two findings that one config can read as one."""
    return replace(
        first,
        manifests=tuple(dict.fromkeys((*first.manifests, *second.manifests))),
        count=first.count + second.count,
        is_exact=first.is_exact and second.is_exact,
        sounds=_sounds(first.sounds, second.sounds),
        pictures=_pictures(first.pictures, second.pictures),
        texts=[*first.texts, *second.texts],
        images_a_row=[*first.images_a_row, *second.images_a_row],
        languages=first.languages + second.languages,
        classes=first.classes + second.classes,
        has_all_classes=first.has_all_classes and second.has_all_classes,
        noun=first.noun if first.noun == second.noun else "samples",
        notes=[*first.notes, *(note for note in second.notes if note not in first.notes)],
        has_text=first.has_text or second.has_text,
    )


def _sounds(first: Sounds | None, second: Sounds | None) -> Sounds | None:
    if first is None or second is None:
        return first or second
    return Sounds(
        seconds=[*first.seconds, *second.seconds],
        rates=first.rates + second.rates,
        channels=first.channels + second.channels,
        formats=first.formats + second.formats,
        unreadable=first.unreadable + second.unreadable,
    )


def _pictures(first: Pictures | None, second: Pictures | None) -> Pictures | None:
    if first is None or second is None:
        return first or second
    return Pictures(sizes=[*first.sizes, *second.sizes], unreadable=first.unreadable + second.unreadable)
