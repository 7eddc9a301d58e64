"""Runs transformers' Seq2SeqTrainer on forebay's loader, and evaluates on a second loader during training.

python examples/hf_seq2seq_trainer.py configs/demo_vision.toml [section.field=value ...]

`predict_with_generate` needs batches of single samples, such as Whisper's. The mixin refuses it for packs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

import forebay
from forebay.train import load_model
from forebay.train.integrations.hf import LoaderMixin


class ForebaySeq2SeqTrainer(LoaderMixin, Seq2SeqTrainer):
    """A Seq2SeqTrainer that takes forebay's loaders as its data sets."""


def main(config_path: str, overrides: list[str]) -> list[float]:
    """Trains `train.max_steps` steps and evaluates after each; returns the losses of the steps."""
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)
    arguments = Seq2SeqTrainingArguments(
        output_dir=f"{config.train.output_dir}/{config.name}-seq2seq",
        max_steps=config.train.max_steps,
        learning_rate=config.train.learning_rate,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=1,
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    place = {"dp_rank": arguments.process_index, "dp_world_size": arguments.world_size}
    trainer = ForebaySeq2SeqTrainer(
        model=load_model(Path(str(config.train.model)), seed=config.loader.seed, init=config.train.init),
        args=arguments,
        train_dataset=forebay.train.make_loader(config, **place),
        eval_dataset=forebay.train.make_loader(config, **place),  # of another config, as a rule
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "eval_loss" in entry:
            print(f"step {entry['step']}: loss of the evaluation {entry['eval_loss']:.3f}")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
