"""The collate function of a source: which fields its batches have, in which dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from forebay.errors import ConfigError
from forebay.store.source import Sample, SampleSource, SourceUnion
from forebay.train.collate.convert import Allocate, fresh
from forebay.train.collate.crop import Crops
from forebay.train.collate.features import Features
from forebay.train.collate.text import PaddingSide, causal_text, plain_text, qwen3_asr_text, whisper_text

Batch = dict[str, torch.Tensor]


class BatchMaker(Protocol):
    """Samples to a batch; threads share it."""

    def collate(self, samples: Sequence[Sample], *, allocate: Allocate) -> Any:
        """Returns the batch of these samples in tensors that `allocate` makes: a dict, or a `PatchBatch`."""
        ...

    def count_frames(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns (frames, or tokens, of the samples, those that their batch has room for)."""
        ...


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Collator:
    """Makes the batch of a list of samples. Picklable, without state: DataLoader workers and threads may share it.

    | features | fields of a batch |
    |---|---|
    | log_mel | `input_features` [B, n_mels, 3000] |
    | qwen3_asr | `input_features` [B, 128, T], `input_features_mask` int32 [B, T] |
    | w2v_bert | `input_features` [B, T, 160], `attention_mask` int32 [B, T] |
    | waveform | `input_values` [B, N], `attention_mask` int32 [B, N] |

    | prompt | fields of a batch, all int64 |
    |---|---|
    | whisper | `decoder_input_ids`, `labels` [B, L] |
    | qwen3_asr | `input_ids`, `attention_mask`, `labels` [B, L] |
    | plain | `labels` [B, L] |
    | plain, features none | `input_ids`, `attention_mask`, `labels` [B, L]: text without audio, as a causal model takes it |

    With `crop_s` the fields are those of `Crops`, and no text: a transcript is that of the whole clip.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        dtype: torch.dtype = torch.float32,
        padding_side: PaddingSide = "right",
        crop_s: float | None = None,
    ) -> None:
        """Takes from `source` its constants and field specifications only.

        source: of a union whose sources have other fields, each its own collator, as `Loader` has.
        dtype: of floating-point fields: float32, float16 or bfloat16. padding_side: of `input_ids`.
        crop_s: length of random crops; samples then have the draw of their crop beside them (`CropDraws.beside`).
        Raises ConfigError for features, prompts or dtypes that have no batch form, or constants that are missing.
        """
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype of batches is {dtype}, wanted one of {', '.join(map(str, _DTYPES))}")
        if padding_side not in ("left", "right"):
            raise ConfigError(f"padding_side is {padding_side!r}, wanted 'left' or 'right'")
        if isinstance(source, SourceUnion) and "features" not in source.constants:
            raise ConfigError(
                f"samples of {', '.join(source.names)} stand in no common batch; make a Collator of each of `source.sources`, "
                "as forebay.train.make_loader does"
            )
        constants, self._name = source.constants, f"cache {source.key[:16]}"
        self.dtype, self.padding_side = dtype, padding_side
        self._features = self._choose_features(source)
        self._crops = None if crop_s is None else Crops.of(source, crop_s=crop_s)
        self._prompt = constants.get("prompt")
        if self._prompt not in ("whisper", "qwen3_asr", "plain", None):
            raise ConfigError(f"{self._name}: no batch form for prompt {self._prompt!r}")
        if self._prompt == "qwen3_asr" and constants["features"] != "qwen3_asr":
            raise ConfigError(
                f"{self._name}: text.prompt is 'qwen3_asr', which counts audio tokens by frames of features 'qwen3_asr'; "
                f"audio.features is {constants['features']!r}"
            )
        self._pad_token_id = 0
        if self._prompt in ("whisper", "qwen3_asr"):
            self._pad_token_id = int(self._constant(constants, "pad_token_id"))
        elif self._features is None:
            # Masked, so any id that has an embedding is right where the tokenizer names none.
            self._pad_token_id = int(constants.get("pad_token_id", 0))

    def __call__(self, samples: Sequence[Sample | Mapping[str, torch.Tensor]]) -> Batch:
        """Returns the batch of these samples in memory of its own; a `collate_fn` for torch's DataLoader."""
        return self.collate([_as_arrays(sample) for sample in samples], allocate=fresh)

    def collate(self, samples: Sequence[Sample], *, allocate: Allocate) -> Batch:
        """Returns the batch of these samples in tensors that `allocate` makes; every element of them is written."""
        if not samples:
            raise ValueError("a batch needs at least one sample")
        if self._crops is not None:
            return self._crops.collate(samples, dtype=self.dtype, allocate=allocate)
        if self._features is None:
            return causal_text(
                samples, pad_token_id=self._pad_token_id, padding_side=self.padding_side, allocate=allocate
            )
        batch = self._features.collate(samples, dtype=self.dtype, allocate=allocate)
        if self._prompt == "whisper":
            return batch | whisper_text(samples, pad_token_id=self._pad_token_id, allocate=allocate)
        if self._prompt == "qwen3_asr":
            return batch | qwen3_asr_text(
                samples, pad_token_id=self._pad_token_id, padding_side=self.padding_side, allocate=allocate
            )
        return batch | plain_text(samples, allocate=allocate) if self._prompt == "plain" else batch

    def count_frames(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns (frames of the samples, frames that their batch has room for), of text tokens; the difference is padding."""
        if self._crops is not None:
            return self._crops.count_frames(samples)
        if self._features is None:
            tokens = [len(sample["input_ids"]) for sample in samples]
            return sum(tokens), len(tokens) * max(tokens)
        lengths = [len(values) for values in self._features.values(samples)]
        return sum(lengths), len(lengths) * self._features.room(max(lengths))

    def _choose_features(self, source: SampleSource) -> Features | None:
        kind = self._constant(source.constants, "features")
        if kind == "none":
            if source.constants.get("prompt") != "plain":
                raise ConfigError(
                    f"{self._name}: no batch form for prompt {source.constants.get('prompt')!r} without audio; wanted 'plain'"
                )
            return None
        if kind not in ("log_mel", "qwen3_asr", "w2v_bert", "waveform"):
            raise ConfigError(f"{self._name}: no batch form for features {kind!r}")
        shape = source.fields[Features(kind, 0).stored].shape
        return Features(kind, shape[0] if shape else 1)

    def _constant(self, constants: Mapping[str, Any], name: str) -> Any:
        value = constants.get(name)
        if value is None:
            raise ConfigError(
                f"{self._name}: its metadata has no {name}, which its batches need; rebuild it: forebay preprocess"
            )
        return value


def _as_arrays(sample: Sample | Mapping[str, torch.Tensor]) -> Sample:
    return {name: v.numpy() if isinstance(v, torch.Tensor) else v for name, v in sample.items()}
