"""`kind = "webdataset"`: tars of `{id}.flac` + `{id}.json` or `{id}.txt`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config import SourceConfig
from forebay.errors import DecodeError
from forebay.preprocess.sources.headers import no_duration, opened
from forebay.preprocess.sources.json_object import JsonError
from forebay.preprocess.sources.members import UnreadableTar, open_tar
from forebay.preprocess.sources.naming import manifest_files
from forebay.preprocess.sources.rows import ROW_SCHEMA, Manifest, storable
from forebay.preprocess.sources.sidecar import AUDIO, Members, clip_duration_s, members_of, read_sidecar, split_name
from forebay.preprocess.sources.task import Failures, Located, LocateTask
from forebay.preprocess.sources.unused import Unused
from forebay.store.sources import COMPRESSED_TARS
from forebay.store.tar_members import TarIndex

logger = logging.getLogger(__name__)

ROW_BITS = 32
"""`row` is `file number << ROW_BITS | position in the tar`."""

NAMELESS = frozenset(("bad_checksum", "bad_extended_header", "extended_header_too_large", "truncated", "no_name"))
"""Reasons after which a member's name cannot be believed: any of them may have been a clip."""


def list_webdataset(source: SourceConfig) -> Manifest:
    """Returns the tars that a config names; which samples they hold is only known when they are read.

    Compressed tars in a folder of tars are left out, and named in a warning.
    """
    for folder in map(Path, source.manifests):
        packed = sorted(p for p in folder.glob("*") if p.name.endswith(COMPRESSED_TARS)) if folder.is_dir() else []
        if packed:
            logger.warning("%d compressed tars are left out, %s first; decompress them", len(packed), packed[0])
    return Manifest(files=tuple(manifest_files(source)), rows=ROW_SCHEMA.empty_table())


def locate_webdataset(task: LocateTask) -> Located:
    """Returns the samples of a tar in archive order, every column known.

    A sample's members share a key, the name up to the first dot of its last part; where several clips share one, each is
    a sample by its name without extension. Clips: wav, flac, ogg, mp3, opus in any case. The id is that of the JSON, else
    the key. The duration of WAV and FLAC is the header's, whatever the JSON says; what that says is compared with the audio.
    Left out, each with its reason: `extra_audio` (a second clip of one name), `no_audio` (JSON alone), `bad_metadata`,
    `repeated_field`, `unknown_duration` (or why, see `duration_of`), what the tar's index refuses.
    """
    index = open_tar(task)
    if isinstance(index, UnreadableTar):
        return _tar_failed(task, index)
    members = members_of(index)
    rows: list[tuple[Any, ...]] = []
    failures, unused = Failures(), Unused()
    with opened(index.path) as descriptor:
        keys = _sample_keys(members)
        for stem in members.audio:
            try:
                values = _values(descriptor, index, members, stem, keys[stem], unused)
            except JsonError as err:
                position = _row(task, members.audio[stem][0])
                reason = err.reason or "bad_metadata"
                failures.add(position, keys[stem], reason, f"{task.name}: {err}; write the tar again")
                continue
            clip = members.audio[stem]
            try:
                rows.append((*values, clip_duration_s(descriptor, index, clip, stated_s=values[-1])))
            except DecodeError as err:
                failures.add(_row(task, values[0]), values[1], *no_duration(task.name, values[1], err))
    _add_left_out(task, index, members, failures)
    return Located(rows=_table(task, rows), failed=failures.table(), unused=unused.counts)


def _tar_failed(task: LocateTask, result: UnreadableTar) -> Located:
    """A tar that cannot be read at all: one failure in its name, for nobody knows its samples."""
    failures = Failures()
    failures.add(_row(task, 0), task.name, result.reason, result.message)
    return Located(rows=_table(task, []), failed=failures.table(), absent=(task.group,) if result.absent else ())


def _sample_keys(members: Members) -> dict[str, str]:
    """Sample id by stem: the name up to the first dot where only one clip has it."""
    keys = {stem: _first_dot(stem) for stem in members.audio}
    shared: dict[str, int] = {}
    for key in keys.values():
        shared[key] = shared.get(key, 0) + 1
    return {stem: key if shared[key] == 1 else stem for stem, key in keys.items()}


def _first_dot(stem: str) -> str:
    folder, slash, name = stem.rpartition("/")
    return folder + slash + (name[:1] + name[1:].partition(".")[0])


def _values(descriptor: int, index: TarIndex, members: Members, stem: str, key: str, unused: Unused) -> tuple[Any, ...]:
    """Every value of a clip but its duration, the one that its metadata states last."""
    row = members.audio[stem][0]
    sidecar = read_sidecar(descriptor, index, members, (stem, _first_dot(stem)))
    unused.add(sidecar.unused)
    sample_id = storable(key) if sidecar.sample_id is None else sidecar.sample_id
    explicit = sidecar.sample_id is not None
    name = storable(index.names[row])
    place = (int(index.offsets[row]), int(index.sizes[row]))
    texts = (sidecar.language, sidecar.prompt, sidecar.text)
    return row, sample_id, explicit, name, *place, *texts, sidecar.duration_s


def _table(task: LocateTask, rows: list[tuple[Any, ...]]) -> pa.Table:
    texts = ("language", "prompt", "text")
    names = ("row", "sample_id", "explicit_id", "member", "offset", "size", *texts, "stated_s", "duration_s")
    columns: dict[str, Sequence[Any]] = dict.fromkeys(names, ())
    if rows:
        columns.update(zip(names, zip(*rows, strict=True), strict=True))
    columns["row"] = tuple(_row(task, row) for row in columns["row"])
    columns["group"] = columns["file"] = (task.group,) * len(rows)
    return pa.table([pa.array(columns[f.name], f.type) for f in ROW_SCHEMA], schema=ROW_SCHEMA)


def _add_left_out(task: LocateTask, index: TarIndex, members: Members, failures: Failures) -> None:
    for row, name in members.extra:
        message = f"{task.name}: member {name} shares its name with another clip; give it another name"
        failures.add(_row(task, row), name, "extra_audio", message, kind="excluded")
    used = {*members.audio, *map(_first_dot, members.audio)}
    for stem, row in members.json.items():
        if stem not in used and not any(stem + extension in members.refused for extension in AUDIO):
            message = f"{task.name}: member {stem}.json has no clip beside it"
            failures.add(_row(task, row), stem, "no_audio", message, kind="excluded")
    for refused in index.refused:
        stem, extension = split_name(refused.name)
        if extension not in AUDIO and (extension in {".json", ".txt"} or refused.reason not in NAMELESS):
            continue
        sample_id = stem if extension in AUDIO else f"{task.name}@{refused.offset}"
        message = f"{task.name}: member {refused.name} at offset {refused.offset} is refused: {refused.reason}; write the tar again"
        row = int(np.searchsorted(index.offsets, refused.offset))
        failures.add(_row(task, row), sample_id, refused.reason, message)


def _row(task: LocateTask, position: int) -> int:
    return task.group << ROW_BITS | position
