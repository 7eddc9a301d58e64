"""Stored features to the model's feature inputs: each sample goes from its view straight into its row of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from forebay.train.collate.convert import copy_pieces, widen
from forebay.train.collate.memory import Allocate
from forebay.train.finish import (
    WHISPER_FRAMES,
    output_frames,
    padded_frames,
    qwen3_asr_input,
    w2v_bert_input,
    waveform_input,
    whisper_input,
)
from forebay.train.source import Sample

Array = np.ndarray[Any, Any]
_FBANK_SAMPLES, _FBANK_HOP = 400, 160
"""Audio samples that a filter bank frame sees, and between frames, in `SeamlessM4TFeatureExtractor`."""

FeatureKind = Literal["log_mel", "qwen3_asr", "w2v_bert", "waveform"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Of a batch whose longest sample has so many frames: a row's shape, its mask's length, and the frames it has room for.

    Frames are counted as stored, a waveform's frames are its samples; room that a sample does not fill is padding.
    """

    shape: tuple[int, ...]
    mask_length: int
    room: int


@dataclass(frozen=True, slots=True)
class Features:
    """How one kind of stored features becomes batch fields.

    stored: field of a sample; output, mask: fields of the batch; n_mels: columns of the stored frames.
    """

    kind: FeatureKind
    n_mels: int

    @property
    def stored(self) -> str:
        """The sample's field."""
        return {"w2v_bert": "fbanks", "waveform": "waveform"}.get(self.kind, "input_features")

    @property
    def output(self) -> str:
        """The batch's field of values."""
        return "input_values" if self.kind == "waveform" else "input_features"

    @property
    def mask(self) -> str | None:
        """The batch's field that marks what is no padding; None for Whisper, whose input is always 30 s."""
        return {"log_mel": None, "qwen3_asr": "input_features_mask"}.get(self.kind, "attention_mask")

    @property
    def only_moves(self) -> bool:
        """Whether values are moved and padded but not computed with: then they may stay float16."""
        return self.kind in ("log_mel", "qwen3_asr")

    def rows(self, longest: int) -> Rows:
        """Returns what the rows look like of a batch whose longest sample has `longest` stored frames."""
        if self.kind == "log_mel":
            return Rows((self.n_mels, WHISPER_FRAMES), 0, WHISPER_FRAMES)
        if self.kind == "qwen3_asr":
            frames = int(padded_frames(longest))
            return Rows((self.n_mels, frames), frames, frames)
        if self.kind == "w2v_bert":
            frames = int(output_frames(longest))
            return Rows((frames, 2 * self.n_mels), frames, 2 * frames)
        return Rows((longest,), longest, longest)

    def values(self, sample: Sample) -> Array:
        """Returns the stored frames that an uncropped clip uses: all, but for w2v_bert those that lie inside of the clip."""
        values = sample[self.stored]
        if self.kind == "w2v_bert":
            return values[: 1 + (int(sample["num_samples"][0]) - _FBANK_SAMPLES) // _FBANK_HOP]
        return values

    def write(self, sample: Sample, values: Array, *, row: Array, mask: Array) -> None:
        """Makes every element of `row` and `mask` the sample's, padding included. values: of the sample, float32 maybe."""
        if self.kind == "log_mel":
            whisper_input(values, float(sample["pad_value"][0]), row)
        elif self.kind == "qwen3_asr":
            qwen3_asr_input(values, row, mask)
        elif self.kind == "w2v_bert":
            w2v_bert_input(values, row, mask)
        else:
            waveform_input(values, row)
            mask[: len(values)] = 1
            mask[len(values) :] = 0


def collate_features(
    features: Features, samples: Sequence[Sample], *, dtype: torch.dtype, allocate: Allocate
) -> dict[str, torch.Tensor]:
    """Returns the feature fields of a batch: values in `dtype`, the mask int32 as transformers' extractors give it.

    Where the stored dtype or `dtype` is not what `write` works in, a sample goes through one row of float32 scratch, which
    stays in the CPU's cache: whole batches are never converted in a second pass.
    """
    stored = [features.values(sample) for sample in samples]
    rows = features.rows(max(map(len, stored)))
    values = allocate(features.output, (len(samples), *rows.shape), dtype=dtype)
    masks = allocate(features.mask or "no mask", (len(samples), rows.mask_length), dtype=torch.int32)
    stays_half = features.only_moves and dtype == torch.float16 and stored[0].dtype == np.float16
    scratch = None if stays_half or dtype == torch.float32 else allocate("row scratch", rows.shape, dtype=torch.float32)
    wide = None if stays_half or stored[0].dtype != np.float16 else _scratch_for(stored, allocate)
    outputs = [scratch.numpy()] * len(samples) if scratch is not None else list(values.numpy())
    for i, (sample, frames, row, mask) in enumerate(zip(samples, stored, outputs, masks.numpy(), strict=True)):
        if wide is not None:
            widen(frames, wide[: len(frames)])
            frames = wide[: len(frames)]
        features.write(sample, frames, row=row, mask=mask)
        if scratch is not None:
            copy_pieces(scratch.view(-1), values[i].view(-1))
    return {features.output: values} if features.mask is None else {features.output: values, features.mask: masks}


def _scratch_for(stored: Sequence[Array], allocate: Allocate) -> Array:
    longest = max(stored, key=len)
    array: Array = allocate("frames scratch", longest.shape, dtype=torch.float32).numpy()
    return array
