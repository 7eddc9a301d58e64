"""Tiny models, batches and a loader of ready batches, for the tests of the training loop."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from forebay.config import (
    AudioConfig,
    BucketConfig,
    Config,
    LoaderConfig,
    SourceConfig,
    TextConfig,
    TrainConfig,
)
from forebay.plan.interface import Tail
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.mixture.mixture_plan import mixture_plan
from forebay.plan.names import plan_key
from forebay.store.source import SourceUnion, without_audio
from forebay.train.loader import Loader
from tests.train import fake_source
from tests.train.fake_source import FakeSource
from tests.train.loaders import loader_of

VOCAB_SIZE = 40
AUDIO_TOKEN_ID = 30
AUDIO_TOKENS_PER_SECOND = 13  # of 100 frames
NUM_MEL_FRAMES = 40  # of the tiny Whisper, instead of 3000


def whisper_folder(folder: Path, **changes: Any) -> Path:
    """Makes `folder` a config.json of a two-layer Whisper with heads of 64; no weights."""
    config = {
        "model_type": "whisper",
        "vocab_size": VOCAB_SIZE,
        "num_mel_bins": 80,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 1,
        "decoder_attention_heads": 1,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": NUM_MEL_FRAMES // 2,
        "max_target_positions": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    return _write(folder, {**config, **changes})


def qwen3_asr_folder(folder: Path, *, vocab_size: int = VOCAB_SIZE, audio_token_id: int = AUDIO_TOKEN_ID) -> Path:
    """Makes `folder` a config.json of a Qwen3-ASR with two layers in each part and heads of 64; no weights."""
    config = {
        "model_type": "qwen3_asr",
        "audio_token_id": audio_token_id,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "audio_config": {
            "model_type": "qwen3_asr_encoder",
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 1,
            "encoder_ffn_dim": 64,
            "d_model": 64,
            "output_dim": 64,
            "downsample_hidden_size": 8,
        },
        "text_config": {
            "model_type": "qwen3",
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
    }
    return _write(folder, config)


def _write(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def config_of(
    folder: Path, *, model: Path, model_type: str = "whisper", n_mels: int | None = None, seed: int = 0, **train: Any
) -> Config:
    """Returns a config whose run folder is `folder`/runs/tiny; `train` are fields of [train]."""
    return Config(
        name="tiny",
        source=SourceConfig(kind="tar", manifest=str(folder / "train.parquet")),
        audio=AudioConfig(
            features="log_mel" if model_type == "whisper" else "qwen3_asr",
            settings={} if n_mels is None else {"n_mels": n_mels},
        ),
        text=TextConfig(tokenizer=str(model), prompt=model_type),
        loader=LoaderConfig(seed=seed),
        train=TrainConfig(model=str(model), output_dir=str(folder / "runs"), **{"init": "random", **train}),
        path=str(folder / "tiny.toml"),
    )


def whisper_batch(
    seed: int, *, num_samples: int = 2, num_tokens: Sequence[int] | None = None, n_mels: int = 80
) -> dict[str, torch.Tensor]:
    """Returns a batch whose samples have `num_tokens` targets (by default 3, 4, ...), the rest of the rows masked."""
    generator = torch.Generator().manual_seed(seed)
    counts = list(num_tokens or range(3, 3 + num_samples))
    width = max(counts) + 1
    ids = torch.randint(3, VOCAB_SIZE, (len(counts), width + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:, 0] = -100
    for row, count in enumerate(counts):
        labels[row, 1 + count :] = -100
    features = torch.randn(len(counts), n_mels, NUM_MEL_FRAMES, generator=generator)
    return {"input_features": features, "decoder_input_ids": ids[:, :-1].contiguous(), "labels": labels}


def qwen3_asr_batch(seed: int, *, num_tokens: Sequence[int] = (3, 5)) -> dict[str, torch.Tensor]:
    """Returns a batch of one-second clips: audio placeholders, then `num_tokens` targets, right padding."""
    generator = torch.Generator().manual_seed(seed)
    length = AUDIO_TOKENS_PER_SECOND + max(num_tokens)
    ids = torch.randint(3, AUDIO_TOKEN_ID, (len(num_tokens), length), generator=generator)
    ids[:, :AUDIO_TOKENS_PER_SECOND] = AUDIO_TOKEN_ID
    mask = torch.ones_like(ids)
    labels = ids.clone()
    labels[:, :AUDIO_TOKENS_PER_SECOND] = -100
    for row, count in enumerate(num_tokens):
        end = AUDIO_TOKENS_PER_SECOND + count
        ids[row, end:], labels[row, end:], mask[row, end:] = 0, -100, 0
    return {
        "input_features": torch.randn(len(num_tokens), 128, 100, generator=generator),
        "input_features_mask": torch.ones(len(num_tokens), 100, dtype=torch.long),
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
    }


def real_loader(*, dp_rank: int = 0, dp_world_size: int = 1, num_threads: int = 2) -> Loader:
    """Returns forebay's loader over random Qwen3-ASR samples, 7 micro-batches an epoch; `real_loader_model` fits it."""
    source = FakeSource(list(range(20, 230, 10)), features="qwen3_asr", prompt="qwen3_asr", seed=2)
    settings = BucketConfig(edges_s=(1.0, 3.0), batch_size=3, lockstep=1)
    return loader_of(
        source,
        bucket_plan(source.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=settings),
        plan_key=plan_key(source.key, settings),
        seed=1,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        num_threads=num_threads,
    )


def text_loader(
    *, dp_rank: int = 0, dp_world_size: int = 1, tail: Tail = "short", model_type: str = "qwen3_asr"
) -> Loader:
    """Returns the loader of samples and of texts without audio, two micro-batches of three with audio."""
    features, prompt = ("log_mel", "whisper") if model_type == "whisper" else ("qwen3_asr", "plain")
    speech = FakeSource(list(range(20, 230, 10)), features=features, prompt=model_type, seed=2)
    texts = FakeSource([0] * 9, features="none", prompt=prompt, seed=3)
    union = SourceUnion([speech, texts], ["speech", "texts"], shares_batches=False)
    settings = BucketConfig(edges_s=(1.0, 3.0), edges=(15, 30), batch_size=3, lockstep=1, tail=tail)
    lengths = union.lengths
    plan = bucket_plan(
        lengths["num_audio_samples"],
        sample_rate_hz=16_000,
        settings=settings,
        tokens=lengths["num_tokens"],
        texts=without_audio(union),
    )
    mixture = mixture_plan(plan, union.source_of, names=union.names, weights=(2, 1), batches="per_source")
    return loader_of(
        union, mixture, plan_key="0" * 64, seed=1, dp_rank=dp_rank, dp_world_size=dp_world_size, num_threads=2
    )


def real_loader_model(folder: Path) -> Path:
    """Makes `folder` the config.json of a Qwen3-ASR with the token ids of `real_loader`."""
    return qwen3_asr_folder(
        folder, vocab_size=fake_source.AUDIO_TOKEN_ID + 1, audio_token_id=fake_source.AUDIO_TOKEN_ID
    )


def real_loader_whisper(folder: Path) -> Path:
    """Makes `folder` the config.json of a Whisper that takes the samples of `text_loader`."""
    return whisper_folder(
        folder, vocab_size=fake_source.AUDIO_TOKEN_ID, max_source_positions=1500, max_target_positions=64
    )


def num_labels(batch: Mapping[str, Any]) -> int:
    """Returns the elements of a batch's labels: what is counted where a test has no model."""
    return int(batch["labels"].numel())


class ListLoader:
    """Yields ready batches, this rank's share of them, epoch after epoch in the same order; resumes by position.

    Like the real one: ranks do equally many steps, the last of which may be a filler of weight 0 on some.
    """

    def __init__(self, batches: Sequence[dict[str, torch.Tensor]], *, dp_rank: int = 0, dp_world_size: int = 1) -> None:
        self._batches = batches
        self._rank, self._world_size = dp_rank, dp_world_size
        self._epoch, self._position = 0, 0
        self.weight = 1
        self.num_closed = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        try:
            while self._position < len(self._batches):
                mine = self._position + self._rank
                self._position += self._world_size
                self.weight = int(mine < len(self._batches))
                yield self._batches[mine % len(self._batches)]
            self._epoch, self._position = self._epoch + 1, 0
        finally:
            self.num_closed += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self._epoch, self._position = state["epoch"], state["position"]

    def report(self) -> dict[str, Any]:
        return {"padding": 0.25}
