"""Random crops: which part of a clip an epoch takes, and the batch of these parts.

A crop is a function of (seed, epoch, sample id) and the clip's length alone. Rank, world size, thread, order and place
in the epoch do not enter, so a crop is the same after any resume and in any loader, cached or not, and in a mixture of
caches as in each by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forebay.errors import ConfigError
from forebay.plan.permutation import derive_key
from forebay.steps.audio.audio_section import crop_samples
from forebay.steps.batch import collate
from forebay.steps.form import BatchForm
from forebay.steps.step import Allocate, Batch, Stored
from forebay.steps.table import audio_step
from forebay.store.layout import Array
from forebay.store.source import Sample

CROP_VERSION = 1
"""Bumped when the same seed, epoch, sample id and length give another crop."""

DRAW = "crop_draw"
"""The field that carries a draw beside a sample's own, int64 [1]."""

_DRAW_BITS = 63


class CropDraws:
    """The draws of one epoch: an integer in [0, 2^63) for every sample id, uniform and independent of all others."""

    __slots__ = ("_key",)

    def __init__(self, *, seed: int, epoch: int) -> None:
        self._key = derive_key("forebay crop", CROP_VERSION, seed, epoch).to_bytes(8, "little")

    def draw(self, sample_id: str) -> int:
        """Returns the draw of a sample: BLAKE2b of its id under the epoch's key, 1 us."""
        # Ids are names of tar members too, which need not be UTF-8.
        text = sample_id.encode("utf-8", "surrogateescape")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=self._key).digest(), "little") >> 1

    def beside(self, sample: Mapping[str, Array], sample_id: str) -> dict[str, Array]:
        """Returns the sample's fields and its draw, which a `Collator` with `crop_s` wants."""
        return {**sample, DRAW: np.array([self.draw(sample_id)], np.int64)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Crop:
    """A kind of crop: `num_samples` audio samples that start at a multiple of `grid_samples`, both 1 or more."""

    num_samples: int
    grid_samples: int

    def num_starts(self, clip_samples: int) -> int:
        """Returns at how many places a crop can start so that it lies inside; 1, at 0, where the clip is shorter."""
        return max(0, clip_samples - self.num_samples) // self.grid_samples + 1

    def start(self, clip_samples: int, *, draw: int) -> int:
        """Returns the audio sample at which the crop of a clip starts, every possible one as likely.

        draw: of `CropDraws`. Multiply and shift: no start is more than one draw in 2^63 / num_starts too likely.
        """
        return (draw * self.num_starts(clip_samples) >> _DRAW_BITS) * self.grid_samples


@dataclass(frozen=True, slots=True)
class Crops:
    """The crop of every sample as a batch: `wav` [B, N], and what features add (`w2v_bert`: `feats` [B, 1, T, 160]).

    N is `crop.num_samples`. A clip that is shorter than N is followed by zeros.
    """

    crop: Crop
    form: BatchForm

    @classmethod
    def of(cls, stored: Stored, *, crop_s: float) -> Crops:
        """Returns the crops of a source. Raises ConfigError where it has none of `crop_s` seconds: `crop_samples`."""
        kind, rate = stored.constants.get("features"), stored.constants.get("sample_rate_hz")
        if kind is None or rate is None:
            raise ConfigError(
                f"{stored.name}: its metadata lacks features or sample_rate_hz; rebuild it: forebay preprocess"
            )
        has_waveform = "waveform" in stored.fields
        samples = crop_samples(crop_s, features=kind, sample_rate_hz=int(rate), has_waveform=has_waveform)
        step = audio_step(kind)
        crop = Crop(num_samples=samples, grid_samples=step.grid_samples or 1)
        return cls(crop, step.crop(stored, num_samples=samples))

    def starts(self, samples: Sequence[Sample]) -> list[int]:
        """Returns where each sample's crop starts, in audio samples. Raises ConfigError for samples without a draw."""
        if not all(DRAW in sample for sample in samples):
            raise ConfigError(
                f"crops need the field {DRAW} beside each sample; pass crop_seed to SampleDataset, or use the Loader"
            )
        return [self.crop.start(len(s["waveform"]), draw=int(s[DRAW][0])) for s in samples]

    def count_frames(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns (frames of the clips in their crops, those of the batch): filter bank frames, else audio samples."""
        field = self.form.fields[-1]
        assert field.length is not None
        return sum(min(len(field.array(s)), field.length) for s in samples), len(samples) * field.length

    def collate(self, samples: Sequence[Sample], *, dtype: torch.dtype, allocate: Allocate) -> Batch:
        """Returns the batch of these samples, each with its draw beside it; fields are in `dtype`."""
        cut = [self._cut(*each) for each in zip(samples, self.starts(samples), strict=True)]
        return collate(self.form, cut, dtype=dtype, allocate=allocate, are_rows=True)

    def _cut(self, sample: Sample, start: int) -> Mapping[str, Sequence[Array]]:
        found: dict[str, Sequence[Array]] = {}
        for field in self.form.stored:
            first = start // field.hop
            found[field.name] = (sample[field.on_disk][first : first + (field.length or 0)],)
        return found
