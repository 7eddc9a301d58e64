"""Speech: recordings and transcripts, or texts alone. What was decoded is compared with what was stated."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.data import SOURCE_KINDS, SourceConfig
from forebay.config.tree import Config
from forebay.preprocess.cut import Cut, name_cuts
from forebay.preprocess.modality import Coder, Finished, Listing, Read, Rows, Values, gathered, narrow
from forebay.preprocess.speech.probe import media_probe, text_probe
from forebay.preprocess.speech.samples import (
    constants,
    loaded_encoder,
    media_samples,
    sample_fields,
    text_samples,
)
from forebay.preprocess.workspace import Failure
from forebay.rows.kept_columns import PREFIX, column_of, fields_of
from forebay.rows.list_recordings import read_rows
from forebay.rows.manifest import Manifest
from forebay.rows.meanings.recording_pieces import allowed_s
from forebay.steps.audio.waveform import Decode
from forebay.steps.recipe import Recipe
from forebay.store.layout import GROUPS, Array, FieldSpec, Group
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.sources import localized
from forebay.store.shard import Shard
from forebay.store.source_files import SourceFile
from forebay.store.texts import TextStore
from forebay.task_map import Map

logger = logging.getLogger(__name__)

_NAMED = 5
"""Ids that a warning lists."""

TEXT_SHARD_ROWS = 8
"""How many times `layout.rows_per_shard` a shard of texts without audio holds; part of where shards begin."""

_NOT_OF: Mapping[Group, frozenset[str]] = {
    "media": frozenset(("text", "language", "prompt", "stated_s")),
    "text": frozenset(("member", "offset", "size", "duration_s", "stated_s")),
}
"""Columns of a listing that a group's task has no use for."""

_SLACK_S = 0.1
"""A manifest's rounded duration passed the filter once; only a real difference is one."""

_TOKENS_PER_BYTE = 0.5
_OVERHEAD_BYTES = 160
"""What a sample costs beside its values: offsets, hashes, id, lengths."""


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
        return np.asarray(~self._is_cut(num_samples) & (seconds < stated_s - self._allowed_s(stated_s)))

    def longer(self, num_samples: Array, stated_s: Array) -> Array:
        """Returns which clips have more audio than was said, bool [rows], as far as a clip is read."""
        return np.asarray(num_samples / self.sample_rate_hz > stated_s + self._allowed_s(stated_s))

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

    def _allowed_s(self, stated_s: Array) -> Array:
        return allowed_s(self.tolerance_s, stated_s)


@dataclass(frozen=True, slots=True)
class Speech:
    """A config's steps over audio: a `Modality`.

    tokenizer: its folder; None for a recipe without text. kept: the fields of `source.keep_columns`.
    needs_text: a row without a text is left out. texts: what was made of texts, under the cache root.
    """

    recipe: Recipe
    tokenizer: str | None
    limits: DurationLimits
    media_column: str = "audio"
    kept: tuple[FieldSpec, ...] = ()
    needs_text: bool = False
    texts: TextStore | None = None
    media_unit = "clip"
    row_unit = "samples"

    @classmethod
    def of(cls, config: Config, recipe: Recipe) -> Speech:
        """Returns the modality of a config."""
        limits = DurationLimits.of(config.source, recipe.decode)
        return cls(
            recipe,
            config.text.tokenizer if config.text else None,
            limits,
            config.source.columns.media,
            needs_text=SOURCE_KINDS[config.source.kind].needs_text,
            texts=TextStore(config.cache_root) if recipe.tokens is not None else None,
        )

    @property
    def max_sample_bytes(self) -> int:
        return self.recipe.decode.max_sample_bytes

    @property
    def groups(self) -> tuple[Group, ...]:
        """Text alone where there is no audio."""
        return GROUPS if self.recipe.has_audio else ("text",)

    @property
    def read_values(self) -> frozenset[str]:
        """None."""
        return frozenset()

    @property
    def length_names(self) -> tuple[str, ...]:
        """Audio samples, feature frames, tokens."""
        return ("num_audio_samples", "num_frames", "num_tokens")

    def manifest(self, config: Config, *, map_: Map = map, is_hashed: bool = False) -> Manifest:
        forget()
        source = localized(config).source
        return read_rows(source, cache_root=config.cache_root, map_=map_, is_hashed=is_hashed)

    def keeping(self, rows: pa.Table) -> Speech:
        if self.recipe.tokens is not None:
            self.recipe.tokens.check_columns(partial(_different, rows))
        return replace(self, kept=fields_of(rows))

    def measured(self, constants: Mapping[str, Any]) -> Speech:  # noqa: ARG002  its settings say it all
        return self

    def fields(self) -> tuple[FieldSpec, ...]:
        return (*sample_fields(self.recipe), *self.kept)

    def shard_rows(self, rows_per_shard: int) -> int:
        # Tokens are small.
        return rows_per_shard if self.recipe.has_audio else rows_per_shard * TEXT_SHARD_ROWS

    def cuts(self, listing: Listing, *, probe: Mapping[Group, str], rows_per_shard: int) -> Iterator[Cut]:
        return name_cuts(
            self.recipe,
            listing.rows,
            names=[file.name for file in listing.files],
            hashes=listing.hashes,
            probe=probe,
            rows_per_shard=self.shard_rows(rows_per_shard),
            groups=self.groups,
            needs_text=self.needs_text,
        )

    def task_rows(self, listing: Listing, cut: Cut, group: Group) -> tuple[tuple[SourceFile, ...], pa.Table]:
        columns = [name for name in listing.rows.column_names if name not in _NOT_OF[group]]
        if group == "media":
            columns = [name for name in columns if not name.startswith(PREFIX)]
        return narrow(listing.rows.select(columns).slice(cut.start, cut.stop - cut.start), listing.files)

    def media_samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:
        return media_samples(self.recipe, rows, read)

    def text_samples(self, rows: pa.Table, names: Sequence[str]) -> Iterator[Values]:
        encoder = loaded_encoder(self.recipe, self.tokenizer)
        made = text_samples(rows, names, encoder, needs_text=self.needs_text, store=self.texts)
        if self.recipe.has_audio:
            return made
        # No other group holds the ids.
        return ({"sample_id": i, **values} for i, values in zip(rows["sample_id"].to_pylist(), made, strict=True))

    def used_by(self, listing: Listing, rows: pa.Table, *, group: Group, position: int) -> tuple[str, list[str]]:  # noqa: ARG002
        sample_id = rows["sample_id"][position].as_py()
        return f"sample {sample_id!r}", [sample_id]

    def constants(self) -> dict[str, Any]:
        return constants(self.recipe, loaded_encoder(self.recipe, self.tokenizer))

    def probe(self, group: Group) -> str:
        if group == "media":
            return media_probe(self.recipe)
        return text_probe(loaded_encoder(self.recipe, self.tokenizer))

    def estimate_bytes(self, listing: Listing) -> int:
        return estimate_bytes(self.recipe, listing.rows)

    def read_rows(self, finished: Finished, listing: Listing) -> Rows:
        rows, why = gathered(self.fields(), finished, reasons=self._reasons, lengths=self._lengths)
        # What was decoded is held against the manifest and the duration filters.
        late = self.limits.refused(rows.lengths[0], listing.rows["stated_s"].to_numpy(), why)
        codes = np.where(rows.reasons.codes, rows.reasons.codes, late)
        failures = self._mismatches(listing, rows.lengths[0], codes == why.number("duration_mismatch"))
        return replace(rows, reasons=why.coded(codes), failures=failures)

    @staticmethod
    def _reasons(media: Shard | None, text: Shard, why: Coder) -> Array:
        failed = why.column(text, "failure")
        unheard = failed if media is None else why.column(media, "failure")
        return np.where(unheard, unheard, failed)

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


def _different(rows: pa.Table, name: str) -> list[str]:
    """Returns the different values of a kept column as texts, sorted."""
    return sorted(str(value) for value in column_of(rows, name).unique().to_pylist() if value is not None)


def _audio_lengths(media: Shard) -> tuple[Array, Array]:
    """Returns audio samples and stored frames of every row, int64 [rows]; 0 where a row failed."""
    values, offsets = media.column("num_audio_samples")
    present = np.diff(offsets) > 0
    num_samples = np.zeros(len(present), np.int64)
    num_samples[present] = values[offsets[:-1][present]]
    return num_samples, media.lengths(media.fields[0].name)


def estimate_bytes(recipe: Recipe, rows: pa.Table) -> int:
    """Returns the expected size in bytes: exact for media where the manifest's durations are, about right for text."""
    seconds = np.nan_to_num(rows["duration_s"].to_numpy())
    if recipe.decode.clip_s is not None:
        seconds = np.minimum(seconds, recipe.decode.clip_s)
    samples = np.round(seconds * recipe.decode.sample_rate_hz).astype(np.int64)
    total = sum(step.size_bytes(samples) for step in recipe.stored)
    text_bytes: int = sum(chunk.nbytes for name in ("text", "prompt", "language") for chunk in rows[name].chunks)
    tokens = int(4 * _TOKENS_PER_BYTE * text_bytes) if recipe.tokens is not None else 0
    return total + text_bytes + tokens + _OVERHEAD_BYTES * len(rows)
