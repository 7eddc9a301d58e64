"""Runs a loop on accelerate: gradients of several micro-batches, ranks under torchrun, the loader's state for a resume.

python examples/accelerate_loop.py configs/demo_vision.toml [section.field=value ...]

The loader gives each rank its share and puts batches on the device. So the loop does not prepare the loader.
accelerate's `accumulate` asks a prepared loader where an epoch ends. This loop says so itself; else the last, odd
micro-batch of an epoch would count for the next epoch.
"""

from __future__ import annotations

import contextlib
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
    for number, batch in enumerate(loader, start=1):
        is_last = number % config.train.grad_acc == 0 or number == len(loader)
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            loss = model(**batch).loss * loader.weight
            accelerator.backward(loss / config.train.grad_acc)
        losses.append(loss.item())
        if not is_last:
            continue
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {number // config.train.grad_acc}: loss {loss.item():.3f}")
        if number >= config.train.max_steps * config.train.grad_acc:
            break
    state = loader.state_dict()  # the same on every rank: save it beside the weights
    accelerator.print(f"the next batch is micro-batch {state['position']} of epoch {state['epoch']}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
