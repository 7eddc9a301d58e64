"""Tars: of recordings or of images with their metadata, and the tables and lists that name clips in tars."""

from __future__ import annotations

import contextlib
import functools
import tarfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.init.candidate import Candidate, Pictures, Sounds
from forebay.init.column_roles import words_of
from forebay.init.config_sections import RECORDINGS
from forebay.init.folder_files import SAMPLE, Clock, spread, text_head
from forebay.init.image_sections import IMAGES
from forebay.init.questions import Choice, Chooser, prompt_of
from forebay.init.table_head import TableHead, read_table
from forebay.rows.reader import AUDIO, IMAGE_EXTENSIONS, TEXT_FIELDS, split_name
from forebay.rows.readers.json_lines import JsonError, parse_object
from forebay.rows.readers.tar_lists import REQUIRED
from forebay.terminal import counted
from forebay.visible import from_here

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
