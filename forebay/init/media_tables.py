"""Tables whose rows hold or name recordings or images, or are texts, and data sets of the `datasets` library."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.data import RECORDINGS as RECORDING_FILES
from forebay.errors import ConfigError, ManifestError
from forebay.extras import install_line
from forebay.init.candidate import Candidate, RowMeaning, unlike_usual
from forebay.init.config_sections import IMAGES, RECORDINGS, TEXTS
from forebay.init.conversation_sections import TALKS, take_talks
from forebay.init.folder_files import AUDIO_DIRS, MAX_HEADS, Tree, extension_of, split_of, spread, walk
from forebay.init.media_headers import Headers, Pictures, Sounds
from forebay.init.questions import Choice, Chooser, column_of, columns_beside, columns_of, speech_columns
from forebay.init.sample_files import list_over_tars, manifest_over_tars
from forebay.init.table_head import (
    LikelyColumn,
    TableHead,
    clips_of_row,
    images_of_row,
    in_folder,
    is_language,
    languages_of,
    likely_columns,
    name_columns,
    path_columns,
    read_table,
    videos_of_row,
    words_of,
    written_paths,
)
from forebay.rows.list_rows import check_pieces
from forebay.rows.meanings.chat_fields import IMAGES as IMAGE_FIELDS
from forebay.rows.meanings.chat_fields import MESSAGES
from forebay.rows.reader import DURATIONS, IMAGE_EXTENSIONS
from forebay.rows.readers.arrow_files import HfFile
from forebay.rows.segments import ENDS, STARTS
from forebay.steps.recipe import load_config
from forebay.store.source_files import hf_splits
from forebay.terminal import counted
from forebay.visible import from_here

_MEDIA = {*RECORDING_FILES, *IMAGE_EXTENSIONS}


_FILES = 8
_OTHER_MESSAGES = ("messages", "conversations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Tables of the same columns and one split. splits: all of these, by the splits' names.

    folders: where relative paths in them may begin.
    """

    own: tuple[TableHead, ...]
    splits: Mapping[str, Sequence[TableHead]]
    folders: Sequence[Path] = ()

    @property
    def first(self) -> TableHead:
        """The head of one of them."""
        return self.own[0]

    @property
    def label(self) -> str:
        """The name that a person gives them."""
        name = self.first.path.name
        return name if len(self.own) == 1 else f"{name} and {len(self.own) - 1} more tables"

    def of_split(self, chooser: Chooser) -> Tables:
        """Returns those of the split that `--split` names; the same where it names none, or there are no splits."""
        if "split" not in chooser.given or not any(self.splits):
            return self
        chooser.used.add("split")
        own = self.splits.get(split_of(chooser.given["split"]))
        if own is None:
            known = ", ".join(filter(None, self.splits))
            raise ConfigError(
                f"--split {chooser.given['split']}: {self.label} is of no such split; wanted one of {known}"
            )
        return replace(self, own=tuple(own))

    def notes(self, *more: str) -> list[str]:
        """Returns what is said of what is left out: `more`, and the tables of other splits.

        They have their folders before their names where those make the difference.
        """
        left = [table.path for tables in self.splits.values() for table in tables if table not in self.own]
        is_plain = {path.parent for path in left} <= {self.first.path.parent}
        names = (*more, *(path.name if is_plain else f"{path.parent.name}/{path.name}" for path in left))
        return [f"Other splits are left out: {', '.join(names)}; --split NAME takes another."] if names else []

    def count_into(self, found: Candidate) -> None:
        """Says what files a candidate is of, and how many rows they have."""
        found.manifests = tuple(table.path for table in self.own)
        found.count = sum(table.num_rows for table in self.own)
        found.is_exact = all(table.is_exact for table in self.own)


def tables_of(
    paths: Sequence[Path], tree: Tree | None, problems: list[str], place: Path | None = None
) -> list[Candidate]:
    """Returns the candidates of tables. tree: of the folder that they were found in; None: each was named.

    problems: why a table is of no use is added, for the message where nothing is of use. place: where names begin.
    """
    found: list[Candidate] = []
    for tables in _grouped(paths, tree, problems):
        first = tables.first
        tables = replace(tables, folders=_folders(first, tree, place))
        candidate = _candidate(tables, tree if place is None or tree is not None else walk(place))
        if candidate is not None:
            found.append(candidate)
        else:
            problems.append(_headless(first, tree) or _of_no_use(tables))
    return found


def _of_no_use(tables: Tables) -> str:
    """Says what a table has in the place of paths: the value that was tried, and where it was looked for."""
    table = tables.first
    items = (items for row in table.rows for items in (images_of_row(row), videos_of_row(row), clips_of_row(row)))
    if {*MESSAGES} & {*table.names} and not any(items):
        return (
            f"{tables.label} has conversations that name no image, clip or video; such rows stand beside others in "
            "source.manifest: run forebay init on a table of those, and list both"
        )
    seen = [(name, value) for name in table.names for value in written_paths(table, name)[:1]]
    name, value = next(((n, v) for n, v in seen if extension_of(v) in _MEDIA), seen[0] if seen else ("", ""))
    tried = (
        f"{name} {value!r:.80} is not in {', '.join(map(from_here, tables.folders[:5]))}" if seen else "it has no texts"
    )
    return (
        f"{tables.label} has columns {', '.join(table.names[:12])}; none holds paths of recordings or images that are "
        f"there, or texts: {tried}; give --audio-dir DIR, the folder that the names are relative to"
    )


def _headless(table: TableHead, tree: Tree | None) -> str | None:
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


def _running(table: TableHead, columns: Sequence[int]) -> int | None:
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
    groups: dict[tuple[str, ...], dict[str, list[TableHead]]] = {}
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
    chosen = [(group.get("train") or group.get("") or next(iter(group.values())), group) for group in groups.values()]
    return [Tables(own=tuple(own), splits=group) for own, group in chosen]


def _candidate(tables: Tables, tree: Tree | None) -> Candidate | None:
    """Returns what tables may be, by their columns. tree: where recordings may lie that they name."""
    table, folders = tables.first, tables.folders
    if (over_tars := manifest_over_tars(table) or list_over_tars(table.path)) is not None:
        return over_tars
    if _headless(table, tree) is not None:
        return None
    label = f"{tables.label}: {counted(table.num_rows, 'rows', is_exact=table.is_exact)}"

    def made(
        kind: str, meaning: RowMeaning, score: float, said: str, read: Callable[..., None], *more: Any
    ) -> Candidate:
        def look(found: Candidate, chooser: Chooser) -> None:
            read(tables.of_split(chooser), *more, found, chooser)

        name = os.path.relpath(table.path, table.path.parent if tree is None else tree.root)
        return Candidate(kind, (table.path,), meaning, f"{label}{said}", score, look, name=name)

    audio = path_columns(table, RECORDING_FILES, folders=folders)
    if any(clips_of_row(row) and words_of(row, {}) is not None for row in table.rows):
        return made("table", TALKS, 82, " of conversations with clips", _talks, audio)
    if audio:
        return made("table", RECORDINGS, 80, f", recordings by column {audio[0].name}", _recordings, audio)
    if tree is not None and (named := name_columns(table, tree.audio)):
        said = f", recordings by their names in column {named[0].name}"
        return made("folder", RECORDINGS, 78, said, _named_recordings, tree, named)
    images = path_columns(table, IMAGE_EXTENSIONS, folders=folders)
    is_shown = any(images_of_row(row) or videos_of_row(row) for row in table.rows)
    if images or (is_shown and any(words_of(row, {}) for row in table.rows)):
        return made("table", IMAGES, 80, " of images and text", _images, images)
    texts = likely_columns(table, "text")
    texts = texts if table.path.suffix == ".parquet" else [each for each in texts if each.name == "text"]
    if texts and table.path.suffix in (".jsonl", ".parquet"):
        return made("text", TEXTS, 30, " of text alone", _texts, texts)
    return None


def _folders(table: TableHead, tree: Tree | None, place: Path | None) -> list[Path]:
    """Returns where paths in a table may begin: a given folder, its own, those beside it and with such names."""
    own = table.path.parent
    folders = [*([] if place is None else [place]), own, *(own / name for name in AUDIO_DIRS if (own / name).is_dir())]
    if tree is None and own.is_dir():
        tree = walk(own, seconds=0.7)
    if tree is not None:
        folders += [tree.root, *(tree.root / base for base in _bases(table, tree))]
    return list(dict.fromkeys(folders))


def _bases(table: TableHead, tree: Tree) -> list[str]:
    """Returns the folders of a tree below which the paths of a table are there, by the ends of both."""
    places: dict[str, list[str]] = {}
    for name in tree.names(frozenset(_MEDIA)):
        places.setdefault(name.rpartition("/")[2], []).append(name)
    bases: Counter[str] = Counter()
    for column in table.names:
        for written in spread(written_paths(table, column), 20):
            for place in places.get(written.rpartition("/")[2], [])[:3]:
                if f"/{place}".endswith(f"/{written}"):
                    bases[place.removesuffix(written).rstrip("/")] += 1
    return [base for base, _ in bases.most_common(5)]


def _place_of(table: TableHead, likely: Sequence[LikelyColumn], name: str | None) -> Path:
    """Returns the folder that paths of a column are relative to."""
    return next((each.folder for each in likely if each.name == name), None) or table.path.parent


def _recordings(tables: Tables, audio: Sequence[LikelyColumn], found: Candidate, chooser: Chooser) -> None:
    table = tables.first
    name = column_of(table, "audio", audio, chooser, may_lack=False) or ""
    columns = speech_columns(table, name, chooser)
    folder = _place_of(table, audio, name)
    if folder != table.path.parent:
        found.source = {"audio_dir": folder}
    elif table.form == "jsonl" and not unlike_usual(columns) and columns["text"]:
        found.kind = "jsonl"
    tables.count_into(found)
    found.take_recordings(tables.own, columns)
    found.noun, found.notes = "recordings", tables.notes()
    found.sounds = Sounds.of([folder / written for written in spread(written_paths(table, name))])
    nested = [name for name in table.names if any(isinstance(each, list | dict) for each in table.values(name))]
    found.unread = () if columns["text"] else tuple(f"{table.path.name} (column {name})" for name in nested)
    _take_bounds(found, table)
    # They would be read, though another column was chosen, or none.
    unasked = [role for role in ("text", "language") if columns[role] is None and role in table.names]
    found.notes += [f"The column {role} is read as {role} by its name." for role in unasked]


def _take_bounds(found: Candidate, table: TableHead) -> None:
    """Takes the columns that say where in recordings rows lie, where without them a build would refuse the table."""
    lower = {name.lower(): name for name in reversed(table.names)}
    roles = {"start": STARTS, "end": ENDS, "duration": DURATIONS}
    bounds = {role: lower[each] for role, names in roles.items() for each in names[::-1] if each in lower}
    folders = {name: os.fspath(value) for name, value in found.source.items()}
    source = {"kind": found.kind, "manifest": [*map(os.fspath, found.manifests)], "columns": found.columns, **folders}
    if not {"start", "end"} & bounds.keys():
        return
    try:
        check_pieces(load_config({"name": "segments", "source": source}))
    except ManifestError as err:
        if err.code != "FB131":
            return  # said when the config is checked
        if "end" in bounds or found.kind == "jsonl":
            bounds.pop("duration", None)
        channels = table.values("channel")
        if channels and {*map(str, channels)} <= {"0", "1"}:
            bounds["channel"] = "channel"
        found.columns |= bounds
        found.noun, found.sounds = "segments", Sounds(seconds=[*_seconds(table, bounds)])
        found.others = tuple(name for name in found.others if name not in bounds.values())


def _seconds(table: TableHead, bounds: Mapping[str, str]) -> Iterator[float]:
    """Yields how long segments are, as far as rows say it. bounds: columns by role."""
    for row in table.rows:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if "end" in bounds:
                yield float(row[bounds["end"]]) - float(row[bounds["start"]] if "start" in bounds else 0)
            else:
                yield float(row[next(name for name in DURATIONS if name in row)])


def _named_recordings(
    tables: Tables, tree: Tree, named: Sequence[LikelyColumn], found: Candidate, chooser: Chooser
) -> None:
    """Takes recordings that a table names without their extensions."""
    table, audio = tables.first, tree.audio
    columns = speech_columns(table, column_of(table, "audio", named, chooser, may_lack=False) or "", chooser)
    found.take_recordings([table], columns)
    folder = os.path.commonpath([os.path.dirname(each) for each in audio]) if audio else ""
    found.manifests, found.source = (tree.path(folder),), {"texts": table.path}
    found.noun, found.count, found.is_exact = "recordings", len(audio), tree.is_whole
    found.sounds = Sounds.of(map(tree.path, spread(audio)))
    found.notes = tables.notes(*(each.path.name for each in tables.own[1:]))


def _images(tables: Tables, images: Sequence[LikelyColumn], found: Candidate, chooser: Chooser) -> None:
    table = tables.first
    image = column_of(table, "image", _of_lines(table, images), chooser) if images else None
    folder = _place_of(table, images, image)
    found.source = {} if folder == table.path.parent else {"image_dir": folder}
    prompt, columns, notes = columns_beside(table, image, chooser)
    # In JSON lines `images` and `conversations` are read by these names.
    same = {**dict.fromkeys(IMAGE_FIELDS, "image"), "conversations": "messages"}
    is_lines = table.form == "jsonl" and not unlike_usual({role: same.get(n or "", n) for role, n in columns.items()})
    found.kind = "jsonl" if is_lines else "table"
    tables.count_into(found)
    rows = found.take_images(table, prompt, columns)
    named = [images_of_row(row, None if is_lines else image) for row in rows]
    found.pictures = Pictures.of(spread([in_folder(folder, written) for names in named for written in names]))
    found.images_a_row = [len(names) for names in named]
    found.take_videos(folder, rows)
    found.notes = [*tables.notes(), *notes]


def _talks(tables: Tables, clips: Sequence[LikelyColumn], found: Candidate, chooser: Chooser) -> None:
    take_talks(found, tables.first, clips, tables.folders, chooser)
    tables.count_into(found)
    found.notes = tables.notes()


def _of_lines(table: TableHead, images: Sequence[LikelyColumn]) -> Sequence[LikelyColumn]:
    """Returns one column where JSON lines have `image` in some rows and `images` in others: both are read."""
    usual = [each for each in images if each.name in IMAGE_FIELDS]
    both = all(sum(row.get(name) is not None for name in IMAGE_FIELDS) <= 1 for row in table.rows)
    return usual[:1] if table.form == "jsonl" and usual and both else images


def _texts(tables: Tables, likely: Sequence[LikelyColumn], found: Candidate, chooser: Chooser) -> None:
    name = column_of(tables.first, "text", likely, chooser, may_lack=False) or "text"
    tables.count_into(found)
    found.noun, found.columns, found.texts = "texts", unlike_usual({"text": name}), tables.first.strings(name)
    found.languages = languages_of(tables.own, "language" if "language" in tables.first.names else None)


_MATRIX, _MELS = 2, (80, 128)


def dataset_of(folder: Path) -> Candidate | None:
    """Returns the candidate of a `save_to_disk` folder, of one data set or of splits; None for another folder."""
    if not any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return None
    splits = hf_splits(folder)
    what = f"splits {', '.join(splits)}" if splits else "one data set"
    look = functools.partial(_look, splits, lambda split: _arrow_files(folder / split))
    return Candidate("hf", (folder,), RECORDINGS, f"a save_to_disk folder of the datasets library, {what}", 100, look)


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
    if sounds and any(words_of(row, {}) is not None for row in table.rows):
        audio = _named(table, "audio", sounds, chooser)
        found.meaning = TALKS
        found.take_images(table, "chat", columns_of(table, "chat", {"audio": audio}, chooser))
        found.sounds, found.images_a_row = Sounds.of(table.encoded(audio)), [0]
    elif sounds or "column audio" in chooser.given:
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
    return any(not headers.of([value]).unreadable for value in islice(table.encoded(name), 4))


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
    language = next((each.name for each in likely_columns(table, "language") if each.score >= 1), None)
    found.columns = {"features": name, **({"labels": "labels"} if found.has_labels else {})}
    found.columns |= unlike_usual({"language": language})
    found.languages = languages_of([table], language)
    found.audio = {"features": "given", "n_mels": int(shape[0])}
    found.notes = [f"Features of shape {shape} stand in the column {name}; no sound is read."]
    return True
