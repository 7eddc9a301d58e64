"""Runs a trainer in the style of TRL's SFTTrainer on forebay's packs: own loss, no key-value cache, token accuracy.

python examples/hf_sft_trainer.py configs/demo_vision.toml [section.field=value ...]

`SftStyleTrainer` does with a batch what TRL's trainer does. With TRL itself write `class T(LoaderMixin, SFTTrainer)`,
and set `dataset_kwargs={"skip_prepare_dataset": True}` in the SFTConfig, because the packs are made already.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

import forebay
from forebay.train import load_model
from forebay.train.integrations.hf import LoaderMixin


class SftStyleTrainer(LoaderMixin, Trainer):
    """Keeps the share of the learnt tokens that the model guesses right, batch by batch."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.accuracies: list[float] = []

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: FBT001, FBT002 (the Trainer's own signature)
        num_items_in_batch: Any = None,
    ) -> Any:
        """Returns the model's own loss of a batch."""
        inputs["use_cache"] = False  # as it is in packs already
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        wanted = inputs["labels"][:, 1:]
        is_right = outputs.logits[:, :-1].argmax(-1) == wanted
        self.accuracies.append(torch.mean(is_right[wanted != -100], dtype=torch.float32).item())
        return (loss, outputs) if return_outputs else loss


def main(config_path: str, overrides: list[str]) -> list[float]:
    """Trains `train.max_steps` steps; returns their losses."""
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)
    arguments = TrainingArguments(
        output_dir=config.train.output_dir,
        max_steps=config.train.max_steps,
        learning_rate=config.train.learning_rate,
        gradient_accumulation_steps=config.train.grad_acc,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = SftStyleTrainer(
        model=load_model(Path(str(config.train.model)), seed=config.loader.seed, init=config.train.init),
        args=arguments,
        train_dataset=forebay.train.make_loader(
            config, dp_rank=arguments.process_index, dp_world_size=arguments.world_size
        ),
    )
    trainer.train()
    print(f"{len(trainer.accuracies)} micro-batches, token accuracy {trainer.accuracies[-1]:.3f}")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
