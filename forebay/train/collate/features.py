"""Stored features to the model's feature inputs: each sample goes from its view straight into its row of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from forebay.store.layout import Array
from forebay.store.source import Sample
from forebay.train.collate.convert import PIECE, Allocate, copy_values, raw, raw_values
from forebay.train.collate.finish import WHISPER_FRAMES, output_frames, padded_frames, w2v_bert_input, waveform_input

FeatureKind = Literal["log_mel", "qwen3_asr", "w2v_bert", "waveform"]


@dataclass(frozen=True, slots=True)
class Features:
    """One kind of stored features and the batch fields that it becomes. n_mels: columns of the stored frames."""

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

    def values(self, samples: Sequence[Sample]) -> list[Array]:
        """Returns the stored frames that uncropped clips use: all, but for w2v_bert those that lie inside of the clip."""
        stored = self.stored
        if self.kind == "w2v_bert":
            return [sample[stored][: sample["valid_frames"].item()] for sample in samples]
        return [sample[stored] for sample in samples]

    def room(self, longest: int) -> int:
        """Returns how many stored frames a row has room for where the batch's longest sample has `longest`."""
        if self.kind == "log_mel":
            return WHISPER_FRAMES
        if self.kind == "qwen3_asr":
            return int(padded_frames(longest))
        return 2 * int(output_frames(longest)) if self.kind == "w2v_bert" else longest

    def collate(self, samples: Sequence[Sample], *, dtype: torch.dtype, allocate: Allocate) -> dict[str, torch.Tensor]:
        """Returns the feature fields of a batch: values in `dtype`, the mask int32 as transformers' extractors give it."""
        stored = self.values(samples)
        room = self.room(max(map(len, stored)))
        if self.kind in ("log_mel", "qwen3_asr"):
            is_mel = self.kind == "log_mel"
            pads = [sample["pad_value"].item() for sample in samples] if is_mel else [0.0] * len(samples)
            batch = {self.output: _move(stored, pads, room=room, dtype=dtype, allocate=allocate)}
            return batch if self.mask is None else {**batch, self.mask: self._mask(stored, room, allocate)}
        shape = (room,) if self.kind == "waveform" else (room // 2, 2 * self.n_mels)
        mask = allocate("attention_mask", (len(samples), shape[0]), dtype=torch.int32)
        return {
            self.output: self._compute(stored, mask.numpy(), shape=shape, dtype=dtype, allocate=allocate),
            "attention_mask": mask,
        }

    def _mask(self, stored: Sequence[Array], room: int, allocate: Allocate) -> torch.Tensor:
        mask = allocate(self.mask or "", (len(stored), room), dtype=torch.int32)
        rows = mask.numpy()
        rows.fill(1)
        for row, values in zip(rows, stored, strict=True):
            row[len(values) :] = 0
        return mask

    def _compute(
        self, stored: Sequence[Array], masks: Array, *, shape: tuple[int, ...], dtype: torch.dtype, allocate: Allocate
    ) -> torch.Tensor:
        """Returns [batch, *shape]; the arithmetic is done in float32, for other dtypes in one row of scratch."""
        out = allocate(self.output, (len(stored), *shape), dtype=dtype)
        scratch = allocate("piece", (PIECE,), dtype=torch.float32)
        row = allocate("row", shape, dtype=torch.float32) if dtype != torch.float32 else None
        rows = list(out.numpy()) if row is None else [row.numpy()] * len(stored)
        wide = None
        if stored[0].dtype == np.float16:
            wide = allocate("wide", max(stored, key=len).shape, dtype=torch.float32)
        for i, (values, mask) in enumerate(zip(stored, masks, strict=True)):
            if wide is not None:
                copy_values(values, wide[: len(values)], scratch=scratch)
                values = wide[: len(values)].numpy()
            if self.kind == "w2v_bert":
                w2v_bert_input(values, rows[i], mask)
            else:
                waveform_input(values, rows[i])
                mask[: len(values)] = 1
                mask[len(values) :] = 0
            if row is not None:
                copy_values(row.numpy(), out[i], scratch=scratch)
        return out


def _move(
    stored: Sequence[Array], pads: Sequence[float], *, room: int, dtype: torch.dtype, allocate: Allocate
) -> torch.Tensor:
    """Returns [batch, n_mels, room]: each sample's frames [frames, n_mels] and its pad value behind them, transposed.

    The memory stays in the order of the store, [batch, room, n_mels], and the tensor is a transposed view of it: a copy is
    then one straight pass (10 times as fast as transposing each sample), a transfer to a device still one block, and the
    model's first convolution brings it into its own order there. Values are those of `finish.whisper_input` and
    `finish.qwen3_asr_input`.
    """
    out = allocate("input_features", (len(stored), room, stored[0].shape[1]), dtype=dtype)
    rows, raw_pads = raw(out), raw_values(pads, dtype)
    if stored[0].dtype == rows.dtype:
        for row, values, pad in zip(rows, stored, raw_pads, strict=True):
            length = len(values)
            row[:length] = values
            row[length:] = pad
        return out.transpose(1, 2)
    scratch = allocate("piece", (PIECE,), dtype=torch.float32)
    for out_row, row, values, pad in zip(out.unbind(), rows, stored, raw_pads, strict=True):
        copy_values(values, out_row[: len(values)], scratch=scratch)
        row[len(values) :] = pad
    return out.transpose(1, 2)
