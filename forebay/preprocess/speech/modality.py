"""The speech line: recordings and transcripts.

How large a cache will be, from durations alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.preprocess.cut import Cut, name_cuts
from forebay.preprocess.durations import DurationLimits
from forebay.preprocess.listing import Listing, narrow
from forebay.preprocess.modality import Coder, Finished, Rows
from forebay.preprocess.speech.probe import media_probe, text_probe
from forebay.preprocess.speech.samples import (
    Read,
    Values,
    constants,
    loaded_encoder,
    media_samples,
    sample_fields,
    text_samples,
)
from forebay.preprocess.workspace import Failure
from forebay.steps.recipe import Recipe
from forebay.store.layout import GROUPS, ROW_BITS, Array, FieldSpec, Group
from forebay.store.shard import Shard, shard_fields
from forebay.store.source_files import SourceFile

if TYPE_CHECKING:
    from forebay.preprocess.shard_task import ShardTask

logger = logging.getLogger(__name__)


_NAMED = 5
"""Ids that a warning lists."""


TEXT_SHARD_ROWS = 16
"""How many times `layout.rows_per_shard` a shard of texts without audio holds; part of where shards begin."""


_NOT_OF: Mapping[Group, frozenset[str]] = {
    "media": frozenset(("text", "language", "prompt", "stated_s")),
    "text": frozenset(("member", "offset", "size", "duration_s", "stated_s")),
}
"""Columns of a listing that a group's task has no use for."""


@dataclass(frozen=True, slots=True)
class SpeechLine:
    """A config's steps over audio. tokenizer: its folder; None for a recipe without text."""

    recipe: Recipe
    tokenizer: str | None
    limits: DurationLimits

    @classmethod
    def of(cls, config: Config, recipe: Recipe) -> SpeechLine:
        """Returns the line of a config."""
        limits = DurationLimits.of(config.source, recipe.decode)
        return cls(recipe, config.text.tokenizer if config.text else None, limits)

    @property
    def max_sample_bytes(self) -> int:
        """Of one encoded recording."""
        return self.recipe.decode.max_sample_bytes

    @property
    def groups(self) -> tuple[Group, ...]:
        """Text alone where there is no audio."""
        return GROUPS if self.recipe.has_audio else ("text",)

    @property
    def length_names(self) -> tuple[str, ...]:
        """Audio samples, feature frames, tokens."""
        return ("num_samples", "num_frames", "num_tokens")

    def fields(self) -> tuple[FieldSpec, ...]:
        """See `Line`."""
        return sample_fields(self.recipe)

    def shard_rows(self, rows_per_shard: int) -> int:
        """See `Line`: tokens are small, so shards of texts alone hold TEXT_SHARD_ROWS times as many."""
        return rows_per_shard if self.recipe.has_audio else rows_per_shard * TEXT_SHARD_ROWS

    def cuts(self, listing: Listing, *, probe: Mapping[Group, str], rows_per_shard: int) -> Iterator[Cut]:
        """See `Line`."""
        return name_cuts(
            self.recipe,
            listing.rows,
            names=[file.name for file in listing.files],
            hashes=listing.hashes,
            probe=probe,
            rows_per_shard=self.shard_rows(rows_per_shard),
            groups=self.groups,
        )

    def task_rows(self, listing: Listing, cut: Cut, group: Group) -> tuple[tuple[SourceFile, ...], pa.Table]:
        """See `Line`: both groups have the same rows."""
        columns = [name for name in listing.rows.column_names if name not in _NOT_OF[group]]
        return narrow(listing.rows.select(columns).slice(cut.start, cut.stop - cut.start), listing.files)

    def media_samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:
        """See `Line`."""
        return media_samples(self.recipe, rows, read)

    def text_samples(self, rows: pa.Table, names: Sequence[str]) -> Iterator[Values]:
        """See `Line`. Without audio no other group holds the ids."""
        made = text_samples(rows, names, loaded_encoder(self.recipe, self.tokenizer))
        if self.recipe.has_audio:
            return made
        return ({"sample_id": i, **values} for i, values in zip(rows["sample_id"].to_pylist(), made, strict=True))

    def used_by(self, listing: Listing, task: ShardTask, position: int) -> tuple[str, list[str]]:  # noqa: ARG002
        """See `Line`: a row is a sample."""
        sample_id = task.rows["sample_id"][position].as_py()
        return f"sample {sample_id!r}", [sample_id]

    def constants(self) -> dict[str, Any]:
        """See `Line`."""
        return constants(self.recipe, loaded_encoder(self.recipe, self.tokenizer))

    def probe(self, group: Group) -> str:
        """See `Line`."""
        if group == "media":
            return media_probe(self.recipe)
        return text_probe(loaded_encoder(self.recipe, self.tokenizer))

    def estimate_bytes(self, listing: Listing) -> int:
        """See `Line`."""
        return estimate_bytes(self.recipe, listing.rows)

    def read_rows(self, finished: Finished, listing: Listing) -> Rows:
        """See `Line`; what was decoded is held against the manifest and the duration filters."""
        slots, reasons, languages, lengths = [], [], [], []
        why, spoken = Coder(), Coder()
        fields = self.fields()
        for index, (path, entry) in enumerate(finished["text"]):
            text = Shard(path, entry, shard_fields(fields, "text"))
            media = Shard(*finished["media"][index], shard_fields(fields, "media")) if "media" in finished else None
            slots.append((np.int64(index) << ROW_BITS) | np.arange(entry.rows, dtype=np.int64))
            languages.append(spoken.column(text, "language"))
            failed = why.column(text, "failure")
            if media is not None:
                unheard = why.column(media, "failure")
                failed = np.where(unheard, unheard, failed)
            reasons.append(failed)
            lengths.append(as_int32(self._lengths(media, text)))
        table = np.concatenate([np.zeros((3, 0), np.int32), *lengths], axis=1)
        codes = np.concatenate([np.zeros(0, np.int32), *reasons])
        late = self.limits.refused(table[0], listing.rows["stated_s"].to_numpy(), why)
        codes = np.where(codes, codes, late)
        return Rows(
            slots=np.concatenate([np.zeros(0, np.int64), *slots]),
            reasons=why.coded(codes),
            languages=spoken.coded(np.concatenate([np.zeros(0, np.int32), *languages])),
            lengths=table,
            failures=self._mismatches(listing, table[0], codes == why.number("duration_mismatch")),
        )

    def _mismatches(self, listing: Listing, num_samples: Array, found: Array) -> tuple[Failure, ...]:
        rows = np.flatnonzero(found)
        taken = listing.rows.select(["sample_id", "stated_s"]).take(pa.array(rows)).to_pylist()
        return tuple(
            Failure(
                sample_id=row["sample_id"],
                reason="duration_mismatch",
                message=self.limits.message(row["sample_id"], count, row["stated_s"]),
            )
            for row, count in zip(taken, num_samples[rows].tolist(), strict=True)
        )

    def summary(self, listing: Listing, rows: Rows, keep: Array) -> dict[str, Any]:
        """See `Line`."""
        return {
            "clipped": self._num_clipped(listing, rows, keep),
            "longer": self._num_longer(listing, rows, keep),
            "languages": self._languages(rows, keep),
        }

    def _lengths(self, media: Shard | None, text: Shard) -> Array:
        none = np.zeros(text.entry.rows, np.int64)
        num_samples, num_frames = (none, none) if media is None else _audio_lengths(media)
        num_tokens = text.lengths("input_ids") if self.recipe.tokens is not None else none
        return np.stack([num_samples, num_frames, num_tokens])

    def _num_clipped(self, listing: Listing, rows: Rows, keep: Array) -> int:
        """Samples of which only the first `clip_s` seconds were taken."""
        if self.recipe.decode.clip_s is None:
            return 0
        rate = self.recipe.decode.sample_rate_hz
        reached = rows.lengths[0] >= round(self.recipe.decode.clip_s * rate)
        # A clip that ends just at the limit lost nothing; a manifest that says less than was decoded is wrong about it.
        lost = np.abs(listing.rows["duration_s"].to_numpy() - self.recipe.decode.clip_s) > 1 / rate
        return int((reached & lost & keep).sum())

    def _num_longer(self, listing: Listing, rows: Rows, keep: Array) -> int:
        """Samples of more audio than their manifest says, which are named; a text may not be of all of it."""
        stated_s = listing.rows["stated_s"].to_numpy()
        longer = np.flatnonzero(self.limits.longer(rows.lengths[0], stated_s) & keep)
        if len(longer):
            names = listing.rows["sample_id"].take(pa.array(longer[:_NAMED])).to_pylist()
            logger.warning(
                "%d samples are longer than their manifest says and kept as they are; the first: %s", len(longer), names
            )
        return len(longer)

    def _languages(self, rows: Rows, keep: Array) -> dict[str, Any]:
        samples = rows.languages.counts(keep).tolist()
        seconds = (rows.languages.counts(keep, rows.lengths[0]) / self.recipe.decode.sample_rate_hz).tolist()
        return {
            name or "unknown": {"samples": count, "hours": length / 3600}
            for name, count, length in sorted(zip(rows.languages.names, samples, seconds, strict=True))
            if count
        }


def _audio_lengths(media: Shard) -> tuple[Array, Array]:
    """Returns audio samples and stored frames of every row, int64 [rows]; 0 where a row failed."""
    values, offsets = media.column("num_samples")
    present = np.diff(offsets) > 0
    num_samples = np.zeros(len(present), np.int64)
    num_samples[present] = values[offsets[:-1][present]]
    return num_samples, media.lengths(media.fields[0].name)


def as_int32(lengths: Array) -> Array:
    """Returns lengths as `lengths.npy` holds them. Raises OverflowError for a sample that no int32 can count."""
    if lengths.size and lengths.max() > np.iinfo(np.int32).max:
        raise OverflowError(f"a sample of {lengths.max()} elements does not fit int32 lengths")
    return lengths.astype("<i4")


_TOKENS_PER_BYTE = 0.5


_OVERHEAD_BYTES = 160
"""Of one sample: offsets, hashes, id, lengths."""


def estimate_bytes(recipe: Recipe, rows: pa.Table) -> int:
    """Returns the expected size in bytes: exact for media where the manifest's durations are, about right for text."""
    seconds = np.nan_to_num(rows["duration_s"].to_numpy())
    if recipe.decode.clip_s is not None:
        seconds = np.minimum(seconds, recipe.decode.clip_s)
    samples = np.round(seconds * recipe.decode.sample_rate_hz).astype(np.int64)
    total = 0
    for step in (recipe.features, recipe.waveform):
        if step is not None and (fields := step.fields()):
            width = fields[0].numpy_dtype.itemsize * int(np.prod(fields[0].shape, dtype=np.int64))
            total += width * int(np.sum(step.num_frames(samples)))
    text_bytes: int = sum(chunk.nbytes for name in ("text", "prompt", "language") for chunk in rows[name].chunks)
    tokens = int(4 * _TOKENS_PER_BYTE * text_bytes) if recipe.tokens is not None else 0
    return total + text_bytes + tokens + _OVERHEAD_BYTES * len(rows)
