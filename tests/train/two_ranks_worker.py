"""Each rank of test_two_ranks.py runs this: `python -m tests.train.two_ranks_worker FOLDER` under torchrun."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from forebay.config import Config
from forebay.train.loader import Loader
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import train
from tests.train.tiny import (
    ListLoader,
    config_of,
    qwen3_asr_batch,
    qwen3_asr_folder,
    real_loader,
    real_loader_model,
    real_loader_whisper,
    text_loader,
    whisper_batch,
    whisper_folder,
)

SCENARIOS = {
    "even": ("whisper", 4, 1),
    "ragged": ("whisper", 5, 1),
    "ragged_accumulating": ("whisper", 5, 2),
    "qwen3_asr": ("qwen3_asr", 3, 2),
    "real_loader": ("qwen3_asr", 7, 1),
    "text_loader": ("qwen3_asr", 10, 2),
    "whisper_zeros": ("whisper", 10, 1),
    "whisper_silence": ("whisper", 10, 1),
}
"""Name to (model type, micro-batches in an epoch, grad_acc)."""
REAL_LOADERS: dict[str, Callable[..., Loader]] = {
    "real_loader": real_loader,
    "text_loader": text_loader,
    "whisper_zeros": partial(text_loader, model_type="whisper"),
    "whisper_silence": partial(text_loader, model_type="whisper"),
}
"""The scenarios with forebay's own loader."""
NUM_STEPS = 5
RESUME_AT = 3


def loader_of(name: str, *, dp_rank: int = 0, dp_world_size: int = 1) -> ListLoader | Loader:
    """Returns a rank's loader of a scenario; its batches have very different numbers of targets."""
    if name in REAL_LOADERS:
        return REAL_LOADERS[name](dp_rank=dp_rank, dp_world_size=dp_world_size)
    model_type, count, _ = SCENARIOS[name]
    make = whisper_batch if model_type == "whisper" else qwen3_asr_batch
    batches = [make(seed, num_tokens=(1 + 3 * seed % 8, 2)) for seed in range(count)]
    return ListLoader(batches, dp_rank=dp_rank, dp_world_size=dp_world_size)


def scenario(folder: Path, name: str, *, grad_acc: int, max_steps: int = NUM_STEPS) -> Config:
    """Returns the config of a scenario, its model folder made where it is not there."""
    model_type = SCENARIOS[name][0]
    model = folder / (f"real_loader_{model_type}" if name in REAL_LOADERS else f"{model_type}_model")
    return dataclasses.replace(
        config_of(
            folder,
            model=model,
            model_type=model_type,
            max_steps=max_steps,
            grad_acc=grad_acc,
            learning_rate=3e-3,
            warmup_steps=NUM_STEPS,  # a linear rate, which does not depend on max_steps
            log_every=1,
            max_grad_norm=3.0,  # of norms from 2 to 6: AdamW alone would not see a wrong scale
            text_encoder="silence" if name == "whisper_silence" else "zeros",
        ),
        name=name,
    )


def noting(losses: list[float]) -> Callable[[StepLog], None]:
    """Returns a log that appends the loss of each line."""
    return lambda line: losses.append(line.loss)


def make_models(folder: Path) -> None:
    """Makes the model folders of all scenarios."""
    real_loader_model(folder / "real_loader_qwen3_asr")
    real_loader_whisper(folder / "real_loader_whisper")
    whisper_folder(folder / "whisper_model")
    qwen3_asr_folder(folder / "qwen3_asr_model")


def main(folder: Path) -> None:
    """Runs every scenario on this rank, the first also interrupted and resumed; writes rank_R.json."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results: dict[str, Any] = {}
    for name, (_, _, grad_acc) in SCENARIOS.items():
        losses: list[float] = []
        for max_steps, resume in ((RESUME_AT, False), (NUM_STEPS, True)):
            config = scenario(folder, name, grad_acc=grad_acc, max_steps=max_steps)
            loader = loader_of(name, dp_rank=rank, dp_world_size=world_size)
            report = train(
                config,
                loader=loader,
                source_kind="cache",
                resume=resume,
                log=noting(losses),
            )
        results[name] = {"losses": losses, "last": report.loss_last, "checkpoint": report.checkpoint}
    results["backend"] = torch.distributed.get_backend()
    (folder / f"rank_{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
