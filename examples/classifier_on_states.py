"""Trains a classifier on the states of a frozen encoder, which a cache holds: the encoder runs over the data once.

python examples/classifier_on_states.py states.toml [section.field=value ...]

`states.toml` has a `[[model]]` that is an encoder, whose field is `states` (docs/model-steps.md). The classes are the
languages of the rows.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import forebay

Batches = Iterable[tuple[torch.Tensor, torch.Tensor, list[str]]]
"""States [batch, frames, size], their mask [batch, frames], and the languages."""


class Pooled(nn.Module):
    """The classes of a clip by the mean of its own states."""

    def __init__(self, size: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(size), nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, num_classes))

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns logits [batch, classes]."""
        own = mask[..., None].to(states.dtype)
        logits: torch.Tensor = self.layers((states * own).sum(dim=1) / own.sum(dim=1))
        return logits


def train(batches: Batches, languages: list[str], *, size: int, learning_rate: float, seed: int) -> list[float]:
    """Trains on batches, wherever their states come from; returns the losses."""
    torch.manual_seed(seed)
    model = Pooled(size, len(languages))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses = []
    for step, (states, mask, spoken) in enumerate(batches, start=1):
        loss = cross_entropy(model(states, mask), torch.tensor([languages.index(name) for name in spoken]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {loss.item():.3f}")
    return losses


def main(config_path: str, overrides: list[str]) -> list[float]:
    """Trains `train.max_steps` steps; returns the losses."""
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)
    loader = forebay.train.make_loader(config, with_columns=["language"])
    languages = sorted(set(loader.source.table(["language"])["language"].to_pylist()))
    epochs = itertools.chain.from_iterable(loader for _ in itertools.count())
    taken = itertools.islice(epochs, config.train.max_steps)
    batches = ((batch["states"], batch["states_mask"], columns["language"]) for batch, columns in taken)
    size = loader.source.fields["states"].shape[0]
    return train(batches, languages, size=size, learning_rate=config.train.learning_rate, seed=config.loader.seed)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
