"""Runs transformers' Trainer on forebay's loader, for speech or for packs, and resumes at the batch where it stopped.

python examples/hf_trainer.py configs/demo_speech.toml [--resume] [section.field=value ...]

`LoaderMixin` hands the loader over as it is and keeps the loader's state in the Trainer's checkpoints. The loader
already gives each rank its share, so accelerate must not wrap the loader. On several ranks the mixin weights the losses
of a step by their targets.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

import forebay
from forebay.train import load_model
from forebay.train.integrations.hf import LoaderMixin


class ForebayTrainer(LoaderMixin, Trainer):
    """A Trainer that takes forebay's loaders as its data sets."""


def main(config_path: str, overrides: list[str], *, resume: bool = False) -> list[float]:
    """Trains up to step `train.max_steps`; returns the losses of the steps, those before a resume among them."""
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)
    arguments = TrainingArguments(
        output_dir=f"{config.train.output_dir}/{config.name}-hf",  # a config a folder: --resume takes what lies there
        max_steps=config.train.max_steps,
        learning_rate=config.train.learning_rate,
        warmup_steps=config.train.warmup_steps,
        gradient_accumulation_steps=config.train.grad_acc,
        logging_steps=1,
        save_steps=config.train.checkpoint_every or config.train.max_steps,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    place = {"dp_rank": arguments.process_index, "dp_world_size": arguments.world_size}
    trainer = ForebayTrainer(
        model=load_model(Path(str(config.train.model)), seed=config.loader.seed, init=config.train.init),
        args=arguments,
        train_dataset=forebay.train.make_loader(config, **place),
    )
    result = trainer.train(resume_from_checkpoint=resume)
    print(f"{result.global_step} steps, mean loss {result.training_loss:.3f}")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    options = [argument for argument in sys.argv[2:] if argument != "--resume"]
    main(sys.argv[1], options, resume="--resume" in sys.argv)
