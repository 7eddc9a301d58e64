"""`w2v_bert`: Kaldi filter banks of `SeamlessM4TFeatureExtractor`; what it does per clip is done below the cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np

from forebay.steps.audio.framing import BLOCK_ROWS, FRAME_SAMPLES, HOP_SAMPLES, Ragged, frames
from forebay.steps.audio.waveform import samples_form
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.step import AudioStep, Fields, Stored
from forebay.store.layout import Array, FieldSpec

if TYPE_CHECKING:
    import torch

Count = TypeVar("Count", int, np.ndarray, "torch.Tensor")
N_MELS = 80
MIN_SAMPLES = FRAME_SAMPLES + HOP_SAMPLES
"""Two frames: the extractor's variance of one frame is NaN, and of none an error."""
FLOOR = 1.192092955078125e-07
"""Kaldi's epsilon, as the extractor writes it. A frame of silence is ln(FLOOR) = -15.942385 in every bin."""
_PREEMPHASIS = 0.97
_HALF_HOP = HOP_SAMPLES // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class W2vBert(AudioStep):
    """Raw filter banks of `SeamlessM4TFeatureExtractor`: `fbanks` [frames, 80], before normalisation and stacking.

    With the frames that overlap a 400-sample zero tail, so that crops on a hop boundary are slices.
    """

    name: ClassVar[str] = "w2v_bert"
    libraries: ClassVar[tuple[str, ...]] = ("torch", "forebay.steps.audio.spectrum")
    axes: ClassVar[dict[str, str | int]] = {"fbanks": "frames", "valid_frames": 1}
    min_samples: ClassVar[int] = MIN_SAMPLES
    # Whole blocks of the feature engine. BLAS may round a row by its place among the 32 of a product (OpenBLAS on AVX2
    # does). From a block's head on, a crop's rows stand at the places where the clip's stood, so a slice is bit for bit
    # what the crop alone would give, on any CPU; at another hop that depends on the CPU. See
    # docs/decisions/steps.md, 0010.
    grid_samples: ClassVar[int | None] = BLOCK_ROWS * HOP_SAMPLES

    dtype: Literal["float16", "float32"] = "float32"
    """Type of the stored filter banks."""
    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the fields: `fbanks` [frames, 80]; `valid_frames` int32 [1], how many the clip by itself has."""
        return (
            FieldSpec(name="fbanks", dtype=self.dtype, shape=(N_MELS,)),
            FieldSpec(name="valid_frames", dtype="int32"),
        )

    def num_frames(self, num_samples: Array) -> Array:
        """Returns the stored frames, int64: 1 + floor(n / 160), those of the clip and a 400-sample zero tail."""
        return np.where(num_samples > 0, 1 + num_samples // HOP_SAMPLES, 0)

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns the filter banks that the extractor would normalise, of each clip followed by 400 zeros.

        Frame i sees samples [160 i, 160 i + 400) and nothing else (offset, pre-emphasis and window are per frame). So
        of the stored frames

        - the clip itself has the first `valid_frames` = 1 + floor((n - 400) / 160); the other two or three see the
          zero tail,
        - the crop of samples [160 a, 160 a + m) inside the clip has 1 + floor((m - 400) / 160) from row a on, bit for
          bit where a is a multiple of 32 (see BLOCK_ROWS); for any a where BLAS rounds a row alike at every place of a
          product, as OpenBLAS does with AVX-512, and with AVX2 but for the last bit of a few values,
        - the clip followed by any number of zeros has all rows, then ln(FLOOR).

        waveforms: float32 [num_samples] at 16 kHz, at least MIN_SAMPLES, finite; scaled by 32768 as Kaldi wants it.
        After normalisation 99.9 % of values are within 2e-6 of the extractor. It computes in float64 and so does this
        up to the power: float32 would be 1.8 times as fast, with a p99.9 of 3e-5, and of 3e-4 on the worst clip.
        """
        from forebay.steps.audio.spectrum import Spectrum, kaldi_filters, log_filter_banks, stored

        ragged = Ragged.zeros(self.num_frames(np.array([w.size for w in waveforms], np.int64)).tolist())
        for index, waveform in enumerate(waveforms):
            np.multiply(waveform, np.float32(32768.0), out=ragged.samples(index)[: waveform.size])
        spectrum = Spectrum(
            write_frames=_write_frames, dtype="float64", fft_samples=512, filters=kaldi_filters(), floor=FLOOR, log="ln"
        )
        banks = log_filter_banks(spectrum, ragged)
        return [
            {
                "fbanks": stored(banks[rows], self.dtype),
                "valid_frames": np.array([valid_frames(waveform.size)], np.int32),
            }
            for rows, waveform in zip(ragged.rows, waveforms, strict=True)
        ]

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:
        """Returns the form `input_features` [B, T, 160], `attention_mask` int32 [B, T], normalised by clip."""
        pairs = _pairs("input_features", stored, finish="w2v_bert", multiple=2)
        return BatchForm.exact(cls.name, pairs, pairs.mask("attention_mask"))

    @classmethod
    def crop(cls, stored: Stored, *, num_samples: int) -> BatchForm:
        """Returns the form `wav` [B, num_samples], `feats` [B, 1, T, 160].

        T is half of the crop's 1 + (N - 400) // 160 frames, rounded up (an odd last frame stands beside zeros, as in
        the extractor).
        """
        length, pad = valid_frames(num_samples), float(_silence(stored.fields["fbanks"].shape[0]))
        feats = _pairs("feats", stored, finish="w2v_bert_crop", length=length, hop=HOP_SAMPLES, pad=pad)
        return BatchForm.exact(cls.name, samples_form("wav", stored, length=num_samples), feats)


class NormalisedPairs:
    """The operation of whole clips: two frames stand side by side in a batch, normalised by clip."""

    def shape(self, rows: int, inner: tuple[int, ...]) -> tuple[int, ...]:
        """Returns [pairs, 2 * n_mels]."""
        return (output_frames(rows), 2 * inner[0])

    def made(self, rows: Count) -> Count:
        """Returns the pairs of frames, an odd last one counted too."""
        return output_frames(rows)

    def marked(self, rows: Count) -> Count:
        """Returns the pairs without that of an odd last frame, as the extractor's mask has it."""
        return rows // 2

    def batch(self, lines: torch.Tensor, lengths: torch.Tensor, room: int) -> torch.Tensor:
        """Returns [batch, pairs, 2 * n_mels]. On a CPU bit for bit what `write` makes; elsewhere within 2e-6.

        Sums are in float64, as there: but a device adds in another order.
        """
        if lines.device.type != "cpu":
            return self.on_device(lines, lengths, room)
        out = lines.new_zeros(len(lengths), output_frames(room), 2 * lines.shape[1])
        ends = lengths.cumsum(0).tolist()
        for clip, start, end in zip(out.numpy(), [0, *ends], ends, strict=False):
            self.write(lines.numpy()[start:end], clip[: output_frames(end - start)])
        return out

    @staticmethod
    def on_device(lines: torch.Tensor, lengths: torch.Tensor, room: int) -> torch.Tensor:
        """See `batch`; of all clips at once."""
        import torch

        from forebay.steps.form_values import places_of

        n_mels, device = lines.shape[1], lines.device
        out = lines.new_zeros(len(lengths), 2 * output_frames(room), n_mels)
        firsts = torch.arange(len(lengths), device=device) * out.shape[1]
        out.view(-1, n_mels).index_copy_(0, places_of(firsts, lengths, len(lines)), lines)
        mean = out.sum(1, dtype=torch.float64) / lengths[:, None]
        out.sub_(mean.float()[:, None])
        out.mul_((torch.arange(out.shape[1], device=device) < lengths[:, None])[:, :, None])
        variance = out.double().square_().sum(1) / (lengths[:, None] - 1)
        return out.div_((variance + 1e-7).sqrt().float()[:, None]).view(len(lengths), -1, 2 * n_mels)

    def write(self, values: Array, out: Array) -> None:
        """Makes `out` the values of a clip's frames."""
        flat = out.reshape(-1, 2 * values.shape[1])
        w2v_bert_input(values, flat, np.empty(len(flat), np.int32))


class NormalisedCrops(NormalisedPairs):
    """The operation of crops: the same beside an axis of length 1.

    A clip that is shorter than its crop is followed by zeros before its features: the frames of its end and of silence
    count in mean and variance, as in `SeamlessM4TFeatureExtractor` of the padded waveform.
    """

    def shape(self, rows: int, inner: tuple[int, ...]) -> tuple[int, ...]:
        """Returns [1, pairs, 2 * n_mels]."""
        return (1, *NormalisedPairs.shape(self, rows, inner))


def valid_frames(num_samples: int) -> int:
    """Returns how many frames lie wholly inside a clip or crop: what the extractor makes of it."""
    return max(0, 1 + (num_samples - FRAME_SAMPLES) // HOP_SAMPLES)


def output_frames(num_fbank_frames: Count) -> Count:
    """Returns the frames of a `w2v_bert` input, an int or elementwise: pairs, an odd last one counted too."""
    return (num_fbank_frames + 1) // 2


def w2v_bert_input(fbanks: np.ndarray, out: np.ndarray, mask_out: np.ndarray) -> None:
    """Makes `out` and `mask_out` what `SeamlessM4TFeatureExtractor` gives for a clip or crop alone, then masked zeros.

    fbanks: float [F, 80], F >= 2: the frames to use. A whole clip uses the first `valid_frames` of those stored; a crop
    of m samples from sample 160 a on uses 1 + (m - 400) // 160 of them from row a on.
    out: float32 [T, 160], C-contiguous; T is `output_frames(F)`, or that of the batch's longest clip.
    mask_out: integer [T]; the extractor's is int32. An odd last frame stands in `out` beside zeros, but is masked.

    Every bin gets mean 0 and variance 1 over the F frames (variance with F - 1, plus 1e-7); pairs of frames are
    stacked. Nothing here calls BLAS: its bits depend on the alignment of its inputs, and a mapped view and a fresh
    array would then finish differently.
    """
    num_frames, n_mels = fbanks.shape
    if num_frames < 2:
        raise ValueError(f"fbanks have {num_frames} frames; their variance needs 2 or more")
    if out.shape[1] != 2 * n_mels or not out.flags.c_contiguous:
        raise ValueError(f"out is {list(out.shape)}, wanted C-contiguous [T, {2 * n_mels}]")
    if output_frames(num_frames) > len(out) or mask_out.shape != (len(out),):
        needed = output_frames(num_frames)
        raise ValueError(f"out has {len(out)} frames and mask_out {list(mask_out.shape)}, the sample needs {needed}")
    flat = out.reshape(-1, n_mels)
    values = flat[:num_frames]
    # The sums in float64: frame by frame, float32 loses 2e-5 of the mean in 30 s, and where a short clip is followed by
    # silence, whose equal addends all round to the same side, as much of the deviation.
    np.subtract(fbanks, fbanks.mean(axis=0, dtype=np.float64).astype(np.float32), out=values, dtype=np.float32)
    variance = np.einsum("ij,ij->j", values, values, dtype=np.float64) / (num_frames - 1)
    np.divide(values, np.sqrt(variance + 1e-7).astype(np.float32), out=values)
    flat[num_frames:] = 0.0
    mask_out[: num_frames // 2] = 1
    mask_out[num_frames // 2 :] = 0


def _pairs(name: str, stored: Stored, **more: Any) -> FieldForm:
    return FieldForm.frames(stored.fields["fbanks"], name=name, used_of="valid_frames", **more)


def _silence(n_mels: int) -> np.float32:
    """Returns a filter bank value of a silent frame, by the very operation of the feature engine: torch's logarithm."""
    import torch

    value: np.float32 = torch.full((32, n_mels), FLOOR, dtype=torch.float32, device="cpu").log_().numpy()[0, 0]
    return value


def _write_frames(signal: np.ndarray, out: np.ndarray) -> None:
    import torch

    # Removing the mean m and then pre-emphasis, (x[j] - m) - 0.97 (x[j-1] - m), is e[j] - 0.03 m with
    # e = x[j] - 0.97 x[j-1]: so pre-emphasis is done once a sample, not once a frame, and the mean comes from sums over
    # half hops that frames share.
    # Sample 0 of a frame has its own rule in Kaldi, but the Povey window is 0 there.
    samples = signal.astype(np.float64)
    emphasised = np.empty_like(samples)
    emphasised[0] = 0.0
    np.multiply(samples[:-1], -_PREEMPHASIS, out=emphasised[1:])
    emphasised[1:] += samples[1:]
    window, weighted = torch.from_numpy(povey()), torch.from_numpy(out)
    torch.mul(torch.from_numpy(frames(emphasised)), window, out=weighted)
    weighted.addcmul_(torch.from_numpy(_frame_means(samples))[:, None], window, value=_PREEMPHASIS - 1.0)


def _frame_means(samples: np.ndarray) -> np.ndarray:
    halves = samples.reshape(-1, _HALF_HOP).sum(axis=1)
    each = FRAME_SAMPLES // _HALF_HOP
    parts = np.lib.stride_tricks.sliding_window_view(halves, each)[:: HOP_SAMPLES // _HALF_HOP]
    return np.asarray(parts.sum(axis=1) / FRAME_SAMPLES)


@cache
def povey() -> np.ndarray:
    """Returns Kaldi's Povey window, a Hann window to the power 0.85, symmetric, float64 [400]."""
    return np.power(np.hanning(FRAME_SAMPLES), 0.85)
