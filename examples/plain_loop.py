"""Trains in a plain torch loop: builds the cache once, finds the cache by its key, trains.

python examples/plain_loop.py configs/demo_speech.toml [section.field=value ...]
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

import forebay
from forebay.train import load_model


def main(config_path: str, overrides: list[str]) -> list[float]:
    """Trains `train.max_steps` steps and shows how the order goes on after a stop; returns the losses."""
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)  # a no-op when the cache is sealed
    loader = forebay.train.make_loader(config)

    model = load_model(
        Path(str(config.train.model)), seed=config.loader.seed, init=config.train.init
    )  # or from_pretrained of transformers
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.learning_rate)
    losses = []
    epochs = itertools.chain.from_iterable(loader for _ in itertools.count())  # each `iter(loader)` is the next epoch
    for step, batch in enumerate(itertools.islice(epochs, config.train.max_steps), start=1):
        loss = model(**batch).loss * loader.weight  # a batch has the model's own argument names
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {loss.item():.3f}")

    state = loader.state_dict()  # a few integers: save it beside the weights
    again = forebay.train.make_loader(config)
    again.load_state_dict(state)  # the next batch is the one that `loader` would have given
    print(f"the next batch is micro-batch {state['position']} of epoch {state['epoch']}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
