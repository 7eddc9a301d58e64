"""Reads a cache through torchdata's StatefulDataLoader: workers fetch ahead, a stopped run goes on at its next batch.

python examples/stateful_dataloader.py configs/demo_speech.toml [section.field=value ...]

This example needs torchdata. Nothing is replayed: the DataLoader's state holds the sampler's state, a few integers, as
a loader's. A loop on several ranks multiplies each loss by `weight_of(batch)`.

torchdata takes the state of its own DataLoader with the same number of workers only. For another number give the
sampler's state to the new `PlanSampler`, as below; of a DataLoader without workers it is
`state["_index_sampler_state"]`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import forebay
from forebay.plan import plan_of
from forebay.train import Collator, PlanSampler, SampleDataset, weight_of


def make_dataloader(config: forebay.Config, cache: forebay.Cache, *, num_workers: int) -> Any:
    """Returns a StatefulDataLoader over this rank's batches."""
    sampler = PlanSampler(plan_of(config, cache), seed=config.loader.seed)
    return StatefulDataLoader(
        SampleDataset(cache), batch_sampler=sampler, collate_fn=Collator(cache), num_workers=num_workers
    )


def main(config_path: str, overrides: list[str]) -> None:
    """Reads half an epoch, three batches with a new DataLoader, and the rest with one that has no workers."""
    config = forebay.load_config(config_path, overrides=overrides)
    cache = forebay.open_cache(forebay.preprocess.build(config).cache)
    expected = [{name: tensor.clone() for name, tensor in batch.items()} for batch in forebay.train.make_loader(config)]

    first = make_dataloader(config, cache, num_workers=2)
    batches = iter(first)
    found = [next(batches) for _ in range(len(expected) // 2)]
    state = first.state_dict()  # save it beside the weights

    second = make_dataloader(config, cache, num_workers=2)
    second.load_state_dict(state)
    found += [batch for _, batch in zip(range(3), second, strict=False)]

    third = make_dataloader(config, cache, num_workers=0)
    third.batch_sampler.load_state_dict(second.state_dict()["_snapshot"]["_main_snapshot"]["_index_sampler_state"])
    found += list(third)
    for number, (batch, same) in enumerate(zip(found, expected, strict=True)):
        equal = all(torch.equal(batch[name], same[name]) for name in same)
        print(f"batch {number}: {len(batch['labels']) * weight_of(batch)} samples, equal: {equal}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
