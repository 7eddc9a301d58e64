"""Trains as Qwen's qwen-vl-finetune does, on samples that are decoded once.

python examples/qwen_vl_finetune.py configs/demo_vision.toml [section.field=value ...]

In `qwenvl/train/train_qwen.py` one import changes: `make_supervised_data_module` comes from here, and
`--dataset_use` names a config. Its `min_pixels` and `max_pixels` must be those of the samples.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoTokenizer, Trainer, TrainingArguments

import forebay
from forebay.train import load_model
from forebay.train.integrations.qwen_finetune import make_supervised_data_module


def main(config_path: str, overrides: list[str]) -> list[float]:
    """Trains up to step `train.max_steps`; returns the losses of the steps."""
    rules = ["text.learn_through=newline", "text.strip_text=true"]  # its tokens and labels
    config = forebay.load_config(config_path, overrides=[*rules, *overrides])
    forebay.preprocess.build(config)
    folder = Path(str(config.train.model))
    processor = SimpleNamespace(
        tokenizer=AutoTokenizer.from_pretrained(folder, local_files_only=True)
    )  # or the model's whole processor
    data_args = SimpleNamespace(
        **{"dataset_use": config, "data_flatten": False, "data_packing": False},
        **{"min_pixels": 16_384, "max_pixels": 131_072},
    )
    arguments = TrainingArguments(
        output_dir=f"{config.train.output_dir}/{config.name}-qwen",
        max_steps=config.train.max_steps,
        learning_rate=config.train.learning_rate,
        per_device_train_batch_size=4,
        remove_unused_columns=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    model = load_model(folder, seed=config.loader.seed, init=config.train.init)
    trainer = Trainer(model=model, args=arguments, **make_supervised_data_module(processor, data_args))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"{trainer.state.global_step} steps, loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
