"""Batches of random crops: the waveform of each, and for `w2v_bert` the features that this waveform alone would have.

Random crops: which part of a clip an epoch takes. A function of (seed, epoch, sample id) and the clip's length alone.

Rank, world size, thread, order and place in the epoch do not enter, so a crop is the same after any resume and in any
loader, cached or not, and in a mixture of caches as in each by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forebay.config.crop import crop_samples
from forebay.errors import ConfigError
from forebay.plan.permutation import derive_key
from forebay.store.layout import Array
from forebay.store.source import Sample, SampleSource
from forebay.train.collate.convert import PIECE, Allocate, copy_values
from forebay.train.collate.finish import output_frames, w2v_bert_input, waveform_input

_FRAME_SAMPLES = 400


_KALDI_FLOOR = 1.192092955078125e-07
"""Mel power of a silent frame, as `w2v_bert` floors it."""


@dataclass(frozen=True, slots=True)
class Crops:
    """The crop of every sample as a batch.

    | features | fields of a batch |
    |---|---|
    | w2v_bert | `wav` [B, N], `feats` [B, 1, T, 160] |
    | waveform | `wav` [B, N] |

    N is `crop.num_samples`, T half of its 1 + (N - 400) // 160 frames, rounded up (an odd last frame stands beside zeros,
    as in the extractor). A clip that is shorter than N is followed by zeros before its features: the frames of its end and
    of silence count in mean and variance, as in `SeamlessM4TFeatureExtractor` of the padded waveform.
    n_mels: columns of the stored filter banks, 0 without.
    """

    crop: Crop
    n_mels: int

    @classmethod
    def of(cls, source: SampleSource, *, crop_s: float) -> Crops:
        """Returns the crops of a source. Raises ConfigError where it has none of `crop_s` seconds, see `crop_samples`."""
        kind, rate = source.constants.get("features"), source.constants.get("sample_rate_hz")
        if kind is None or rate is None:
            raise ConfigError(
                f"cache {source.key[:16]}: its metadata lacks features or sample_rate_hz; rebuild it: forebay preprocess"
            )
        has_waveform = "waveform" in source.fields
        samples = crop_samples(crop_s, features=kind, sample_rate_hz=int(rate), has_waveform=has_waveform)
        if kind == "waveform":
            return cls(Crop(num_samples=samples, grid_samples=HOP_SAMPLES), 0)
        grid = W2V_BERT_GRID_HOPS * HOP_SAMPLES
        return cls(Crop(num_samples=samples, grid_samples=grid), source.fields["fbanks"].shape[0])

    @property
    def num_frames(self) -> int:
        """Filter bank frames of a crop."""
        return 1 + (self.crop.num_samples - _FRAME_SAMPLES) // HOP_SAMPLES

    def starts(self, samples: Sequence[Sample]) -> list[int]:
        """Returns where each sample's crop starts, in audio samples. Raises ConfigError for samples without a draw."""
        if not all(DRAW in sample for sample in samples):
            raise ConfigError(
                f"crops need the field {DRAW} beside each sample; pass crop_seed to SampleDataset, or use the Loader"
            )
        return [self.crop.start(len(s["waveform"]), draw=int(s[DRAW][0])) for s in samples]

    def count_frames(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns (frames of the clips in their crops, frames of the batch): filter bank frames, or audio samples without."""
        if not self.n_mels:
            lengths = [min(len(sample["waveform"]), self.crop.num_samples) for sample in samples]
            return sum(lengths), len(lengths) * self.crop.num_samples
        lengths = [min(int(sample["valid_frames"][0]), self.num_frames) for sample in samples]
        return sum(lengths), len(lengths) * self.num_frames

    def collate(self, samples: Sequence[Sample], *, dtype: torch.dtype, allocate: Allocate) -> dict[str, torch.Tensor]:
        """Returns the batch of these samples, each with its draw beside it; fields are in `dtype`."""
        starts = self.starts(samples)
        batch = {"wav": self._waveforms(samples, starts, dtype=dtype, allocate=allocate)}
        if self.n_mels:
            batch["feats"] = self._features(samples, starts, dtype=dtype, allocate=allocate)
        return batch

    def _waveforms(
        self, samples: Sequence[Sample], starts: Sequence[int], *, dtype: torch.dtype, allocate: Allocate
    ) -> torch.Tensor:
        length = self.crop.num_samples
        out = allocate("wav", (len(samples), length), dtype=dtype)
        rows = _Rows(out, (length,), allocate=allocate)
        for index, (sample, start) in enumerate(zip(samples, starts, strict=True)):
            waveform_input(sample["waveform"][start : start + length], rows.array(index))
            rows.done(index)
        return out

    def _features(
        self, samples: Sequence[Sample], starts: Sequence[int], *, dtype: torch.dtype, allocate: Allocate
    ) -> torch.Tensor:
        """Returns [batch, 1, T, 2 * n_mels]: arithmetic in float32, in the caller's thread."""
        frames = self.num_frames
        shape = (int(output_frames(frames)), 2 * self.n_mels)
        out = allocate("feats", (len(samples), 1, *shape), dtype=dtype)
        rows = _Rows(out, shape, allocate=allocate)
        padded = allocate("banks", (frames, self.n_mels), dtype=torch.float32)
        scratch = allocate("piece", (PIECE,), dtype=torch.float32)
        silence = _silence(self.n_mels)
        unused_mask = np.empty(shape[0], np.int32)
        for index, (sample, start) in enumerate(zip(samples, starts, strict=True)):
            first = start // HOP_SAMPLES
            banks = sample["fbanks"][first : first + frames]
            if len(banks) < frames or banks.dtype != np.float32:
                copy_values(banks, padded[: len(banks)], scratch=scratch)
                # What a silent frame is after it was stored, float16 for example.
                padded[len(banks) :] = float(silence.astype(banks.dtype))
                banks = padded.numpy()
            w2v_bert_input(banks, rows.array(index), unused_mask)
            rows.done(index)
        return out


class _Rows:
    """Rows of a batch to be written in float32: its own memory, or for other dtypes one scratch row that is then copied."""

    def __init__(self, out: torch.Tensor, shape: tuple[int, ...], *, allocate: Allocate) -> None:
        self._out, self._shape = out, shape
        self._is_direct = out.dtype == torch.float32
        if not self._is_direct:
            self._row = allocate("row", shape, dtype=torch.float32)
            self._scratch = allocate("piece", (PIECE,), dtype=torch.float32)

    def array(self, index: int) -> Array:
        """Returns float32 [*shape] to write row `index` into."""
        if self._is_direct:
            return self._out[index].numpy().reshape(self._shape)
        return self._row.numpy()

    def done(self, index: int) -> None:
        """Row `index` of the batch now holds what was written."""
        if not self._is_direct:
            copy_values(self._row.numpy(), self._out[index], scratch=self._scratch)


def _silence(n_mels: int) -> np.float32:
    """Returns a filter bank value of a silent frame, by the very operation of the feature engine: torch's logarithm."""
    value: np.float32 = torch.full((32, n_mels), _KALDI_FLOOR, dtype=torch.float32, device="cpu").log_().numpy()[0, 0]
    return value


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
