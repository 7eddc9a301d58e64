"""Data sets of the `datasets` library, and parquet files that hold sound, images or features in themselves."""

from __future__ import annotations

import importlib.util
import io
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import ConfigError
from forebay.extras import install_line
from forebay.init.choose import Choice, Chooser
from forebay.init.columns import columns_named, languages_of
from forebay.init.conversation import USED, texts_of_row
from forebay.init.found import Found, Reading, counted
from forebay.init.media import Pictures, Sounds, pictures_in, sounds_in
from forebay.init.readings.image_tables import classes_found, vision_columns
from forebay.init.readings.roles import pick, unlike_usual
from forebay.init.readings.splits import split_of
from forebay.init.readings.tables import speech_columns
from forebay.init.reads import columns_beside
from forebay.init.table import Table, read_table
from forebay.init.tree import spread
from forebay.rows.readers.arrow_files import HfFile
from forebay.store.source_files import hf_splits

_FILES = 8
_PEEK = 4


def dataset_reading(folder: Path) -> Reading | None:
    """Returns the reading of a `save_to_disk` folder, of one data set or of several splits; None for another folder."""
    if not any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return None
    splits = hf_splits(folder)
    what = f"splits {', '.join(splits)}" if splits else "one data set"
    return Reading(
        kind="hf",
        label=f"a save_to_disk folder of the datasets library, {what}",
        score=100,
        settle=lambda chooser: _dataset(folder, splits, chooser),
    )


def parquet_reading(paths: Sequence[Path], folders: tuple[Path, ...] | None, problems: list[str]) -> Reading | None:
    """Returns the reading of data files that hold media or features; None where they hold none.

    folders: that hold them, to be named whole.
    """
    try:
        table = read_table(paths[0])
    except ConfigError as err:
        problems.append(str(err))
        return None
    if not table.blobs and not table.matrices:
        return None
    splits = sorted({split for folder in folders or () for split in hf_splits(folder)})
    label = f"{counted(len(paths), 'data files')} that hold {', '.join((*table.blobs, *table.matrices))} in their rows"
    manifests = folders or tuple(paths)
    return Reading(
        kind="hf",
        label=label,
        score=88,
        settle=lambda chooser: _settled(manifests, _of_split(paths, splits, chooser), splits, chooser),
    )


def _dataset(folder: Path, splits: list[str], chooser: Chooser) -> Found:
    split = _split(splits, chooser)
    inside = folder if split is None else folder / split
    files = sorted(path for path in inside.glob("*.arrow") if not path.match("cache-*.arrow"))
    if not files:
        raise ConfigError(f"{inside} holds no .arrow file; save the data set again with save_to_disk")
    return _found((folder,), files, splits, split, chooser)


def _settled(manifests: tuple[Path, ...], paths: list[Path], splits: list[str], chooser: Chooser) -> Found:
    return _found(manifests, paths, splits, _split(splits, chooser) if len(splits) > 1 else None, chooser)


def _of_split(paths: Sequence[Path], splits: list[str], chooser: Chooser) -> list[Path]:
    split = _split(splits, chooser) if len(splits) > 1 else None
    return [path for path in paths if split is None or path.name.startswith(f"{split}-")]


def _split(splits: list[str], chooser: Chooser) -> str | None:
    """Returns the split to take: the one that is called train, the only one, or the one that is chosen."""
    if not splits:
        return None
    likely = [split for split in splits if split_of(split) == "train"]
    first = likely[:1] if "split" not in chooser.given else []
    choices = [Choice(split, split, split) for split in first or splits]
    return chooser.one("which split is to be read", choices, option="split")


def _found(
    manifests: tuple[Path, ...], files: Sequence[Path], splits: list[str], split: str | None, chooser: Chooser
) -> Found:
    table = read_table(spread(files, _FILES)[0])
    found = _features(table, chooser) if table.matrices and "column audio" not in chooser.given else None
    found = found or _media(table, chooser)
    found.manifests = manifests
    found.count, found.is_exact = _rows(files)
    if importlib.util.find_spec("datasets") is None:
        found.notes.append(f"Reading it needs the datasets library: {install_line('hf')}.")
    if split is not None:
        found.source["split"] = split
        rest = [each for each in splits if each != split]
        if rest:
            found.notes.append(f"Other splits: {', '.join(rest)}.")
    return found


def _rows(files: Sequence[Path]) -> tuple[int, bool]:
    looked = spread(files, _FILES)
    total = sum(len(HfFile(path)) for path in looked)
    return (total, True) if len(looked) == len(files) else (round(total * len(files) / len(looked)), False)


def _media(table: Table, chooser: Chooser) -> Found:
    kinds = {name: _kind(table, name) for name in table.blobs}
    images = [name for name, kind in kinds.items() if kind == "image"]
    sounds = [name for name, kind in kinds.items() if kind == "audio"]
    given = {option.partition(" ")[2] for option in chooser.given if option.startswith("column ")}
    if sounds or "audio" in given:
        return _speech(table, sounds, chooser)
    if images or "image" in given:
        return _vision(table, images, chooser)
    raise ConfigError(
        f"{table.path}: no column holds recordings or images; it has {', '.join(table.names)}; "
        "give --column audio=NAME or --column image=NAME"
    )


def _kind(table: Table, name: str) -> str:
    values = list(islice(table.encoded(name), _PEEK))
    if any(pictures_in([value]).sizes for value in values):
        return "image"
    return "audio" if any(sounds_in([value]).seconds for value in values) else ""


def _named(table: Table, role: str, names: list[str], chooser: Chooser) -> str:
    option = f"column {role}"
    if option in chooser.given:
        return pick(table, role, [], chooser) or ""
    choices = [Choice(f"{name}", name, name) for name in sorted(names, key=lambda name: name != role)]
    return chooser.one(f"which column is {role}", choices, option=option)


def _speech(table: Table, names: list[str], chooser: Chooser) -> Found:
    audio = _named(table, "audio", names, chooser)
    columns = speech_columns(table, audio, chooser)
    text = columns["text"]
    used = {*columns.values(), "prompt", "sample_id", "id", "duration_s", "duration"}
    return Found(
        kind="hf",
        modality="speech",
        manifests=(),
        columns=unlike_usual(**{**columns, "duration": None}),
        noun="rows",
        sounds=sounds_in(table.encoded(audio)) if audio in table.blobs else Sounds(),
        texts=[value for value in table.values(text) if isinstance(value, str)] if text else [],
        languages=languages_of([table], columns["language"]),
        others=tuple(name for name in table.names if name not in used and name not in table.blobs),
        has_text=text is not None,
    )


def _vision(table: Table, names: list[str], chooser: Chooser) -> Found:
    image = _named(table, "image", names, chooser)
    prompt, notes = columns_beside(table, image, chooser)
    columns = vision_columns(prompt, table, image, chooser)
    same = {"conversations": "messages"}
    words = {role: name for role, name in columns.items() if role not in ("image", "id") and name}
    texts = (
        [texts_of_row(row, **words) for row in table.rows] if prompt == "chat" else table.values(words.get("text", ""))
    )
    return Found(
        kind="hf",
        modality="vision",
        prompt=prompt,
        manifests=(),
        columns=unlike_usual(**{role: same.get(name or "", name) for role, name in columns.items()}),
        noun="rows",
        pictures=pictures_in(table.encoded(image)) if image in table.blobs else Pictures(),
        texts=[text for text in texts if isinstance(text, str)],
        images_a_row=[1],
        others=tuple(n for n in table.names if n not in {*columns.values(), *USED}),
        notes=notes,
        **classes_found(table, columns),
    )


def _features(table: Table, chooser: Chooser) -> Found | None:
    """Returns what is found of a table with matrices of features, as a Trainer's `map` leaves them."""
    name = table.matrices[0] if len(table.matrices) == 1 else _named(table, "features", [*table.matrices], chooser)
    data = HfFile(table.path).encoded(0, name) if table.num_rows else None
    shape = list(np.load(io.BytesIO(data)).shape) if data is not None else []
    if len(shape) != 2 or shape[0] not in (80, 128):
        return None
    columns: dict[str, str] = {"features": name}
    labels = "labels" in table.names
    if labels:
        columns["labels"] = "labels"
    language = columns_named(table, "language")
    audio: dict[str, Any] = {"features": "given", "n_mels": int(shape[0])}
    return Found(
        kind="hf",
        modality="speech",
        manifests=(),
        columns=columns | unlike_usual(language=language[0].name if language else None),
        noun="rows",
        languages=languages_of([table], language[0].name) if language else Counter(),
        audio=audio,
        has_text=labels,
        has_labels=labels,
        notes=[f"Features of shape {shape} stand in the column {name}; no sound is read."],
    )
