"""Each rank of test_ranks.py runs this: `python -m tests.train.ranks_worker CONFIG PACKS OUT` under torchrun.

Nothing here names a rank: that is what is tested.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from forebay import load_config
from forebay.errors import ConfigError
from forebay.plan.make import Planned
from forebay.train import CachedVLDataset, make_loader, weight_of
from forebay.train.dataset import PlanSampler, SampleDataset

HEAD = 16
"""Audio samples that tell a clip from every other."""


def heads(batches: Iterable[dict[str, Any]]) -> list[list[list[int]]]:
    """Returns the first samples of every clip of every batch; of a filler none."""
    return [(b["input_values"][:, :HEAD] * 2**15).to(torch.int64).tolist() if weight_of(b) else [] for b in batches]


def main(config_path: str, packs: str, out: Path) -> None:
    """Reads one epoch in every way and writes rank_R.json."""
    torch.set_num_threads(1)
    config = load_config(config_path, overrides=["loader.num_threads=1"])
    results: dict[str, Any] = {"environment": heads(make_loader(config))}
    dataset = CachedVLDataset(packs)
    results["workers"] = [
        batch["input_ids"].flatten().tolist() for batch in DataLoader(dataset, batch_size=None, num_workers=2)
    ]
    accelerator = Accelerator(cpu=True)
    assert torch.distributed.is_initialized()
    loader = make_loader(config)
    results["initialised"] = heads(loader)
    results["prepared"] = heads(accelerator.prepare(loader))
    if accelerator.process_index == 1:  # and no other rank
        results["alone"] = heads(make_loader(config, dp_rank=0, dp_world_size=1))
        results["alone"] += heads(make_loader(config, shuffle=False, dp_rank=0, dp_world_size=1))
    sampler = PlanSampler(Planned(plan=loader.plan, key=loader.plan_key), seed=0)
    results["sampler"] = [list(batch) for batch in sampler]
    batches: DataLoader[Any] = DataLoader(SampleDataset(loader.source), batch_sampler=sampler)
    try:
        accelerator.prepare(batches)
    except ConfigError as err:
        results["shared_twice"] = str(err)
    torch.distributed.destroy_process_group()
    (out / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
