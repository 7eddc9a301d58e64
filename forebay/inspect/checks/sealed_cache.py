"""A sealed cache, measured: by what it keeps. No raw data is read."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import SEGMENT_FIELDS
from forebay.config.remote import RemoteConfig
from forebay.errors import CacheCorruptError, FormError
from forebay.inspect.checks.limits import Limits
from forebay.inspect.checks.measured import (
    Classes,
    ImageFacts,
    Measured,
    MeasuredColumns,
    MeasuredPart,
    Refused,
    Sound,
    Walk,
    band_db,
    measured_sound,
    overlap_s,
)
from forebay.inspect.checks.raw_data import coded, sound_hash
from forebay.inspect.checks.text_letters import classes_in, kind_of, said_of
from forebay.inspect.listed_groups import names_items
from forebay.rows.manifest import reduced
from forebay.steps.form import BatchForm
from forebay.steps.image.processor.codes import is_padding, levels_of
from forebay.store.cache import Cache, open_cache
from forebay.store.image.codec import FIELDS, SECONDS, StoredImages
from forebay.store.image.stored_items import StoredArrays, stored_items
from forebay.store.key import digest
from forebay.store.layout import ROW_BITS, ROW_MASK, TEXT, Array, Group, Ints
from forebay.store.source_comparison import steps_of
from forebay.task_map import mark

_TEXTS, _ITEMS = 1024, 256
"""Rows of a task."""
_OPEN = 8
"""Shards that a worker has open: its samples follow each other, and what was read of a file counts as its memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheTask:
    """Rows of a group of a cache from `start` on: `text` and `language`, or of which `sample` and `place` in it.

    kind: of texts, see `kind_of`.
    """

    start: int
    rows: pa.Table
    group: Group
    place: str
    remote: RemoteConfig
    limits: Limits
    kind: str

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
    kind = kind_of(cache.constants.get("prompt"), lists=bool(names_items(cache)))
    listed = {group: _Listed.of(cache, group, count) for group in cache.listed if (group, True) in _MEASURED}
    tables = {group: pa.table({"sample": used.samples, "place": used.places}) for group, used in listed.items()}
    if "waveform" in cache.fields:
        tables[cache.fields["waveform"].group] = pa.table({"sample": np.arange(count)})
    tables[TEXT] = pa.table({each: _column(cache, each, count) for each in ("text", "language")})

    def task(group: Group, start: int, stop: int) -> CacheTask:
        rows = tables[group].slice(start, stop - start)
        return CacheTask(
            start=start, rows=rows, group=group, place=cache.place, remote=remote, limits=limits, kind=kind
        )

    found = _walked({group: len(rows) for group, rows in tables.items()}, task, workers=workers, progress=progress)
    texts = tables.pop(TEXT)
    languages, language_of = coded(texts["language"])
    classes = _classes(cache, texts["text"].to_pylist()) if kind == "class" else None
    left_out = _left_out(cache, texts["text"], kind=kind)
    del texts
    pa.default_memory_pool().release_unused()  # of all columns texts are the largest
    files, file_of = coded(_column(cache, "source", count))
    images = {group: used.facts(cache, found[group]) for group, used in listed.items()}.get("image")
    is_rough = images is not None and bool(np.isnan(images.range).any())
    own = [columns for group, columns in found.items() if group not in listed]
    return Measured(
        name=name,
        is_raw=False,
        rate_hz=cache.constants.get("sample_rate_hz") if "audio" in cache.groups else None,
        ids=_column(cache, "sample_id", count),
        places=np.arange(count),
        files=files,
        file_of=file_of,
        languages=languages,
        language_of=language_of,
        facts={key: column for columns in own for key, column in columns.facts.items()}
        | _seconds(cache, count)
        | _overlaps(cache, count),
        content={key: column for columns in own for key, column in columns.content.items()} | _hashes(cache, count),
        refused=_refused(cache),
        images=images,
        classes=classes,
        left_out=left_out,
        notes=["its images are floats without a table: blank_image finds those of one value alone"] if is_rough else [],
        excluded=cache.metadata["excluded"],
    )


def _walked(
    counts: Mapping[Group, int], task: Callable[[Group, int, int], CacheTask], *, workers: int | None, progress: bool
) -> dict[Group, MeasuredColumns]:
    """Returns what is measured of the rows of each group, in pieces."""
    walk = Walk(workers=workers, progress=progress)
    with walk.pool() as pool:
        return {
            group: walk.columns(
                pool,
                measure_stored,
                functools.partial(task, group),
                count,
                size=_TEXTS if group == TEXT else _ITEMS,
                unit=group,
            )
            for group, count in counts.items()
        }


def _column(cache: Cache, name: str, count: int) -> pa.ChunkedArray:
    """Returns a column of the first samples; empty texts where the cache has none of its name."""
    if name not in cache.column_names:
        return pa.chunked_array([pa.repeat(pa.scalar("", pa.large_string()), count)])
    return cache.table([name])[name].slice(0, count)


def measure_stored(task: CacheTask) -> MeasuredPart:
    """Returns what is measured of some rows of a cache."""
    if task.group == TEXT:
        return said_of(task.rows["text"].to_pylist(), task.rows["language"].to_pylist(), task.kind)
    cache = _opened(task.place, task.remote)
    return _MEASURED[task.group, task.group in cache.listed](cache, task)


@functools.lru_cache(maxsize=1)
def _opened(place: str, remote: RemoteConfig) -> Cache:
    return open_cache(place, remote=remote, max_open_shards=_OPEN)


def _sounds(cache: Cache, task: CacheTask) -> MeasuredPart:
    count, rate_hz = len(task.rows), cache.constants["sample_rate_hz"]
    facts = {name: np.full(count, np.nan) for name in (*Sound._fields, "band_db")}
    hashes = np.zeros(count, np.int64)
    for row, index in enumerate(task.rows["sample"].to_pylist()):
        mark(row)
        clip = cache.read(index)["waveform"]
        for name, value in {**measured_sound(clip, rate_hz, task.limits)._asdict(), "band_db": band_db(clip)}.items():
            facts[name][row] = value
        hashes[row] = sound_hash(clip)
    return MeasuredPart(facts, {"sound": hashes})


def _pixels(cache: Cache, task: CacheTask) -> MeasuredPart:
    """Measures the range between the darkest and the brightest value of each image, of 255."""
    name, measured = _range_of(cache, task.group)
    ranges = np.full(len(task.rows), np.nan)
    known, items = -1, list[Any]()
    for row, (index, place) in enumerate(zip(*(task.rows[n].to_pylist() for n in ("sample", "place")), strict=True)):
        mark(row)
        if index != known:
            known, sample = index, cache.read(index)
            items = _in_order(cache, task.group, index, sample) if SECONDS in sample else sample[name]
        ranges[row] = measured(items[place])
    return MeasuredPart({"range": ranges})


def _in_order(cache: Cache, group: Group, index: int, sample: Mapping[str, Any]) -> list[Array]:
    """Returns the patches of the items of a sample that may have videos."""
    rows = (cache.shard(group, slot >> ROW_BITS).row(slot & ROW_MASK) for slot in cache.items_of(group, index))
    stored = StoredImages.of(cache.metadata, folder=cache.folder)
    return [patches for patches, _ in stored.in_order(sample, rows)]


_MEASURED: Mapping[tuple[Group, bool], Callable[[Cache, CacheTask], MeasuredPart]] = {
    ("audio", False): _sounds,
    ("image", True): _pixels,
}
"""The measures of the stored items of a group, by whether samples list them."""


def _range_of(cache: Cache, group: Group) -> tuple[str, Callable[[Any], float]]:
    """Returns the field of an image's pixels, and what measures the range of its values, of 255.

    Floats without a table do not say what is 255: NaN, but of one value alone.
    """
    if not isinstance(stored_items(cache.metadata, folder=cache.folder)[group], StoredArrays):
        return FIELDS["raw"], lambda patches: float(np.ptp(patches))
    field_ = BatchForm.from_json(cache.constants.of(group)["form"]).pixels

    def of_levels(array: Array) -> float:
        if field_.table is None and field_.stored_dtype != "uint8":
            return 0.0 if array.size and np.ptp(array) == 0 else np.nan
        held = levels_of(field_, array)[~is_padding(field_, array)]
        return float(np.ptp(held)) if held.size else np.nan

    return field_.name, of_levels


@dataclass(frozen=True, kw_only=True)
class _Listed:
    """The different items of a group that samples list. starts, flat: see `ImageFacts`.

    samples, places: int64 [items], which sample lists each first, and as its how many-th.
    """

    group: Group
    hashes: list[str] = field(repr=False)
    starts: Ints
    flat: Ints
    samples: Ints
    places: Ints

    @classmethod
    def of(cls, cache: Cache, group: Group, count: int) -> Self:
        """Returns the items of the first samples, in the order in which samples list them; no item is read."""
        listed = cache.items(group)
        starts = np.asarray(listed.offsets[: count + 1])
        used, inverse = np.unique(listed.slots[: int(starts[-1])], return_inverse=True)
        numbers: dict[str, int] = {}
        shards = used >> ROW_BITS
        of_used = np.zeros(len(used), np.int64)
        for shard in np.unique(shards).tolist():
            names = cache.shard(group, shard).strings(f"{group}_hash")
            for place in np.flatnonzero(shards == shard).tolist():
                of_used[place] = numbers.setdefault(names[int(used[place]) & ROW_MASK], len(numbers))
        _, first, flat = np.unique(of_used[inverse.reshape(-1)], return_index=True, return_inverse=True)
        order = np.argsort(first)  # of a sample's images each is read once
        rank, hashes = np.argsort(order), list(numbers)
        owners = np.repeat(np.arange(count), np.diff(starts))[first[order]]
        return cls(
            group=group,
            hashes=[hashes[number] for number in order.tolist()],
            starts=starts,
            flat=rank[flat.reshape(-1)],
            samples=owners,
            places=first[order] - starts[owners],
        )

    def facts(self, cache: Cache, found: MeasuredColumns) -> ImageFacts:
        """Returns what is known of the items. found: what was measured of each."""
        names, column = [], f"{self.group}s"
        called = cache.table([column])[column].take(pa.array(self.samples))
        for text, place in zip(called.to_pylist(), self.places.tolist(), strict=True):
            names.append(str(json.loads(text)[place]))
        unknown = np.zeros(len(names), np.int64)
        return ImageFacts(
            names=names,
            hashes=self.hashes,
            width=unknown,
            height=unknown,
            range=found.facts.get("range", np.full(len(names), np.nan)),
            starts=self.starts,
            flat=self.flat,
        )


def _left_out(cache: Cache, texts: pa.ChunkedArray, *, kind: str) -> dict[str, str]:
    if names_items(cache):
        lacks = {"sizes": "a cache keeps images as the processor sizes them: read the raw data with --raw"}
        cut = {"length": "a cache keeps what is left of texts that are cut: read the raw data with --raw"}
        return lacks | (cut if kind == "text" else {})
    if cache.groups == (TEXT,):
        return dict.fromkeys(("sound", "file", "seconds"), "the samples have no sound")
    lacks = {"file": "a cache keeps no files: read the raw data with --raw, or lint its config"}
    if "waveform" not in cache.fields:
        lacks["sound"] = "the cache keeps no waveform (audio.keep_waveform)"
    if not pc.any(pc.not_equal(texts, "")).as_py():
        lacks |= dict.fromkeys(("text", "seconds"), "the samples have no texts")
    return lacks


def _seconds(cache: Cache, count: int) -> dict[str, Array]:
    """Returns how long clips are; NaN where only the first `clip_s` seconds were kept."""
    rate_hz = cache.constants.get("sample_rate_hz")
    if rate_hz is None or "num_audio_samples" not in cache.lengths:
        return {}
    num_samples = np.asarray(cache.lengths["num_audio_samples"][:count])
    seconds = num_samples / rate_hz
    clip_s = (cache.metadata["recipe"].get("audio") or {}).get("clip_s")
    if clip_s is not None:
        seconds[num_samples >= round(clip_s * rate_hz)] = np.nan
    return {"seconds": np.asarray(seconds)}


def _overlaps(cache: Cache, count: int) -> dict[str, Array]:
    """Returns how far segments overlap, and of windows, which do so with timestamps, which are without speech."""
    recipe = cache.metadata["recipe"]
    if recipe.get("source", {}).get("window_s") is not None:
        is_empty = np.asarray(pc.equal(_column(cache, "text", count), ""))
        return {"no_speech": is_empty * float(bool((recipe.get("text") or {}).get("no_speech")))}
    if not {*SEGMENT_FIELDS} <= {*cache.column_names}:
        return {}
    names, start_s, end_s, channels = (_column(cache, name, count) for name in SEGMENT_FIELDS)
    _, recordings = coded(names)
    return {"overlap_s": overlap_s(recordings, channels, start_s.to_numpy(), end_s.to_numpy())}


def _hashes(cache: Cache, count: int) -> dict[str, Ints]:
    """Returns the hashes of what is stored of each recording: of two caches of the same steps they may be compared."""
    found: dict[str, Ints] = {}
    for group in cache.groups:
        if group == TEXT or group in cache.listed or "takes" in cache.constants.of(group):
            continue
        name = f"stored {digest(steps_of(cache.metadata['recipe']).get(group))[:16]}"
        hashes = found[name] = np.zeros(count, np.int64)
        for number, samples, rows in cache.by_shard(count):
            shard = cache.shard(group, number)
            hashes[samples] = shard.hashes[rows]
            shard.drop_pages()
    return found


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


def _classes(cache: Cache, texts: list[str]) -> Classes:
    is_multi = bool(cache.constants["text_form"]["fields"][0]["shape"])
    known = cache.constants["classes"] or ()
    if not all(isinstance(name, str) for name in known):
        raise FormError(f"classes are {known!r:.80}, wanted names")
    return Classes(names=classes_in(texts, is_multi=is_multi), known=known)
