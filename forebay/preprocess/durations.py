"""What was decoded against what was said of it: the duration filters again, and a manifest that promises more or less audio."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forebay.config import SourceConfig
from forebay.preprocess.modality import Coder
from forebay.steps.audio.waveform import Decode
from forebay.store.layout import Array

_SLACK_S = 0.1
"""A manifest's rounded duration passed the filter once; only a real difference is one."""
_LEAST_S, _SHARE = 0.5, 0.05
"""Without `source.duration_tolerance`: the larger of these seconds and this share of the stated duration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DurationLimits:
    """The duration settings of `[source]`, and what decoding does to a duration.

    Below, num_samples: int [rows], decoded, at `sample_rate_hz`; 0 where a row failed. stated_s: float64 [rows], what the
    manifest says, or the metadata beside the clip; NaN where neither does.
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
        """Returns which clips have more audio than was said, bool [rows]; of one that is clipped as far as it is read."""
        return np.asarray(num_samples / self.sample_rate_hz > stated_s + self._allowed_s(stated_s))

    def message(self, sample_id: str, num_samples: int, stated_s: float) -> str:
        """Returns what there is to say of a `duration_mismatch`."""
        return (
            f"sample {sample_id}: {num_samples / self.sample_rate_hz:.2f} s of audio, its manifest says {stated_s:.2f} s; write "
            "the clip again, correct its duration, or raise source.duration_tolerance"
        )

    def _is_cut(self, num_samples: Array) -> Array:
        """Where only the first `clip_s` seconds were read: how long the clip is was not seen."""
        if self.clip_s is None:
            return np.zeros(len(num_samples), bool)
        return np.asarray(num_samples >= round(self.clip_s * self.sample_rate_hz))

    def _allowed_s(self, stated_s: Array) -> Array:
        if self.tolerance_s is not None:
            return np.full(len(stated_s), self.tolerance_s)
        return np.maximum(_LEAST_S, _SHARE * stated_s)
