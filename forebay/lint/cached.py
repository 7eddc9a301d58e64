"""A sealed cache, measured: by what it keeps. No raw data is read."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from forebay.config.remote import RemoteConfig
from forebay.errors import CacheCorruptError, FormError
from forebay.lint.clips import Clips, note_text
from forebay.lint.limits import Limits
from forebay.lint.measured import Classes, ImageFacts, Measured, Refused
from forebay.lint.pictures import classes_in, kind_of, said_of
from forebay.lint.raw import coded
from forebay.lint.sound import Sound, band_db, measured_sound
from forebay.lint.spans import cut, run_spans
from forebay.lint.text import signed
from forebay.preprocess.pool import Pool
from forebay.preprocess.sources.rows import reduced
from forebay.preprocess.worker import mark
from forebay.progress import Progress
from forebay.steps.audio.waveform import Waveform
from forebay.steps.form import BatchForm
from forebay.steps.image.levels import is_padding, levels_of
from forebay.store.cache import Cache, open_cache
from forebay.store.derived import steps_of
from forebay.store.key import digest
from forebay.store.layout import ROW_BITS, ROW_MASK, Array, Ints
from forebay.store.source import is_of_images

_ROWS = 1024
_OPEN = 8
"""Shards that a worker has open: its samples follow each other, and what was read of a file counts as its memory."""

_INT16 = Waveform(dtype="int16")
_HEARD = {"sound": (*Sound._fields, "band_db"), "content": ("sound", "text")}
_SAID = {"sound": (), "content": ("text",)}


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheTask:
    """Samples of a cache from `start` on: `text` and `language` of each. heard: whether their waveforms are read."""

    start: int
    rows: pa.Table
    place: str
    remote: RemoteConfig
    limits: Limits
    is_heard: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


def measure_cache(
    cache: Cache,
    limits: Limits,
    *,
    name: str,
    remote: RemoteConfig,
    workers: int | None,
    most: int | None,
    progress: bool,
) -> Measured:
    """Returns what is known of the samples of a cache. most: only so many, the first ones."""
    count = len(cache) if most is None else min(most, len(cache))
    if cache.metadata.get("codec") is not None:
        return _vision(cache, name=name, count=count, progress=progress)
    is_heard = "waveform" in cache.fields
    said = {each: _column(cache, each, count) for each in ("text", "language")}

    def task(start: int, stop: int) -> CacheTask:
        part = pa.table({each: column.slice(start, stop - start) for each, column in said.items()})
        return CacheTask(start=start, rows=part, place=cache.place, remote=remote, limits=limits, is_heard=is_heard)

    def new_pool() -> Pool:
        return Pool(workers or os.cpu_count() or 1)

    found, unit = Clips.unknown(count, **(_HEARD if is_heard else _SAID)), "clip" if is_heard else "text"
    with Progress(count, desc="lint", unit=unit, is_shown=progress) as bar, new_pool() as pool:
        run_spans(pool, measure_stored, task, cut(count, _ROWS), new_pool=new_pool, done=bar.update, keep=found.put)
    left_out = _left_out(cache, said.pop("text"), is_heard=is_heard)
    pa.default_memory_pool().release_unused()  # of all columns texts are the largest
    languages, language_of = coded(said["language"])
    files, file_of = coded(_column(cache, "source", count))
    rate_hz = cache.constants.get("sample_rate_hz") if "media" in cache.groups else None
    return Measured(
        name=name,
        modality="speech",
        is_raw=False,
        rate_hz=rate_hz,
        ids=_column(cache, "sample_id", count),
        places=np.arange(count),
        files=files,
        file_of=file_of,
        languages=languages,
        language_of=language_of,
        facts=found.facts | found.strings | ({} if rate_hz is None else {"seconds": _seconds(cache, rate_hz, count)}),
        content=found.content | _stored_hashes(cache, count),
        refused=_refused(cache),
        left_out=left_out,
        excluded=cache.metadata["excluded"],
    )


def _column(cache: Cache, name: str, count: int) -> pa.ChunkedArray:
    """Returns a column of the first samples; empty texts where the cache has none of its name."""
    if name not in cache.column_names:
        return pa.chunked_array([pa.repeat(pa.scalar("", pa.large_string()), count)])
    return cache.table([name])[name].slice(0, count)


def measure_stored(task: CacheTask) -> Clips:
    """Returns what is measured of some samples of a cache."""
    count = len(task.rows)
    found = Clips.unknown(count, **(_HEARD if task.is_heard else _SAID))
    for row, each in enumerate(task.rows.to_pylist()):
        note_text(found, row, each["text"], each["language"])
    if not task.is_heard:
        return found
    cache = _opened(task.place, task.remote)
    rate_hz = cache.constants["sample_rate_hz"]
    for row in range(count):
        mark(row)
        clip = cache.read(task.start + row)["waveform"]
        for name, value in measured_sound(clip, rate_hz, task.limits)._asdict().items():
            found.facts[name][row] = value
        found.facts["band_db"][row] = band_db(clip)
        samples = _INT16.make([clip])[0]["waveform"]
        found.content["sound"][row] = signed(xxhash.xxh3_64_intdigest(np.ascontiguousarray(samples).data))
    return found


@functools.lru_cache(maxsize=1)
def _opened(place: str, remote: RemoteConfig) -> Cache:
    return open_cache(place, remote=remote, max_open_shards=_OPEN)


def _left_out(cache: Cache, texts: pa.ChunkedArray, *, is_heard: bool) -> dict[str, str]:
    if "media" not in cache.groups:
        return dict.fromkeys(("media", "file", "seconds"), "the samples have no sound")
    lacks = {"file": "a cache keeps no files: read the raw data with --raw, or lint its config"}
    if not is_heard:
        lacks["media"] = "the cache keeps no waveform (audio.keep_waveform)"
    if not pc.any(pc.not_equal(texts, "")).as_py():
        lacks |= dict.fromkeys(("text", "seconds"), "the samples have no texts")
    return lacks


def _seconds(cache: Cache, rate_hz: int, count: int) -> Array:
    """Returns how long clips are; NaN where only the first `clip_s` seconds were kept."""
    num_samples = np.asarray(cache.lengths["num_audio_samples"][:count])
    seconds = num_samples / rate_hz
    clip_s = (cache.metadata["recipe"].get("audio") or {}).get("clip_s")
    if clip_s is not None:
        seconds[num_samples >= round(clip_s * rate_hz)] = np.nan
    return np.asarray(seconds)


def _stored_hashes(cache: Cache, count: int) -> dict[str, Ints]:
    """Returns the hashes of what is stored of each recording: of two caches of the same steps they may be compared."""
    if "media" not in cache.groups:
        return {}
    hashes = np.zeros(count, np.int64)
    for number, samples, rows in cache.by_shard(count):
        shard = cache.shard("media", number)
        hashes[samples] = shard.hashes[rows]
        shard.drop_pages()
    return {f"stored {digest(steps_of(cache.metadata['recipe']).get('audio'))[:16]}": hashes}


def _refused(cache: Cache) -> list[Refused]:
    path = cache.folder / "rejected.jsonl"
    if "rejected.jsonl" not in cache.metadata["files"] or not path.is_file():
        return []
    try:
        entries: list[Mapping[str, str]] = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
        return [
            Refused(
                sample_id=each["sample_id"],
                reason=each["reason"],
                message=each.get("message", "a build left it out; the raw data says why: forebay lint CONFIG --raw"),
            )
            for each in entries
            if each["kind"] == "failed"
        ]
    except (ValueError, KeyError, TypeError) as err:
        raise CacheCorruptError(
            f"{path} is none that forebay writes: {err}; run: forebay preprocess CONFIG --rebuild"
        ) from err


def _vision(cache: Cache, *, name: str, count: int, progress: bool) -> Measured:
    table = cache.table(["sample_id", "text", "source"]).slice(0, count)
    images = _stored_images(cache, count, progress=progress)
    kind = kind_of(cache.constants.get("prompt")) if is_of_images(cache) else "conversation"
    texts = table["text"].to_pylist()
    said = said_of(texts, kind)
    files, file_of = coded(table["source"])
    lacks = {"sizes": "a cache keeps images as the processor sizes them: read the raw data with --raw"}
    if kind == "text":
        lacks["length"] = "a cache keeps what is left of texts that are cut: read the raw data with --raw"
    is_rough = bool(np.isnan(images.range).any())
    return Measured(
        name=name,
        modality="vision",
        is_raw=False,
        rate_hz=None,
        ids=table["sample_id"],
        places=np.arange(count),
        files=files,
        file_of=file_of,
        languages=[""],
        language_of=np.zeros(count, np.int64),
        facts={**said.facts, **{key: np.array(values, object) for key, values in said.strings.items()}},
        content={"text": said.hashes},
        refused=_refused(cache),
        images=images,
        classes=_classes(cache, texts) if kind == "class" else None,
        left_out=lacks,
        notes=["its images are floats without a table: blank_image finds those of one value alone"] if is_rough else [],
        excluded=cache.metadata["excluded"],
    )


def _classes(cache: Cache, texts: list[str]) -> Classes:
    is_multi = bool(cache.constants["text_form"]["fields"][0]["shape"])
    known = cache.constants["classes"] or ()
    if not all(isinstance(name, str) for name in known):
        raise FormError(f"classes are {known!r:.80}, wanted names")
    return Classes(names=classes_in(texts, is_multi=is_multi), known=known)


def _range_of(cache: Cache) -> Callable[[Any], float]:
    """Returns what measures the range of the values of a stored image, of 255.

    Floats without a table do not say what is 255: NaN, but of one value alone.
    """
    if not is_of_images(cache):
        return lambda patches: float(np.ptp(patches))
    field = BatchForm.from_json(cache.constants["form"]).pixels

    def of_levels(array: Array) -> float:
        if field.table is None and field.stored_dtype != "uint8":
            return 0.0 if array.size and np.ptp(array) == 0 else np.nan
        held = levels_of(field, array)[~is_padding(field, array)]
        return float(np.ptp(held)) if held.size else np.nan

    return of_levels


def _stored_images(cache: Cache, count: int, *, progress: bool) -> ImageFacts:
    """Returns the images of a cache; each is looked at once, where the first sample uses it."""
    rows_field, measured = cache.metadata["media_rows"], _range_of(cache)
    pixels = BatchForm.from_json(cache.constants["form"]).pixels.name if is_of_images(cache) else "patches"
    called = cache.table(["images"])["images"].slice(0, count)
    numbers: dict[str, int] = {}
    shown: list[str] = []
    ranges: list[float] = []
    starts, flat = [0], []
    names: dict[int, list[str]] = {}
    slots = cache.slots
    with Progress(count, desc="lint", unit="sample", is_shown=progress) as bar:
        for index in range(count):
            number, row = int(slots[index]) >> ROW_BITS, int(slots[index]) & ROW_MASK
            if number not in names:
                names = {number: cache.shard("media", number).strings("image_hash")}
            used = [names[number][media] for media in cache.shard("text", number).row(row)[rows_field].tolist()]
            new = [place for place, name in enumerate(used) if name not in numbers]
            patches = cache.read(index)[pixels] if new else ()
            for place in new:
                if used[place] not in numbers:
                    numbers[used[place]] = len(numbers)
                    shown.append(str(json.loads(called[index].as_py())[place]))
                    ranges.append(measured(patches[place]))
            flat += [numbers[name] for name in used]
            starts.append(len(flat))
            bar.update()
    unknown = np.zeros(len(numbers), np.int64)
    return ImageFacts(
        names=shown,
        hashes=list(numbers),
        width=unknown,
        height=unknown,
        range=np.array(ranges, np.float64),
        starts=np.array(starts, np.int64),
        flat=np.array(flat, np.int64),
    )
