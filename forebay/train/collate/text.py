"""Stored tokens to the decoder's inputs and labels, by prompt kind. -100 marks what is not learnt, as in transformers.

Labels are masked by position, from the stored `prefix_len`, never by comparing ids: a pad token that is also the end of
text stays a target, and any padding side is right.

How many audio tokens a clip becomes in Qwen3-ASR.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch

from forebay.store.source import Sample
from forebay.train.collate.convert import Allocate

PaddingSide = Literal["left", "right"]


IGNORED = -100
"""Label that torch's cross entropy passes over."""


def whisper_text(samples: Sequence[Sample], *, pad_token_id: int, allocate: Allocate) -> dict[str, torch.Tensor]:
    """Returns `decoder_input_ids` and `labels`, both int64 [batch, longest - 1].

    `input_ids` of a sample are the whole decoder sequence: it is fed without its last token and learnt without its first,
    so the labels of position i are token i + 1, masked where that is still one of the `prefix_len` prompt tokens.
    Padding stands right: Whisper's positions count from the left.
    """
    sequences = [sample["input_ids"] for sample in samples]
    shape = (len(samples), max(map(len, sequences)) - 1)
    inputs, labels = (
        _filled("decoder_input_ids", shape, pad_token_id, allocate),
        _filled("labels", shape, IGNORED, allocate),
    )
    for ids, sample, inputs_row, labels_row in zip(sequences, samples, inputs.numpy(), labels.numpy(), strict=True):
        prefix = max(sample["prefix_len"].item() - 1, 0)
        inputs_row[: len(ids) - 1] = ids[:-1]
        labels_row[prefix : len(ids) - 1] = ids[prefix + 1 :]
    return {"decoder_input_ids": inputs, "labels": labels}


def qwen3_asr_text(
    samples: Sequence[Sample], *, pad_token_id: int, padding_side: PaddingSide, allocate: Allocate
) -> dict[str, torch.Tensor]:
    """Returns `input_ids`, `attention_mask` and `labels`, all int64 [batch, longest].

    A sample's `input_ids` hold one audio placeholder, at `audio_index`; it is repeated once for each audio token that the
    model makes of the sample's feature frames. Labels begin behind the `prefix_len` stored tokens of the prompt.
    """
    places = [_audio_place(sample) for sample in samples]
    shape = (len(samples), max(place.length for place in places))
    inputs, labels = (
        _filled("input_ids", shape, pad_token_id, allocate),
        _filled("labels", shape, IGNORED, allocate),
    )
    mask = _filled("attention_mask", shape, 0, allocate)
    rows = zip(inputs.numpy(), mask.numpy(), labels.numpy(), strict=True)
    for sample, place, (inputs_row, mask_row, labels_row) in zip(samples, places, rows, strict=True):
        ids = sample["input_ids"]
        start = shape[1] - place.length if padding_side == "left" else 0
        end, audio = start + place.length, start + place.index
        mask_row[start:end] = 1
        inputs_row[start:audio] = ids[: place.index]
        inputs_row[audio : audio + place.count] = ids[place.index]
        inputs_row[audio + place.count : end] = ids[place.index + 1 :]
        labels_row[start + place.prefix : end] = inputs_row[start + place.prefix : end]
    return {"input_ids": inputs, "attention_mask": mask, "labels": labels}


def plain_text(samples: Sequence[Sample], *, allocate: Allocate) -> dict[str, torch.Tensor]:
    """Returns `labels` int64 [batch, longest], padded with -100 on the right, without the `prefix_len` prompt tokens' values."""
    sequences = [sample["input_ids"] for sample in samples]
    labels = _filled("labels", (len(samples), max(map(len, sequences))), IGNORED, allocate)
    for ids, sample, row in zip(sequences, samples, labels.numpy(), strict=True):
        prefix = sample["prefix_len"].item()
        row[prefix : len(ids)] = ids[prefix:] if prefix else ids
    return {"labels": labels}


def causal_text(
    samples: Sequence[Sample], *, pad_token_id: int, padding_side: PaddingSide, allocate: Allocate
) -> dict[str, torch.Tensor]:
    """Returns `input_ids`, `attention_mask` and `labels` of text without audio, all int64 [batch, longest].

    Labels are the ids, -100 on padding and on the `prefix_len` prompt tokens; a causal model moves them by one itself.
    """
    sequences = [sample["input_ids"] for sample in samples]
    shape = (len(samples), max(map(len, sequences)))
    inputs, labels = (
        _filled("input_ids", shape, pad_token_id, allocate),
        _filled("labels", shape, IGNORED, allocate),
    )
    mask = _filled("attention_mask", shape, 0, allocate)
    rows = zip(inputs.numpy(), mask.numpy(), labels.numpy(), strict=True)
    for ids, sample, (inputs_row, mask_row, labels_row) in zip(sequences, samples, rows, strict=True):
        start = shape[1] - len(ids) if padding_side == "left" else 0
        prefix = int(sample["prefix_len"][0])
        inputs_row[start : start + len(ids)] = ids
        mask_row[start : start + len(ids)] = 1
        labels_row[start + prefix : start + len(ids)] = ids[prefix:]
    return {"input_ids": inputs, "attention_mask": mask, "labels": labels}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the audio tokens stand in the expanded ids, how many they are, and how long prompt and all are then."""

    index: int
    count: int
    prefix: int
    length: int


def _audio_place(sample: Sample) -> _Place:
    prefix, index = sample["prefix_len"].item(), sample["audio_index"].item()
    count = int(num_audio_tokens(len(sample["input_features"])))
    more = count - 1  # the placeholder itself is one of them
    return _Place(index, count, prefix + more if index < prefix else prefix, len(sample["input_ids"]) + more)


def _filled(name: str, shape: tuple[int, int], value: int, allocate: Allocate) -> torch.Tensor:
    tensor = allocate(name, shape, dtype=torch.int64)
    tensor.numpy().fill(value)
    return tensor


FRAMES_PER_CHUNK = 100


TOKENS_PER_CHUNK = 13


Count = TypeVar("Count", int, np.ndarray)


def num_audio_tokens(num_frames: Count) -> Count:
    """Returns the number of audio tokens of clips with so many valid mel frames, as an int or elementwise.

    The encoder works on chunks of 100 frames (`n_window` 50) and halves each three times, rounding up: a whole chunk
    gives 13 tokens. Equal to `Qwen3ASRProcessor._get_audio_token_length` and to the lengths that the encoder gives.
    """
    tokens = num_frames % FRAMES_PER_CHUNK
    for _ in range(3):
        tokens = (tokens + 1) // 2
    total: Count = num_frames // FRAMES_PER_CHUNK * TOKENS_PER_CHUNK + tokens
    return total
