"""`kind = "python"`: the samples of a user's iterator.

It runs once, in a process of its own, and what it yielded is written down; later the list is read.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.code import ask
from forebay.config.data import SourceConfig
from forebay.config.tree import Config
from forebay.errors import ConfigError, ManifestError, SampleError
from forebay.rows.audio_facts import fill_durations, header_duration_s, located
from forebay.rows.kept_columns import values_in
from forebay.rows.manifest import MediaPlace, Record
from forebay.rows.media_reader import opened
from forebay.rows.reader import DURATIONS, Failures, FilePiece, Located, LocateTask, RecordingLister, RowReader, Sink
from forebay.rows.readers.json_lines import JsonError, parse_object, string_of
from forebay.rows.readers.table_records import line_runs, piece_lines, read_lines
from forebay.store.files import temporary_name
from forebay.store.inputs import ASKER, SAMPLES, Inputs, inputs_of

logger = logging.getLogger(__name__)
_CHECKED = 16
"""Samples at the start that are asked for a second time."""


_MEDIA = re.compile(r"[0-9]{5}\.media")
_FIELDS = frozenset({"id", "xxh3_128", "media", "offset", "size", "text", "language", "prompt"})


def list_inputs(config: Config, *, again: bool = False) -> None:
    """Lists the samples of a config of `kind = "python"` that are not listed yet; nothing for any other kind.

    again: also if they are: forebay does not see what the iterator reads.
    Raises ConfigError where the iterator cannot be run, yields what is no sample, or yields others when it runs again.
    """
    if config.source.kind != "python":
        return
    inputs = inputs_of(config)
    is_listed = inputs.samples.is_file()
    if is_listed and not again:
        return
    aside = temporary_name(inputs.folder)
    try:
        aside.mkdir(parents=True)
        logger.info("%s is run once, to list its samples; they are written to %s", inputs.label, inputs.folder)
        _compare(inputs, _run(inputs, aside, most=inputs.most, seed="1")["first"])
        _put(inputs, aside)
    except OSError as err:
        raise ConfigError(
            f"{inputs.label}: its samples cannot be written to {inputs.folder}: {err.strerror}; set run.cache_root to "
            "a folder that can be written",
            code="FB129",
        ) from err
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _run(inputs: Inputs, folder: Path | None, *, most: int | None, seed: str) -> dict[str, Any]:
    question = {
        "source": base64.b64encode(inputs.source).decode("ascii"),
        "path": str(inputs.path),
        "name": inputs.name,
        "split": inputs.split,
        "most": most,
        "modality": inputs.subjects,
        "folder": None if folder is None else str(folder),
        "first": _CHECKED,
    }
    found = ask(
        ["-m", "forebay.rows.readers.python_run"], question, seed=seed, timeout_s=None, called=inputs.label, asker=ASKER
    )
    if error := found.get("error"):
        raise ConfigError(f"{inputs.label}: {error}; correct the file", code="FB129")
    return found


def _compare(inputs: Inputs, first: list[str]) -> None:
    """Raises ConfigError where the iterator begins otherwise when it runs again, with another seed of `hash`."""
    second = _run(inputs, None, most=len(first), seed="2")["first"]
    for number, (line, other) in enumerate(zip(first, [*second, *[""] * len(first)], strict=False)):
        if line != other:
            raise ConfigError(
                f"{inputs.label} is not deterministic: as sample {number} it yielded {line[:160]} and then "
                f"{other[:160] or 'nothing'}; the same samples come in the same order every time (no chance, no clock, "
                "no order of a set)",
                code="FB129",
            )


def _put(inputs: Inputs, aside: Path) -> None:
    """Puts what was listed in its place; what another process put there meanwhile stays."""
    if not inputs.folder.exists():
        try:
            os.rename(aside, inputs.folder)
        except OSError:
            if not inputs.samples.is_file():
                raise
        return
    if (difference := _difference(inputs.samples, aside / SAMPLES)) is None:
        return
    logger.warning("%s yields other samples than when it was listed before: %s", inputs.label, difference)
    old = temporary_name(inputs.folder)
    os.rename(inputs.folder, old)
    os.rename(aside, inputs.folder)
    shutil.rmtree(old, ignore_errors=True)


def _difference(old: Path, new: Path) -> str | None:
    """Returns the first sample that differs between two lists, None where they are the same."""
    with old.open("rb") as before, new.open("rb") as after:
        for number, (was, now) in enumerate(itertools.zip_longest(before, after, fillvalue=b"")):
            if was != now:
                return f"sample {number} was {_shown(was)} and is {_shown(now)}"
    return None


def _shown(line: bytes) -> str:
    try:
        row = json.loads(line)
        return f"{row['id']!r:.80}, xxh3-128 {row['xxh3_128'][:16]}"
    except (ValueError, KeyError, TypeError):
        return "none"


def _read_samples(piece: FilePiece, rows: Sink) -> None:
    """Gives the samples that were written down when the iterator ran.

    Raises ManifestError where the list is not as it was written: that costs the build, not a row.
    """
    for place, line in piece_lines(piece):
        where = f"{piece.path}, {place}"
        try:
            record = _sample(line, rows, piece.source)
            piece.meaning.row(record, unknown=set(), home=Path(piece.path))
        except (SampleError, JsonError) as err:
            raise ManifestError(
                f"{where}: {err}; correct what the iterator yields, or run: forebay preprocess CONFIG --rebuild",
                code="FB129",
            ) from err
        rows.take(record, where=where, number=place.number)


def _sample(line: bytes, rows: Sink, source: SourceConfig) -> Record:
    keep, columns = source.keep_columns, source.columns
    fields = parse_object(line)
    media = string_of(fields, ("media",), required=True) or ""
    offset, size = fields.get("offset"), fields.get("size")
    if type(offset) is not int or type(size) is not int or not (0 <= offset < 1 << 62 and 0 <= size < 1 << 62):
        raise JsonError(f"offset and size are {offset!r:.40} and {size!r:.40}, wanted integers")
    if _MEDIA.fullmatch(media) is None:
        raise JsonError(f"field media is {media!r:.40}, wanted a name as 00000.media")
    values_in(fields, keep)
    bounds = [name for name in (columns.start, columns.end, columns.channel) if name is not None]
    bounds += DURATIONS if bounds else []
    own = {name: fields.get(name) for name in ("text", "language", "prompt", *bounds)}
    own["sample_id"] = string_of(fields, ("id",), required=True)
    rows.unused.add_of(fields, _FIELDS.union(keep, bounds))
    return Record(own, {"audio": [MediaPlace(media, "", offset, size)]}, kept=fields)


def locate_python(task: LocateTask) -> Located:
    """Returns the durations that the headers of a task's sounds give."""
    failures = Failures()
    places = [*zip(task.rows["offset"].to_pylist(), task.rows["size"].to_pylist(), strict=True)]
    with opened(task.paths[task.group]) as descriptor:

        def duration_s(position: int) -> float:
            offset, size = places[position]
            return header_duration_s(descriptor, offset=offset, size=size)

        unknown = np.flatnonzero(np.isnan(task.rows["duration_s"].to_numpy()))
        durations = fill_durations(task, unknown, duration_s, failures)
    return located(task, {"duration_s": pa.array(durations)}, failures)


READER = RowReader(
    read=read_lines, runs=line_runs, recordings=RecordingLister(read=_read_samples, locate=locate_python, by_file=True)
)
