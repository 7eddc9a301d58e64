"""Data sets of the `datasets` library, and parquet files that hold sound, images or features in themselves."""

from __future__ import annotations

import functools
import importlib.util
import io
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from forebay.errors import ConfigError
from forebay.extras import install_line
from forebay.init.candidate import Candidate, Headers, Pictures, Sounds, counted, unlike_usual
from forebay.init.column_roles import columns_named, languages_of
from forebay.init.config_sections import RECORDINGS
from forebay.init.folder_files import split_of, spread
from forebay.init.image_sections import IMAGES
from forebay.init.questions import Choice, Chooser, column_of, columns_beside, speech_columns
from forebay.init.table_head import TableHead, read_table
from forebay.rows.readers.arrow_files import HfFile
from forebay.store.source_files import hf_splits

_FILES = 8
_PEEK = 4
_MATRIX, _MELS = 2, (80, 128)
_OTHER_MESSAGES = ("messages", "conversations")


def dataset_of(folder: Path) -> Candidate | None:
    """Returns the candidate of a `save_to_disk` folder, of one data set or of splits; None for another folder."""
    if not any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return None
    splits = hf_splits(folder)
    what = f"splits {', '.join(splits)}" if splits else "one data set"
    look = functools.partial(_look, splits, lambda split: _arrow_files(folder / split))
    label = f"a save_to_disk folder of the datasets library, {what}"
    return Candidate("hf", (folder,), RECORDINGS, label, 100, look)


def _arrow_files(folder: Path) -> list[Path]:
    if files := sorted(path for path in folder.glob("*.arrow") if not path.match("cache-*.arrow")):
        return files
    raise ConfigError(f"{folder} holds no .arrow file; save the data set again with save_to_disk")


def media_tables_of(paths: Sequence[Path], folders: tuple[Path, ...] | None, problems: list[str]) -> Candidate | None:
    """Returns the candidate of data files that hold media or features; None where they hold none.

    folders: that hold them, to be named whole.
    """
    try:
        table = read_table(paths[0])
    except ConfigError as err:
        problems.append(str(err))
        return None
    held = (*table.blobs, *table.matrices)
    if not held:
        return None
    splits = sorted({split for folder in folders or () for split in hf_splits(folder)})
    splits = splits if len(splits) > 1 else []

    def of_split(split: str) -> list[Path]:
        return [path for path in paths if not split or path.name.startswith(f"{split}-")]

    label = f"{counted(len(paths), 'data files')} that hold {', '.join(held)} in their rows"
    return Candidate("hf", folders or tuple(paths), RECORDINGS, label, 88, functools.partial(_look, splits, of_split))


def _look(splits: Sequence[str], files_of: Callable[[str], list[Path]], found: Candidate, chooser: Chooser) -> None:
    """Takes what the files of a split hold: that of train, the only one, or a chosen one; "" where there are none."""
    train = [split for split in splits if split_of(split) == "train"][:1] if "split" not in chooser.given else []
    choices = [Choice(split, split, split) for split in train or splits]
    split = chooser.one("which split is to be read", choices, option="split") if choices else ""
    files = files_of(split)
    looked = spread(files, _FILES)
    table = read_table(looked[0])
    if not (table.matrices and "column audio" not in chooser.given and _take_features(table, found, chooser)):
        _take_media(table, found, chooser)
    found.noun, total = "rows", sum(len(HfFile(path)) for path in looked)
    found.is_exact = len(looked) == len(files)
    found.count = total if found.is_exact else round(total * len(files) / len(looked))
    if importlib.util.find_spec("datasets") is None:
        found.notes.append(f"Reading it needs the datasets library: {install_line('hf')}.")
    if split:
        found.source["split"] = split
        if rest := [each for each in splits if each != split]:
            found.notes.append(f"Other splits: {', '.join(rest)}.")


def _take_media(table: TableHead, found: Candidate, chooser: Chooser) -> None:
    images = [name for name in table.blobs if _holds(Pictures, table, name)]
    sounds = [name for name in table.blobs if name not in images and _holds(Sounds, table, name)]
    if sounds or "column audio" in chooser.given:
        audio = _named(table, "audio", sounds, chooser)
        found.take_recordings([table], speech_columns(table, audio, chooser))
        found.sounds = Sounds.of(table.encoded(audio) if audio in table.blobs else ())
    elif images or "column image" in chooser.given:
        image = _named(table, "image", images, chooser)
        prompt, columns, found.notes = columns_beside(table, image, chooser)
        found.meaning = IMAGES
        found.take_images(table, prompt, columns)
        # Where nothing is said, `conversations` are read as messages too.
        found.columns = {role: name for role, name in found.columns.items() if (role, name) != _OTHER_MESSAGES}
        found.pictures = Pictures.of(table.encoded(image) if image in table.blobs else ())
    else:
        raise ConfigError(
            f"{table.path}: no column holds recordings or images; it has {', '.join(table.names)}; "
            "give --column audio=NAME or --column image=NAME"
        )


def _holds(headers: type[Headers], table: TableHead, name: str) -> bool:
    """Returns whether one of the first media of a column has a header of a kind."""
    return any(not headers.of([value]).unreadable for value in islice(table.encoded(name), _PEEK))


def _named(table: TableHead, role: str, names: Sequence[str], chooser: Chooser) -> str:
    option = f"column {role}"
    if option in chooser.given:
        return column_of(table, role, [], chooser) or ""
    choices = [Choice(name, name, name) for name in sorted(names, key=lambda name: name != role)]
    return chooser.one(f"which column is {role}", choices, option=option)


def _take_features(table: TableHead, found: Candidate, chooser: Chooser) -> bool:
    """Takes matrices of features, as a Trainer's `map` leaves them; returns whether a table has such."""
    name = table.matrices[0] if len(table.matrices) == 1 else _named(table, "features", table.matrices, chooser)
    data = HfFile(table.path).encoded(0, name) if table.num_rows else None
    shape = list(np.load(io.BytesIO(data)).shape) if data is not None else []
    if len(shape) != _MATRIX or shape[0] not in _MELS:
        return False
    found.has_text = found.has_labels = "labels" in table.names
    language = next((each.name for each in columns_named(table, "language")), None)
    found.columns = {"features": name, **({"labels": "labels"} if found.has_labels else {})}
    found.columns |= unlike_usual({"language": language})
    found.languages = languages_of([table], language)
    found.audio = {"features": "given", "n_mels": int(shape[0])}
    found.notes = [f"Features of shape {shape} stand in the column {name}; no sound is read."]
    return True
