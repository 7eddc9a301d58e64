"""Runs a loop on accelerate: gradients of several micro-batches, ranks under torchrun, the loader's state for a resume.

python examples/accelerate_loop.py configs/demo_vision.toml [section.field=value ...]

The loader gives each rank its share and puts batches on the device. So the loop does not prepare the loader.
accelerate's `accumulate` asks a prepared loader where an epoch ends. This loop says so itself; else the last, odd
micro-batch of an epoch would count for the next epoch. The losses of a step count by their targets, over all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

import forebay
from forebay.train import load_model


def main(config_path: str, overrides: list[str]) -> list[float]:
    """Trains one epoch, at most `train.max_steps` steps; returns the losses of the micro-batches."""
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    loader = forebay.train.make_loader(
        config, dp_rank=accelerator.process_index, dp_world_size=accelerator.num_processes, device=accelerator.device
    )
    model = load_model(Path(str(config.train.model)), seed=config.loader.seed, init=config.train.init)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=config.train.learning_rate))

    losses: list[float] = []
    batches = iter(loader)
    for step in range(1, config.train.max_steps + 1):
        group = list(itertools.islice(batches, config.train.grad_acc))
        if not group:
            break
        targets = [forebay.train.num_targets(model, batch) for batch in group]  # 0 of a batch that only keeps step
        total = accelerator.reduce(torch.tensor(sum(targets), device=accelerator.device), "sum")
        for batch, count in zip(group, targets, strict=True):
            with contextlib.nullcontext() if batch is group[-1] else accelerator.no_sync(model):
                loss = model(**batch).loss
                accelerator.backward(loss * (count * accelerator.num_processes / total))
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {losses[-1]:.3f}")
    state = loader.state_dict()  # the same on every rank: save it beside the weights
    accelerator.print(f"the next batch is micro-batch {state['position']} of epoch {state['epoch']}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
