"""Reads packs of images and text through torch's DataLoader: the dataset takes a folder, and workers make the packs.

python examples/vision_dataloader.py configs/demo_vision.toml [section.field=value ...]

This is for loops that need a DataLoader. `build_vl_dataloader` gives equal batches with threads, without a copy between
processes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import forebay
from forebay.train import load_model, weight_of


def main(config_path: str, overrides: list[str]) -> None:
    """Reads one epoch both ways and compares them batch by batch; the model takes the first."""
    config = forebay.load_config(config_path, overrides=overrides)
    cache = Path(forebay.preprocess.build(config).cache)
    loader = forebay.train.build_vl_dataloader(config)  # its plan is on disk now, beside the cache

    dataset = forebay.train.CachedVLDataset(cache, seed=config.loader.seed)
    dataset.set_epoch(0)  # before every epoch: the workers are copies
    batches = DataLoader(dataset, batch_size=None, num_workers=2)
    for number, (batch, same) in enumerate(zip(batches, loader, strict=True)):
        equal = all(torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(same[name])) for name in same)
        images, tokens = len(batch["image_grid_thw"]), batch["input_ids"].shape[1]
        print(f"pack {number}: {images} images, {tokens} tokens, equal: {equal}")
        if number == 0:
            model = load_model(Path(str(config.train.model)), seed=0, init=config.train.init)
            loss = model(**batch).loss * weight_of(batch)  # the model's own argument names, and use_cache=False
            print(f"loss {loss.item():.2f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
