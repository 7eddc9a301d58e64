"""Runs TRL's SFTTrainer on forebay's loader, of packs, images or texts, and resumes at the batch where it stopped.

python examples/hf_sft_trainer.py configs/demo_vision.toml [--resume] [section.field=value ...]

This example needs trl. The batches are made already, so TRL prepares nothing: `skip_prepare_dataset`. TRL wants to know
the tokenizer, and computes its own loss and token accuracy.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import forebay
from forebay.train import load_model
from forebay.train.integrations.hf import LoaderMixin


class ForebaySFTTrainer(LoaderMixin, SFTTrainer):
    """TRL's SFTTrainer that takes forebay's loaders as its data sets."""


def main(config_path: str, overrides: list[str], *, resume: bool = False) -> list[float]:
    """Trains up to step `train.max_steps`; returns the losses of the steps, those before a resume among them."""
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)
    arguments = SFTConfig(
        output_dir=f"{config.train.output_dir}/{config.name}-sft",  # a config a folder: --resume takes what lies there
        max_steps=config.train.max_steps,
        learning_rate=config.train.learning_rate,
        gradient_accumulation_steps=config.train.grad_acc,
        dataset_kwargs={"skip_prepare_dataset": True},
        bf16=False,  # SFTConfig's default is true
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_steps=config.train.checkpoint_every or config.train.max_steps,
        report_to=[],
    )
    place = {"dp_rank": arguments.process_index, "dp_world_size": arguments.world_size}
    trainer = ForebaySFTTrainer(
        model=load_model(Path(str(config.train.model)), seed=config.loader.seed, init=config.train.init),
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(str(config.text.tokenizer), local_files_only=True),
        train_dataset=forebay.train.make_loader(config, **place),
    )
    trainer.train(resume_from_checkpoint=resume)
    found = [entry for entry in trainer.state.log_history if "loss" in entry]
    print(f"{trainer.state.global_step} steps, token accuracy {found[-1]['mean_token_accuracy']:.3f}")
    return [entry["loss"] for entry in found]


if __name__ == "__main__":
    options = [argument for argument in sys.argv[2:] if argument != "--resume"]
    main(sys.argv[1], options, resume="--resume" in sys.argv)
