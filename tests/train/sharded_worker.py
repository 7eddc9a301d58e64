"""Each rank of test_sharded.py runs this: `accelerate launch --config_file X -m tests.train.sharded_worker FOLDER`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from forebay.config import Config, LoraConfig
from forebay.train.loop import launch as sharded
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import train
from tests.train.tiny import ListLoader, config_of, whisper_batch, whisper_folder

NUM_STEPS = 6
RESUME_AT = 3
NUM_BATCHES = 6
"""Micro-batches in an epoch: three of each rank, so that the second step of an epoch has one."""


def config_for(folder: Path, *, grad_acc: int, **changes: Any) -> Config:
    """Returns the config of a run in `folder`, whose model folder is made; weight decay, a frozen part, own rates."""
    settings = {
        "max_steps": NUM_STEPS,
        "learning_rate": 3e-3,
        "schedule": "constant",
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "embed_lr_mult": 0.5,
        "freeze": ("encoder.layers.0",),
        "max_grad_norm": 1.5,  # of norms from 1 to 6
        "log_every": 1,
        **changes,
    }
    model = folder / "model"
    if not model.exists():
        whisper_folder(model)
    return config_of(folder, model=model, grad_acc=grad_acc, **settings)


def loader_of(*, dp_rank: int = 0, dp_world_size: int = 1) -> ListLoader:
    """Returns a rank's loader, whose batches have very different numbers of targets."""
    batches = [whisper_batch(seed, num_tokens=(1 + 3 * seed % 8, 2)) for seed in range(NUM_BATCHES)]
    return ListLoader(batches, dp_rank=dp_rank, dp_world_size=dp_world_size)


@torch.no_grad()
def passes(model: Any, *, rank: int) -> list[float]:
    """Returns what the model says of one batch: before it is held whole, then of ranks apart, and after it.

    Held whole, rank 0 alone writes texts, too: twice as many passes as rank 1 has, which would wait for ever.
    """
    batch = whisper_batch(0)
    found = [model(**batch).loss.item()]
    with sharded.held_whole(model):
        found.append(model(**batch).loss.item())
        if rank == 0:
            plain = getattr(model, "module", model)  # without DDP around it
            plain.generate(batch["input_features"], max_new_tokens=4, min_new_tokens=4)
            found.append(plain(**batch).loss.item())
    return [*found, model(**batch).loss.item()]


def losses_with_adapters(folder: Path, *, dp_rank: int = 0, dp_world_size: int = 1) -> list[float]:
    """Returns the losses of a run with LoRA, which is stopped and resumed; on ranks other than 0 none."""
    losses: list[float] = []
    changes = {"lora": LoraConfig(rank=4, alpha=16.0), "learning_rate": 0.05, "freeze": (), "embed_lr_mult": 1.0}
    for max_steps, resume in ((2, False), (4, True)):
        config = config_for(folder, grad_acc=4 // dp_world_size, max_steps=max_steps, **changes)
        train(
            dataclasses.replace(config, name="adapters"),
            loader=loader_of(dp_rank=dp_rank, dp_world_size=dp_world_size),
            source_kind="cache",
            resume=resume,
            log=lambda line: losses.append(line.loss),
        )
    return losses


def main(folder: Path) -> None:
    """Trains, stops, resumes, and goes on from the checkpoint of the other way where there is one."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seen: list[dict[str, Any]] = []
    models: list[Any] = []
    prepare = sharded.prepare

    def watched(accelerator: Any, model: Any, settings: Any) -> tuple[Any, Any]:
        prepared, optimizer = prepare(accelerator, model, settings)
        parts = [value for value in prepared.parameters() if isinstance(value, DTensor)]
        held = sum(
            value.to_local().numel() if isinstance(value, DTensor) else value.numel() for value in prepared.parameters()
        )
        models.append(prepared)
        seen.append({"is_fsdp": isinstance(prepared, FSDPModule), "parts": len(parts), "held": held})
        return prepared, optimizer

    sharded.prepare = watched
    results: dict[str, Any] = {"losses": [], "norms": []}

    def log(line: StepLog) -> None:
        results["losses"].append(line.loss)
        results["norms"].append(line.grad_norm)

    for max_steps, resume in ((RESUME_AT, False), (NUM_STEPS, True)):
        config = config_for(folder, grad_acc=2, max_steps=max_steps)
        loader = loader_of(dp_rank=rank, dp_world_size=world_size)
        report = train(config, loader=loader, source_kind="cache", resume=resume, log=log)
    results |= {"seen": seen, "checkpoint": report.checkpoint, "last": report.loss_last}
    if (other := folder / "go_on").exists():
        config = dataclasses.replace(config_for(folder, grad_acc=2, max_steps=RESUME_AT + 1), name="other")
        loader = loader_of(dp_rank=rank, dp_world_size=world_size)
        results["other"] = train(config, loader=loader, source_kind="cache", resume=other).loss_last
    results["passes"] = passes(models[1], rank=rank)
    sharded.prepare = prepare
    results["adapters"] = losses_with_adapters(folder, dp_rank=rank, dp_world_size=world_size)
    (folder / f"rank_{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
