"""Files that are samples themselves, texts in lines, and tars.

Recordings and images with texts beside them, LJSpeech; tars of recordings or of images with their metadata, and the
tables and lists that name clips in tars.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.config.data import PICTURES, SUBTITLES, TEXT_OF_IMAGE, SourceConfig
from forebay.errors import ConfigError, ManifestError
from forebay.init.candidate import Candidate, files_noun
from forebay.init.config_sections import IMAGES, RECORDINGS, TEXTS
from forebay.init.folder_files import SAMPLE, TRANSCRIPTS, Clock, TrainFiles, Tree, spread, text_head, walk
from forebay.init.media_headers import Pictures, Sounds
from forebay.init.questions import Choice, Chooser, prompt_of
from forebay.init.table_head import TableHead, is_language, read_table, words_of
from forebay.rows.named_files import path_stem
from forebay.rows.reader import AUDIO, IMAGE_EXTENSIONS, TEXT_FIELDS, split_name
from forebay.rows.readers.json_lines import BOM, JsonError, parse_object
from forebay.rows.readers.line_blocks import codec_of, head_of, plain_name
from forebay.rows.readers.speech_sets import segments_of
from forebay.rows.readers.tar_lists import REQUIRED
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
        found.notes += _left(len(tree.names(frozenset(PICTURES))), "images")
        found.has_text = bool(found.texts)

    label = f"{counted(len(own.names), Sounds.noun)}{has}"
    return Candidate("folder", tuple(map(tree.path, own.folders)), RECORDINGS, label, score, look)


def _left(count: int, noun: str) -> list[str]:
    there = f"Beside them lie {counted(count, noun)}, which this config does not read"
    return [f"{there}: forebay init takes them in a folder of their own."] if count else []


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


def speech_set_of(paths: Sequence[Path], problems: list[str]) -> Candidate | None:
    """Returns the candidate of files or a folder whose rows are segments anyway; None where they are none such."""
    kind = next((kind for kind, (_, is_one) in _SETS.items() if is_one(paths)), None)
    if kind is None:
        return None
    manifests = tuple(map(str, paths))
    try:
        listed = segments_of(SourceConfig(kind=kind, manifest=manifests))
    except ManifestError as err:
        problems.append(str(err))
        return None
    rows = listed.rows
    if not len(rows):
        problems.append(listed.rejected["message"][0].as_py())
        return None
    count = counted(len(rows), "segments")

    def look(found: Candidate, chooser: Chooser) -> None:  # noqa: ARG001
        found.noun, found.count = "segments", len(rows)
        found.texts = rows["text"].drop_null().slice(0, _TEXTS).to_pylist()
        found.languages = Counter(rows["language"].drop_null().to_pylist())
        found.sounds = Sounds(seconds=[seconds for seconds in rows["duration_s"].to_pylist() if seconds == seconds])
        found.has_text = bool(found.texts)
        if len(listed.rejected):
            found.notes.append(f"{len(listed.rejected):,} lines cannot be used: {listed.rejected['message'][0]}.")

    return Candidate(kind, tuple(paths), RECORDINGS, f"{_SETS[kind][0]}, {count}", 95, look)


def _is_kaldi(paths: Sequence[Path]) -> bool:
    return all(path.is_dir() and (path / "wav.scp").is_file() for path in paths)


def _is_lhotse(paths: Sequence[Path]) -> bool:
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl*")) if path.is_dir() else [path])]
    firsts = [_first_object(file) for file in files]
    cuts = [{"recording", "supervisions"} <= {*first} for first in firsts]
    apart = [("sources" in first) + 2 * ("recording_id" in first) for first in firsts]
    return any(cuts) or {1, 2} <= {*apart}


def _is_nemo(paths: Sequence[Path]) -> bool:
    return all(path.is_file() and {"audio_filepath", "offset"} <= {*_first_object(path)} for path in paths)


def _first_object(path: Path) -> dict[str, Any]:
    """Returns the first object of a file of lines, empty where there is none."""
    if not path.name.endswith((".json", ".jsonl", ".jsonl.gz")):
        return {}
    with contextlib.suppress(OSError, EOFError, ValueError, RecursionError):
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            found = json.loads(file.readline(_HEAD))
        return found if isinstance(found, dict) else {}
    return {}


def _has_subtitles(paths: Sequence[Path]) -> bool:
    """Returns whether most recordings of a folder have subtitles beside them."""
    if len(paths) > 1 or not paths[0].is_dir():
        return False
    tree = walk(paths[0], seconds=1.0)
    stems = {path_stem(name) for name in tree.names(frozenset(SUBTITLES))}
    stems |= {path_stem(stem) for stem in stems}
    return sum(path_stem(name) in stems for name in tree.audio) > _MOST * len(tree.audio)


_SETS: Mapping[str, tuple[str, Callable[[Sequence[Path]], bool]]] = {
    "kaldi": ("a Kaldi data folder", _is_kaldi),
    "lhotse": ("lhotse: cuts or supervisions", _is_lhotse),
    "nemo": ("a NeMo manifest", _is_nemo),
    "subtitles": ("recordings with subtitles", _has_subtitles),
}


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
        found.notes += own.notes + _left(len(tree.audio), "recordings")
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


_TARS, _SECONDS = 8, 1.5
_FEWEST = 8
_SIDECAR_BYTES, _CLIP_BYTES = 1 << 20, 16 * 1024 * 1024
_USED = frozenset(("id", "language", "prompt", "duration", "duration_s", *TEXT_FIELDS))


@dataclass(slots=True)
class _Seen:
    """Members of some tars, the first ones of each. rows: what stands beside the media: `text`, `label`, or a JSON.

    documents: the JSONs among the rows. problems: why a tar could not be read.
    """

    clips: int = 0
    images: int = 0
    sounds: Sounds = field(default_factory=Sounds)
    pictures: Pictures = field(default_factory=Pictures)
    rows: list[dict[str, Any]] = field(default_factory=list)
    documents: list[dict[str, Any]] = field(default_factory=list)
    read_bytes: int = 0
    total_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.read_bytes >= self.total_bytes

    @property
    def texts(self) -> list[str]:
        """The texts of recordings: those of a row's first field that may hold one."""
        named = ([row[name] for name in TEXT_FIELDS if isinstance(row.get(name), str)] for row in self.rows)
        return [texts[0] for texts in named if texts]

    @property
    def possible(self) -> list[Choice[str]]:
        """The readings that are possible beside the images, the likeliest first."""
        found = {
            "chat": ("conversations in .json", any(words_of(row, {}) is not None for row in self.documents)),
            "label": ("classes in .json or .cls", any(isinstance(r.get("label"), str | int | list) for r in self.rows)),
            "plain": ("texts in .json or .txt", any(isinstance(row.get("text"), str) for row in self.rows)),
        }
        return [Choice(label, prompt, prompt) for prompt, (label, is_there) in found.items() if is_there]

    def count_into(self, found: Candidate, count: int) -> None:
        """Says how many samples a candidate has: those that were seen, or about as many more as the tars are larger."""
        found.is_exact = self.is_whole
        found.count = count if self.is_whole else round(count * self.total_bytes / max(1, self.read_bytes))

    def read(self, path: Path, clock: Clock, wanted: int) -> int:
        """Adds the first members of a tar, about as many media as wanted; returns how many of its bytes they are."""
        size, before = path.stat().st_size, self.clips + self.images
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                if not member.isfile():
                    continue
                self._add(tar, member, split_name(member.name)[1])
                media = self.clips + self.images - before
                if media > wanted or (media > _FEWEST and clock.is_over()):
                    return int(member.offset_data + member.size)
        return size

    def _add(self, tar: tarfile.TarFile, member: tarfile.TarInfo, extension: str) -> None:
        is_clip, is_image = extension in AUDIO, extension in IMAGE_EXTENSIONS
        self.clips += is_clip
        self.images += is_image
        is_beside = extension in (".json", ".txt", ".cls") and member.size <= _SIDECAR_BYTES
        if not is_beside and (not (is_clip or is_image) or member.size > _CLIP_BYTES):
            return
        file = tar.extractfile(member)
        data = b"" if file is None else file.read()
        if is_clip or is_image:
            (self.sounds if is_clip else self.pictures).add(data)
        elif extension == ".json":
            with contextlib.suppress(JsonError):
                self.documents.append(parse_object(data))
                self.rows.append(self.documents[-1])
        else:
            text = data.decode("utf-8-sig", "replace")
            self.rows.append({"text": text} if extension == ".txt" else {"label": text.strip()})


def tars_of(tars: Sequence[Path], folders: tuple[Path, ...] | None) -> Candidate | None:
    """Returns the candidate of tars as samples with metadata. folders: that hold them, to be named whole."""
    if not tars:
        return None
    seen, clock, chosen = _Seen(), Clock(_SECONDS), spread(tars, _TARS)
    seen.total_bytes = sum(path.stat().st_size for path in tars if path.is_file())
    for path in clock.while_left(chosen):
        try:
            seen.read_bytes += seen.read(path, clock, max(_FEWEST, SAMPLE // len(chosen)))
        except (OSError, tarfile.TarError) as err:
            seen.problems.append(f"{path.name} cannot be read: {err}.")
    made = functools.partial(Candidate, "webdataset", folders or tuple(tars))
    label = f"{counted(len(tars), 'tars')} of"
    if seen.clips:
        has, score = ("texts in .json or .txt beside them", 75) if seen.texts else ("without texts", 40)
        return made(RECORDINGS, f"{label} recordings, {has}", score, functools.partial(_recordings, seen))
    if seen.images:
        has = " and ".join(choice.label for choice in seen.possible) or "nothing beside them"
        score = 78 if seen.possible else 20
        return made(IMAGES, f"{label} images, with {has}", score, functools.partial(_images, seen))
    return None


def _recordings(seen: _Seen, found: Candidate, chooser: Chooser) -> None:  # noqa: ARG001
    seen.count_into(found, seen.clips)
    found.noun, found.sounds, found.texts = "clips", seen.sounds, seen.texts
    found.languages = Counter(row["language"] for row in seen.documents if isinstance(row.get("language"), str))
    fields = dict.fromkeys(name for row in seen.documents for name, value in row.items() if value is not None)
    found.others = tuple(name for name in fields if name not in _USED)
    found.has_text = bool(found.texts)
    found.notes += seen.problems


def _images(seen: _Seen, found: Candidate, chooser: Chooser) -> None:
    prompt, notes = prompt_of(from_here(found.manifests[0]), seen.possible, chooser)
    table = TableHead(found.manifests[0], "jsonl", names=(), rows=tuple(seen.rows), num_rows=len(seen.rows))
    found.take_images(table, prompt, {"label": "label"} if prompt == "label" else {"text": "text"})
    found.has_all_classes, found.pictures = seen.is_whole, seen.pictures
    seen.count_into(found, seen.images)
    if prompt == "chat":
        seen.count_into(found, len(seen.documents))
        found.images_a_row = [max(1, round(seen.images / max(1, len(seen.documents))))]
    found.notes += [*seen.problems, *notes]


def manifest_over_tars(table: TableHead) -> Candidate | None:
    """Returns the candidate of a parquet manifest over tars; None for another table."""
    if not set(REQUIRED) <= set(table.names):
        return None

    def look(found: Candidate, chooser: Chooser) -> None:  # noqa: ARG001
        found.take_recordings([table], {**{name: name for name in REQUIRED}, "text": "transcript"})
        found.noun, found.count = "clips", table.num_rows
        found.sounds.seconds = [float(each) for each in table.values("duration_s") if isinstance(each, int | float)]

    label = f"{table.path.name}: {counted(table.num_rows, 'rows')} that name clips in tars"
    return Candidate("tar", (table.path,), RECORDINGS, label, 90, look)


def list_over_tars(path: Path) -> Candidate | None:
    """Returns the candidate of a TSV without header over tars: shard, id, language, seconds; None for another file."""
    lines = text_head(path).splitlines()[:100] if path.suffix.lower() == ".tsv" else []
    rows = [line.split("\t") for line in lines[:-1] or lines if line]
    if not rows or any(len(row) != 4 or not row[0].endswith(".tar") for row in rows):
        return None

    def look(found: Candidate, chooser: Chooser) -> None:  # noqa: ARG001
        table = read_table(path)
        rows = [tuple(row.values()) for row in table.rows if len(row) == 4]
        found.noun, found.count, found.is_exact = "clips", table.num_rows + 1, table.is_exact  # the first is no header
        for row in rows:
            with contextlib.suppress(ValueError):
                found.sounds.seconds += [each] if (each := float(row[3])) >= 0 else []
        found.languages = Counter(str(row[2]) for row in rows if row[2])

    label = f"{path.name}: a list of shard, id, language and seconds over tars"
    return Candidate("filelist", (path,), RECORDINGS, label, 65, look)
