"""Tables whose rows name recordings, images or texts: CSV, TSV, JSON lines, parquet and arrow."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.config.data import RECORDINGS
from forebay.errors import ConfigError
from forebay.init.choose import Chooser
from forebay.init.columns import (
    Candidate,
    audio_columns,
    columns_named,
    id_columns,
    image_columns,
    language_columns,
    languages_of,
    name_columns,
    text_columns,
    written_paths,
)
from forebay.init.conversation import images_of_row, texts_of_row
from forebay.init.found import Found, Reading, counted
from forebay.init.media import sounds_of
from forebay.init.readings.image_tables import vision_found
from forebay.init.readings.roles import Tables, only, pick, splits_note, unlike_usual
from forebay.init.readings.splits import split_of
from forebay.init.readings.tars import list_reading, manifest_reading
from forebay.init.table import Table, read_table
from forebay.init.tree import AUDIO_DIRS, MAX_TABLES, Tree, extension_of, spread, walk


def table_readings(paths: Sequence[Path], tree: Tree | None, problems: list[str]) -> list[Reading]:
    """Returns the readings of tables. tree: of the folder that they were found in; None: each was named.

    problems: why a table is of no use is added, for the message where nothing is of use.
    """
    found: list[Reading] = []
    for tables in _grouped(paths, problems):
        reading = _reading(tables, tree)
        if reading is None and (without := _without_header(tables.first)) is not None:
            problems.append(without)
        elif reading is None:
            names = ", ".join(tables.first.names[:12])
            problems.append(f"{tables.label} has columns {names}; none holds paths of recordings or images, or texts")
        else:
            found.append(reading)
    return found


def _without_header(table: Table) -> str | None:
    """Returns what to do where the first line of a table is a row and no header, None where it is a header."""
    row = next((name for name in table.names if extension_of(name) in RECORDINGS), None)
    if row is None or table.form == "data":
        return None
    return f"{table.path.name} begins with {row!r:.60} instead of a header line; add one, for example path,text"


def _grouped(paths: Sequence[Path], problems: list[str]) -> list[Tables]:
    """Returns tables of equal columns together, those of other splits than the train split left out of each group."""
    groups: dict[tuple[str, ...], list[Table]] = {}
    for path in spread(paths, MAX_TABLES):
        try:
            table = read_table(path)
        except ConfigError as err:
            problems.append(str(err))
            continue
        groups.setdefault((path.suffix.lower(), str(path.parent), *sorted(table.names)), []).append(table)
    return [_without_other_splits(group) for group in groups.values()]


def _without_other_splits(group: list[Table]) -> Tables:
    by_split: dict[str, list[Table]] = {}
    for table in group:
        by_split.setdefault(split_of(table.path.stem), []).append(table)
    own = by_split.get("train") or by_split.get("") or next(iter(by_split.values()))
    others = tuple(table.path.name for table in group if table not in own)
    return Tables(paths=tuple(table.path for table in own), first=own[0], others=others)


def _reading(tables: Tables, tree: Tree | None) -> Reading | None:
    table = tables.first
    if (manifest := manifest_reading(table)) is not None:
        return manifest
    if table.path.suffix.lower() == ".tsv" and (listed := list_reading(table.path)) is not None:
        return listed
    if _without_header(table) is not None:
        return None
    folders = _folders(table, tree)
    rows = counted(table.num_rows, "rows", is_exact=table.is_exact)
    if audio := audio_columns(table, folders):
        label = f"{tables.label}: {rows}, recordings by column {audio[0].name}"
        return Reading(
            kind="table",
            label=label,
            score=80,
            settle=lambda chooser: _speech(tables, audio, chooser),
            name=table.path.name,
        )
    if tree is not None and (named := name_columns(table, tree.audio)):
        label = f"{tables.label}: {rows}, recordings by their names in column {named[0].name}"
        return Reading(
            kind="folder",
            label=label,
            score=78,
            settle=lambda chooser: _named_speech(tables, tree, named, chooser),
            name=table.path.name,
        )
    images = image_columns(table, folders)
    if images or _named_in_messages(table):
        label = f"{tables.label}: {rows} of images and text"
        return Reading(
            kind="table",
            label=label,
            score=80,
            settle=lambda chooser: vision_found(tables, images, chooser),
            modality="vision",
            name=table.path.name,
        )
    texts = [each for each in text_columns(table, taken=()) if table.path.suffix == ".parquet" or each.name == "text"]
    if texts and (table.form == "jsonl" or table.path.suffix == ".parquet"):
        label = f"{tables.label}: {rows} of text alone"
        return Reading(
            kind="text",
            label=label,
            score=30,
            settle=lambda chooser: _texts(tables, texts, chooser),
            modality="text",
            name=table.path.name,
        )
    return None


def _named_in_messages(table: Table) -> bool:
    return any(images_of_row(row) for row in table.rows) and any(texts_of_row(row) for row in table.rows)


def _folders(table: Table, tree: Tree | None) -> list[Path]:
    """Returns where paths in a table may begin: its own folder, folders beside it, folders that hold such names."""
    own = table.path.parent
    folders = [own, *(own / name for name in AUDIO_DIRS if (own / name).is_dir())]
    if tree is None and own.is_dir():
        tree = walk(own, seconds=0.7)
    if tree is not None:
        folders += [tree.root, *(tree.root / base for base in _bases(table, tree))]
    return list(dict.fromkeys(folders))


def _bases(table: Table, tree: Tree) -> list[str]:
    """Returns the folders of a tree below which the paths of a table are there, by the ends of both."""
    places: dict[str, list[str]] = {}
    for name in (*tree.audio, *tree.images):
        places.setdefault(name.rpartition("/")[2], []).append(name)
    bases: Counter[str] = Counter()
    for column in table.names:
        for written in spread(written_paths(table, column), 20):
            for place in places.get(written.rpartition("/")[2], [])[:3]:
                if f"/{place}".endswith(f"/{written}"):
                    bases[place.removesuffix(written).rstrip("/")] += 1
    return [base for base, _ in bases.most_common(5)]


def speech_columns(table: Table, audio: str, chooser: Chooser) -> dict[str, str | None]:
    """Returns the columns of text, language and id beside a column of sound."""
    language = only(language_columns(table, taken=(audio,)), "language", table, chooser)
    taken = {audio, language or ""}
    text = pick(table, "text", text_columns(table, taken=taken), chooser)
    taken.add(text or "")
    return {
        "audio": audio,
        "text": text,
        "language": language,
        "id": only(id_columns(table, taken=taken), "id", table, chooser, is_open=False),
        "duration": only(columns_named(table, "duration", taken=taken), "duration", table, chooser, is_open=False),
    }


def _speech(tables: Tables, audio: Sequence[Candidate], chooser: Chooser) -> Found:
    table = tables.first
    name = pick(table, "audio", audio, chooser, may_lack=False) or ""
    folder = next((each.folder for each in audio if each.name == name), None) or table.path.parent
    columns = speech_columns(table, name, chooser)
    columns["duration"] = None
    is_lines = _is_plain_jsonl(table, columns, folder)
    paths = [folder / written for written in written_paths(table, name)]
    source: dict[str, Any] = {} if folder == table.path.parent else {"audio_dir": folder}
    text = columns["text"]
    found = Found(
        kind="jsonl" if is_lines else "table",
        modality="speech",
        manifests=tables.paths,
        source=source,
        columns={} if is_lines else unlike_usual(**columns),
        noun="recordings",
        count=table.num_rows * len(tables.paths),
        is_exact=table.is_exact and len(tables.paths) == 1,
        sounds=sounds_of(paths),
        texts=[value for value in table.values(text) if isinstance(value, str)] if text else [],
        languages=languages_of(table, columns["language"]),
        others=_others(table, columns),
        notes=splits_note(tables),
        has_text=text is not None,
    )
    _refuse_defaults_that_are_other(table, found, columns)
    return found


def _named_speech(tables: Tables, tree: Tree, named: Sequence[Candidate], chooser: Chooser) -> Found:
    """Returns what is found of recordings that a table names without their extensions."""
    table, audio = tables.first, tree.audio
    name = pick(table, "audio", named, chooser, may_lack=False) or ""
    columns = {**speech_columns(table, name, chooser), "duration": None}
    text = columns["text"]
    folder = os.path.commonpath([os.path.dirname(each) for each in audio]) if audio else ""
    return Found(
        kind="folder",
        modality="speech",
        manifests=(tree.path(folder),),
        source={"texts": table.path},
        columns=unlike_usual(**columns),
        noun="recordings",
        count=len(audio),
        is_exact=tree.is_whole,
        sounds=sounds_of([tree.path(each) for each in spread(audio)]),
        texts=[value for value in table.values(text) if isinstance(value, str)] if text else [],
        languages=languages_of(table, columns["language"]),
        others=_others(table, columns),
        notes=splits_note(replace(tables, others=(*(path.name for path in tables.paths[1:]), *tables.others))),
        has_text=text is not None,
    )


def _refuse_defaults_that_are_other(table: Table, found: Found, columns: dict[str, str | None]) -> None:
    """A column named as a role is by default would be read as it, though another was chosen, or none."""
    for role in ("text", "language"):
        if columns[role] is None and role in table.names:
            found.notes.append(f"The column {role} is read as {role} by its name.")


def _is_plain_jsonl(table: Table, columns: dict[str, str | None], folder: Path) -> bool:
    usual = {"audio": ("audio",), "text": ("text",), "language": ("language", None), "id": ("sample_id", "id", None)}
    return (
        table.form == "jsonl"
        and folder == table.path.parent
        and all(columns[role] in names for role, names in usual.items())
    )


def _texts(tables: Tables, candidates: Sequence[Candidate], chooser: Chooser) -> Found:
    table = tables.first
    name = pick(table, "text", candidates, chooser, may_lack=False) or "text"
    return Found(
        kind="text",
        modality="text",
        manifests=tables.paths,
        noun="texts",
        count=table.num_rows * len(tables.paths),
        is_exact=table.is_exact and len(tables.paths) == 1,
        columns={} if name == "text" else {"text": name},
        texts=[value for value in table.values(name) if isinstance(value, str)],
        languages=languages_of(table, "language" if "language" in table.names else None),
    )


def _others(table: Table, columns: dict[str, str | None]) -> tuple[str, ...]:
    taken = {*columns.values(), "prompt", "sample_id", "id", "duration", "duration_s"}
    return tuple(name for name in table.names if name not in taken and table.values(name))
