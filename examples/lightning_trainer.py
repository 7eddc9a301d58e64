"""Runs Lightning's Trainer on forebay's loader: Lightning wants an iterable with a length and a state.

python examples/lightning_trainer.py configs/demo_speech.toml [section.field=value ...]

This example needs lightning. Lightning keeps the loader's state in its checkpoints, so a run that stopped within an
epoch goes on at the next batch. On several ranks give `make_loader` the rank and pass `use_distributed_sampler=False`;
the losses of a step count by their targets. Where Lightning leaves an epoch
early (`limit_train_batches`, more ranks than before), its next epoch goes on behind the last batch. Evaluate on
`make_loader(config, shuffle=False)`; for `overfit_batches` set `source.max_samples`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch

import forebay
from forebay.train import load_model


class ConfigModel(lightning.LightningModule):
    """The config's model, of speech or of packs; a batch has its argument names."""

    def __init__(self, config: forebay.Config) -> None:
        super().__init__()
        self.model = load_model(Path(str(config.train.model)), seed=config.loader.seed, init=config.train.init)
        self.learning_rate = config.train.learning_rate
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        """Returns the loss of a batch."""
        loss: torch.Tensor = self.model(**batch).loss
        targets = torch.tensor(forebay.train.num_targets(self.model, batch), device=self.device)
        share = targets * self.trainer.world_size / self.all_gather(targets).sum()
        self.losses.append(loss.item())
        print(f"step {self.global_step + 1}: batch {batch_idx}, loss {loss.item():.3f}")
        return loss * share

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW at a constant rate."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def trainer(config: forebay.Config, *, max_steps: int) -> lightning.Trainer:
    """Returns a Trainer that says little."""
    return lightning.Trainer(
        max_steps=max_steps,
        default_root_dir=config.train.output_dir,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main(config_path: str, overrides: list[str]) -> list[float]:
    """Returns the losses of `train.max_steps` steps, and of as many after a save with new Trainer and loader."""
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)
    first = trainer(config, max_steps=config.train.max_steps)
    started = ConfigModel(config)
    first.fit(started, forebay.train.make_loader(config))
    checkpoint = Path(config.train.output_dir) / "lightning.ckpt"
    first.save_checkpoint(checkpoint)

    loader = forebay.train.make_loader(config)
    second = trainer(config, max_steps=2 * config.train.max_steps)
    resumed = ConfigModel(config)
    second.fit(resumed, loader, ckpt_path=str(checkpoint))
    print(f"{second.global_step} steps; the next batch is micro-batch {loader.state_dict()['position']}")
    return started.losses + resumed.losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
