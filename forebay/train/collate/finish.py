"""Stored features to model inputs: what stands below the cut, one function a feature, from a read-only view into a batch row.

numpy only, no temporaries the size of a sample. Nothing here calls BLAS: its bits depend on the alignment of its inputs,
and a mapped view and a fresh array would then finish differently.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

Count = TypeVar("Count", int, np.ndarray)


WHISPER_FRAMES = 3000


QWEN3_ASR_MULTIPLE = 100
"""Frames of a chunk of the encoder, 2 * `n_window`."""


_VARIANCE_FLOOR = 1e-7


_INT16_STEP = np.float32(2.0**-15)


_TILE = 8192
"""Elements that are transposed together; source and target stay in the L1 cache, twice as fast as all at once for 30 s."""


def whisper_input(frames: np.ndarray, pad_value: float, out: np.ndarray) -> None:
    """Makes `out` what `WhisperFeatureExtractor` returns for the clip: its frames, then silence to 30 s.

    frames: float [K, n_mels], K <= 3000, as stored by `log_mel`. pad_value: the stored scalar. out: float [n_mels, 3000].
    Bit for bit the extractor's where the frames are; float16 frames are the extractor's to float16 rounding.
    """
    if len(frames) > WHISPER_FRAMES or out.shape != (frames.shape[1], WHISPER_FRAMES):
        raise ValueError(
            f"frames are {list(frames.shape)}, out is {list(out.shape)}; wanted [K <= 3000, M] and [M, 3000]"
        )
    _transpose(frames, out)
    out[:, len(frames) :] = pad_value


def qwen3_asr_input(frames: np.ndarray, out: np.ndarray, mask_out: np.ndarray) -> None:
    """Makes `out` and `mask_out` what `Qwen3ASRFeatureExtractor` returns for the clip alone, followed by masked zeros.

    frames: float [T, 128]. out: float [128, P]; P is `padded_frames(T)`, or that of the batch's longest clip.
    mask_out: integer [P], 1 where a frame is valid; the extractor's is int32.
    """
    num_frames = len(frames)
    _check_mask(mask_out, length=out.shape[1], needed=num_frames)
    _transpose(frames, out)
    out[:, num_frames:] = 0.0
    mask_out[:num_frames] = 1
    mask_out[num_frames:] = 0


def padded_frames(num_frames: Count) -> Count:
    """Returns the frames of a `qwen3_asr` input, an int or elementwise: the next multiple of 100."""
    return -(-num_frames // QWEN3_ASR_MULTIPLE) * QWEN3_ASR_MULTIPLE


def w2v_bert_input(fbanks: np.ndarray, out: np.ndarray, mask_out: np.ndarray) -> None:
    """Makes `out` and `mask_out` what `SeamlessM4TFeatureExtractor` returns for the clip or crop alone, then masked zeros.

    fbanks: float [F, 80], F >= 2: the frames to use. A whole clip uses the first `valid_frames` of those stored; a crop
    of m samples from sample 160 a on uses 1 + (m - 400) // 160 of them from row a on.
    out: float32 [T, 160], C-contiguous; T is `output_frames(F)`, or that of the batch's longest clip.
    mask_out: integer [T]; the extractor's is int32. An odd last frame stands in `out` beside zeros, but is masked.

    Every bin gets mean 0 and variance 1 over the F frames (variance with F - 1, plus 1e-7); pairs of frames are stacked.
    """
    num_frames, n_mels = fbanks.shape
    if num_frames < 2:
        raise ValueError(f"fbanks have {num_frames} frames; their variance needs 2 or more")
    if out.shape[1] != 2 * n_mels or not out.flags.c_contiguous:
        raise ValueError(f"out is {list(out.shape)}, wanted C-contiguous [T, {2 * n_mels}]")
    _check_mask(mask_out, length=len(out), needed=output_frames(num_frames))
    flat = out.reshape(-1, n_mels)
    values = flat[:num_frames]
    # The sums in float64: frame by frame, float32 loses 2e-5 of the mean in 30 s, and where a short clip is followed by
    # silence, whose equal addends all round to the same side, as much of the deviation.
    np.subtract(fbanks, fbanks.mean(axis=0, dtype=np.float64).astype(np.float32), out=values, dtype=np.float32)
    variance = np.einsum("ij,ij->j", values, values, dtype=np.float64) / (num_frames - 1)
    np.divide(values, np.sqrt(variance + _VARIANCE_FLOOR).astype(np.float32), out=values)
    flat[num_frames:] = 0.0
    mask_out[: num_frames // 2] = 1
    mask_out[num_frames // 2 :] = 0


def output_frames(num_fbank_frames: Count) -> Count:
    """Returns the frames of a `w2v_bert` input, an int or elementwise: pairs, an odd last one counted too."""
    return (num_fbank_frames + 1) // 2


def waveform_input(waveform: np.ndarray, out: np.ndarray) -> None:
    """Makes `out` the samples as float, int16 divided by 32768 (exact), followed by zeros.

    waveform: int16 or float32 [n]. out: float32 [N], N >= n.
    """
    if len(waveform) > len(out):
        raise ValueError(f"waveform has {len(waveform)} samples, out has room for {len(out)}")
    samples = out[: len(waveform)]
    if waveform.dtype == np.int16:
        np.multiply(waveform, _INT16_STEP, out=samples)
    else:
        samples[:] = waveform
    out[len(waveform) :] = 0.0


def _transpose(frames: np.ndarray, out: np.ndarray) -> None:
    if len(out) != frames.shape[1] or out.shape[1] < len(frames):
        raise ValueError(f"frames are {list(frames.shape)}, out is {list(out.shape)}; wanted [T, M] and [M, T or more]")
    rows = _TILE // frames.shape[1]
    for start in range(0, len(frames), rows):
        tile = frames[start : start + rows]
        out[:, start : start + len(tile)] = tile.T


def _check_mask(mask_out: np.ndarray, *, length: int, needed: int) -> None:
    if needed > length or mask_out.shape != (length,):
        raise ValueError(f"out has {length} frames and mask_out {list(mask_out.shape)}, the sample needs {needed}")
