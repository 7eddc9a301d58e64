"""Rows that are stretches of a recording: where a table says they lie, and their samples as a WAV of their own.

What reads a row gets the bytes of its stretch, so everything behind it takes a segment for a file. A recording is open
once a thread and is decoded forward in blocks: of rows that follow each other in it no sample is decoded twice. FLAC,
WAV and AIFF seek over what no row needs; other formats do not seek exactly and are decoded from their beginning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import DecodeError
from forebay.rows.manifest import ROW_SCHEMA, SPAN, Manifest, joined, rejections
from forebay.rows.readers.json_lines import JsonError, seconds_of
from forebay.store.layout import Array

SEGMENT_COLUMNS = {"start_s": pa.float64(), "end_s": pa.float64(), "channel": pa.int32()}
"""Columns of rows that are segments, behind those of ROW_SCHEMA: seconds, NaN at the end of the recording, and which
channel, null for the mean of all."""
_BLOCK_FRAMES, _SMALL_FRAMES = 1 << 18, 1 << 12
_EXACT_SEEKS = frozenset(("FLAC", "WAV", "WAVEX", "AIFF", "RF64", "W64"))
_PCM, _FLOAT = 1, 3
_MAX_WAV_BYTES = (1 << 32) - 64
_MAX_CHANNELS = 1024
_NO_STRETCH = " is no stretch of a recording; correct the row"
STARTS = ("start", "start_s", "start_time", "begin", "begin_s", "begin_time", "onset", "offset")
ENDS = ("end", "end_s", "end_time")
BOUNDS = frozenset(form for name in STARTS + ENDS for form in (name, name.capitalize(), name.upper()))
"""Columns that say where in its recording a row begins or ends."""
STRETCH = ("start", "end", "channel", "duration")
"""Fields that say which stretch of its recording a clip of a conversation is."""
_LATEST_S = 1e9
"""No recording is as long, and samples of more seconds may be no number."""
_SAME_S = 0.02
"""An end, and start and duration, are rounded each by itself."""


class Bounds(NamedTuple):
    """A stretch of a recording: seconds, `end_s` NaN for all that follows, and a channel, None for all of them."""

    start_s: float
    end_s: float
    channel: int | None = None

    def frames(self, rate_hz: int) -> tuple[int, int | None]:
        """Returns the first sample and the one behind the last, None for the end of the recording."""
        start, end = (min(seconds, _LATEST_S) * rate_hz for seconds in (self.start_s, self.end_s))
        return round(start), None if math.isnan(self.end_s) else round(end)

    def samples_of(self, num_samples: int, rate_hz: int) -> int:
        """Returns how many samples of a recording of so many lie in it; 0 where it begins behind their end."""
        start, stop = self.frames(rate_hz)
        return max(0, (num_samples if stop is None else min(stop, num_samples)) - start)

    def __str__(self) -> str:
        end = "the end" if math.isnan(self.end_s) else _shown_s(self.end_s)
        return f"{_shown_s(self.start_s)} to {end}{'' if self.channel is None else f', channel {self.channel}'}"


def _shown_s(seconds: float) -> str:
    return f"{seconds:.2f} s" if round(seconds, 2) == seconds else f"{round(seconds, 6)} s"


def segment_of(row: Mapping[str, Any]) -> Bounds | None:
    """Returns the stretch of a row, None where its recording is the row."""
    return Bounds(row["start_s"], row["end_s"], row["channel"]) if row.get("start_s") is not None else None


def stretch_fields(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns those of STRETCH that count: a duration without a start is that of the recording."""
    return STRETCH if fields.get("start") is not None else STRETCH[:-1]


def stretch_of(fields: Mapping[str, Any], where: str) -> Bounds | None:
    """Returns the stretch that STRETCH names, None for all of a recording.

    Raises JsonError `bad_segment` where it is none, or is named otherwise, `two_values` where `end` and `duration`
    contradict each other. where: the fields stand, in messages.
    """
    if others := sorted(name for name in BOUNDS.difference(STRETCH) if fields.get(name) is not None):
        raise JsonError(f"{where}: field {others[0]} is given, wanted {', '.join(STRETCH)}", reason="bad_segment")
    try:
        counted = stretch_fields(fields)
        start_s, end_s, channel, seconds = (seconds_of(fields, (name,) if name in counted else ()) for name in STRETCH)
    except JsonError as err:
        raise JsonError(f"{where}: {err}", reason="bad_segment") from err
    by_length = start_s + seconds
    if abs(by_length - end_s) > _SAME_S:
        said = f"{where}: end is {end_s:g}, and start and duration say {by_length:g}"
        raise JsonError(said, reason="two_values")
    start_s, end_s = (0.0 if math.isnan(start_s) else start_s), (by_length if math.isnan(end_s) else end_s)
    is_channel = math.isnan(channel) or channel in range(_MAX_CHANNELS)
    if not 0 <= start_s < math.inf or end_s <= start_s or math.isinf(end_s) or not is_channel:
        told = f"{Bounds(start_s, end_s)}{'' if math.isnan(channel) else f', channel {channel:g}'}"
        raise JsonError(f"{where}: {told}{_NO_STRETCH}", reason="bad_segment")
    # One NaN for all, as a part of keys.
    end_s, number = (math.nan if math.isnan(end_s) else end_s), (None if math.isnan(channel) else int(channel))
    return None if not start_s and math.isnan(end_s) and number is None else Bounds(start_s, end_s, number)


def segment_columns(rows: pa.Table) -> list[str]:
    """Returns the names of SEGMENT_COLUMNS that some rows have."""
    return [name for name in SEGMENT_COLUMNS if name in rows.column_names]


def named_segments(ids: Any, explicit: Any, bounds: Mapping[str, Any]) -> Any:
    """Returns ids of rows: those that are given, else those of their recordings with what `segment_name` adds.

    explicit: whether each is given, None: none is. bounds: SEGMENT_COLUMNS; empty where rows are whole recordings.
    """
    if not bounds:
        return ids
    columns = (np.asarray(bounds[name], np.float64).tolist() for name in SEGMENT_COLUMNS)
    derived = joined(ids, pa.array([segment_name(*each) for each in zip(*columns, strict=True)], pa.large_string()))
    return derived if explicit is None else pc.if_else(explicit, ids, derived)


def segment_name(start_s: float, end_s: float, channel: float) -> str:
    """Returns what stands behind the name of a recording in that of its segment: `_START_END` in ms, `_chN`."""
    times = "".join(f"_{round(1000 * value):07d}" for value in (start_s, end_s) if math.isfinite(value))
    return f"{times}_ch{channel:g}" if math.isfinite(channel) else times


def segmented(manifest: Manifest) -> Manifest:
    """Returns a listing whose rows have SEGMENT_COLUMNS, those of a recording one behind the other.

    `duration_s` becomes that of the segment as far as it is known. A row that is no stretch fails as `bad_segment`.
    """
    rows = manifest.rows
    start, end, channel = (np.asarray(rows[SPAN + name], np.float64) for name in SEGMENT_COLUMNS)
    is_bad = ~(start >= 0) | np.isinf(start) | (end <= start) | np.isinf(end)
    is_bad |= ~np.isnan(channel) & ~np.isin(channel, np.arange(_MAX_CHANNELS))
    bad = zip(*(values[is_bad].tolist() for values in (start, end, channel)), strict=True)
    said = [f"{a:g} s to {b:g} s{'' if math.isnan(c) else f', channel {c:g}'}" for a, b, c in bad]
    gone = rows.filter(pa.array(is_bad))
    names = [f"{manifest.files[number].path}: " for number in gone["group"].to_pylist()]
    message = joined(pa.array(names, pa.large_string()), pa.array(said, pa.large_string()), _NO_STRETCH)
    failed = rejections(gone["row"], gone["sample_id"], kind="failed", reason="bad_segment", message=message)
    known, stated = (np.asarray(rows[name], np.float64) for name in ("duration_s", "stated_s"))
    is_open = np.isnan(end)
    rows = _with(rows, "duration_s", np.where(is_open, np.where(start == 0, known, np.nan), end - start))
    rows = _with(rows, "stated_s", pa.array(np.where(is_open, stated, end - start), from_pandas=True))
    rows = rows.drop_columns([SPAN + name for name in SEGMENT_COLUMNS])
    numbers = pa.array(np.where(is_bad, np.nan, channel), pa.int32(), from_pandas=True, safe=False)
    for name, values in zip(SEGMENT_COLUMNS, (pa.array(start), pa.array(end), numbers), strict=True):
        rows = rows.append_column(name, values)
    rows = rows.filter(pa.array(~is_bad)).combine_chunks()
    # By recording in the order of its first row, then by time: what follows is decoded forward.
    keys = [np.asarray(rows[name]) for name in ("end_s", "start_s")]
    order = np.lexsort((*keys, recordings_of(rows), np.asarray(rows["group"])))
    rows = _with(rows.take(pa.array(order)), "row", np.arange(len(rows)))
    return dataclasses.replace(manifest, rows=rows, rejected=pa.concat_tables([manifest.rejected, failed]))


def with_ends(manifest: Manifest) -> Manifest:
    """Returns a listing whose rows without an end have the seconds behind their start: durations are known now."""
    rows = manifest.rows
    start, end, seconds = (np.asarray(rows[name]) for name in ("start_s", "end_s", "duration_s"))
    return dataclasses.replace(manifest, rows=_with(rows, "duration_s", seconds - np.where(np.isnan(end), start, 0.0)))


def _with(rows: pa.Table, name: str, values: Any) -> pa.Table:
    place = ROW_SCHEMA.get_field_index(name)
    return rows.set_column(place, ROW_SCHEMA.field(place), pa.array(values))


def _codes(keys: pa.Table) -> Array:
    """Returns a number for every different row of a table, in the order of the first appearance: int64 [rows]."""
    parts = [keys[name].combine_chunks().dictionary_encode() for name in keys.column_names]
    code = np.zeros(len(keys), np.int64)
    for part in parts:
        code = code * (len(part.dictionary) + 1) + part.indices.to_numpy()
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        code = np.argsort(np.argsort(first))[inverse.reshape(-1)]
    return code


def recordings_of(rows: pa.Table) -> Array:
    """Returns a number for every row that is that of its recording, in the order of the rows: int64 [rows]."""
    return _codes(rows.select(["file", "member", "offset"]))


def reading_order(items: pa.Table, groups: Array) -> Array:
    """Returns the order of listed items in which stretches of a recording follow each other in time: int64 [items].

    Recordings come by their first item; groups, one behind the other, stay apart.
    """
    keys = items.select(["file", "member", "offset"]).append_column("group", pa.array(groups))
    start, end = (pc.fill_null(items[name], 0.0).to_numpy() for name in ("start_s", "end_s"))
    return np.lexsort((end, start, _codes(keys)))


class RecordingParts:
    """The stretches of one recording, as WAVs; calls in the order of their starts decode nothing twice."""

    def __init__(self, file: int | io.RawIOBase | io.BytesIO, *, name: str) -> None:
        """file: what libsndfile reads. name: of the recording, for messages. Raises DecodeError for no audio."""
        import soundfile

        class Forward(soundfile.SoundFile):  # type: ignore[misc]  # it has no types
            """A file that does not seek to where it stands after every read, which MP3 does not survive."""

            def seekable(self) -> bool:
                return False

        self._file, self._name = file, name
        self._stack = contextlib.ExitStack()
        self._opens = Forward
        try:
            self._opened: Any = self._stack.enter_context(self._open())
        except soundfile.LibsndfileError as err:
            said = f"{name} cannot be decoded ({err.error_string}); write it again"
            raise DecodeError("corrupt_audio", said) from err
        self.rate_hz: int = self._opened.samplerate
        self._dtype = "int16" if self._opened.subtype == "PCM_16" else "float32"
        self._blocks: list[Array] = []
        self._first = self._end = 0
        self._is_over, self._step = False, _BLOCK_FRAMES
        self._damage: tuple[int, DecodeError] | None = None
        """Where no more can be decoded, and why."""

    def _open(self) -> Any:
        if isinstance(self._file, int):
            # Anew: a duplicate would share its place in the file with those of other threads.
            return self._opens(os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY))
        self._file.seek(0)
        return self._opens(self._file)

    def close(self) -> None:
        """Closes what is open."""
        self._stack.close()

    def wav(self, segment: Bounds, *, max_bytes: int | None) -> bytes:
        """Returns a stretch as a WAV of 16-bit integers, where the recording has these, else of float32.

        Raises DecodeError: `segment_past_end`, `no_such_channel`, `too_large`, `corrupt_audio`.
        """
        start, stop = segment.frames(self.rate_hz)
        channels = self._opened.channels
        if stop == start:
            said = f"{self._name}, {segment}: less than a sample at {self.rate_hz} Hz; correct the manifest"
            raise DecodeError("bad_segment", said)
        if segment.channel is not None and segment.channel >= channels:
            said = f"{self._name} has {channels} channels, and a row is of channel {segment.channel}; they count from 0"
            raise DecodeError("no_such_channel", f"{said}; correct the manifest")
        size = None if stop is None else (stop - start) * channels * np.dtype(self._dtype).itemsize
        if max_bytes is not None and size is not None and size > max_bytes:
            said = f"{self._name}, {segment}: {size} bytes, allowed are {max_bytes}"
            raise DecodeError("too_large", f"{said}; raise source.max_sample_bytes")
        frames = self._frames(start, stop, max_bytes=max_bytes)
        if not len(frames):
            said = f"{self._name} has {self._end / self.rate_hz:.2f} s, and a row is from {segment}"
            raise DecodeError("segment_past_end", f"{said}; correct the manifest")
        if segment.channel is not None:
            frames = frames[:, segment.channel : segment.channel + 1]
        if frames.nbytes > _MAX_WAV_BYTES:
            said = f"{self._name}, {segment}: {frames.nbytes} bytes, and a WAV holds {_MAX_WAV_BYTES}"
            raise DecodeError("too_large", f"{said}; cut the segment in the manifest")
        return wav_bytes(frames, self.rate_hz)

    def _frames(self, start: int, stop: int | None, *, max_bytes: int | None) -> Array:
        if start < self._first:
            self._blocks, self._first, self._end, self._is_over = [], 0, 0, False
            self._again()
        while self._blocks and self._first + len(self._blocks[0]) <= start:
            self._first += len(self._blocks.pop(0))
        self._skip_to(start)
        while not self._is_over and (stop is None or self._end < stop):
            if self._damage is not None and self._end == self._damage[0]:
                raise self._damage[1]
            block = self._read()
            if self._end <= start and not self._blocks:  # decoded, and of no row
                self._first = self._end
                continue
            self._blocks.append(block)
            held = sum(each.nbytes for each in self._blocks)
            if max_bytes is not None and held > max_bytes + 2 * block.nbytes:
                said = f"{self._name} from {start / self.rate_hz:.2f} s: more than {max_bytes} bytes"
                raise DecodeError("too_large", f"{said}; raise source.max_sample_bytes")
        frames = np.concatenate(self._blocks) if self._blocks else np.zeros((0, self._opened.channels), self._dtype)
        found: Array = frames[max(0, start - self._first) : None if stop is None else max(0, stop - self._first)]
        return found

    def _skip_to(self, start: int) -> None:
        if self._blocks or start - self._end < _BLOCK_FRAMES or self._opened.format not in _EXACT_SEEKS:
            return
        import soundfile

        with contextlib.suppress(soundfile.LibsndfileError):  # a length that nobody wrote: decoded forward then
            self._first = self._end = int(self._opened.seek(min(start, self._opened.frames)))

    def _read(self) -> Array:
        import soundfile

        try:
            block: Array = self._opened.read(self._step, dtype=self._dtype, always_2d=True)
        except soundfile.LibsndfileError as err:
            if self._step == _BLOCK_FRAMES:  # what lies before the damage is had in small steps
                self._step = _SMALL_FRAMES
                self._again()
                return self._read()
            said = f"{self._name} cannot be decoded behind {self._end / self.rate_hz:.2f} s ({err.error_string})"
            self._damage = self._end, DecodeError("corrupt_audio", f"{said}; write it again")
            raise self._damage[1] from err
        self._end += len(block)
        self._is_over = len(block) < self._step
        return block

    def _again(self) -> None:
        """Opens the recording anew and decodes it up to where it stood."""
        self.close()
        self._opened = self._stack.enter_context(self._open())
        left = self._end
        while left > 0:
            left -= len(self._opened.read(min(left, _BLOCK_FRAMES), dtype=self._dtype, always_2d=True)) or left


def wav_bytes(frames: Array, rate_hz: int) -> bytes:
    """Returns int16 or float32 [n, channels] as a WAV."""
    data = np.ascontiguousarray(frames).tobytes()
    kind, width = (_PCM, 2) if frames.dtype == np.int16 else (_FLOAT, 4)
    channels = frames.shape[1]
    form = struct.pack("<HHIIHH", kind, channels, rate_hz, rate_hz * channels * width, channels * width, 8 * width)
    head = struct.pack("<4sI4s4sI", b"RIFF", 4 + 8 + len(form) + 8 + len(data), b"WAVE", b"fmt ", len(form))
    return b"".join([head, form, struct.pack("<4sI", b"data", len(data)), data])


class FileStretch(io.RawIOBase):
    """A stretch of an open file, for libsndfile."""

    def __init__(self, descriptor: int, offset: int, size: int) -> None:
        """descriptor: stays open as long as this. offset, size: in bytes."""
        self._descriptor, self._offset, self._size, self._at = descriptor, offset, size, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:  # noqa: D102
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:  # noqa: D102
        return self._at

    def readinto(self, buffer: Any, /) -> int:  # noqa: D102
        count = max(0, min(len(buffer), self._size - self._at))
        data = os.pread(self._descriptor, count, self._offset + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def readable(self) -> bool:  # noqa: D102
        return True

    def seekable(self) -> bool:  # noqa: D102
        return True


def cut_recordings(recordings: Array, groups: Array, *, rows_per_shard: int) -> Iterator[tuple[int, int]]:
    """Yields [start, stop) of every shard of segments: whole recordings up to `rows_per_shard`, or one recording.

    recordings, groups: of the rows, each one behind the other.
    """
    if not len(recordings):
        return
    borders = [*(np.flatnonzero(np.diff(recordings) | np.diff(groups)) + 1).tolist(), len(recordings)]
    start = end = 0
    for border in borders:
        is_full = border - start > rows_per_shard or (end and groups[end] != groups[start])
        if end > start and is_full:
            yield start, end
            start = end
        end = border
    yield start, end
