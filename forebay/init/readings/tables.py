"""Tables whose rows name recordings, images or texts: CSV, TSV, JSON lines, parquet and arrow."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
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
    is_language,
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
from forebay.init.tree import AUDIO_DIRS, MAX_HEADS, Tree, extension_of, spread, walk
from forebay.rows.readers.tar_members import IMAGE_EXTENSIONS
from forebay.visible import from_here

_MEDIA = {*RECORDINGS, *IMAGE_EXTENSIONS}


def table_readings(
    paths: Sequence[Path], tree: Tree | None, problems: list[str], place: Path | None = None
) -> list[Reading]:
    """Returns the readings of tables. tree: of the folder that they were found in; None: each was named.

    problems: why a table is of no use is added, for the message where nothing is of use. place: where names begin.
    """
    found: list[Reading] = []
    for tables in _grouped(paths, tree, problems):
        folders = _folders(tables.first, tree, place)
        reading = _reading(tables, tree if place is None or tree is not None else walk(place), folders)
        if reading is not None:
            found.append(reading)
        else:
            problems.append(headless(tables.first, tree) or _of_no_use(tables, folders))
    return found


def _of_no_use(tables: Tables, folders: Sequence[Path]) -> str:
    """Says what a table has in the place of paths: the value that was tried, and where it was looked for."""
    table = tables.first
    seen = [(name, value) for name in table.names for value in written_paths(table, name)[:1]]
    name, value = next(((n, v) for n, v in seen if extension_of(v) in _MEDIA), seen[0] if seen else ("", ""))
    tried = f"{name} {value!r:.80} is not in {', '.join(map(from_here, folders[:5]))}" if seen else "it has no texts"
    return (
        f"{tables.label} has columns {', '.join(table.names[:12])}; none holds paths of recordings or images that are "
        f"there, or texts: {tried}; give --audio-dir DIR, the folder that the names are relative to"
    )


def headless(table: Table, tree: Tree | None) -> str | None:
    """Returns what to do where the first line of a table is a row and no header, None where it is a header."""
    stems = set() if tree is None else {name.rpartition("/")[2].rpartition(".")[0] for name in tree.audio}
    path = next((n for n, name in enumerate(table.names) if extension_of(name) in _MEDIA or name in stems), None)
    if path is None or table.form != "csv":
        return None
    names = [f"c{number}" for number in range(1, len(table.names) + 1)]
    others = [n for n in range(len(names)) if n != path]
    text = _running(table, others)
    language = next((n for n in others if n != text and is_language(table.names[n])), None)
    for role, number in (("language", language), ("text", text), ("path", path)):
        if number is not None:
            names[number] = role
    header = f"{table.delimiter.join(names)}\n".replace("\t", "\\t").replace("\n", "\\n")
    own, made = (shlex.quote(from_here(p)) for p in (table.path, table.path.with_suffix(f".named{table.path.suffix}")))
    return (
        f"{table.path.name} begins with {table.names[path]!r:.60} instead of a header line; write it with one, and run "
        f"forebay init on that: (printf {shlex.quote(header)}; cat {own}) > {made}"
    )


def _running(table: Table, columns: Sequence[int]) -> int | None:
    """Returns the column with the most letters whose values differ; the first of those with as many."""
    letters = {}
    for number in columns:
        values = [str(value) for value in (table.names[number], *table.values(table.names[number]))]
        if 2 * len(set(values)) > len(values):
            letters[number] = sum(map(str.isalpha, "".join(values)))
    return max(letters, key=lambda number: letters[number], default=None)


def _grouped(paths: Sequence[Path], tree: Tree | None, problems: list[str]) -> list[Tables]:
    """Returns tables of equal columns together, of each group those of the train split.

    The name of a table says its split, or that of its folder: `train/metadata.csv` and `test/metadata.csv`.
    """
    groups: dict[tuple[str, ...], dict[str, list[Table]]] = {}
    looked = list(paths) if tree is None else spread(paths, MAX_HEADS)
    if tree is not None and len(looked) < len(paths):
        tree.cut.append(
            f"Of {len(paths)} tables {len(looked)} were looked into, evenly spread from {looked[0].name} to "
            f"{looked[-1].name}, and the others are left out: name them (forebay init DIR/*{looked[0].suffix}), or a "
            "folder with fewer."
        )
    for path in looked:
        try:
            table = read_table(path)
        except ConfigError as err:
            if tree is None or path.suffix.lower() != ".json":  # most of them are no tables
                problems.append(str(err))
            continue
        above = split_of(path.parent.name) if tree is not None and path.parent != tree.root else ""
        place = path.parent.parent if above else path.parent
        key = (path.suffix.lower(), str(place), *sorted(table.names))
        groups.setdefault(key, {}).setdefault(split_of(path.stem) or above, []).append(table)
    return [_of_train(group) for group in groups.values()]


def _of_train(group: dict[str, list[Table]]) -> Tables:
    own = group.get("train") or group.get("") or next(iter(group.values()))
    return Tables(own=tuple(own), splits=group)


def _reading(tables: Tables, tree: Tree | None, folders: Sequence[Path]) -> Reading | None:
    table = tables.first
    if (manifest := manifest_reading(table)) is not None:
        return manifest
    if table.path.suffix.lower() == ".tsv" and (listed := list_reading(table.path)) is not None:
        return listed
    if headless(table, tree) is not None:
        return None
    name = os.path.relpath(table.path, table.path.parent if tree is None else tree.root)
    rows = counted(table.num_rows, "rows", is_exact=table.is_exact)
    if audio := audio_columns(table, folders):
        label = f"{tables.label}: {rows}, recordings by column {audio[0].name}"
        return Reading(
            kind="table",
            label=label,
            score=80,
            settle=lambda chooser: _speech(tables.of_split(chooser), audio, chooser),
            name=name,
        )
    if tree is not None and (named := name_columns(table, tree.audio)):
        label = f"{tables.label}: {rows}, recordings by their names in column {named[0].name}"
        return Reading(
            kind="folder",
            label=label,
            score=78,
            settle=lambda chooser: _named_speech(tables.of_split(chooser), tree, named, chooser),
            name=name,
        )
    images = image_columns(table, folders)
    if images or _named_in_messages(table):
        label = f"{tables.label}: {rows} of images and text"
        return Reading(
            kind="table",
            label=label,
            score=80,
            settle=lambda chooser: vision_found(tables.of_split(chooser), images, chooser),
            modality="vision",
            name=name,
        )
    texts = [each for each in text_columns(table, taken=()) if table.path.suffix == ".parquet" or each.name == "text"]
    if texts and (table.path.suffix in (".jsonl", ".parquet")):
        label = f"{tables.label}: {rows} of text alone"
        return Reading(
            kind="text",
            label=label,
            score=30,
            settle=lambda chooser: _texts(tables.of_split(chooser), texts, chooser),
            modality="text",
            name=name,
        )
    return None


def _named_in_messages(table: Table) -> bool:
    return any(images_of_row(row) for row in table.rows) and any(texts_of_row(row) for row in table.rows)


def _folders(table: Table, tree: Tree | None, place: Path | None) -> list[Path]:
    """Returns where paths in a table may begin: a given folder, its own, those beside it and with such names."""
    own = table.path.parent
    folders = [*([] if place is None else [place]), own, *(own / name for name in AUDIO_DIRS if (own / name).is_dir())]
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
        count=tables.count,
        is_exact=tables.is_exact,
        sounds=sounds_of(paths),
        texts=[value for value in table.values(text) if isinstance(value, str)] if text else [],
        languages=languages_of(tables.own, columns["language"]),
        others=_others(table, columns),
        notes=splits_note(tables.others),
        has_text=text is not None,
        unread=() if text else tuple(f"{table.path.name} (column {name})" for name in _nested(table)),
    )
    _refuse_defaults_that_are_other(table, found, columns)
    return found


def _nested(table: Table) -> list[str]:
    return [name for name in table.names if any(isinstance(value, list | dict) for value in table.values(name))]


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
        languages=languages_of([table], columns["language"]),
        others=_others(table, columns),
        notes=splits_note((*(path.name for path in tables.paths[1:]), *tables.others)),
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
        count=tables.count,
        is_exact=tables.is_exact,
        columns={} if name == "text" else {"text": name},
        texts=[value for value in table.values(name) if isinstance(value, str)],
        languages=languages_of(tables.own, "language" if "language" in table.names else None),
    )


def _others(table: Table, columns: dict[str, str | None]) -> tuple[str, ...]:
    taken = {*columns.values(), "prompt", "sample_id", "id", "duration", "duration_s"}
    return tuple(name for name in table.names if name not in taken and table.values(name))
