"""`kind = "folder"`: recordings or images at any depth below a folder.

Recordings have their texts beside them or in a table. The first folder below names the class of an image.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import RECORDINGS, TEXT_OF_IMAGE, UNREAD, SourceConfig
from forebay.errors import ManifestError, SampleError
from forebay.rows.audio_facts import locate_files
from forebay.rows.columns_aside import BLOCK_ROWS
from forebay.rows.equal_values import StringIndex, first_rows, hashes_of
from forebay.rows.manifest import SPAN, Manifest, MediaPlace, Record, Unused, require_rows, row_table, without_rows
from forebay.rows.meanings.recordings import SEVERAL, refuse_differing
from forebay.rows.named_files import is_picture, manifest_files, path_stem, shown_name
from forebay.rows.reader import Failures, FilePiece, RecordingLister, RowReader, Sink
from forebay.rows.readers.json_lines import manifest_lines
from forebay.rows.readers.table_files import open_rows
from forebay.rows.source_table import SourceFiles
from forebay.store.layout import Array
from forebay.store.memo import SIZE
from forebay.store.remote.raw.raw_sources import at_hand, files_below, is_folder, place_of, walk
from forebay.store.source_files import SourceFile, chunks_of

IMAGES_PER_PART = 16_384
MAX_TEXT_BYTES = 1 << 20
"""The most that the text beside an image may have."""
HIDDEN, NO_IMAGE, NO_OWNER = "(hidden files)", "(files that are no images)", "(texts without an image)"
_LISTS = ".trans.txt"
"""LibriSpeech's lists: a line for each recording of their folder, its name and its text."""
_BESIDE = (".txt", ".lab", ".normalized.txt")
_NO_ROW = -1


def list_folder(source: SourceConfig) -> Manifest:
    """Returns the recordings below folders: `.wav`, `.flac`, `.ogg`, `.opus`, `.mp3`, `.aiff`, in the order of paths.

    Id: the path below the folder without its extension. Text: that of `NAME.txt`, else `NAME.lab`, else
    `NAME.normalized.txt` beside it, else of its line in a `*.trans.txt` of its folder; with `source.texts` that of its
    row in the table, and nothing else. Text files that belong to no recording are counted. A text that is not UTF-8
    fails as `bad_text`, a link to a text that is gone as `missing_file`.

    Language: with `languages_from_folders` the first folder below the manifest's, else of the
    table. Raises ManifestError for two recordings that a row of the table may mean.
    """
    files = manifest_files(source)
    numbers = sound_files(files)
    require_rows(len(numbers), files)
    names = files.take(numbers).shown()
    failures, unused = Failures(), Unused()
    columns: dict[str, Any] = {"text": None}
    kept: dict[str, Any] = {}
    if source.texts is None:
        columns["text"] = _texts(files, numbers, names, failures, unused)
    else:
        columns, kept = read_texts(source, files, names, failures, unused)
    if source.languages_from_folders:
        folders = (name.partition("/")[0] if "/" in name else None for name in names.to_pylist())
        columns["language"] = pa.array(folders, pa.large_string())
    rows = row_table({**places_of(files, numbers, names), **columns}, num_rows=len(names), kept=kept)
    rows = without_rows(rows, [row for row, *_ in failures.found])
    return Manifest(files=files, rows=rows, rejected=failures.table(), unused=unused.counts)


def sound_files(files: SourceFiles) -> Array:
    """The numbers of recordings; one of a form that is not read counts where no other of its name is beside it."""
    is_read, is_unread = _end_so(files.names, RECORDINGS), _end_so(files.names, UNREAD)
    numbers = np.flatnonzero(is_read)
    if is_unread.any():
        read = set(map(path_stem, files.take(numbers).paths))
        unread = np.flatnonzero(is_unread)
        alone = [path_stem(path) not in read for path in files.take(unread).paths]
        numbers = np.union1d(numbers, unread[alone])
    return numbers.astype(np.int64)


def _end_so(names: Any, endings: Sequence[str]) -> Array:
    """Whether names end so, in any case of letters, bool [names]. names: arrow's binaries."""
    pattern = "(?i)(" + "|".join(re.escape(ending) for ending in endings) + r")\z"
    return np.asarray(pc.match_substring_regex(names, pattern))


def places_of(files: SourceFiles, numbers: Array, names: pa.Array) -> dict[str, Any]:
    """Returns where the recordings are; each entry of `source.manifest` is cut into shards by itself."""
    _, first, inverse = np.unique(files.entries[numbers], return_index=True, return_inverse=True)
    return {
        "sample_id": _stems(names),
        "group": pa.array(numbers[first[inverse]], pa.int32()),
        "file": pa.array(numbers, pa.int32()),
        "member": names,
        "size": pa.array(np.where(files.has_stat, files.stats[:, SIZE], 0)[numbers], pa.int64()),
    }


def _size(file: SourceFile) -> int:
    return 0 if file.stat is None else file.stat[SIZE]


def _stems(names: Any) -> Any:
    """Returns names without their extensions, as `path_stem` does."""
    return pc.replace_substring_regex(names, r"([^/])\.[^./]*\z", r"\1")


def _texts(files: SourceFiles, numbers: Array, names: Any, failures: Failures, unused: Unused) -> pa.ChunkedArray:
    """Returns the text of every recording, from the files beside it."""
    is_other, is_list = ~_end_so(files.names, UNREAD), np.asarray(pc.ends_with(files.names, _LISTS))
    is_other[numbers] = False
    listed = _listed_texts(files.take(np.flatnonzero(is_other & is_list)).paths)
    beside, index = np.flatnonzero(is_other & ~is_list), StringIndex()
    index.add(hashes_of(files.take(beside).written_paths()), 0)
    texts, num_used = [], 0
    for start in range(0, len(numbers), BLOCK_ROWS):
        recordings = files.take(numbers[start : start + BLOCK_ROWS])
        found, stems = _beside(recordings, files, beside, index), list(map(path_stem, recordings.paths))
        num_used += int(np.count_nonzero(found >= 0))
        taken, at = iter(files.take(beside[found[found >= 0]]).paths), (found >= 0).tolist()
        block: list[str | None] = []
        for row, stem in enumerate(stems):
            path = next(taken) if at[row] else None
            try:
                block.append(listed.pop(stem, None) if path is None else _text(path))
            except SampleError as err:
                failures.add(start + row, path_stem(names[start + row].as_py()), err.reason, str(err))
                block.append(None)
        texts.append(pa.array(block, pa.large_string()))
    unused.merge({"(texts without a recording)": len(beside) - num_used + len(listed)})
    return pa.chunked_array(texts, pa.large_string())


def _beside(recordings: SourceFiles, files: SourceFiles, beside: Array, index: StringIndex) -> Array:
    """Returns which of the texts is beside each recording, int32 [recordings], -1 where there is none.

    beside: the numbers of the texts' files, in the order of the index.
    """

    def paths_of(at: Any) -> Any:
        return files.take(beside[at]).written_paths()

    found, stems = np.full(len(recordings), -1, np.int32), _stems(recordings.written_paths())
    for ending in _BESIDE:
        left = np.flatnonzero(found < 0)
        if not len(left):
            break
        chosen = stems.take(pa.array(left))
        paths = pc.binary_join_element_wise(
            chosen, pa.scalar(ending.encode(), chosen.type), pa.scalar(b"", chosen.type)
        )
        found[left] = index.find(paths, hashes_of(paths), paths_of, lambda: paths_of(slice(None)))
    return found


def _text(path: str) -> str:
    """Returns the text of a file. Raises SampleError if it is gone or not UTF-8, ManifestError if it cannot be read."""
    try:
        is_here = place_of(path) is None
        with nullcontext(path) if is_here else at_hand(Path(path)) as local, open(local, "rb", buffering=0) as file:
            return file.read().decode("utf-8-sig").strip()
    except UnicodeDecodeError as err:
        raise SampleError("bad_text", f"{path} is not UTF-8: {err}; save it as UTF-8") from err
    except FileNotFoundError as err:
        raise SampleError("missing_file", f"{path} links to what is not there; bring that, or remove it") from err
    except OSError as err:
        raise ManifestError(
            f"cannot read {path}: {err.strerror}; check its permissions, or remove it", code="FB201"
        ) from err


def _listed_texts(lists: Sequence[str]) -> dict[str, str]:
    """Returns the texts of `*.trans.txt` by the path of their recording without its extension."""
    texts: dict[str, str] = {}
    for path in map(Path, lists):
        for number, line in manifest_lines(path):
            try:
                name, _, text = line.decode("utf-8").strip().partition(" ")
            except UnicodeDecodeError as err:
                raise ManifestError(
                    f"{path}, line {number}: is not UTF-8: {err}; correct the line", code="FB203"
                ) from err
            texts[str(path.parent / name)] = text.strip()
    return texts


class _Pictures(NamedTuple):
    """Some images of one entry of `source.manifest`. texts: files beside them, by path without extension.

    others: what of the entry is no image, counted by what it is.
    """

    images: Sequence[SourceFile]
    texts: Mapping[str, SourceFile]
    others: Mapping[str, int]


def _picture_pieces(whole: FilePiece, files: Sequence[SourceFile]) -> Iterator[FilePiece]:
    """Yields the images of each entry in the order of their paths, up to 16384 a piece; all of an entry are one group.

    Texts are among the files where they are read, see `SourceKind.files_of`.
    """
    listed = SourceFiles.of(files)
    for entry, written in enumerate(whole.source.manifests):
        own = [(number, listed[number]) for number in np.flatnonzero(listed.entries == entry).tolist()]
        images = [(number, file) for number, file in own if is_picture(file)]
        if not images:
            raise ManifestError(f"{written}: no images; add them, or correct source.manifest", code="FB204")
        texts = {path_stem(str(file.path)): file for _, file in own if file.path.name.lower().endswith(TEXT_OF_IMAGE)}
        others = _others(Path(written), {str(file.path) for _, file in own})
        if lonely := texts.keys() - {path_stem(str(file.path)) for _, file in images}:
            others[NO_OWNER] = len(lonely)
        group, first = images[0]
        for start in range(0, len(images), IMAGES_PER_PART):
            chosen = tuple(file for _, file in images[start : start + IMAGES_PER_PART])
            stems = {path_stem(str(file.path)) for file in chosen}
            pictures = _Pictures(chosen, {stem: texts[stem] for stem in stems & texts.keys()}, others)
            yield replace(whole, group=group, name=shown_name(first), path=str(first.path), files=pictures)
            others = {}


def _read_pictures(piece: FilePiece, rows: Sink) -> None:
    """Gives a row an image. Its id is the path below the folder without its extension, with it where that is taken.

    Its class is the first folder below that of `source.manifest`, as torchvision's ImageFolder has it; an image beside
    the folders has none. Its text is that of `NAME.txt` beside it, in UTF-8.
    """
    pictures: _Pictures = piece.files
    for image in pictures.images:
        name = shown_name(image)
        record = partial(_picture, image, name, piece.meaning.columns, pictures.texts.get(path_stem(str(image.path))))
        rows.take(record, where=name, stem=path_stem(name))
    rows.unused.merge(pictures.others)


def _picture(image: SourceFile, name: str, columns: Sequence[str], beside: SourceFile | None) -> Record:
    fields = {}
    if "label" in columns and "/" in name:
        fields["label"] = name.partition("/")[0]
    if "text" in columns and beside is not None:
        fields["text"] = _text_of_picture(beside)
    # A size, also of a whole file: a listed file without one is a table of images.
    return Record(fields, {"image": [MediaPlace(path=str(image.path), size=_size(image))]})


def _text_of_picture(file: SourceFile) -> str:
    if _size(file) > MAX_TEXT_BYTES:
        raise SampleError("too_large", f"{shown_name(file)} has {_size(file)} bytes, wanted at most {MAX_TEXT_BYTES}")
    return _text(str(file.path))


def _others(folder: Path, listed: Set[str]) -> dict[str, int]:
    """Returns how many files of a folder are hidden, and how many of the rest nothing reads. listed: paths."""
    if not is_folder(folder):
        return {}
    below: Iterable[str] = (os.path.relpath(f"{base}/{name}", folder) for base, _, own in walk(folder) for name in own)
    if place_of(folder) is not None:
        below = (path.relative_to(folder).as_posix() for path in files_below(folder, lambda _: True))
    found: Counter[str] = Counter()
    for name in below:
        if any(part.startswith(".") for part in name.split("/")):
            found[HIDDEN] += 1
        elif f"{folder}/{name}" not in listed:
            found[NO_IMAGE] += 1
    return dict(found)


READER = RowReader(
    read=_read_pictures,
    pieces=_picture_pieces,
    recordings=RecordingLister(list=list_folder, locate=locate_files),
    lists_media=True,
)


def read_texts(
    source: SourceConfig, files: SourceFiles, names: pa.Array, failures: Failures, unused: Unused
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the columns of `source.texts`, and those that are kept, by recording; null where no row means one.

    names: of the recordings, relative to their folder. Rows that mean no recording, or one that an earlier row means,
    have failed, behind the recordings. Raises ManifestError where a row may mean several recordings.
    """
    number = pc.index(files.written_paths(), os.fsencode(Path(source.texts or ""))).as_py()
    table = open_rows(files[number], number, source)
    columns, kept = table.values()
    paths = table.paths()
    unused.add(table.unused, rows=len(paths))
    matched = _Matched(names, files[number].path, paths, table.problems)
    for row, problem in sorted(matched.problems.items()):
        failures.add(len(names) + row, columns["sample_id"][row].as_py(), *problem)
    spans = {name: column for name, column in columns.items() if name.startswith(SPAN)}
    rows = {"file": pa.array(matched.meant), "sample_id": columns["sample_id"], "text": columns["text"], **spans}
    of_table = without_rows(row_table(rows, num_rows=len(paths)), np.flatnonzero(matched.meant == _NO_ROW).tolist())
    of_table = refuse_differing(of_table, lambda recording, _: f"{files[number].path}: {names[recording]}")
    if SEVERAL in of_table.column_names:
        columns[SEVERAL] = pa.array(np.isin(np.arange(len(paths)), of_table["row"].filter(of_table[SEVERAL])))
    places = pa.array(matched.rows, mask=matched.rows == _NO_ROW)
    found = {name: column.take(places) for name, column in columns.items() if column is not None}
    if (given_s := found.get("duration_s")) is not None:
        found["duration_s"] = pc.fill_null(given_s, float("nan"))
    stems = _stems(names)
    explicit = found.pop("explicit_id", None)
    if explicit is None:
        del found["sample_id"]
    else:
        found["explicit_id"] = pc.fill_null(explicit, fill_value=False)
        found["sample_id"] = pc.if_else(found["explicit_id"], found["sample_id"], stems)
    return found, {name: column.take(places) for name, column in kept.items()}


class _Matched:
    """The row of every recording. rows: int64 [recordings], `_NO_ROW` where there is none. meant: the other way.

    problems: why rows give no recording its text, as reason and message; those that are known already among them.
    """

    def __init__(self, names: pa.Array, table: Path, written: Any, problems: Mapping[int, tuple[str, str]]) -> None:
        """written: what each row of the table names. Raises ManifestError where that may be one of several."""
        self.problems = dict(problems)
        is_named = np.asarray(pc.fill_null(pc.not_equal(written, ""), fill_value=False))
        where = f"{table}, row "
        for row in np.flatnonzero(~is_named).tolist():
            self.problems.setdefault(row, ("missing_file", f"{where}{row + 1}: it names no recording; correct the row"))
        asked = np.setdiff1d(np.flatnonzero(is_named), list(problems))
        bare = pc.replace_substring_regex(pc.fill_null(written.take(pa.array(asked)), ""), r"\A\./", "")
        self.meant: Array = np.full(len(written), _NO_ROW, np.int64)
        self.meant[asked], doubtful = _meant_by(bare, names)
        if len(doubtful):
            at, one, other = doubtful[0]
            raise ManifestError(
                f"{where}{asked[at] + 1}: {bare[at].as_py()!r} may be {one!r} or {other!r}; write the path below "
                "source.manifest in the table",
                code="FB203",
            )
        for row in asked[self.meant[asked] == _NO_ROW].tolist():
            message = f"{where}{row + 1}: no recording is {written[row].as_py()!r}; correct the row or add the file"
            self.problems[row] = "missing_file", message
        rows = np.flatnonzero(self.meant != _NO_ROW)
        different, first = np.unique(self.meant[rows], return_index=True)
        self.rows: Array = np.full(len(names), _NO_ROW, np.int64)
        self.rows[different] = rows[first]
        for row in rows[self.rows[self.meant[rows]] != rows].tolist():
            earlier, name = int(self.rows[self.meant[row]]) + 1, written[row].as_py()
            said = f"row {earlier} is of the same recording, {name!r}; keep one of them"
            self.problems[row] = "repeated_row", f"{where}{row + 1}: {said}"


def _meant_by(written: Any, names: pa.Array) -> tuple[Array, list[tuple[int, str, str]]]:
    """Returns which recording each name means, int64, and the first name that may mean several, with two of these.

    A path goes before the bare name of a file, and a name with its extension before one without.
    """
    meant, doubtful = np.full(len(written), _NO_ROW, np.int64), list[tuple[int, str, str]]()
    for is_file, has_extension in product((False, True), (True, False)):
        left = np.flatnonzero(meant == _NO_ROW)
        if not len(left):
            break
        form = pc.replace_substring_regex(names, r"\A.*/", "") if is_file else names
        form = form if has_extension else _stems(form)
        asked = written if len(left) == len(written) else written.take(pa.array(left))  # most often there is no copy
        first = first_rows(pa.chunked_array([form, *chunks_of(asked)]))
        found, is_first = first[len(form) :], first[: len(form)] == np.arange(len(form))
        is_here = found < len(form)
        meant[left[is_here]] = found[is_here]
        again = np.isin(found, first[: len(form)][~is_first]) & is_here
        for at in np.flatnonzero(again)[:1].tolist():
            other = int(np.flatnonzero((first[: len(form)] == found[at]) & ~is_first)[0])
            doubtful.append((int(left[at]), names[int(found[at])].as_py(), names[other].as_py()))
    return meant, sorted(doubtful)
