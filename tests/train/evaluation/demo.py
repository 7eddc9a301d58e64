"""Caches of a few demo recordings, and models whose texts differ from sample to sample."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from forebay import load_config
from forebay.config import Config
from forebay.store.source import SampleSource
from forebay.train.collate.collator import Collator
from forebay.train.models.model_folder import load_model
from forebay.train.select import select
from tests.preprocess.here_pool import build_here

ROOT = Path(__file__).parents[3]
NUM_SAMPLES = 12
MAX_TOKENS = 24
NUM_LESSONS = 50

_SOURCE = """
[source]
kind = "tar"
manifest = "{root}/demo/speech/train.parquet"
max_duration_s = 30.0
overlong = "keep"
max_samples = {num_samples}
"""
_WHISPER = """
[audio]
features = "log_mel"
n_mels = 80
[text]
tokenizer = "{root}/demo/speech/model"
prompt = "whisper"
"""
_QWEN3_ASR = """
[audio]
features = "qwen3_asr"
[text]
tokenizer = "{root}/demo/speech/qwen3_asr_model"
prompt = "qwen3_asr"
"""
_REST = """
[plan]
edges_s = [1, 2, 30]
batch_size = 3
lockstep = 1
[loader]
seed = 17
[run]
cache_root = "caches"
num_workers = 1
[train]
model = "{family}_model"
output_dir = "runs"
learning_rate = 1e-4
max_steps = 4
log_every = 1
"""
FAMILIES = {"whisper": (_WHISPER, "model"), "qwen3_asr": (_QWEN3_ASR, "qwen3_asr_model")}
"""Text of the config, and the demo's model folder."""


def demo_config(folder: Path, family: str, *overrides: str, sets: str = "") -> Config:
    """Returns a config over `NUM_SAMPLES` demo recordings; caches, runs and the model are in `folder`.

    sets: tables of `[[train.eval]]`, in which THIS is the config of the same data without any.
    """
    text = f'name = "{family}"\n{_SOURCE}{FAMILIES[family][0]}{_REST}'
    text = text.format(root=ROOT, num_samples=NUM_SAMPLES, family=family)
    this = folder / f"{family}.toml"
    this.write_text(text)
    evaluated = folder / f"{family}_evaluated.toml"
    evaluated.write_text(text + sets.replace("THIS", str(this)))
    return load_config(evaluated, overrides=overrides)


def make_demo(folder: Path, family: str, *, is_taught: bool = True) -> Config:
    """Seals the cache of `NUM_SAMPLES` recordings in `folder` and makes a model that has nearly learnt their texts.

    So texts differ, most of them end by themselves, and the best token leads by more than rounding. is_taught: it costs
    4 s of CPU; a model that is not has random weights.
    """
    config = demo_config(folder, family)
    build_here(config)
    source = ROOT / "demo" / "speech" / FAMILIES[family][1]
    model = load_model(source, seed=5, init="random")
    if is_taught:
        _teach(model, select(config))
    target = folder / f"{family}_model"
    model.save_pretrained(target)
    for path in source.iterdir():
        if not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
    return config


def _teach(model: Any, source: SampleSource) -> None:
    """Trains a model on all samples at once; a Whisper's encoder stays as it is, so that it runs only once."""
    batch = Collator(source)([source.read(index) for index in range(len(source))])
    if "decoder_input_ids" in batch:
        with torch.no_grad():
            encoded = model.get_encoder()(batch.pop("input_features"))
        batch["encoder_outputs"] = encoded
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(NUM_LESSONS):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
