"""forebay under torchdata's StatefulDataLoader: stop anywhere, go on at the next batch, with worker processes.

python examples/stateful_dataloader.py configs/demo_speech.toml [section.field=value ...]

Needs torchdata. Nothing is replayed: the DataLoader's state holds the sampler's, which is a loader's (a few integers).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import forebay
from forebay.config import Config
from forebay.plan.make import plan_of
from forebay.train.collate import Collator
from forebay.train.dataset import PlanSampler, SampleDataset
from forebay.train.select import select


def make_dataloader(config: Config, *, num_workers: int) -> Any:
    """Returns a StatefulDataLoader over this rank's batches."""
    source = select(config).source
    planned = plan_of(config, source)
    sampler = PlanSampler(planned.plan, seed=config.loader.seed, plan_key=planned.key)
    return StatefulDataLoader(
        SampleDataset(source), batch_sampler=sampler, collate_fn=Collator(source), num_workers=num_workers
    )


def main(config_path: str, overrides: list[str]) -> None:
    """Reads half an epoch, saves the state, and reads the other half with a new DataLoader."""
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)
    expected = [{name: tensor.clone() for name, tensor in batch.items()} for batch in forebay.train.make_loader(config)]

    first = make_dataloader(config, num_workers=2)
    batches = iter(first)
    found = [next(batches) for _ in range(len(expected) // 2)]
    state = first.state_dict()  # save it beside the weights

    second = make_dataloader(config, num_workers=2)
    second.load_state_dict(state)
    found += list(second)
    for number, (batch, same) in enumerate(zip(found, expected, strict=True)):
        equal = all(torch.equal(batch[name], same[name]) for name in same)
        print(f"batch {number}: {len(batch['labels'])} samples, equal: {equal}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
