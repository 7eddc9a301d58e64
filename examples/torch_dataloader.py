"""Reads a cache through torch's own DataLoader: the same samples, plan and collation, in worker processes.

python examples/torch_dataloader.py configs/demo_speech.toml [section.field=value ...]

This is for loops that need a DataLoader. forebay's own loader gives equal batches with threads, and is faster. A loop
on several ranks multiplies each loss by `weight_of(batch)`: 0 of a batch that only keeps its rank in step.
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader

import forebay
from forebay.plan import plan_of
from forebay.train import Collator, PlanSampler, SampleDataset, weight_of


def main(config_path: str, overrides: list[str]) -> None:
    """Reads one epoch both ways and compares them batch by batch."""
    config = forebay.load_config(config_path, overrides=overrides)
    cache = forebay.open_cache(forebay.preprocess.build(config).cache)
    sampler = PlanSampler(plan_of(config, cache), seed=config.loader.seed)
    sampler.set_epoch(0)  # before every epoch, as with torch's DistributedSampler
    batches = DataLoader(SampleDataset(cache), batch_sampler=sampler, collate_fn=Collator(cache), num_workers=2)
    for number, (batch, same) in enumerate(zip(batches, forebay.train.make_loader(config), strict=True)):
        equal = all(torch.equal(batch[name], same[name]) for name in same)
        print(f"batch {number}: {len(batch['labels']) * weight_of(batch)} samples, equal: {equal}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
