"""The arithmetic of a training step, free of state: loss, learning rate, optimizer and seeds."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch.nn import functional

from forebay.config.train import TrainConfig
from forebay.steps.batch import IGNORED


def count_targets(labels: torch.Tensor, *, labels_are_shifted: bool) -> int:
    """Returns how many positions of `labels` [batch, tokens] count in the loss."""
    targets = labels if labels_are_shifted else labels[:, 1:]
    return int((targets != IGNORED).sum())


def summed_loss(logits: torch.Tensor, labels: torch.Tensor, *, labels_are_shifted: bool) -> torch.Tensor:
    """Returns the cross-entropy summed over all targets, float32 scalar, in nats; 0 where there are none.

    logits: [batch, tokens, vocab]; labels: int64 [batch, tokens]. The sum over `count_targets` is what
    `model(**batch).loss` gives; the sum itself can be weighted by the targets of all micro-batches and ranks.
    """
    if not labels_are_shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def lr_factor(step: int, settings: TrainConfig) -> float:
    """Returns the share of `learning_rate` that step 1, 2, ... takes: linear warm-up, then half a cosine towards 0.

    Step `warmup_steps` is the first at the full rate, and no step is spent at a rate of 0 (transformers'
    `get_cosine_schedule_with_warmup` spends the first). A function of the step, so it needs no state.
    """
    if step <= settings.warmup_steps:
        return step / settings.warmup_steps
    done = (step - 1 - settings.warmup_steps) / max(settings.max_steps - settings.warmup_steps, 1)
    return 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


def adamw(model: torch.nn.Module, settings: TrainConfig) -> torch.optim.AdamW:
    """Returns AdamW over the model's trainable parameters; biases and norm weights (one axis) are not decayed."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in trainable if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
    )


def seed_step(seed: int, *, step: int, rank: int) -> None:
    """Makes the random states those of (seed, step, rank), so dropout and SpecAugment need no state in a checkpoint."""
    words = np.random.SeedSequence([seed & (2**64 - 1), step, rank]).generate_state(2)
    random.seed(int(words[0]))
    np.random.seed(words[0])
    torch.manual_seed(int(words[0]) | int(words[1]) << 32)
