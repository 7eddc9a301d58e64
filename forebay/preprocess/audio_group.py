"""The group `audio`: recordings, decoded and made into features. What was decoded is compared with what was stated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.config.tree import Config
from forebay.errors import BuildError, ConfigError, ForebayError, SampleError
from forebay.preprocess.decode import decode_audio
from forebay.preprocess.group import Coder, Items, Read, Values, columns_digest, values_digest
from forebay.preprocess.probes import probe_features, probe_sounds
from forebay.preprocess.workspace import Failure
from forebay.rows.manifest import WHOLE_FILE, Manifest, joined
from forebay.rows.meanings.recordings import allowed_s
from forebay.rows.media_reader import open_parts, sparse_files
from forebay.rows.segments import Bounds, segment_columns, segment_of
from forebay.rows.source_table import SourceFiles
from forebay.spans import DECODE, FEATURES, span
from forebay.steps.audio.audio_section import AudioGroup
from forebay.steps.audio.waveform import Decode
from forebay.store.image.codec import Codec
from forebay.store.layout import Array, FieldSpec, Group
from forebay.store.memo import SIZE
from forebay.store.remote.raw.raw_sources import source_stat
from forebay.store.shard import Shard
from forebay.store.sound_containers import AudioInfo, parsed_header
from forebay.store.source_files import SourceFile
from forebay.task_map import mark
from forebay.terminal import Progress

logger = logging.getLogger(__name__)
UNKNOWN = -1
_HEADERS_A_PIECE = 512
"""Rows that a thread does at once."""
_THREADS = 8
"""Most of them wait if the files lie on a network."""
_NAMED = 5
"""Ids that a warning lists."""
_BLOCK_SAMPLES = 16_000 * 300
"""Decoded audio samples held at once: enough for the feature engine to fill its chunks, little beside a shard."""
_SLACK_S = 0.1
"""A manifest's rounded duration passed the filter once; only a real difference is one."""
_PLACE = ("member", "offset", "size")
NUM_SAMPLES = FieldSpec(name="num_audio_samples", dtype="int64", role="table")
_OF_SEGMENTS = (
    FieldSpec(name="recording", dtype="str", role="table"),
    FieldSpec(name="start_s", dtype="float64", role="table"),
    FieldSpec(name="end_s", dtype="float64", role="table"),
    FieldSpec(name="channel", dtype="int64", role="table"),
)
"""Where a segment lies; `channel` null for the mean of all."""


def exact_lengths(rows: pa.Table, files: Sequence[SourceFile], step: Decode) -> Array:
    """Returns the audio samples of every row after decoding, int64 [num_rows]; UNKNOWN where no header says it exactly.

    rows, files: as in `Manifest`. FLAC and RIFF WAVE say it, in a read of 4 KiB a clip, with a progress bar. Clips
    inside of a table (`hf`) are UNKNOWN: reading them is reading everything. So is what cannot be opened: it will fail
    when it is read.
    """
    columns = [rows[name].to_numpy() for name in ("file", "offset", "size", *segment_columns(rows)[:2])]
    pieces = [
        [column[start : start + _HEADERS_A_PIECE].tolist() for column in columns]
        for start in range(0, len(rows), _HEADERS_A_PIECE)
    ]
    found = np.full(len(rows), UNKNOWN, np.int64)
    sparse = sparse_files(rows, files)
    bar = Progress(len(rows), unit="clip", desc="audio headers")
    with ThreadPoolExecutor(_THREADS) as threads, bar:
        made = threads.map(lambda piece: list(_lengths(piece, files, step, sparse)), pieces)
        for number, lengths in enumerate(made):
            found[number * _HEADERS_A_PIECE : number * _HEADERS_A_PIECE + len(lengths)] = lengths
            bar.update(len(lengths))
    return found


def _lengths(
    piece: list[list[int]], files: Sequence[SourceFile], step: Decode, sparse: frozenset[int]
) -> Iterator[int]:
    for number, places in groupby(zip(*piece, strict=True), key=lambda place: place[0]):
        file = files[number]
        with ExitStack() as stack:
            read: Callable[[int, int], bytes] | None = None
            for _, offset, size, *bounds in places:
                if size == WHOLE_FILE and file.listed:
                    yield UNKNOWN
                    continue
                try:
                    if read is None:
                        read = stack.enter_context(open_parts(str(file.path), is_sparse=number in sparse))
                    if size == WHOLE_FILE:
                        size = source_stat(file.path)[SIZE]
                    yield _length(read, offset, size, step, segment=Bounds(*bounds) if bounds else None)
                except OSError:
                    yield UNKNOWN


def _length(read: Callable[[int, int], bytes], offset: int, size: int, step: Decode, *, segment: Bounds | None) -> int:
    info = parsed_header(lambda start, count: read(max(0, min(count, size - start)), offset + start), size)
    if info is None:
        return UNKNOWN
    if segment is not None and info.num_samples > 0:
        info = info._replace(num_samples=segment.samples_of(info.num_samples, info.sample_rate_hz))
    return decoded_length(info, step)


def _behind(members: Any, names: Sequence[str]) -> pa.Array:
    """Returns what stands behind the name of a file: of a tar the member."""
    pairs = zip(members.to_pylist(), names, strict=True)
    return pa.array(["" if not m or name.endswith(m) else f":{m}" for m, name in pairs], pa.large_string())


def decoded_length(info: AudioInfo, step: Decode) -> int:
    """Returns the samples of a clip at the step's rate, no more than it clips to; UNKNOWN if the header has none."""
    if info.num_samples <= 0 or info.sample_rate_hz <= 0:
        return UNKNOWN
    # soxr rounds half up.
    length = (2 * info.num_samples * step.sample_rate_hz + info.sample_rate_hz) // (2 * info.sample_rate_hz)
    return max(1, length if step.clip_s is None else min(length, round(step.clip_s * step.sample_rate_hz)))


@dataclass(frozen=True, kw_only=True, slots=True)
class DurationLimits:
    """The duration settings of `[source]`, and what decoding does to a duration.

    Below, num_samples: int [rows], decoded, at `sample_rate_hz`; 0 where a row failed. stated_s: float64 [rows], what
    the manifest says, or the metadata beside the clip; NaN where neither does.
    """

    sample_rate_hz: int
    clip_s: float | None
    min_s: float
    max_s: float | None
    tolerance_s: float | None

    @classmethod
    def of(cls, source: SourceConfig, decode: Decode) -> DurationLimits:
        """Returns the limits of a config's settings."""
        return cls(
            sample_rate_hz=decode.sample_rate_hz,
            clip_s=decode.clip_s,
            min_s=source.min_duration_s,
            max_s=source.max_duration_s if source.overlong == "drop" else None,
            tolerance_s=source.duration_tolerance,
        )

    def refused(self, num_samples: Array, stated_s: Array, reasons: Coder) -> Array:
        """Returns why clips are left out, as numbers of `reasons`, 0 where they are not: int32 [rows].

        `duration_mismatch`, `too_long` or `too_short`.
        """
        seconds = num_samples / self.sample_rate_hz
        found = np.zeros(len(seconds), np.int32)
        found[seconds < self.min_s - _SLACK_S] = reasons.number("too_short")
        if self.max_s is not None:
            found[seconds > self.max_s + _SLACK_S] = reasons.number("too_long")
        found[self.shorter(num_samples, stated_s)] = reasons.number("duration_mismatch")
        return found

    def shorter(self, num_samples: Array, stated_s: Array) -> Array:
        """Returns which clips have less audio than was said, bool [rows]; of one that is clipped that is not seen."""
        seconds = num_samples / self.sample_rate_hz
        return np.asarray(~self._is_cut(num_samples) & (seconds < stated_s - allowed_s(self.tolerance_s, stated_s)))

    def longer(self, num_samples: Array, stated_s: Array) -> Array:
        """Returns which clips have more audio than was said, bool [rows], as far as a clip is read."""
        return np.asarray(num_samples / self.sample_rate_hz > stated_s + allowed_s(self.tolerance_s, stated_s))

    def problem(self, num_samples: int) -> SampleError | None:
        """Returns why a clip of so many samples is left out, as `refused` says it; None where it is not."""
        seconds = num_samples / self.sample_rate_hz
        if seconds < self.min_s - _SLACK_S:
            return SampleError("too_short", f"{seconds:.2f} s is below source.min_duration_s {self.min_s:g}")
        if self.max_s is not None and seconds > self.max_s + _SLACK_S:
            return SampleError("too_long", f"{seconds:.2f} s is above source.max_duration_s {self.max_s:g}")
        return None

    def message(self, sample_id: str, num_samples: int, stated_s: float) -> str:
        """Returns what there is to say of a `duration_mismatch`."""
        return (
            f"sample {sample_id}: {num_samples / self.sample_rate_hz:.2f} s of audio, its manifest says "
            f"{stated_s:.2f} s; write the clip again, correct its duration, or raise source.duration_tolerance"
        )

    def _is_cut(self, num_samples: Array) -> Array:
        """Where only the first `clip_s` seconds were read: how long the clip is was not seen."""
        if self.clip_s is None:
            return np.zeros(len(num_samples), bool)
        return np.asarray(num_samples >= round(self.clip_s * self.sample_rate_hz))


@dataclass(frozen=True, slots=True)
class AudioItems:
    """Recordings of a config: an `ItemGroup`. Each row of the listing is a recording."""

    steps: AudioGroup
    limits: DurationLimits
    column: str = "audio"
    has_segments: bool = False
    """Whether rows are stretches of recordings."""
    tells: ClassVar[bool] = True
    name: ClassVar[Group] = "audio"
    unit: ClassVar[str] = "clip"
    lists: ClassVar[str | None] = None
    decoded_name: ClassVar[str] = "waveform"
    codec: ClassVar[str | None] = None
    merge_size: ClassVar[int | None] = None
    length_names: ClassVar[tuple[str, ...]] = ("num_audio_samples", "num_frames")
    read_values: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def of(cls, config: Config, steps: AudioGroup) -> Self:
        """Returns the group of a config."""
        source = config.source
        return cls(steps, DurationLimits.of(source, steps.decode), source.columns.media, source.has_segments)

    @property
    def max_sample_bytes(self) -> int:
        return self.steps.decode.max_sample_bytes

    def items(self, manifest: Manifest) -> Items:
        return Items.own(manifest.rows)

    def checked(self, manifest: Manifest) -> Manifest:
        return manifest

    def measured(self, constants: Mapping[str, Any]) -> Self:  # noqa: ARG002  its settings say it all
        return self

    def fields(self) -> tuple[FieldSpec, ...]:
        stored = [spec for step in self.steps.stored for spec in step.fields()]
        return (*self.steps.variants.fields(stored), NUM_SAMPLES, *(_OF_SEGMENTS if self.has_segments else ()))

    def lengths(self, shard: Shard) -> Array:
        values, offsets = shard.column("num_audio_samples")
        present = np.diff(offsets) > 0
        num_samples = np.zeros(len(present), np.int64)
        num_samples[present] = values[offsets[:-1][present]]
        first = self.steps.features.fields()[:1]
        frames = [shard.lengths(spec.name) for spec in self.steps.variants.fields(first)]
        return np.stack([num_samples, np.max([np.zeros_like(num_samples), *frames], axis=0)])

    def content(self, items: pa.Table, hashes: Sequence[str]) -> dict[str, Any]:
        used, inverse = np.unique(items["file"].to_numpy(), return_inverse=True)
        return {
            "files": [hashes[file] for file in used.tolist()],
            "rows": columns_digest(items.select([*_PLACE, *segment_columns(items)]), inverse),
        }

    def task_rows(self, items: pa.Table, files: Sequence[SourceFile]) -> pa.Table:
        rows = items.select(["sample_id", "file", *_PLACE, "duration_s", *segment_columns(items)])
        if not self.has_segments:
            return rows
        names = [SourceFiles.of(files).shown_names[file] for file in rows["file"].to_pylist()]
        return rows.append_column(
            "recording", joined(pa.array(names, pa.large_string()), _behind(rows["member"], names))
        )

    def samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:
        block: list[tuple[str, Values, Array | None]] = []
        held = 0
        said = [*segment_columns(rows), *(["recording"] if self.has_segments else [])]
        said += [name for name in (NUM_SAMPLES.name,) if name in rows.column_names]
        for position, row in enumerate(rows.select(["sample_id", "file", "offset", "size", *said]).to_pylist()):
            mark(position)
            values: Values = {}
            audio = None
            try:
                data = read(row["file"], row["offset"], row["size"], segment_of(row))
                with span(DECODE):
                    audio = _clip(self.steps, data, sample_id=row["sample_id"])
                values["num_audio_samples"] = np.int64(self.steps.features.num_samples(audio))
                _require_told(row, len(audio))
                if self.has_segments:
                    values |= self._place_of(row, len(audio))
                held += audio.size
            except SampleError as err:
                values = {"failure": err.reason, "message": str(err)}
            block.append((row["sample_id"], values, audio))
            if held >= _BLOCK_SAMPLES:
                yield from _with_features(self.steps, block)
                block, held = [], 0
        yield from _with_features(self.steps, block)

    def _place_of(self, row: Mapping[str, Any], num_samples: int) -> Values:
        """Returns what the row table says of where a sample lies."""
        end_s = row["end_s"]
        if np.isnan(end_s):
            end_s = row["start_s"] + num_samples / self.steps.decode.sample_rate_hz
        return {"recording": row["recording"], "start_s": row["start_s"], "end_s": end_s, "channel": row["channel"]}

    def under(self, codec: Codec) -> Self:  # noqa: ARG002  there is one way
        return self

    def told(self, items: pa.Table) -> list[Any]:
        return [None] * len(items)

    def probe_told(self, place: int) -> Any:  # noqa: ARG002  prompts are told nothing
        return None

    def listed_lengths(self, items: pa.Table, files: Sequence[SourceFile]) -> dict[str, Array]:
        # Exact headers (FLAC, WAV) give those of the cache; else it is the manifest, which a warning says.
        decode, exact = self.steps.decode, exact_lengths(items, files, self.steps.decode)
        seconds = np.nan_to_num(items["duration_s"].to_numpy())
        if decode.clip_s is not None:
            seconds = np.minimum(seconds, decode.clip_s)
        stated = np.maximum(1, np.rint(seconds * decode.sample_rate_hz)).astype(np.int64)
        is_stated = exact == UNKNOWN
        if is_stated.any() and self.steps.features.reads_sound:  # else the listing counted frames
            logger.warning(
                "the lengths of %d of %d samples are the manifest's or a header's estimate, since no FLAC or WAV "
                "header says them exactly: batches may differ from those of the cache, and a state saved here is then "
                "refused there",
                is_stated.sum(),
                len(exact),
            )
        samples = np.where(is_stated, stated, exact)
        longest = self.steps.variants.longest(samples)
        return {"num_audio_samples": samples, "num_frames": self.steps.features.num_frames(longest)}

    def check(self, values: Mapping[str, Any], row: pa.Table) -> None:
        count, stated_s = values["num_audio_samples"], row["stated_s"].to_numpy()
        if self.limits.shorter(np.array([count]), stated_s)[0]:
            name = str(row["sample_id"][0].as_py())
            raise SampleError("duration_mismatch", self.limits.message(name, int(count), float(stated_s[0])))

    def joined(self, sample: dict[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        (own,) = items
        return {**own, **sample}

    def decoded(self, data: bytes, *, sample_id: str) -> Array:
        return decode_audio(data, self.steps.decode, sample_id=sample_id)

    def constants(self) -> dict[str, Any]:
        features = self.steps.features
        own = {**features.constants, **self.steps.variants.constants}
        return {"features": features.form(), "sample_rate_hz": self.steps.decode.sample_rate_hz, **own}

    def probe(self) -> str:
        return values_digest(self.probed())

    def probed(self) -> Iterator[Values]:
        """Yields what is made of three clips at three rates, or of three matrices.

        It moves exactly when libsndfile's, soxr's, numpy's or the CPU's numerics move, which no version string says.
        """
        features = self.steps.features
        inputs = probe_sounds() if features.reads_sound else probe_features(features.fields()[0].shape[0])
        count = len(inputs)
        rows = pa.table(
            {
                "sample_id": [f"probe-{i}" for i in range(count)],
                "file": list(range(count)),
                "offset": [0] * count,
                "size": [-1] * count,
            }
        )
        return replace(self, has_segments=False).samples(rows, lambda file, *_: inputs[file])

    def estimate_bytes(self, items: pa.Table) -> int:
        # Exact where the manifest's durations are.
        seconds, decode = np.nan_to_num(items["duration_s"].to_numpy()), self.steps.decode
        if decode.clip_s is not None:
            seconds = np.minimum(seconds, decode.clip_s)
        samples = np.round(seconds * decode.sample_rate_hz).astype(np.int64)
        speeds = [1.0, *self.steps.variants.factors]
        return sum(
            step.size_bytes((samples / speed).astype(np.int64)) for speed in speeds for step in self.steps.stored
        )

    def refused(self, lengths: Mapping[str, Array], rows: pa.Table, why: Coder) -> Array:
        # What was decoded is held against the manifest and the duration filters.
        return self.limits.refused(lengths["num_audio_samples"], rows["stated_s"].to_numpy(), why)

    def refusals(self, lengths: Mapping[str, Array], rows: pa.Table, codes: Array, why: Coder) -> tuple[Failure, ...]:
        found = np.flatnonzero(codes == why.number("duration_mismatch"))
        taken = rows.select(["sample_id", "stated_s"]).take(pa.array(found)).to_pylist()
        return tuple(
            Failure(
                sample_id=row["sample_id"],
                reason="duration_mismatch",
                message=self.limits.message(row["sample_id"], count, row["stated_s"]),
            )
            for row, count in zip(taken, lengths["num_audio_samples"][found].tolist(), strict=True)
        )

    def summary(self, lengths: Mapping[str, Array], rows: pa.Table, items: Items, keep: Array) -> dict[str, Any]:  # noqa: ARG002
        num_samples, variants = lengths["num_audio_samples"], self.steps.variants
        return {
            "clipped": self._num_clipped(num_samples, rows, keep),
            "longer": self._num_longer(num_samples, rows, keep),
            **({"without_variant": variants.num_missing(num_samples[keep])} if variants.factors else {}),
        }

    def _num_clipped(self, num_samples: Array, rows: pa.Table, keep: Array) -> int:
        """Samples of which only the first `clip_s` seconds were taken."""
        clip_s, rate = self.steps.decode.clip_s, self.steps.decode.sample_rate_hz
        if clip_s is None:
            return 0
        # A clip that ends just at the limit lost nothing; a manifest that says less than was decoded is wrong about it.
        lost = np.abs(rows["duration_s"].to_numpy() - clip_s) > 1 / rate
        return int(((num_samples >= round(clip_s * rate)) & lost & keep).sum())

    def _num_longer(self, num_samples: Array, rows: pa.Table, keep: Array) -> int:
        """Samples of more audio than their manifest says, which are named; a text may not be of all of it."""
        longer = np.flatnonzero(self.limits.longer(num_samples, rows["stated_s"].to_numpy()) & keep)
        if len(longer):
            names = rows["sample_id"].take(pa.array(longer[:_NAMED])).to_pylist()
            logger.warning(
                "%d samples are longer than their manifest says and kept as they are; the first: %s", len(longer), names
            )
        return len(longer)


def _require_told(row: Mapping[str, Any], found: int) -> None:
    """Raises SampleError where a clip has another length than its header said, by which texts were written."""
    wanted = row.get(NUM_SAMPLES.name, found)
    if found != wanted:
        raise SampleError(
            "header_mismatch",
            f"{row['sample_id']}: by its header it has {wanted} samples at the rate of the features, decoded are "
            f"{found}; write it again",
        )


def _clip(steps: AudioGroup, data: bytes, *, sample_id: str) -> Array:
    if not steps.features.reads_sound:
        return steps.features.opened(data)
    return decode_audio(data, steps.decode, sample_id=sample_id, want=(steps.waveform or steps.features).clip_dtype)


def _with_features(steps: AudioGroup, block: Sequence[tuple[str, Values, Array | None]]) -> Iterator[Values]:
    decoded = [audio for _, _, audio in block if audio is not None]
    try:
        made = iter(_compute(steps, decoded))
    except (BuildError, ConfigError) as err:
        raise _named(err, steps, block) from err
    for _, values, audio in block:
        if audio is None:
            yield values
            continue
        result = next(made)
        if isinstance(result, SampleError):
            # Without its length: a failed row has no values.
            yield {"failure": result.reason, "message": str(result)}
        else:
            yield {**values, **result}


def _named(err: ForebayError, steps: AudioGroup, block: Sequence[tuple[str, Values, Array | None]]) -> ForebayError:
    """Returns what stops a build with the sample that it is of: the first for which the steps raise it alone."""
    for sample_id, _, audio in block:
        try:
            if audio is not None:
                _compute(steps, [audio])
        except (BuildError, ConfigError) as of_one:
            kind = BuildError if isinstance(err, BuildError) else ConfigError
            return kind(f"sample {sample_id}: {of_one}", code=of_one.code)
    return err


def _compute(steps: AudioGroup, waveforms: Sequence[Array]) -> list[Mapping[str, Array] | SampleError]:
    if not waveforms:
        return []
    try:
        with span(FEATURES):
            return list(steps.variants.made(waveforms, partial(_all_features, steps)))
    except SampleError as err:
        if len(waveforms) == 1:
            return [err]
    # One of them cannot be used. Features do not depend on neighbours, so asking one by one changes no byte of the
    # rest.
    results: list[Mapping[str, Array] | SampleError] = []
    for waveform in waveforms:
        try:
            results += steps.variants.made([waveform], partial(_all_features, steps))
        except SampleError as err:
            results.append(err)
    return results


def _all_features(steps: AudioGroup, waveforms: Sequence[Array]) -> list[Mapping[str, Array]]:
    clips = waveforms
    if "int16" not in steps.features.clip_dtypes:
        clips = [w.astype(np.float32) / np.float32(32768) if w.dtype == np.int16 else w for w in waveforms]
    made = [step.compute(waveforms if step is steps.waveform else clips) for step in steps.stored]
    return [{name: values for fields in each for name, values in fields.items()} for each in zip(*made, strict=True)]
