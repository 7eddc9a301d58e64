"""A set of samples as it was measured, a column a fact; findings; and the walk that measures rows and items.

Runs of rows are measured in worker processes, a task each; a row that kills its worker is a finding and not the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from forebay.inspect.checks.limits import SEVERITIES, Limits, Severity
from forebay.preprocess.pool import Pool
from forebay.store.layout import Array, Ints
from forebay.task_map import WorkerDied
from forebay.terminal import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A sample that a build leaves out. row: of `Measured`, -1 where the listing left it out already."""

    sample_id: str
    reason: str
    message: str
    row: int = -1
    place: int = -1
    """The place of the sample in the listing."""


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """The different images of a set. starts, flat: those of sample i are `flat[starts[i] : starts[i + 1]]`.

    width, height: int [images], 0 where they are not known. range: float [images], between the darkest and the
    brightest value; NaN where it was not measured. hashes: the xxh3-128 of the encoded bytes, 32 hex digits.
    """

    names: Sequence[str]
    hashes: Sequence[str]
    width: Ints
    height: Ints
    range: Array
    starts: Ints
    flat: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Classes:
    """The classes of a set of images. names: of each sample those that it has.

    known: names that the config or the source declares. folders: of classes, without an image.
    """

    names: Sequence[Sequence[str]]
    known: Sequence[str] = ()
    folders: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A set of samples. Columns are [samples]; a fact that is not known is NaN, of a hash 0.

    name: of the set, in messages. is_raw: whether it was read from raw data. ids: large_string. places: where a sample
    stands in its listing or cache. files: the source file of each. languages: "" where none is known.
    facts: fields of `TextFacts` and `Sound`, `band_db`, `seconds`, `stated_s`, `file_rate_hz`, and of
    segments `overlap_s`, of windows `no_speech`. content: hashes by what
    they are of; those of one name may be compared between sets. rate_hz: of the config; None where there is no sound.
    longer: which samples have more audio than was stated. dropped: which `[filter]` leaves out. left_out: why checks
    were not made, by what these need.
    excluded: how many samples the settings of the config leave out, by reason. notes: what else to say.
    """

    name: str
    is_raw: bool
    ids: pa.ChunkedArray
    places: Ints
    files: Sequence[str]
    file_of: Ints
    languages: Sequence[str]
    language_of: Ints
    rate_hz: int | None = None
    facts: Mapping[str, Array] = field(default_factory=dict)
    content: Mapping[str, Ints] = field(default_factory=dict)
    refused: Sequence[Refused] = ()
    images: ImageFacts | None = None
    classes: Classes | None = None
    longer: Array | None = None
    dropped: Array | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    excluded: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.places)

    def sample_id(self, row: int) -> str:
        """Returns the id of a sample."""
        return str(self.ids[row].as_py())

    def file(self, row: int) -> str:
        """Returns the name of a sample's source file."""
        return self.files[int(self.file_of[row])]

    def language(self, row: int) -> str:
        """Returns the language of a sample, "" where none is known."""
        return self.languages[int(self.language_of[row])]

    def meant_silent(self) -> Array:
        """Returns which samples are windows without speech, bool [samples]."""
        return np.asarray(self.facts.get("no_speech", np.zeros(len(self))) > 0)

    def usable(self) -> Array:
        """Returns which samples a build would take and a filter leaves, bool [samples]."""
        found = np.ones(len(self), bool) if self.dropped is None else ~self.dropped
        found[[each.row for each in self.refused if each.row >= 0]] = False
        return found


def overlap_s(recordings: Array, channels: pa.ChunkedArray, start_s: Array, end_s: Array) -> Array:
    """Returns the seconds of each segment that an earlier one of its recording and channel has too, float64 [segments].

    recordings: a number a recording. channels: null for the mean of all.
    """
    channel = np.asarray(channels.fill_null(-1)).astype(np.int64)
    _, group = np.unique(np.stack([recordings, channel]), axis=1, return_inverse=True)
    order = np.lexsort((end_s, start_s, group.reshape(-1)))
    # Each recording on a stretch of its own of one line, so that no end of another one reaches into it.
    front = group.reshape(-1)[order] * (1.0 + np.max(np.nan_to_num(end_s), initial=0.0))
    starts, ends = front + start_s[order], front + np.fmax(end_s, start_s)[order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(ends)[:-1]])
    found = np.zeros(len(order))
    found[order] = np.clip(np.minimum(ends, before) - starts, 0, None)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that a check found. value: what was measured. limit: what it was compared with.

    other: the sample that this one is the same as, and `other_set` where that is in another set.
    """

    check: str
    severity: Severity
    set: str
    sample_id: str
    row: int
    source: str
    message: str
    value: float | str | None = None
    limit: float | str | None = None
    other: str | None = None
    other_set: str | None = None

    def order(self) -> tuple[int, str, str, int, str, str, str]:
        """Returns what findings are sorted by: the worst first, then by check, set and place."""
        rank = SEVERITIES.index(self.severity)
        return (rank, self.check, self.set, self.row, self.sample_id, self.other_set or "", self.message)


_WINDOW = 512
_WINDOWS = 32
"""The loudest ones are enough to see where a band ends."""
_ABOVE = 0.6
"""The share of the band. Half of it would meet the slope of a filter that ends there: torchaudio's reaches to 0.58."""


class Sound(NamedTuple):
    """The measures of a clip.

    loudest_dbfs: level of its loudest piece of 20 ms. quiet: share of pieces below `quiet_dbfs`. clipped: share of
    samples at full scale. offset: magnitude of its mean, 1.0 being full scale.
    """

    loudest_dbfs: float
    quiet: float
    clipped: float
    offset: float


def measured_sound(clip: Array, rate_hz: int, limits: Limits) -> Sound:
    """Returns what a clip is like. clip: int16 or float32 (1.0 is full scale) [num_samples], at least one."""
    samples = _as_float(clip)
    size = max(1, round(0.02 * rate_hz))
    count = max(1, len(samples) // size)
    pieces = samples[: count * size].reshape(count, -1)
    power = np.einsum("ij,ij->i", pieces, pieces) / pieces.shape[1] - pieces.mean(axis=1) ** 2
    levels = np.asarray(10 * np.log10(np.maximum(power, 1e-20)))
    return Sound(
        loudest_dbfs=float(levels.max()),
        quiet=float(np.mean(levels < limits.quiet_dbfs)),
        clipped=_clipped(samples, limits.full_scale),
        offset=abs(float(samples.mean(dtype=np.float64))),
    )


def _as_float(clip: Array) -> Array:
    samples = clip.astype(np.float32)
    return samples * np.float32(2**-15) if clip.dtype == np.int16 else samples


def _clipped(samples: Array, full_scale: float) -> float:
    # The extremes cost half of the comparison, and most clips end here.
    if samples.max() < full_scale and samples.min() > -full_scale:
        return 0.0
    return float(np.mean(np.abs(samples) >= full_scale))


def band_db(clip: Array) -> float:
    """Returns the power in the upper part of a clip's band over all of its power, in dB; NaN where that cannot be told.

    clip: int16 or float32 [num_samples]. It is seen in the 32 loudest of its windows of 512 samples.
    """
    count = len(clip) // _WINDOW
    if not count:
        return float("nan")
    windows = _as_float(clip[: count * _WINDOW]).reshape(count, _WINDOW)
    power = np.einsum("ij,ij->i", windows, windows)
    loudest = windows[np.argpartition(-power, _WINDOWS - 1)[:_WINDOWS]] if count > _WINDOWS else windows
    spectrum = (np.abs(np.fft.rfft(loudest * np.hanning(_WINDOW), axis=1)) ** 2).sum(axis=0)
    total = float(spectrum.sum())
    if total < 1e-6:
        return float("nan")
    return float(10 * np.log10(max(float(spectrum[int(_ABOVE * len(spectrum)) :].sum()) / total, 1e-20)))


R = TypeVar("R")
Span = tuple[int, int]
"""Rows [start, stop)."""


class SpanTask(Protocol):
    """A task of a worker: some consecutive rows from `start` on."""

    @property
    def start(self) -> int:
        """The first row."""


def cut(count: int, size: int) -> list[Span]:
    """Returns the runs of `size` rows that `count` rows make."""
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def run_spans(
    pool: Pool,
    function: Callable[[Any], R],
    make: Callable[[int, int], SpanTask],
    spans: Sequence[Span],
    *,
    new_pool: Callable[[], Pool],
    done: Callable[[int], object],
    keep: Callable[[int, R], object],
) -> list[int]:
    """Keeps `function(make(start, stop))` of every run of rows; returns the rows that killed a worker twice, sorted.

    A task is made when a worker is free for it.

    pool: whose workers begin. new_pool: makes another one behind a death, whose neighbours' tasks are lost with it.
    done: is called with the number of rows that were done. keep: takes each result, with its first row, as it comes.
    """
    deaths: list[int] = []
    waiting = dict(spans)
    with contextlib.ExitStack() as stack:
        while waiting:
            try:
                for task, result in pool.run(function, (make(*span) for span in list(waiting.items()))):
                    keep(task.start, result)
                    done(waiting.pop(task.start) - task.start)
            except WorkerDied as err:
                start = err.task.start
                stop, row = waiting.pop(start), start + err.position
                deaths.append(row)
                done(1)
                waiting |= {a: b for a, b in ((start, row), (row + 1, stop)) if a < b}
                pool = stack.enter_context(new_pool())
    return sorted(deaths)


Bad = tuple[int, str, str]
"""Position of a row, reason, message."""
_UNKNOWN = {"f": np.nan, "i": 0, "O": ""}
"""The value of a column where nothing was measured, by the kind of its values."""


@dataclass
class MeasuredPart:
    """The measures of some rows, a value a row.

    facts: by name, float64 (NaN where not known), int64 or strings. content: int64 hashes by what they are of, 0 where
    there is none. bad: those that a build leaves out.
    """

    facts: dict[str, Array] = field(default_factory=dict)
    content: dict[str, Ints] = field(default_factory=dict)
    bad: list[Bad] = field(default_factory=list)


class MeasuredColumns(MeasuredPart):
    """The measures of all rows. deaths: the rows that killed a worker twice; nothing is known of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.deaths: list[int] = []

    def put(self, start: int, part: MeasuredPart) -> None:
        """Writes what was measured of the rows from `start` on."""
        for columns, values in ((self.facts, part.facts), (self.content, part.content)):
            for name, found in values.items():
                if name not in columns:
                    columns[name] = np.full(self.count, _UNKNOWN[found.dtype.kind], found.dtype)
                columns[name][start : start + len(found)] = found
        self.bad.extend((start + row, reason, message) for row, reason, message in part.bad)


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """The processes in which rows are measured. workers: None: one a core."""

    workers: int | None
    progress: bool

    def pool(self) -> Pool:
        """Returns new processes."""
        return Pool(self.workers or os.cpu_count() or 1, shows=self.progress, modules=(__name__,))

    def columns(
        self,
        pool: Pool,
        function: Callable[[Any], MeasuredPart],
        make: Callable[[int, int], SpanTask],
        count: int,
        *,
        size: int,
        unit: str,
    ) -> MeasuredColumns:
        """Returns what a function measures of `count` rows. make: gives a task of rows. size: rows of a task."""
        found = MeasuredColumns(count)
        with Progress(count, desc="lint", unit=unit, is_shown=self.progress) as bar:
            spans = cut(count, size)
            found.deaths = run_spans(pool, function, make, spans, new_pool=self.pool, done=bar.update, keep=found.put)
        return found
