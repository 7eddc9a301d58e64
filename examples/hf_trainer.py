"""transformers' Trainer on forebay's loader.

python examples/hf_trainer.py configs/demo_speech.toml [section.field=value ...]

`get_train_dataloader` hands the loader over as it is: it already gives each rank its share, so accelerate must not wrap it.
On several ranks set plan.tail = "drop": the Trainer does not know of fillers with weight 0.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import Trainer, TrainingArguments

import forebay
from forebay.config import Config
from forebay.train.models import load_model


class ForebayTrainer(Trainer):
    """A Trainer whose training batches come from a forebay config."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        state = PartialState()
        self._loader = forebay.train.make_loader(config, dp_rank=state.process_index, dp_world_size=state.num_processes)

    def get_train_dataloader(self) -> Any:
        """Returns this rank's loader, not prepared by accelerate."""
        return self._loader


def main(config_path: str, overrides: list[str]) -> None:
    """Trains `train.max_steps` steps."""
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)
    arguments = TrainingArguments(
        output_dir=config.train.output_dir,
        max_steps=config.train.max_steps,
        learning_rate=config.train.learning_rate,
        warmup_steps=config.train.warmup_steps,
        gradient_accumulation_steps=config.train.grad_acc,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    model = load_model(Path(str(config.train.model)), seed=config.train.seed, init=config.train.init)
    result = ForebayTrainer(config, model=model, args=arguments).train()
    print(f"{result.global_step} steps, mean loss {result.training_loss:.3f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
