"""Random crops: which part of a clip an epoch takes. A function of (seed, epoch, sample id) and the clip's length alone.

Rank, world size, thread, order and place in the epoch do not enter, so a crop is the same after any resume and in any
loader, cached or not, and in a mixture of caches as in each by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.train.plan.permutation import derive_key

CROP_VERSION = 1
"""Bumped when the same seed, epoch, sample id and length give another crop."""
HOP_SAMPLES = 160
W2V_BERT_GRID_HOPS = 32
"""Crops of filter banks start at multiples of this many hops: whole blocks of the feature engine.

BLAS may round a row by its place among the 32 of a product (OpenBLAS on AVX2 does). From a block's head on, a crop's rows
stand at the places where the clip's stood, so a slice is bit for bit what the crop alone would give, on any CPU; at another
hop that depends on the CPU. See docs/decisions/0010-crops.md.
"""
DRAW = "crop_draw"
"""The field that carries a draw beside a sample's own, int64 [1]."""
_DRAW_BITS = 63

Array = np.ndarray[Any, Any]


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
        """Returns at how many places a crop of a clip can start so that it lies inside; 1, at 0, where the clip is shorter."""
        return max(0, clip_samples - self.num_samples) // self.grid_samples + 1

    def start(self, clip_samples: int, *, draw: int) -> int:
        """Returns the audio sample at which the crop of a clip starts, every possible one as likely.

        draw: of `CropDraws`. Multiply and shift: no start is more than one draw in 2^63 / num_starts too likely.
        """
        return (draw * self.num_starts(clip_samples) >> _DRAW_BITS) * self.grid_samples
