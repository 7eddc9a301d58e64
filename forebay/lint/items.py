"""Tasks over raw data: some rows, or items of a group, read and made as a build does, and measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from forebay.errors import SampleError
from forebay.lint.limits import Limits
from forebay.lint.sound import Sound, band_db, measured_sound
from forebay.lint.text import kind_of, said_of, signed
from forebay.lint.walk import Bad, Part
from forebay.preprocess.audio_group import AudioItems
from forebay.preprocess.group import ItemGroup, Read
from forebay.preprocess.groups import Groups
from forebay.preprocess.speech.decode import decode_audio
from forebay.rows.manifest import reduced
from forebay.rows.media_reader import MediaReader
from forebay.steps.audio.waveform import Waveform
from forebay.store.image.codec import FIELDS
from forebay.store.layout import TEXT, Array, Group
from forebay.store.sound_headers import header_info
from forebay.store.source_files import SourceFile
from forebay.task_map import mark

_INT16 = Waveform(dtype="int16")
_PATCHES = FIELDS["raw"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RawTask:
    """Rows of a group, as `Groups.task_rows` gives them, and the files that they use.

    groups: with no codec, so that nothing is compressed.
    """

    start: int
    rows: pa.Table
    files: tuple[SourceFile, ...]
    groups: Groups
    group: Group
    limits: Limits
    max_open_tars: int

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


def measure_rows(task: RawTask) -> Part:
    """Returns what is measured of some rows. Raises TarError or OSError where a file as a whole cannot be read."""
    if task.group == TEXT:
        return _texts(task)
    group = task.groups.item_group(task.group)
    with MediaReader(
        task.files, max_open=task.max_open_tars, max_bytes=group.max_sample_bytes, column=group.column, as_listed=True
    ) as read:
        return _LOOKS.get(task.group, _made)(task, group, read)


def _texts(task: RawTask) -> Part:
    """The build's own reasons, and what the texts are like."""
    text = task.groups.text
    texts, languages, bad = [], [], []
    for row, values in enumerate(text.samples(task.rows, [file.name for file in task.files])):
        if "failure" in values:
            bad.append((row, values["failure"], values["message"]))
        texts.append(values["text"])
        languages.append(values.get("language", ""))
    said = said_of(texts, languages, kind_of(text.steps.step.name, lists=bool(text.listed)))
    cut_tokens = getattr(text.encoder, "cut_tokens", None)
    cut = {} if cut_tokens is None else {"cut": np.array([cut_tokens(each) for each in texts], np.float64)}
    return replace(said, facts={**said.facts, **cut}, bad=bad)


def _made(task: RawTask, group: ItemGroup, read: Read) -> Part:
    """The build's own reasons alone."""
    made = enumerate(group.samples(task.rows, read))
    return Part(bad=[(row, values["failure"], values["message"]) for row, values in made if "failure" in values])


def _pixels(task: RawTask, group: ItemGroup, read: Read) -> Part:
    """The build's own reasons, and what lies between the darkest and the brightest value of each image."""
    ranges = np.full(len(task.rows), np.nan)
    rows = iter(range(len(ranges)))

    def measuring(file: int, offset: int, size: int) -> bytes:
        row, data = next(rows), read(file, offset, size)
        with contextlib.suppress(SampleError):  # the build's own step says what is wrong
            ranges[row] = np.ptp(np.asarray(group.decoded(data, sample_id="")))
        return data

    bad: list[Bad] = []
    are_pixels = any(spec.name == _PATCHES for spec in group.fields())
    for row, values in enumerate(group.samples(task.rows, read if are_pixels else measuring)):
        if "failure" in values:
            bad.append((row, values["failure"], values["message"]))
        elif are_pixels:
            ranges[row] = np.ptp(values[_PATCHES])
    return Part({"range": ranges}, bad=bad)


def _sounds(task: RawTask, group: AudioItems, read: Read) -> Part:
    """What clips are like, as decoded, and why a build leaves them out."""
    count = len(task.rows)
    facts = {name: np.full(count, np.nan) for name in (*Sound._fields, "band_db", "file_rate_hz", "file_s")}
    facts["num_samples"] = np.zeros(count, np.int64)
    found = Part(facts, {name: np.zeros(count, np.int64) for name in ("file", "sound")})
    for row, place in enumerate(task.rows.select(["sample_id", "file", "offset", "size"]).to_pylist()):
        mark(row)
        try:
            data = read(place["file"], place["offset"], place["size"])
            found.content["file"][row] = signed(xxhash.xxh3_64_intdigest(data))
            _sound(task, group, found, row, data, sample_id=place["sample_id"])
        except SampleError as err:
            found.bad.append((row, err.reason, str(err)))
    return found


def _sound(task: RawTask, group: AudioItems, found: Part, row: int, data: bytes, *, sample_id: str) -> None:
    """Writes what a clip is like into its row. Raises DecodeError where a build leaves it out."""
    features, decode, facts = group.steps.features, group.steps.decode, found.facts
    if not features.reads_sound:
        features.compute([features.opened(data)])
        return
    info = header_info(lambda offset, size: data[offset : offset + size], len(data))
    if info is not None:
        facts["file_rate_hz"][row], facts["file_s"][row] = info.sample_rate_hz, info.duration_s
    clip = decode_audio(data, decode, sample_id=sample_id, want="int16")
    if clip.dtype != np.int16 or len(clip) < features.min_samples:
        features.check(clip.astype(np.float32))
    own, own_hz = clip, decode.sample_rate_hz
    if info is not None and info.sample_rate_hz != decode.sample_rate_hz:
        # Resampling moves samples off full scale, so these are seen as the file has them.
        own_hz = info.sample_rate_hz
        own = decode_audio(data, replace(decode, sample_rate_hz=own_hz), sample_id=sample_id, want="int16")
    for name, value in measured_sound(own, own_hz, task.limits)._asdict().items():
        facts[name][row] = value
    if own_hz >= decode.sample_rate_hz:  # a file of a lower rate has nothing above, and is told of by its rate
        facts["band_db"][row] = band_db(clip)
    found.content["sound"][row] = sound_hash(clip)
    facts["num_samples"][row] = len(clip)


def sound_hash(clip: Array) -> int:
    """Returns the hash of a clip's samples as int16."""
    samples = _INT16.make([clip])[0]["waveform"]
    return signed(xxhash.xxh3_64_intdigest(np.ascontiguousarray(samples).data))


_LOOKS: Mapping[Group, Callable[[RawTask, Any, Read], Part]] = {"audio": _sounds, "image": _pixels}
"""What is measured of the items of a group; of others only what a build says of them."""
