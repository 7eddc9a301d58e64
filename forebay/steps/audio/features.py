"""Waveforms to stored features: one function over the step descriptions in `forebay.config.steps`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never, overload

import numpy as np

from forebay.config.steps import FeatureStep, LogMel, NoAudio, Qwen3Asr, W2vBert, Waveform
from forebay.errors import DecodeError
from forebay.steps.audio import log_mel, qwen3_asr, w2v_bert, waveform
from forebay.store.layout import FieldSpec

Fields = dict[str, np.ndarray]


_MAX_MAGNITUDE = 1e10
"""Above it, the power of a frame leaves float32. Full scale is 1."""


_GROUP_SAMPLES = 1 << 20
"""Samples that are laid out together, 4 MiB: enough to fill chunks, and freed memory of this size is used again."""


def field_specs(step: FeatureStep) -> tuple[FieldSpec, ...]:
    """Returns the fields that `compute` makes for a step, in the order in which they are stored."""
    match step:
        case LogMel():
            return log_mel.field_specs(step)
        case Qwen3Asr():
            return qwen3_asr.field_specs(step)
        case W2vBert():
            return w2v_bert.field_specs(step)
        case Waveform():
            return waveform.field_specs(step)
        case NoAudio():
            return ()
        case _:
            assert_never(step)


@overload
def num_frames(step: FeatureStep, num_samples: int) -> int: ...


@overload
def num_frames(step: FeatureStep, num_samples: np.ndarray) -> np.ndarray: ...


def num_frames(step: FeatureStep, num_samples: int | np.ndarray) -> int | np.ndarray:
    """Returns the stored length of a step's first field for clips of these lengths: exact, without any audio.

    num_samples: int, or integers [num_clips], which gives int64 [num_clips]. An empty clip has no frames.
    """
    samples = np.asarray(num_samples, np.int64)
    match step:
        case LogMel():
            frames = log_mel.num_frames(samples)
        case Qwen3Asr():
            frames = qwen3_asr.num_frames(samples)
        case W2vBert():
            frames = w2v_bert.num_frames(samples)
        case Waveform():
            frames = samples
        case NoAudio():
            frames = np.zeros_like(samples)
        case _:
            assert_never(step)
    return frames if isinstance(num_samples, np.ndarray) else int(frames)


def check(step: FeatureStep, clip: np.ndarray) -> None:
    """Returns for a clip that `compute` accepts.

    Raises DecodeError otherwise, reason `empty_audio` (no samples), `not_finite` (NaN, infinity or a magnitude above
    1e10, whose power float32 cannot hold) or `too_short` (fewer samples than the reference needs: w2v_bert, 560).
    Raises TypeError for an array that is not float32 [num_samples] (or int16, for Waveform): a mistake of the caller.
    """
    dtypes = ("float32", "int16") if isinstance(step, Waveform) else ("float32",)
    if clip.ndim != 1 or clip.dtype not in dtypes:  # `dtype.name` would cost more than the whole check
        raise TypeError(f"a clip is {clip.dtype} {list(clip.shape)}, {step} takes {' or '.join(dtypes)} [num_samples]")
    if clip.size == 0:
        raise DecodeError("empty_audio", "the audio has no samples")
    if clip.dtype == np.float32:
        _check_finite(clip)
    if isinstance(step, W2vBert) and clip.size < w2v_bert.MIN_SAMPLES:
        raise DecodeError(
            "too_short",
            f"the audio has {clip.size} samples, w2v_bert needs {w2v_bert.MIN_SAMPLES}: raise min_duration_s",
        )


def _check_finite(clip: np.ndarray) -> None:
    # One fast read; NaN and infinity spread into the sum. Only a clip that fails it is looked at closely.
    with np.errstate(over="ignore", invalid="ignore"):
        if float(np.dot(clip, clip)) <= _MAX_MAGNITUDE**2:
            return
    bad = ~(np.abs(clip) <= _MAX_MAGNITUDE)
    if bad.any():
        first = int(bad.argmax())
        raise DecodeError(
            "not_finite",
            f"{int(bad.sum())} of {clip.size} samples are NaN, infinite or above {_MAX_MAGNITUDE:.0e}, "
            f"where full scale is 1; the first is {clip[first]} at {first}",
        )


def compute(step: FeatureStep, waveforms: Sequence[np.ndarray]) -> list[Fields]:
    """Returns the fields of each clip, named and typed as `field_specs` says.

    waveforms: float32 mono [num_samples] at 16 kHz (any rate for Waveform, int16 too); each passes `check`, whose errors
    this raises for the first clip that does not. The arrays returned are C-contiguous and own their memory, except that
    Waveform hands on what needs no conversion.

    A clip's bytes do not depend on the other clips of the call, their order, or the number of threads.
    """
    for clip in waveforms:
        check(step, clip)
    if isinstance(step, NoAudio):
        return [{} for _ in waveforms]
    if isinstance(step, Waveform):
        return waveform.compute(step, waveforms)
    return [fields for group in _groups(waveforms) for fields in _compute_group(step, group)]


def _compute_group(step: LogMel | Qwen3Asr | W2vBert, waveforms: Sequence[np.ndarray]) -> list[Fields]:
    match step:
        case LogMel():
            return log_mel.compute(step, waveforms)
        case Qwen3Asr():
            return qwen3_asr.compute(step, waveforms)
        case W2vBert():
            return w2v_bert.compute(step, waveforms)
        case _:
            assert_never(step)


def _groups(waveforms: Sequence[np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
    """Yields runs of clips of about _GROUP_SAMPLES together, so that memory does not grow with the call."""
    first = samples = 0
    for index, clip in enumerate(waveforms):
        samples += clip.size
        if samples >= _GROUP_SAMPLES or index == len(waveforms) - 1:
            yield waveforms[first : index + 1]
            first, samples = index + 1, 0
