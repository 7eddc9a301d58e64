"""One task of an evaluation set: the tar of a language, made by a worker."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import xxhash

from forebay.errors import BuildError, SampleError
from forebay.preprocess.audio_group import DurationLimits
from forebay.preprocess.decode import decode_audio
from forebay.preprocess.group import Coder
from forebay.preprocess.text_group import TextItems
from forebay.rows.manifest import reduced
from forebay.rows.media_reader import MediaReader, sparse_files
from forebay.rows.named_files import shown_name, unchanged_stats
from forebay.rows.segments import segment_of
from forebay.rows.source_table import SourceFiles
from forebay.steps.audio.waveform import Decode, Waveform
from forebay.store.by_hand import pcm16_wav
from forebay.store.files import write_aside
from forebay.store.layout import Array
from forebay.store.output import Entry, Summed
from forebay.store.source_files import SourceFile
from forebay.tar.header import TarWriter, member_key
from forebay.task_map import mark

_ATTEMPTS = 3
_NAMED = 5
"""Samples that were left out of a tar, of which the message is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TarTask:
    """All that a worker needs to make one tar. rows: candidates in the order of the draw; `files` by their `file`.

    wanted: samples of the tar. is_all: whether there are no candidates beyond these rows.
    """

    language: str | None
    path: Path
    rows: pa.Table
    files: Sequence[SourceFile]
    text: TextItems
    column: str
    decode: Decode
    limits: DurationLimits
    wanted: int
    is_all: bool
    max_open_tars: int

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


@dataclass(kw_only=True)
class _Taken:
    """The candidates taken. spool: the WAVs, one behind the other. samples: place, size and JSON by id."""

    spool: IO[bytes]
    samples: dict[str, tuple[int, int, dict[str, Any]]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def leave_out(self, reason: str, message: str) -> None:
        self.left_out[reason] += 1
        if len(self.messages) < _NAMED:
            self.messages.append(message)


def make_tar(task: TarTask) -> Entry | None:
    """Makes the tar of a language, of files that were what was listed from before to after, and returns its entry.

    None where too few of the rows can be used and there are more: nothing is written then. The name of an entry is
    None where no row can be used.
    Raises BuildError for files that changed.
    """
    for _ in range(_ATTEMPTS):
        before = unchanged_stats(task.files)
        with tempfile.TemporaryFile(dir=task.path.parent) as spool:
            taken = _Taken(spool=spool)
            try:
                _take(task, taken)
            finally:
                after = unchanged_stats(task.files)
            if after == before:
                is_short = len(taken.samples) < task.wanted and not task.is_all
                return None if is_short else _written(task, taken)
    raise BuildError(
        f"{task.files[0].path}, or another file of {task.path.name}, was touched each of {_ATTEMPTS} times that it was "
        "read; wait until nothing writes to it, then run the command again",
        code="FB303",
    )


def _take(task: TarTask, taken: _Taken) -> None:
    texts = task.text.samples(task.rows, SourceFiles.of(task.files).all_names)
    with MediaReader(
        task.files,
        max_open=task.max_open_tars,
        max_bytes=task.decode.max_sample_bytes,
        column=task.column,
        sparse=sparse_files(task.rows, task.files),
    ) as read:
        rows = (row for batch in task.rows.to_batches(max_chunksize=1024) for row in batch.to_pylist())
        for position, (row, text) in enumerate(zip(rows, texts, strict=True)):
            mark(position)
            try:
                _require_text(row, text)
                samples = _samples(task, row, read(row["file"], row["offset"], row["size"], segment_of(row)))
            except SampleError as err:
                taken.leave_out(err.reason, str(err))
                continue
            _add(task, taken, row, samples)
            if len(taken.samples) == task.wanted:
                return


def _require_text(row: dict[str, Any], text: dict[str, Any]) -> None:
    if "failure" in text:
        raise SampleError(text["failure"], text["message"])
    if not (row["text"] or "").strip():
        raise SampleError("no_text", f"sample {row['sample_id']}: it has no transcription to be compared with")


def _samples(task: TarTask, row: dict[str, Any], data: bytes) -> Array:
    """Returns the int16 samples of a row. Raises SampleError where the build would leave them out."""
    sample_id = row["sample_id"]
    decoded = decode_audio(data, task.decode, sample_id=sample_id, want="int16")
    samples: Array = Waveform(dtype="int16").make([decoded])[0]["waveform"]
    reasons, count = Coder(), len(samples)
    stated_s = math.nan if row["stated_s"] is None else row["stated_s"]
    found = int(task.limits.refused(np.array([count]), np.array([stated_s]), reasons)[0])
    if found:
        reason = reasons.coded(np.zeros(0, np.int32)).names[found]
        rate = task.decode.sample_rate_hz
        message = f"sample {sample_id}: {count / rate:.2f} s of audio, which the duration filters leave out"
        if reason == "duration_mismatch":
            message = task.limits.message(sample_id, count, stated_s)
        raise SampleError(reason, message)
    return samples


def _add(task: TarTask, taken: _Taken, row: dict[str, Any], samples: Array) -> None:
    digest = xxhash.xxh3_128_hexdigest(samples.data)
    if digest in taken.seen:
        taken.leave_out("duplicate_audio", f"sample {row['sample_id']}: its audio is that of another sample of the set")
        return
    taken.seen.add(digest)
    rate = task.decode.sample_rate_hz
    fields = {
        "id": row["sample_id"],
        "language": row["language"] or None,
        "duration": len(samples) / rate,
        "transcription": row["text"],
        "source": shown_name(task.files[row["file"]]),
    }
    if row["prompt"]:
        fields["prompt"] = row["prompt"]
    wav = pcm16_wav(samples, rate)
    taken.samples[row["sample_id"]] = (taken.spool.tell(), len(wav), fields)
    taken.spool.write(wav)
    taken.seconds += len(samples) / rate


def _written(task: TarTask, taken: _Taken) -> Entry:
    entry: Entry = {
        "language": task.language,
        "name": task.path.name if taken.samples else None,
        "num_samples": len(taken.samples),
        "hours": taken.seconds / 3600,
        "left_out": dict(sorted(taken.left_out.items())),
        "messages": taken.messages,
        "members": [],
    }
    if not taken.samples:
        return {**entry, "size_bytes": 0}
    with write_aside(task.path) as raw:
        file = Summed(raw, with_sha256=True)
        tar = TarWriter(file)
        for sample_id in sorted(taken.samples):
            start, size, fields = taken.samples[sample_id]
            taken.spool.seek(start)
            members = {"wav": taken.spool.read(size), "json": json.dumps(fields, ensure_ascii=False).encode()}
            for extension, data in members.items():
                name = f"{member_key(sample_id)}.{extension}"
                described = {"name": name, "offset": tar.add(name, data), "size": len(data)}
                entry["members"].append({**described, "xxh3_128": xxhash.xxh3_128_hexdigest(data)})
        tar.close()
    return {**entry, **file.sums()}
