"""The group `audio` where conversations list its items: clips, each content stored once a source file.

A text is written by the lengths that headers say; a clip that turns out to have another one costs its sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.errors import SampleError
from forebay.preprocess.audio_group import NUM_SAMPLES, AudioItems, decoded_length
from forebay.preprocess.decode import FilmClips
from forebay.preprocess.group import Coder, Items, Read, Values, columns_digest, item_names, without
from forebay.preprocess.workspace import Failure
from forebay.rows.manifest import LISTS, Manifest
from forebay.rows.segments import segment_columns, segment_of
from forebay.steps.audio.audio_section import AudioGroup, in_conversations
from forebay.store.image.stored_items import StoredFields
from forebay.store.layout import Array, FieldSpec
from forebay.store.shard import Shard
from forebay.store.sound_containers import AudioInfo
from forebay.store.source_files import SourceFile

AUDIO_HASH = FieldSpec(name="audio_hash", dtype="str", role="table")


@dataclass(frozen=True, slots=True)
class ClipItems(AudioItems):
    """Clips of a config: an `ItemGroup`. Rows list them."""

    lists: ClassVar[str | None] = LISTS["audio"]
    decoded_name: ClassVar[str] = LISTS["audio"]
    length_names: ClassVar[tuple[str, ...]] = ("num_audios", *AudioItems.length_names)

    def fields(self) -> tuple[FieldSpec, ...]:
        return (*super(ClipItems, self).fields(), AUDIO_HASH)

    def lengths(self, shard: Shard) -> Array:
        return np.concatenate([np.ones((1, shard.entry.rows), np.int64), super(ClipItems, self).lengths(shard)])

    def samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:
        read = FilmClips(read, self.max_sample_bytes)
        hashes = rows["hash"].to_pylist() if "hash" in rows.column_names else [""] * len(rows)
        for found, values in zip(hashes, super(ClipItems, self).samples(rows, read), strict=True):
            yield {AUDIO_HASH.name: found, **values}

    def items(self, manifest: Manifest) -> Items:
        return Items.listed(manifest.rows, LISTS[self.name], manifest.items[self.name])

    def checked(self, manifest: Manifest) -> Manifest:
        """Returns the manifest with `num_audio_samples` of the clips as they will be decoded, see `ItemGroup`."""
        clips = manifest.items[self.name]
        rows = clips.select(["num_samples", "sample_rate_hz", *segment_columns(clips)]).to_pylist()
        headers = [AudioInfo(row["sample_rate_hz"], _told_samples(row), 1, "") for row in rows]
        lengths = [decoded_length(info, self.steps.decode) for info in headers]
        clips = clips.append_column(NUM_SAMPLES.name, pa.array(lengths, pa.int64()))
        found = (
            self._no_stretch(row, length) or self.limits.problem(length) or self.steps.features.refused(length)
            for row, length in zip(rows, lengths, strict=True)
        )
        refused = {place: error for place, error in enumerate(found) if error is not None}
        return without(replace(manifest, items={**manifest.items, self.name: clips}), self.name, refused)

    def _no_stretch(self, row: Mapping[str, Any], num_samples: int) -> SampleError | None:
        """Why a clip is no stretch of its recording, in the reasons of rows that are segments; None where it is whole.

        row: of `checked`. num_samples: of the stretch, as it will be decoded.
        """
        if (segment := segment_of(row)) is None:
            return None
        rate_hz, is_nothing = row["sample_rate_hz"], num_samples < 0
        start, stop = segment.frames(rate_hz)
        if is_nothing and start == stop:
            return SampleError("bad_segment", f"less than a sample at {rate_hz} Hz; correct the row")
        if is_nothing:
            said = f"its recording has {row['num_samples'] / rate_hz:.2f} s; correct the row"
            return SampleError("segment_past_end", said)
        if self.limits.shorter(np.array([num_samples]), np.array([segment.end_s - segment.start_s]))[0]:
            seconds = f"{num_samples / self.limits.sample_rate_hz:.2f} s"
            said = f"its recording has {seconds} of it; correct the row, or raise source.duration_tolerance"
            return SampleError("duration_mismatch", said)
        return None

    def content(self, items: pa.Table, hashes: Sequence[str]) -> dict[str, Any]:  # noqa: ARG002  each has its own
        return {"clips": columns_digest(items.select(["hash"]))}

    def task_rows(self, items: pa.Table, files: Sequence[SourceFile]) -> pa.Table:
        rows = items.select(["file", "offset", "size", "hash", NUM_SAMPLES.name, *segment_columns(items)])
        return rows.append_column("sample_id", pa.array(item_names(items, files), pa.large_string()))

    def told(self, items: pa.Table) -> list[Any]:
        return list(items[NUM_SAMPLES.name].to_pylist())

    def probe_told(self, place: int) -> Any:
        return (8_000, 30_000)[place]

    def listed_lengths(self, items: pa.Table, files: Sequence[SourceFile]) -> dict[str, Array]:  # noqa: ARG002
        samples = items[NUM_SAMPLES.name].to_numpy()
        return {
            "num_audios": np.ones_like(samples),
            "num_audio_samples": samples,
            "num_frames": self.steps.features.num_frames(samples),
        }

    def joined(self, sample: dict[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return StoredFields(tuple(spec for spec in self.fields() if spec.role == "tensor")).sample(sample, items)

    def estimate_bytes(self, items: pa.Table) -> int:
        return sum(step.size_bytes(items[NUM_SAMPLES.name].to_numpy()) for step in self.steps.stored)

    def refused(self, lengths: Mapping[str, Array], rows: pa.Table, why: Coder) -> Array:  # noqa: ARG002  see `checked`
        return np.zeros(len(rows), np.int32)

    def refusals(self, lengths: Mapping[str, Array], rows: pa.Table, codes: Array, why: Coder) -> tuple[Failure, ...]:  # noqa: ARG002
        return ()

    def summary(self, lengths: Mapping[str, Array], rows: pa.Table, items: Items, keep: Array) -> dict[str, Any]:  # noqa: ARG002
        return {"clipped": self._num_cut(items.table), "num_audios": items.different}

    def _num_cut(self, clips: pa.Table) -> int:
        """Clips of which only the first `clip_s` seconds were taken."""
        if (limit := self.steps.decode.clip_s) is None:
            return 0
        rows = clips.select(["num_samples", "sample_rate_hz", *segment_columns(clips)]).to_pylist()
        return sum(_told_samples(row) / row["sample_rate_hz"] > limit for row in rows)


def _told_samples(row: Mapping[str, Any]) -> int:
    """Returns how many samples a clip has at its own rate, by the header of its recording."""
    count, segment = int(row["num_samples"]), segment_of(row)
    return count if segment is None else segment.samples_of(count, row["sample_rate_hz"])


def audio_items_of(config: Config, steps: AudioGroup) -> AudioItems:
    """Returns the group of a config: clips that conversations list, or rows that are recordings."""
    return (ClipItems if in_conversations(config) else AudioItems).of(config, steps)
