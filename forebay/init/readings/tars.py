"""Tars: of recordings or of images with their metadata, and the lists that name clips in tars."""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forebay.init.choose import Choice, Chooser
from forebay.init.conversation import texts_of_row
from forebay.init.found import Found, Reading, counted
from forebay.init.media import Pictures, Sounds
from forebay.init.reads import NOUNS, prompt_of
from forebay.init.table import Table, read_table
from forebay.init.tree import SAMPLE, Clock, spread
from forebay.rows.readers.json_lines import JsonError, parse_object
from forebay.rows.readers.tar_lists import REQUIRED
from forebay.rows.readers.tar_members import AUDIO, IMAGE_EXTENSIONS, TEXT_FIELDS, split_name
from forebay.visible import from_here

_TARS, _SECONDS = 8, 1.5
_SIDECAR_BYTES, _CLIP_BYTES = 1 << 20, 16 * 1024 * 1024
_CLASS_BYTES = 1024
_USED = frozenset(("id", "language", "prompt", "duration", "duration_s", *TEXT_FIELDS))


@dataclass(slots=True)
class _Seen:
    """Members of some tars, the first ones of each."""

    clips: int = 0
    images: int = 0
    texts: list[str] = field(default_factory=list)
    conversations: list[str] = field(default_factory=list)
    images_a_row: list[int] = field(default_factory=list)
    documents: int = 0
    captions: list[str] = field(default_factory=list)
    classes: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    fields: Counter[str] = field(default_factory=Counter)
    sounds: Sounds = field(default_factory=Sounds)
    pictures: Pictures = field(default_factory=Pictures)
    read_bytes: int = 0
    total_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.read_bytes >= self.total_bytes

    @property
    def possible(self) -> list[Choice[str]]:
        """What can be read beside the images, the likeliest first."""
        found = {
            "chat": ("conversations in .json", bool(self.conversations)),
            "label": ("classes in .json or .cls", bool(self.classes)),
            "plain": ("texts in .json or .txt", bool(self.captions)),
        }
        return [Choice(label, prompt, prompt) for prompt, (label, is_there) in found.items() if is_there]

    def scaled(self, count: int) -> int:
        return count if self.is_whole else round(count * self.total_bytes / max(1, self.read_bytes))


def tar_readings(tars: Sequence[Path], folders: tuple[Path, ...] | None) -> list[Reading]:
    """Returns the readings of tars as samples with metadata. folders: that hold them, to be named whole."""
    if not tars:
        return []
    seen = _look(tars)
    manifests = folders or tuple(tars)
    found = []
    if seen.clips:
        label = f"{counted(len(tars), 'tars')} of recordings, {_with(seen)}"
        score = 75 if seen.texts else 40
        found.append(Reading(kind="webdataset", label=label, score=score, settle=lambda _: _speech(manifests, seen)))
    if seen.images and not seen.clips:
        found.append(_image_reading(manifests, tars, seen))
    return found


def _image_reading(manifests: tuple[Path, ...], tars: Sequence[Path], seen: _Seen) -> Reading:
    possible = seen.possible
    has = " and ".join(choice.label for choice in possible) or "nothing beside them"
    return Reading(
        kind="webdataset",
        label=f"{counted(len(tars), 'tars')} of images, with {has}",
        score=78 if possible else 20,
        settle=lambda chooser: _vision(manifests, seen, chooser),
        modality="vision",
    )


def _with(seen: _Seen) -> str:
    return "texts in .json or .txt beside them" if seen.texts else "without texts"


def manifest_reading(table: Table) -> Reading | None:
    """Returns the reading of a parquet manifest over tars; None for another table."""
    if not set(REQUIRED) <= set(table.names):
        return None
    label = f"{table.path.name}: {counted(table.num_rows, 'rows')} that name clips in tars"
    return Reading(kind="tar", label=label, score=90, settle=lambda _: _manifest(table))


def list_reading(path: Path) -> Reading | None:
    """Returns the reading of a TSV without header over tars: shard, id, language, seconds; None for another file."""
    try:
        with open(path, "rb") as file:
            lines = file.read(64 * 1024).decode("utf-8", "replace").splitlines()[:100]
    except OSError:
        return None
    rows = [line.split("\t") for line in lines[:-1] or lines if line]
    if not rows or any(len(row) != 4 or not row[0].endswith(".tar") for row in rows):
        return None
    label = f"{path.name}: a list of shard, id, language and seconds over tars"
    return Reading(kind="filelist", label=label, score=65, settle=lambda _: _filelist(path))


def _manifest(table: Table) -> Found:
    seconds = [float(value) for value in table.values("duration_s") if isinstance(value, int | float)]
    return Found(
        kind="tar",
        modality="speech",
        manifests=(table.path,),
        noun="clips",
        count=table.num_rows,
        sounds=Sounds(seconds=seconds),
        texts=[value for value in table.values("transcript") if isinstance(value, str)],
        languages=Counter(str(value) for value in table.values("language")),
        others=tuple(name for name in table.names if name not in {*REQUIRED, "prompt", "sample_id"}),
    )


def _filelist(path: Path) -> Found:
    table = read_table(path)
    rows = [tuple(row.values()) for row in table.rows if len(row) == 4]
    return Found(
        kind="filelist",
        modality="speech",
        manifests=(path,),
        noun="clips",
        count=table.num_rows + 1,  # the first line is no header here
        is_exact=table.is_exact,
        sounds=Sounds(seconds=[float(row[3]) for row in rows if _is_number(row[3])]),
        languages=Counter(str(row[2]) for row in rows if row[2]),
    )


def _is_number(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False


def _speech(manifests: tuple[Path, ...], seen: _Seen) -> Found:
    return Found(
        kind="webdataset",
        modality="speech",
        manifests=manifests,
        noun="clips",
        count=seen.scaled(seen.clips),
        is_exact=seen.is_whole,
        sounds=seen.sounds,
        texts=seen.texts,
        languages=seen.languages,
        others=tuple(name for name in seen.fields if name not in _USED),
        has_text=bool(seen.texts),
        notes=list(seen.problems),
    )


def _vision(manifests: tuple[Path, ...], seen: _Seen, chooser: Chooser) -> Found:
    prompt, notes = prompt_of(from_here(manifests[0]), seen.possible, chooser)
    is_chat = prompt == "chat"
    return Found(
        kind="webdataset",
        modality="vision",
        prompt=prompt,
        manifests=manifests,
        noun=NOUNS[prompt],
        count=seen.scaled(seen.documents if is_chat else seen.images),
        is_exact=seen.is_whole,
        pictures=seen.pictures,
        texts={"chat": seen.conversations, "plain": seen.captions}.get(prompt, []),
        images_a_row=[max(1, round(seen.images / max(1, seen.documents))) if is_chat else 1],
        classes=seen.classes if prompt == "label" else Counter(),
        has_all_classes=seen.is_whole,
        notes=[*seen.problems, *notes],
    )


def _look(tars: Sequence[Path]) -> _Seen:
    seen, clock = _Seen(), Clock(_SECONDS)
    seen.total_bytes = sum(path.stat().st_size for path in tars if path.is_file())
    chosen = spread(tars, _TARS)
    for path in clock.while_left(chosen):
        try:
            seen.read_bytes += _look_into(path, seen, clock, max(8, SAMPLE // len(chosen)))
        except (OSError, tarfile.TarError) as err:
            seen.problems.append(f"{path.name} cannot be read: {err}.")
    return seen


def _look_into(path: Path, seen: _Seen, clock: Clock, wanted: int) -> int:
    """Adds the first members of a tar to `seen`; returns how many of its bytes they are."""
    size, clips = path.stat().st_size, 0
    with tarfile.open(path, "r:") as tar:
        while (member := tar.next()) is not None:
            if not member.isfile():
                continue
            _add(tar, member, seen)
            clips += split_name(member.name)[1] in AUDIO | IMAGE_EXTENSIONS
            if clips > wanted or (clips > 8 and clock.is_over()):
                return int(member.offset_data + member.size)
    return size


def _add(tar: tarfile.TarFile, member: tarfile.TarInfo, seen: _Seen) -> None:
    extension = split_name(member.name)[1]
    if extension in AUDIO:
        seen.clips += 1
        if member.size <= _CLIP_BYTES:
            seen.sounds.add_bytes(_bytes(tar, member))
    elif extension in IMAGE_EXTENSIONS:
        seen.images += 1
        if member.size <= _CLIP_BYTES:
            seen.pictures.add_bytes(_bytes(tar, member))
    elif extension == ".json" and member.size <= _SIDECAR_BYTES:
        _add_document(_bytes(tar, member), seen)
    elif extension == ".txt" and member.size <= _SIDECAR_BYTES:
        text = _bytes(tar, member).decode("utf-8-sig", "replace")
        seen.texts.append(text)
        seen.captions.append(text)
    elif extension == ".cls" and member.size <= _CLASS_BYTES:
        seen.classes[_bytes(tar, member).decode("utf-8-sig", "replace").strip()] += 1


def _bytes(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return b"" if file is None else file.read()


def _add_document(data: bytes, seen: _Seen) -> None:
    try:
        fields = parse_object(data)
    except JsonError:
        return
    seen.documents += 1
    seen.fields.update(name for name, value in fields.items() if value is not None)
    text = next((fields[name] for name in TEXT_FIELDS if isinstance(fields.get(name), str)), None)
    if text is not None:
        seen.texts.append(text)
    if isinstance(fields.get("language"), str):
        seen.languages[fields["language"]] += 1
    if isinstance(fields.get("text"), str):
        seen.captions.append(fields["text"])
    if isinstance(label := fields.get("label"), str | int | list):
        seen.classes.update(str(each) for each in (label if isinstance(label, list) else [label]))
    if (conversation := texts_of_row(fields)) is not None:
        seen.conversations.append(conversation)
