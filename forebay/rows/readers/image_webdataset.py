"""`kind = "webdataset"` under `[vision]`: tars of `{id}.json` and `{id}.jpg`, or `{id}.0.jpg`, `{id}.1.png`.

Rows of one image with a class or a text are in `tar_images`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.config.data import SourceConfig
from forebay.errors import SampleError, TextError
from forebay.rows.manifest import storable
from forebay.rows.meanings.conversation import identifier, image_names, text_error
from forebay.rows.media_reader import opened
from forebay.rows.parts import Part, PartRows, PartTask, Place, VisionKind, part_tasks
from forebay.rows.readers.image_tars import IMAGE_EXTENSIONS, MEMBERS_PER_RUN, add_images
from forebay.rows.readers.json_lines import JsonError, parse_object
from forebay.rows.readers.tar_members import (
    NAMELESS,
    UnreadableTar,
    read_sidecar,
    refusal,
    split_name,
    tar_index,
)
from forebay.store.source_files import SourceFile
from forebay.tar.members import Refused, TarIndex


@dataclass(slots=True)
class _Samples:
    """Members of a tar by stem of their JSON. images: rows in the index. lonely: images without a JSON, by row."""

    jsons: dict[str, int] = field(default_factory=dict)
    images: dict[str, list[int]] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)
    lonely: dict[int, str] = field(default_factory=dict)


def tar_parts(source: SourceConfig, manifests: Sequence[SourceFile], cache_root: str) -> Iterator[PartTask]:
    """Returns the tars."""
    return part_tasks(source, enumerate(manifests), cache_root)


def read_tar_part(task: PartTask) -> Part:
    """Returns the rows of a tar: one for each `{id}.json`, in archive order.

    Its images are the members `{id}.jpg`, `.jpeg`, `.png`, `.webp` (in any case) and `{id}.{n}.jpg`, in the order of
    their numbers; names of images in the JSON only say how many there are. The id is that of the JSON, else the name.
    Rows that cannot be used: `unreadable_tar`, `bad_conversation`, `image_count_mismatch`, what the tar's index
    refuses; images without a JSON are excluded as `no_conversation`. What is no conversation: `add_images`.
    """
    rows = task.rows()
    index = tar_index(task.path, cache_root=task.cache_root)
    if isinstance(index, UnreadableTar):
        rows.reject(task.name, index.reason, index.message)
        return rows.part(task.group, absent=index.absent)
    if task.reads != "conversations":
        add_images(rows, index, task)
        return rows.part(task.group)
    samples = _samples(index)
    entries = sorted([(row, stem) for stem, row in samples.jsons.items()] + list(samples.lonely.items()))
    with opened(index.path) as descriptor:
        for row, stem in entries:
            if row in samples.lonely:
                message = f"{task.name}: member {index.names[row]} has no {stem}.json; add it"
                rows.reject(storable(stem), "no_conversation", message, kind="excluded")
                continue
            try:
                _add(rows, descriptor, index, samples, stem)
            except SampleError as err:
                rows.reject(storable(stem), err.reason, f"{task.name}: member {stem}.json: {err}")
    _reject_jsons(rows, task, samples)
    return rows.part(task.group)


def _add(rows: PartRows, descriptor: int, index: TarIndex, samples: _Samples, stem: str) -> None:
    if stem in samples.refused:
        refused = samples.refused[stem]
        raise SampleError(
            refused.reason,
            f"{refused.name} at offset {refused.offset} is refused: {refused.reason}; write the tar again",
        )
    fields = _json(descriptor, index, samples.jsons[stem])
    members = sorted(samples.images.get(stem, ()), key=lambda row: _order(index.names[row], stem))
    places = [
        Place(None, storable(index.names[row]), int(index.offsets[row]), int(index.sizes[row]), row // MEMBERS_PER_RUN)
        for row in members
    ]
    named = len(image_names(fields))
    if named and named != len(places):
        raise TextError("image_count_mismatch", f"names {named} images, the tar has {len(places)} of them; add them")
    given = identifier(fields)
    rows.add(fields, places, sample_id=given or storable(stem), explicit=given is not None)


def _json(descriptor: int, index: TarIndex, row: int) -> dict[str, Any]:
    try:
        return parse_object(read_sidecar(descriptor, index, row))
    except JsonError as err:
        raise text_error(err) from err


def _samples(index: TarIndex) -> _Samples:
    samples = _Samples()
    split = [split_name(name) for name in index.names]
    for row, (stem, extension) in enumerate(split):
        if extension == ".json":
            samples.jsons[stem] = row  # of equal names the last counts, as when tar extracts them
    for row, (stem, extension) in enumerate(split):
        if extension in IMAGE_EXTENSIONS and index.rows[index.names[row]] == row:
            owner = _owner(stem, samples.jsons)
            if owner is None:
                samples.lonely[row] = stem
            else:
                samples.images.setdefault(owner, []).append(row)
    for refused in index.refused:
        stem, extension = split_name(refused.name)
        if extension not in {*IMAGE_EXTENSIONS, ".json"} and refused.reason not in NAMELESS:
            continue
        samples.refused[_owner(stem, samples.jsons) or stem if extension in IMAGE_EXTENSIONS else stem] = refused
    return samples


def _owner(stem: str, jsons: dict[str, int]) -> str | None:
    """The stem of the JSON that an image belongs to: its own, or without its last number."""
    return next((name for name in (stem, stem.rpartition(".")[0]) if name in jsons), None)


def _order(name: str, stem: str) -> tuple[int, str]:
    """Images of a sample by their number, then by name; the one without a number first."""
    number = name[len(stem) :].split(".")[1] if name[len(stem) :].count(".") > 1 else ""
    return (int(number) if number.isdecimal() else -1, name)


def _reject_jsons(rows: PartRows, task: PartTask, samples: _Samples) -> None:
    """Members of which only a refused JSON, or nothing that can be named, is left."""
    for stem, refused in samples.refused.items():
        if stem not in samples.jsons:
            name = storable(stem) or f"{task.name}@{refused.offset}"
            rows.reject(name, refused.reason, refusal(refused, task.name))


KIND = VisionKind(parts=tar_parts, read=read_tar_part)
