"""Shows the dataloader that torchtitan wants: an endless iterable of (inputs, labels) with a state, for one rank.

python examples/torchtitan_dataloader.py configs/demo_speech.toml [section.field=value ...]

torchtitan makes the dataloader with `dp_rank` and `dp_world_size`, and saves its state with
torch.distributed.checkpoint, as below. The state is the same on every rank, so a checkpoint of 8 ranks goes on with 4
or 16.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

import forebay


class ForebayDataLoader(Stateful):
    """Yields (inputs, labels) for ever, epoch after epoch; stops and goes on between any two batches."""

    def __init__(self, config: forebay.Config, *, dp_rank: int, dp_world_size: int) -> None:
        self._loader = forebay.train.make_loader(config, dp_rank=dp_rank, dp_world_size=dp_world_size)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for batch in self._loader:
                labels = batch.pop("labels")
                if not self._loader.weight:  # the batch only keeps this rank in step, and torchtitan counts labels
                    labels.fill_(-100)
                yield batch, labels

    def state_dict(self) -> dict[str, Any]:
        """Returns where the next batch is."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next batch the one that the state names."""
        self._loader.load_state_dict(state_dict)


def main(config_path: str, overrides: list[str]) -> None:
    """Reads three steps of two ranks, saves, and goes on with one rank where the two have stopped."""
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)
    one_rank = ForebayDataLoader(config, dp_rank=0, dp_world_size=1)
    expected = [labels.clone() for _, labels in itertools.islice(one_rank, 8)]

    ranks = [ForebayDataLoader(config, dp_rank=rank, dp_world_size=2) for rank in range(2)]
    steps = zip(*ranks, strict=True)
    found = [labels.clone() for _ in range(3) for _, labels in next(steps)]
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"dataloader": ranks[0]}, checkpoint_id=folder, no_dist=True)
        again = ForebayDataLoader(config, dp_rank=0, dp_world_size=1)
        dcp.load({"dataloader": again}, checkpoint_id=folder, no_dist=True)
    found += [labels.clone() for _, labels in itertools.islice(again, 2)]
    for number, (labels, same) in enumerate(zip(found, expected, strict=True)):
        print(f"micro-batch {number}: {len(labels)} samples, equal: {torch.equal(labels, same)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
