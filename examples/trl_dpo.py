"""Runs TRL's DPOTrainer on forebay's loader of pairs, and resumes at the batch where it stopped.

python examples/trl_dpo.py pairs.toml [--resume] [section.field=value ...]

This example needs trl, and a config with `text.pairs = true` (docs/vision.md, "Pairs of answers"). A pair is two texts
over the same images, padded: of pairs there are no packs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

import forebay
from forebay.train import load_model
from forebay.train.integrations.hf import LoaderMixin


class ForebayDPOTrainer(LoaderMixin, DPOTrainer):
    """TRL's DPOTrainer that takes forebay's loaders as its data sets."""


def main(config_path: str, overrides: list[str], *, resume: bool = False, **options: Any) -> list[float]:
    """Trains up to step `train.max_steps`; returns the losses of the steps, those before a resume among them.

    options: further ones of DPOConfig.
    """
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)
    arguments = DPOConfig(
        output_dir=f"{config.train.output_dir}/{config.name}-dpo",  # a config a folder: --resume takes what lies there
        max_steps=config.train.max_steps,
        learning_rate=config.train.learning_rate,
        gradient_accumulation_steps=config.train.grad_acc,
        max_length=None,  # pairs are batches already
        bf16=False,  # DPOConfig's default is true
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_steps=config.train.checkpoint_every or config.train.max_steps,
        report_to=[],
        **options,
    )
    place = {"dp_rank": arguments.process_index, "dp_world_size": arguments.world_size}
    folder, made = Path(str(config.train.model)), {"seed": config.loader.seed, "init": config.train.init}
    trainer = ForebayDPOTrainer(
        model=load_model(folder, **made),
        ref_model=load_model(folder, **made),
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(str(config.text.tokenizer), local_files_only=True),
        train_dataset=forebay.train.make_loader(config, **place),
    )
    trainer.train(resume_from_checkpoint=resume)
    found = [entry for entry in trainer.state.log_history if "loss" in entry]
    print(f"{trainer.state.global_step} steps, loss {found[-1]['loss']:.3f}")
    return [entry["loss"] for entry in found]


if __name__ == "__main__":
    given = [argument for argument in sys.argv[2:] if argument != "--resume"]
    main(sys.argv[1], given, resume="--resume" in sys.argv)
