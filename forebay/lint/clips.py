"""One task over raw speech: some consecutive rows, read and decoded as a build does, and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from forebay.errors import SampleError
from forebay.lint.limits import Limits
from forebay.lint.sound import Sound, band_db, measured_sound
from forebay.lint.text import TextFacts, signed, text_facts
from forebay.preprocess.sources.media import MediaReader
from forebay.preprocess.sources.rows import reduced
from forebay.preprocess.speech.decode import decode_audio
from forebay.preprocess.speech.headers import header_info
from forebay.preprocess.speech.modality import Speech
from forebay.preprocess.worker import mark
from forebay.steps.audio.waveform import Waveform
from forebay.store.layout import Array
from forebay.store.source_files import SourceFile

_INT16 = Waveform(dtype="int16")

SOUND_FACTS = (*Sound._fields, "band_db", "file_rate_hz", "file_s")
"""Facts of a clip, float64; NaN where they are not known."""

TEXT_FACTS = tuple(name for name in TextFacts._fields if name not in ("script", "word", "hash"))
"""Numbers of a text."""

Bad = tuple[int, str, str]
"""Position of a row, reason, message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipTask:
    """Rows of a listing and the files that they use. is_heard: whether they have sound, or features in its place."""

    start: int
    rows: pa.Table
    files: tuple[SourceFile, ...]
    modality: Speech
    limits: Limits
    max_open_tars: int
    is_heard: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clips:
    """What was measured, a value a row. num_samples: decoded, at the config's rate; 0 where a row failed.

    facts: float64 by name. strings: object by name. content: int64 hashes by what they are of.
    """

    num_samples: Array
    facts: dict[str, Array]
    strings: dict[str, Array]
    content: dict[str, Array]
    bad: list[Bad]

    @classmethod
    def unknown(
        cls, count: int, *, sound: Sequence[str] = SOUND_FACTS, content: Sequence[str] = ("file", "sound", "text")
    ) -> Clips:
        """Returns rows of which nothing is known yet. sound: facts beside those of texts. content: what has a hash."""
        return cls(
            num_samples=np.zeros(count, np.int64),
            facts={name: np.full(count, np.nan) for name in (*sound, *TEXT_FACTS)},
            strings={name: np.full(count, "", object) for name in ("script", "word")},
            content={name: np.zeros(count, np.int64) for name in content},
            bad=[],
        )

    def put(self, start: int, part: Clips) -> None:
        """Writes what was measured of the rows from `start` on."""
        rows = slice(start, start + len(part.num_samples))
        self.num_samples[rows] = part.num_samples
        for columns, values in ((self.facts, part.facts), (self.strings, part.strings), (self.content, part.content)):
            for name, column in columns.items():
                column[rows] = values[name]
        self.bad.extend((start + row, reason, message) for row, reason, message in part.bad)


def measure_clips(task: ClipTask) -> Clips:
    """Returns what is measured of some rows. Raises TarError or OSError where a file as a whole cannot be read."""
    found = Clips.unknown(len(task.rows))
    _texts(task, found)
    if task.is_heard:
        _sounds(task, found)
    return found


def note_text(found: Clips, row: int, text: str, language: str) -> None:
    """Writes what a text is like into its row."""
    known = text_facts(text, language)
    for name in TEXT_FACTS:
        found.facts[name][row] = getattr(known, name)
    found.strings["script"][row], found.strings["word"][row] = known.script, known.word
    found.content["text"][row] = known.hash


def _texts(task: ClipTask, found: Clips) -> None:
    """The build's own reasons, and what the texts are like."""
    made = task.modality.text_samples(task.rows, [file.name for file in task.files])
    for row, values in enumerate(made):
        if "failure" in values:
            found.bad.append((row, values["failure"], values["message"]))
        note_text(found, row, values["text"], values["language"])


def _sounds(task: ClipTask, found: Clips) -> None:
    with MediaReader(
        task.files,
        max_open=task.max_open_tars,
        max_bytes=task.modality.max_sample_bytes,
        column=task.modality.media_column,
        as_listed=True,
    ) as read:
        for row, place in enumerate(_places(task.rows)):
            mark(row)
            try:
                data = read(place["file"], place["offset"], place["size"])
                _sound(task, found, row, data, sample_id=place["sample_id"])
            except SampleError as err:
                found.bad.append((row, err.reason, str(err)))


def _places(rows: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in rows.select(["sample_id", "file", "offset", "size"]).to_batches(max_chunksize=1024):
        yield from batch.to_pylist()


def _sound(task: ClipTask, found: Clips, row: int, data: bytes, *, sample_id: str) -> None:
    """Writes what a clip is like into its row. Raises DecodeError where a build leaves it out."""
    recipe = task.modality.recipe
    found.content["file"][row] = signed(xxhash.xxh3_64_intdigest(data))
    if not recipe.features.reads_sound:
        recipe.features.compute([recipe.features.opened(data)])
        return
    info = header_info(lambda offset, size: data[offset : offset + size], len(data))
    if info is not None:
        found.facts["file_rate_hz"][row], found.facts["file_s"][row] = info.sample_rate_hz, info.duration_s
    clip = decode_audio(data, recipe.decode, sample_id=sample_id, want="int16")
    if clip.dtype != np.int16 or len(clip) < recipe.features.min_samples:
        recipe.features.check(clip.astype(np.float32))
    samples = _INT16.make([clip])[0]["waveform"]
    rate_hz = recipe.decode.sample_rate_hz
    own, own_hz = clip, rate_hz
    if info is not None and info.sample_rate_hz != rate_hz:
        # Resampling moves samples off full scale, so these are seen as the file has them.
        own_hz = info.sample_rate_hz
        own = decode_audio(data, replace(recipe.decode, sample_rate_hz=own_hz), sample_id=sample_id, want="int16")
    sound = measured_sound(own, own_hz, task.limits)
    for name, value in zip(sound._fields, sound, strict=True):
        found.facts[name][row] = value
    if own_hz >= rate_hz:  # a file of a lower rate has nothing above, and is told of by its rate
        found.facts["band_db"][row] = band_db(clip)
    found.content["sound"][row] = signed(xxhash.xxh3_64_intdigest(samples.data))
    found.num_samples[row] = len(clip)
