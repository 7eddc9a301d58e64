"""Trains a flow-matching model of images: cached latents, drawn anew in each epoch, and text embeddings.

python examples/flow_on_latents.py flow.toml [section.field=value ...]

`flow.toml` has two `[[model]]` (docs/model-steps.md): `latents` of an AutoencoderKL, with `shapes`, and `words` of a
text encoder. `plan.by = ["area", "aspect"]` makes batches of one shape. With `source.captions.empty = true` and
`loader.caption_dropout = 0.1` it learns the unconditional flow too, for classifier-free guidance.
"""

from __future__ import annotations

import itertools
import math
import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss

import forebay


class Flow(nn.Module):
    """Predicts the velocity from an image to noise (arXiv 2210.02747), told the time and the words."""

    def __init__(self, *, channels: int, words: int, size: int = 64) -> None:
        super().__init__()
        self.size = size
        self.told = nn.Linear(size + words, size)
        self.begin = nn.Conv2d(channels, size, 3, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(8, size), nn.SiLU(), nn.Conv2d(size, size, 3, padding=1), nn.SiLU())
        self.end = nn.Conv2d(size, channels, 3, padding=1)

    def forward(self, noisy: torch.Tensor, time: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Returns velocities [batch, channels, height, width]. time: [batch] from 0 to 1. words: [batch, words]."""
        steps = torch.exp(-math.log(1e4) * torch.arange(self.size // 2) / (self.size // 2))
        angles = 1000 * time[:, None] * steps
        told = self.told(torch.cat([angles.sin(), angles.cos(), words], dim=1))
        states = self.begin(noisy) + told[:, :, None, None]
        velocity: torch.Tensor = self.end(states + self.middle(states))
        return velocity


def flow_loss(model: Flow, batch: dict[str, torch.Tensor], *, scale: float, shift: float) -> torch.Tensor:
    """Returns the loss of a batch: `latents` [batch, channels, height, width], `words` and their mask."""
    latents, mask = (batch["latents"] - shift) * scale, batch["words_mask"][..., None]
    words = (batch["words"] * mask).sum(dim=1) / mask.sum(dim=1)
    noise, time = torch.randn_like(latents), torch.rand(len(latents))
    part = time[:, None, None, None]
    return mse_loss(model((1 - part) * latents + part * noise, time, words), noise - latents)


def main(config_path: str, overrides: list[str]) -> list[float]:
    """Trains `train.max_steps` steps; returns the losses."""
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)
    loader = forebay.train.make_loader(config)
    facts, fields = loader.source.constants.of("latents"), loader.source.fields
    factors = {"scale": facts.get("scaling_factor") or 1.0, "shift": facts.get("shift_factor") or 0.0}
    torch.manual_seed(config.loader.seed)
    model = Flow(channels=facts["form"]["fields"][0]["shape"][0] // 2, words=fields["words"].shape[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.learning_rate)
    losses = []
    epochs = itertools.chain.from_iterable(loader for _ in itertools.count())
    for step, batch in enumerate(itertools.islice(epochs, config.train.max_steps), start=1):
        loss = flow_loss(model, batch, **factors) * loader.weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {loss.item():.3f}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
