"""`kind = "folder"` under `[vision]`: images at any depth below a folder; the first folder below it names the class."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from forebay.config.data import TEXT_OF_IMAGE, SourceConfig
from forebay.errors import ManifestError, SampleError
from forebay.rows.named_files import path_stem, shown_name
from forebay.rows.parts import Part, PartRows, PartTask, Place, VisionKind, is_picture
from forebay.store.memo import SIZE
from forebay.store.remote.raw.sources import at_hand, files_below, is_folder, place_of, walk
from forebay.store.source_files import SourceFile

IMAGES_PER_PART = 16_384
MAX_TEXT_BYTES = 1 << 20
"""The most that the text beside an image may have."""

HIDDEN, NO_IMAGE, NO_OWNER = "(hidden files)", "(files that are no images)", "(texts without an image)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTask(PartTask):
    """Some images of one entry of `source.manifest`. texts: files beside them, by path without extension.

    others: what of the entry is no image, counted by what it is.
    """

    images: tuple[SourceFile, ...]
    texts: Mapping[str, SourceFile] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)


def folder_parts(source: SourceConfig, manifests: Sequence[SourceFile], cache_root: str) -> Iterator[PartTask]:
    """Yields the images of each entry in the order of their paths, up to 16384 a part; all of an entry are one group.

    Texts are among the files where they are read, see `SourceKind.files_of`.
    """
    for entry, written in enumerate(source.manifests):
        files = [(number, file) for number, file in enumerate(manifests) if file.entry == entry]
        images = [(number, file) for number, file in files if is_picture(file)]
        if not images:
            raise ManifestError(f"{written}: no images; add them, or correct source.manifest", code="FB204")
        texts = {path_stem(str(file.path)): file for _, file in files if file.path.name.lower().endswith(TEXT_OF_IMAGE)}
        others = _others(Path(written), {str(file.path) for _, file in files})
        if lonely := texts.keys() - {path_stem(str(file.path)) for _, file in images}:
            others[NO_OWNER] = len(lonely)
        for start in range(0, len(images), IMAGES_PER_PART):
            chosen = tuple(file for _, file in images[start : start + IMAGES_PER_PART])
            stems = {path_stem(str(file.path)) for file in chosen}
            yield FolderTask(
                source=source,
                group=images[0][0],
                name=shown_name(images[0][1]),
                path=str(images[0][1].path),
                cache_root=cache_root,
                images=chosen,
                texts={stem: texts[stem] for stem in stems & texts.keys()},
                others=others if start == 0 else {},
            )


def read_folder_part(task: PartTask) -> Part:
    """Returns a row an image. Its id is the path below the folder without its extension, with it where that is taken.

    Its class is the first folder below that of `source.manifest`, as torchvision's ImageFolder has it; an image beside
    the folders has none. Its text is that of `NAME.txt` beside it, in UTF-8.
    """
    assert isinstance(task, FolderTask)
    rows = task.rows()
    for image in task.images:
        name = shown_name(image)
        try:
            _add(rows, task, image, name)
        except SampleError as err:
            rows.reject(path_stem(name), err.reason, f"{name}: {err}")
    part = rows.part(task.group)
    return Part(group=part.group, rows=part.rows, images=part.images, unused=dict(task.others))


def _add(rows: PartRows, task: FolderTask, image: SourceFile, name: str) -> None:
    fields = {}
    if task.reads == "labels" and "/" in name:
        fields["label"] = name.partition("/")[0]
    if task.reads == "texts" and (beside := task.texts.get(path_stem(str(image.path)))) is not None:
        fields["text"] = _text(beside)
    # A size, also of a whole file: a listed file without one is a table of images.
    size = 0 if image.stat is None else image.stat[SIZE]
    place = Place(path=str(image.path), size=size)
    rows.add(fields, [place], sample_id=path_stem(name), explicit=False)


def _text(file: SourceFile) -> str:
    if file.stat is not None and file.stat[SIZE] > MAX_TEXT_BYTES:
        raise SampleError(
            "too_large", f"{shown_name(file)} has {file.stat[SIZE]} bytes, wanted at most {MAX_TEXT_BYTES}"
        )
    try:
        with at_hand(file.path) as local:
            return local.read_bytes().decode("utf-8-sig").strip()
    except UnicodeDecodeError as err:
        raise SampleError("bad_text", f"{shown_name(file)} is not UTF-8: {err}; save it as UTF-8") from err
    except OSError as err:
        raise ManifestError(
            f"cannot read {file.path}: {err.strerror}; check its permissions, or remove it", code="FB201"
        ) from err


def _others(folder: Path, listed: Set[str]) -> dict[str, int]:
    """Returns how many files of a folder are hidden, and how many of the rest nothing reads. listed: paths."""
    if not is_folder(folder):
        return {}
    found: Counter[str] = Counter()
    for name in _names_below(folder):
        if any(part.startswith(".") for part in name.split("/")):
            found[HIDDEN] += 1
        elif f"{folder}/{name}" not in listed:
            found[NO_IMAGE] += 1
    return dict(found)


def _names_below(folder: Path) -> Iterator[str]:
    if place_of(folder) is not None:
        yield from (path.relative_to(folder).as_posix() for path in files_below(folder, lambda _: True))
        return
    for base, _, names in walk(folder):
        yield from (os.path.relpath(f"{base}/{name}", folder) for name in names)


KIND = VisionKind(parts=folder_parts, read=read_folder_part, lists_images=True)
