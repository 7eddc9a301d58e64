"""A source in memory, read-only as a mapped cache is, and the batch that a plain loop makes of its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from forebay.steps.text.qwen3_asr_prompt import num_audio_tokens
from forebay.store.layout import FieldSpec
from forebay.store.source import SampleSource
from tests.flat_constants import flat

Array = np.ndarray[Any, Any]
PAD_TOKEN_ID = 3
AUDIO_TOKEN_ID = 900
COLUMNS = {"log_mel": 80, "qwen3_asr": 128, "w2v_bert": 80, "waveform": 0, "none": 0}
STORED = {"log_mel": "input_features", "qwen3_asr": "input_features", "w2v_bert": "fbanks", "waveform": "waveform"}


class FakeSource(SampleSource):
    """Samples of given numbers of frames with random values."""

    def __init__(
        self,
        num_frames: Sequence[int],
        *,
        features: str = "log_mel",
        prompt: str | None = "whisper",
        dtype: str = "float16",
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.key = self.recipe_key = f"{seed:064x}"
        self.constants = flat(features=features, prompt=prompt, pad_token_id=PAD_TOKEN_ID)
        shape = (COLUMNS[features],) if COLUMNS[features] else ()
        specs = [FieldSpec(name=STORED[features], dtype=dtype, shape=shape)] if features != "none" else []
        self.fields: Mapping[str, FieldSpec] = {spec.name: spec for spec in specs}
        self.samples = [_sample(count, rng, features=features, prompt=prompt, dtype=dtype) for count in num_frames]
        tokens = [len(sample.get("input_ids", ())) for sample in self.samples]
        frames = np.array(num_frames, dtype=np.int32) * (features != "none")
        self.lengths: Mapping[str, Array] = {
            **({"num_audio_samples": frames * (1 if features == "waveform" else 160)} if features != "none" else {}),
            **({"num_frames": frames} if features != "none" else {}),
            "num_tokens": np.array(tokens, dtype=np.int32),
        }

    def __len__(self) -> int:
        return len(self.samples)

    def sample_id(self, index: int) -> str:
        return f"fake-{index}"

    def ids_digest(self) -> str:
        return self.key

    def read(self, index: int) -> dict[str, Array]:
        return dict(self.samples[index])


def _sample(
    num_frames: int, rng: np.random.Generator, *, features: str, prompt: str | None, dtype: str
) -> dict[str, Array]:
    shape = (num_frames, COLUMNS[features]) if COLUMNS[features] else (num_frames,)
    values = rng.integers(-(2**15), 2**15, shape) if dtype == "int16" else rng.normal(size=shape)
    sample: dict[str, Array] = {STORED[features]: values.astype(dtype)} if features != "none" else {}
    if features == "w2v_bert":
        num_samples = (num_frames - 1) * 160 + rng.integers(0, 160)
        sample["valid_frames"] = np.array([1 + (num_samples - 400) // 160], dtype=np.int32)
    if features == "log_mel":
        sample["pad_value"] = np.array([rng.normal()], dtype=np.float32)
    if prompt is not None:
        ids = rng.integers(10, 800, size=rng.integers(5, 30)).astype(np.int32)
        ids[-1] = PAD_TOKEN_ID  # many tokenizers pad with the end of text: it must stay a target
        prefix = int(rng.integers(1, len(ids))) if prompt != "plain" or features == "none" else 0
        if prompt == "qwen3_asr":
            prefix = max(prefix, 2)
            sample["audio_index"] = np.array([rng.integers(0, prefix)], dtype=np.int32)
            ids[sample["audio_index"][0]] = AUDIO_TOKEN_ID
        sample["input_ids"] = ids
        sample["prefix_len"] = np.array([prefix], dtype=np.int32)
    for array in sample.values():
        array.flags.writeable = False
    return sample


def plain_batch(
    source: FakeSource, indices: Sequence[int], *, dtype: torch.dtype = torch.float32, padding_side: str = "right"
) -> dict[str, torch.Tensor]:
    """Returns the batch by np.pad and np.stack, one sample at a time, in float32 until the end."""
    samples = [source.samples[index] for index in indices]
    batch = {**_plain_features(source, samples), **_plain_text(source, samples, padding_side=padding_side)}
    return {
        name: torch.from_numpy(value).to(dtype) if value.dtype == np.float32 else torch.from_numpy(value)
        for name, value in batch.items()
    }


def _plain_features(source: FakeSource, samples: list[dict[str, Array]]) -> dict[str, Array]:
    kind = source.constants["features"]
    if kind == "none":
        return {}
    values = [sample[STORED[kind]] for sample in samples]
    if kind == "log_mel":
        padded = [
            np.pad(
                frames.astype(np.float32),
                ((0, 3000 - len(frames)), (0, 0)),
                constant_values=sample["pad_value"][0],
            ).T
            for frames, sample in zip(values, samples, strict=True)
        ]
        return {"input_features": np.stack(padded)}
    if kind == "qwen3_asr":
        longest = -(-max(map(len, values)) // 100) * 100
        mask = np.stack([np.arange(longest) < len(frames) for frames in values]).astype(np.int32)
        rows = [np.pad(frames.astype(np.float32), ((0, longest - len(frames)), (0, 0))).T for frames in values]
        return {"input_features": np.stack(rows), "input_features_mask": mask}
    if kind == "w2v_bert":
        return _plain_w2v_bert(samples)
    longest = max(map(len, values))
    mask = np.stack([np.arange(longest) < len(wave) for wave in values]).astype(np.int32)
    scale = np.float32(2**15 if values[0].dtype == np.int16 else 1)
    rows = [np.pad(wave.astype(np.float32) / scale, (0, longest - len(wave))) for wave in values]
    return {"input_values": np.stack(rows), "attention_mask": mask}


def _plain_w2v_bert(samples: list[dict[str, Array]]) -> dict[str, Array]:
    """Processes filter banks as `SeamlessM4TFeatureExtractor` does: normalise, pad to an even length, stack pairs."""
    clips = []
    for sample in samples:
        frames = sample["fbanks"][: int(sample["valid_frames"][0])].astype(np.float32)
        clips.append((frames - frames.mean(0)) / np.sqrt(frames.var(0, ddof=1) + 1e-7))
    longest = -(-max(map(len, clips)) // 2) * 2
    rows = [np.pad(clip, ((0, longest - len(clip)), (0, 0))).reshape(longest // 2, 160) for clip in clips]
    mask = [(np.arange(longest) < len(clip))[1::2] for clip in clips]
    return {"input_features": np.stack(rows), "attention_mask": np.stack(mask).astype(np.int32)}


def _plain_text(source: FakeSource, samples: list[dict[str, Array]], *, padding_side: str) -> dict[str, Array]:
    prompt = source.constants["prompt"]
    if prompt is None:
        return {}
    rows: dict[str, list[list[int]]] = {}
    for sample in samples:
        ids, prefix = sample["input_ids"].tolist(), int(sample["prefix_len"][0])
        if prompt == "qwen3_asr":
            at, count = int(sample["audio_index"][0]), int(num_audio_tokens(len(sample["input_features"])))
            learnt = [token if i >= prefix else -100 for i, token in enumerate(ids)]
            full = ids[:at] + [AUDIO_TOKEN_ID] * count + ids[at + 1 :]
            row = {
                "input_ids": full,
                "attention_mask": [1] * len(full),
                "labels": learnt[:at] + [-100] * count + learnt[at + 1 :],
            }
        elif prompt == "whisper":
            shifted = [token if i >= prefix else -100 for i, token in enumerate(ids)][1:]
            row = {"decoder_input_ids": ids[:-1], "labels": shifted}
        elif source.constants["features"] == "none":
            learnt = [-100] * prefix + ids[prefix:]
            row = {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": learnt}
        else:
            row = {"labels": ids}
        for name, value in row.items():
            rows.setdefault(name, []).append(value)
    fill = {"labels": -100, "attention_mask": 0, "input_ids": PAD_TOKEN_ID, "decoder_input_ids": PAD_TOKEN_ID}
    batch = {}
    for name, lists in rows.items():
        longest = max(map(len, lists))
        left = padding_side == "left" and "input_ids" in rows
        sides = [(longest - len(row), 0) if left else (0, longest - len(row)) for row in lists]
        batch[name] = np.stack(
            [
                np.pad(np.array(row, dtype=np.int64), side, constant_values=fill[name])
                for row, side in zip(lists, sides, strict=True)
            ]
        )
    return batch
