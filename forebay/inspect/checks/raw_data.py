"""The raw data of a config, measured: listed, read and decoded as a build does, in worker processes.

Tasks over raw data: some rows, or items of a group, read and made as a build does, and measured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from forebay.config.tree import Config
from forebay.errors import SampleError
from forebay.inspect.checks.limits import Limits
from forebay.inspect.checks.measured import (
    Bad,
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
from forebay.inspect.checks.text_letters import LISTED, classes_in, kind_of, listed_hashes, said_of, signed
from forebay.preprocess.audio_group import AudioItems
from forebay.preprocess.decode import decode_audio
from forebay.preprocess.group import Coder, Cut, ItemGroup, Items, Read
from forebay.preprocess.groups import Groups, Listing
from forebay.preprocess.listing import listed
from forebay.rows.manifest import Manifest, reduced
from forebay.rows.meanings.image_class import empty_classes, labels_of
from forebay.rows.media_reader import MediaReader
from forebay.rows.segments import Bounds, recordings_of, segment_columns, segment_of
from forebay.rows.source_table import SourceFiles
from forebay.rows.windows import NO_SPEECH, SPOKEN
from forebay.steps.audio.waveform import Waveform
from forebay.steps.recipe import Recipe
from forebay.steps.text.normal.normal_step import code_in
from forebay.store.image.codec import FIELDS
from forebay.store.layout import TEXT, Array, Group, Ints
from forebay.store.remote.raw.raw_sources import naming_urls
from forebay.store.sound_containers import header_info
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
    files: Sequence[SourceFile]
    groups: Groups
    group: Group
    limits: Limits
    max_open_tars: int

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


def measure_rows(task: RawTask) -> MeasuredPart:
    """Returns what is measured of some rows. Raises TarError or OSError where a file as a whole cannot be read."""
    if task.group == TEXT:
        return _texts(task)
    group = task.groups.item_group(task.group)
    with MediaReader(
        task.files, max_open=task.max_open_tars, max_bytes=group.max_sample_bytes, column=group.column, as_listed=True
    ) as read:
        return _LOOKS.get((task.group, group.lists is not None), _made)(task, group, read)


def _texts(task: RawTask) -> MeasuredPart:
    """The build's own reasons, and what the texts are like."""
    text = task.groups.text
    texts, languages, bad = [], [], []
    for row, values in enumerate(text.samples(task.rows, SourceFiles.of(task.files).all_names)):
        if "failure" in values:
            bad.append((row, values["failure"], values["message"]))
        texts.append(values["text"])
        languages.append(values.get("language", ""))
    said = said_of(texts, languages, kind_of(text.steps.step.name, lists=bool(text.listed)))
    cut_tokens = getattr(text.encoder, "cut_tokens", None)
    cut = {} if cut_tokens is None else {"cut": np.array([cut_tokens(each) for each in texts], np.float64)}
    return replace(said, facts={**said.facts, **cut}, bad=bad)


def _made(task: RawTask, group: ItemGroup, read: Read) -> MeasuredPart:
    """The build's own reasons alone."""
    made = enumerate(group.samples(task.rows, read))
    return MeasuredPart(
        bad=[(row, values["failure"], values["message"]) for row, values in made if "failure" in values]
    )


def _pixels(task: RawTask, group: ItemGroup, read: Read) -> MeasuredPart:
    """The build's own reasons, and what lies between the darkest and the brightest value of each image."""
    ranges = np.full(len(task.rows), np.nan)
    rows = iter(range(len(ranges)))

    def measuring(file: int, offset: int, size: int, _: Bounds | None = None, /) -> bytes:
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
    return MeasuredPart({"range": ranges}, bad=bad)


def _sounds(task: RawTask, group: AudioItems, read: Read) -> MeasuredPart:
    """Measures clips, as decoded, and notes why a build leaves them out."""
    count = len(task.rows)
    facts = {name: np.full(count, np.nan) for name in (*Sound._fields, "band_db", "file_rate_hz", "file_s")}
    facts["num_samples"] = np.zeros(count, np.int64)
    found = MeasuredPart(facts, {name: np.zeros(count, np.int64) for name in ("file", "sound")})
    for row, place in enumerate(
        task.rows.select(["sample_id", "file", "offset", "size", *segment_columns(task.rows)]).to_pylist()
    ):
        mark(row)
        try:
            data = read(place["file"], place["offset"], place["size"], segment_of(place))
            found.content["file"][row] = signed(xxhash.xxh3_64_intdigest(data))
            _sound(task, group, found, row, data, sample_id=place["sample_id"])
        except SampleError as err:
            found.bad.append((row, err.reason, str(err)))
    return found


def _sound(task: RawTask, group: AudioItems, found: MeasuredPart, row: int, data: bytes, *, sample_id: str) -> None:
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


_LOOKS: Mapping[tuple[Group, bool], Callable[[RawTask, Any, Read], MeasuredPart]] = {
    ("audio", False): _sounds,
    ("image", True): _pixels,
}
"""What is measured of the items of a group, by whether rows list them."""

"""The measures of the items of a group; of others only what a build says of them."""


_ITEMS, _TEXTS = 64, 4096
"""Rows of a task: enough to be worth its sending, few enough that the last one does not keep all waiting."""


def measure_raw(config: Config, recipe: Recipe, limits: Limits, *, name: str, progress: bool) -> Measured:
    """Returns what is known of the raw data of a config. Its samples are those that the listing leaves.

    Functions of the user in `text.normalize` are not run, which a note says.
    Raises ConfigError or ManifestError where the config or its manifest cannot be used, TarError or OSError where a
    file as a whole cannot be read.
    """
    groups = Groups.of(config, recipe.without_code())
    walk = Walk(workers=config.run.num_workers, progress=progress)
    with naming_urls(), walk.pool() as pool:
        manifest = listed(config, groups, map_=pool.map)
        listing = Listing(groups=groups.keeping(manifest.rows).under("raw"), manifest=manifest, key="")
        counts = {group.name: (len(listing.items[group.name].table), _ITEMS, group.unit) for group in groups.items}
        counts[TEXT] = (len(manifest.rows), _TEXTS, groups.text.unit)
        found = {
            group: walk.columns(
                pool, measure_rows, tasks_of(config, listing, group, limits), count, size=size, unit=unit
            )
            for group, (count, size, unit) in counts.items()
        }
    return _measured(config, listing, found, name=name)


def tasks_of(config: Config, listing: Listing, group: Group, limits: Limits) -> Callable[[int, int], RawTask]:
    """Returns what gives a task of rows [start, stop) of a group."""

    def task(start: int, stop: int) -> RawTask:
        cut = Cut(group=group, index=0, start=start, stop=stop, key="")
        files, rows = listing.groups.task_rows(listing, cut)
        return RawTask(
            start=start,
            rows=rows,
            files=files,
            groups=listing.groups,
            group=group,
            limits=limits,
            max_open_tars=config.run.max_open_tars,
        )

    return task


@dataclass(frozen=True, kw_only=True)
class _Known:
    """The facts of samples by the items of a group: fields of `Measured`, of which facts and content of all are joined.

    late: rows that are left out for what was decoded.
    """

    facts: Mapping[str, Array] = field(default_factory=dict)
    content: Mapping[str, Ints] = field(default_factory=dict)
    late: Sequence[Bad] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


def _measured(config: Config, listing: Listing, found: Mapping[Group, MeasuredColumns], *, name: str) -> Measured:
    rows, manifest, text, said = listing.rows, listing.manifest, listing.groups.text, found[TEXT]
    bad = [*said.bad, *_dead(said, lambda row: f"sample {rows['sample_id'][row].as_py()}")]
    known = [_Known(facts=said.facts, content=said.content)]
    for group in listing.groups.items:
        items = listing.items[group.name]
        names = functools.partial(_item_name, listing, group)
        bad += _of_rows(items, [*found[group.name].bad, *_dead(found[group.name], names)])
        known_of = _KNOWN.get((group.name, group.lists is not None))
        known += [] if known_of is None else [known_of(listing, group, found[group.name])]
    refused = {row for row, _, _ in bad}
    bad += [each for one in known for each in one.late if each[0] not in refused]
    fields = {key: value for one in known for key, value in one.fields.items()}
    is_class = kind_of(text.steps.step.name, lists=bool(text.listed)) == "class"
    languages, language_of = languages_of(rows)
    code = [] if config.text is None else code_in(config.text.settings)
    return Measured(
        name=name,
        is_raw=True,
        ids=rows["sample_id"],
        places=rows["row"].to_numpy(),
        files=SourceFiles.of(manifest.files).shown_names,
        file_of=_file_of(config, listing),
        languages=languages,
        language_of=language_of,
        facts={key: column for one in known for key, column in one.facts.items()},
        content={key: column for one in known for key, column in one.content.items()},
        refused=_refused(bad, rows, manifest),
        classes=_classes(config, rows) if is_class else None,
        left_out={} if text.listed else _lacks(said, is_sound="rate_hz" in fields),
        excluded=manifest.counts()["excluded"],
        notes=[
            f"{entry} was not run: lint runs no code, so labels are judged as they are without it" for entry in code
        ],
        **fields,
    )


def _lacks(said: MeasuredColumns, *, is_sound: bool) -> dict[str, str]:
    """Returns what a set of recordings, or of texts alone, does not have."""
    has_text = bool(np.any(said.facts.get("chars", np.zeros(0)) > 0))
    lacks = {} if is_sound else dict.fromkeys(("sound", "file", "seconds"), "the samples have no sound")
    return lacks | ({} if has_text else dict.fromkeys(("text", "seconds"), "the samples have no texts"))


def _dead(found: MeasuredColumns, name: Callable[[int], str]) -> list[Bad]:
    return [
        (row, "kills_decoder", f"{name(row)}: reading it ended the process twice; write it again")
        for row in found.deaths
    ]


def _item_name(listing: Listing, group: ItemGroup, item: int) -> str:
    rows = group.task_rows(listing.items[group.name].table.slice(item, 1), listing.files)
    return ("sample " if group.lists is None else "") + str(rows["sample_id"][0].as_py())


def _of_rows(items: Items, bad: Sequence[Bad]) -> list[Bad]:
    """Returns what is bad of items as what is bad of the rows that have them."""
    if items.offsets is None:
        return list(bad)
    owners = np.repeat(np.arange(len(items.offsets) - 1), np.diff(items.offsets))
    why = {item: (reason, message) for item, reason, message in bad}
    uses = np.flatnonzero(np.isin(items.places, list(why)))
    return [(int(owners[use]), *why[int(items.places[use])]) for use in uses]


def _of_clips(listing: Listing, group: AudioItems, found: MeasuredColumns) -> _Known:
    """Seconds: as decoded; of a clip that is cut as its header says."""
    limits, rows, facts = group.limits, listing.rows, {**found.facts}
    num_samples = facts.pop("num_samples", np.zeros(len(rows), np.int64))
    seconds = np.where(num_samples > 0, num_samples / limits.sample_rate_hz, np.nan)
    if limits.clip_s is not None and "file_s" in facts:
        is_cut = num_samples >= round(limits.clip_s * limits.sample_rate_hz)
        seconds = np.where(is_cut, facts["file_s"], seconds)
    stated_s = rows["stated_s"].to_numpy(zero_copy_only=False).astype(np.float64)
    longer = limits.longer(num_samples, stated_s) & (num_samples > 0)
    if SPOKEN in rows.column_names:
        facts["no_speech"] = np.array([said == NO_SPEECH for said in rows[SPOKEN].to_pylist()], np.float64)
    elif segment_columns(rows):
        facts |= _overlaps(rows)
    rate = {"rate_hz": limits.sample_rate_hz} if group.steps.features.reads_sound else {}
    return _Known(
        facts={**facts, "stated_s": stated_s, "seconds": seconds},
        content=found.content,
        late=list(_by_duration(group, rows, num_samples, stated_s)),
        fields={"longer": longer, **rate},
    )


def _overlaps(rows: pa.Table) -> dict[str, Array]:
    start_s, seconds = (rows[name].to_numpy() for name in ("start_s", "duration_s"))
    return {"overlap_s": overlap_s(recordings_of(rows), rows["channel"], start_s, start_s + seconds)}


def _by_duration(group: AudioItems, rows: pa.Table, num_samples: Array, stated_s: Array) -> Iterator[Bad]:
    """Yields what a build leaves out by what it decoded: `duration_mismatch`, `too_long`, `too_short`."""
    reasons, limits = Coder(), group.limits
    codes = limits.refused(num_samples, stated_s, reasons)
    codes[num_samples == 0] = 0
    names = reasons.coded(codes).names
    for row in np.flatnonzero(codes).tolist():
        reason, sample_id, count = names[codes[row]], rows["sample_id"][row].as_py(), int(num_samples[row])
        seconds = count / limits.sample_rate_hz
        message = f"sample {sample_id}: {seconds:.2f} s of audio, which the duration filters leave out"
        if reason == "duration_mismatch":
            message = limits.message(sample_id, count, float(stated_s[row]))
        yield row, reason, message


def _of_images(listing: Listing, group: ItemGroup, found: MeasuredColumns) -> _Known:
    items = listing.items[group.name]
    images = ImageFacts(
        names=group.task_rows(items.table, listing.files)["sample_id"].to_pylist(),
        hashes=items.table["hash"].to_pylist(),
        width=items.table["width"].to_numpy(),
        height=items.table["height"].to_numpy(),
        range=found.facts.get("range", np.full(found.count, np.nan)),
        starts=np.zeros(1, np.int64) if items.offsets is None else items.offsets,
        flat=items.places,
    )
    return _Known(fields={"images": images})


def _of_listed_clips(listing: Listing, group: ItemGroup, _: MeasuredColumns) -> _Known:
    items = listing.items[group.name]
    starts = np.zeros(1, np.int64) if items.offsets is None else items.offsets
    hashes = listed_hashes(items.table["hash"].to_pylist(), starts, items.places)
    return _Known(content={f"{LISTED} {group.name}": hashes})


_KNOWN: Mapping[tuple[Group, bool], Callable[[Listing, Any, MeasuredColumns], _Known]] = {
    ("audio", False): _of_clips,
    ("audio", True): _of_listed_clips,
    ("image", True): _of_images,
}
"""The facts of samples by the items of a group."""


def languages_of(rows: pa.Table) -> tuple[list[str], Ints]:
    """Returns the different languages of rows behind "", and which one each row has."""
    return coded(rows["language"]) if "language" in rows.column_names else ([""], np.zeros(len(rows), np.int64))


def coded(column: pa.ChunkedArray) -> tuple[list[str], Ints]:
    """Returns the different strings of a column behind "", and which one each row has; null is ""."""
    encoded = column.dictionary_encode().combine_chunks()
    indices = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return ["", *encoded.dictionary.to_pylist()], indices + 1


def _refused(bad: Sequence[Bad], rows: pa.Table, manifest: Manifest) -> list[Refused]:
    """Returns what the steps refuse, a row once, and what failed in the listing."""
    first: dict[int, Refused] = {}
    for row, reason, message in sorted(bad, key=lambda each: each[0]):
        sample_id, place = rows["sample_id"][row].as_py(), rows["row"][row].as_py()
        first.setdefault(row, Refused(sample_id=sample_id, reason=reason, message=message, row=row, place=place))
    return [
        *first.values(),
        *(
            Refused(sample_id=each["sample_id"], reason=each["reason"], message=each["message"], place=each["row"])
            for each in manifest.rejected.to_pylist()
            if each["kind"] == "failed"
        ),
    ]


def _file_of(config: Config, listing: Listing) -> Array:
    """Returns the file of each row: the one that holds its media, where images are listed themselves, or lists it."""
    rows = listing.rows
    if "file" in rows.column_names:
        return np.asarray(rows["file"].to_numpy())
    (items, *_) = listing.items.values()
    if config.source.kind == "folder" and len(items.places) == len(rows):
        return np.asarray(items.table["file"].to_numpy()[items.places])
    return np.asarray(rows["group"].to_numpy())


def _classes(config: Config, rows: pa.Table) -> Classes:
    """Returns the classes of listed rows, those that are declared, and folders of classes without images."""
    labels = labels_of(rows)
    given = None if config.text is None else config.text.settings.get("classes")
    known = given if given is not None else (None if labels is None else labels.names)
    return Classes(
        names=classes_in(rows["text"].to_pylist(), is_multi=labels is not None and labels.is_multi),
        known=tuple(map(str, known or ())),
        folders=empty_classes(config.source),
    )
