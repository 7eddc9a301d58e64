"""Each rank of test_split.py runs this: `python -m tests.train.integrations.split_worker FOLDER EXAMPLE...`.

The examples run as they are printed, on tiny packs; each optimizer step tells the gradient that it finds.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState

import forebay
from forebay.train import num_targets
from forebay.train.loader import Loader
from tests.processes import ROOT
from tests.sound_talks import talk_loader
from tests.train.integrations.hf_worker import pack_loader

MODELS = {"images": "model", "clips": "clips/qwen2_audio"}
"""The models of the kinds of packs."""
STEPS = 4
"""Of an epoch of 11 packs on 3 ranks: in the last one 2 packs are left."""


def gradient(parameters: Any) -> list[float]:
    """Returns the norm of the gradient of each parameter that has one; a Trainer has them in another order."""
    return sorted(float(each.grad.norm()) for each in parameters if each.grad is not None)


def loader_of_data(folder: Path, data: str, **place: Any) -> Loader:
    """Returns the loader of packs of images, or of clips."""
    return talk_loader(folder / data, tail="split", **place) if data == "clips" else pack_loader(tail="split", **place)


def alone(model: Any, loader: Loader) -> list[list[float]]:
    """Returns the gradients of the steps of 3 ranks, of one rank that takes all micro-batches of a step itself."""
    found, batches = [], list(loader)
    for start in range(0, len(batches), 3):
        step = batches[start : start + 3]
        counts = [num_targets(model, batch) for batch in step]
        for batch, count in zip(step, counts, strict=True):
            (model(**batch).loss * count / sum(counts)).backward()
        found.append(gradient(model.parameters()))
        model.zero_grad()
    return found


def train_lightning(example: dict[str, Any], config: Any, loader: Callable[[], Loader]) -> None:
    """Runs the example's module on several ranks, which need a Trainer that the example does not have; it resumes."""
    checkpoint = None
    for max_steps in (STEPS // 2, STEPS):
        trainer = example["lightning"].Trainer(
            max_steps=max_steps,
            accelerator="cpu",
            devices=loader().dp_world_size,
            strategy="ddp",
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(example["ConfigModel"](config), loader(), ckpt_path=checkpoint)
        checkpoint = f"{config.train.output_dir}/lightning.ckpt"
        trainer.save_checkpoint(checkpoint)


def main(folder: Path, examples: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: list[list[float]] = []
    step = torch.optim.AdamW.step

    def told(self: Any, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None  # Lightning's makes the gradient
        found.append(gradient(each for group in self.param_groups for each in group["params"]))
        step(self)
        return loss

    torch.optim.AdamW.step = told  # type: ignore[method-assign]
    faces: Any = forebay  # its functions are replaced, as the examples call them
    faces.preprocess.build = lambda _: None
    path, results = str(ROOT / "configs/demo_vision.toml"), {}
    for data, name in itertools.product(MODELS, examples):
        overrides = [f"train.model={folder}/{MODELS[data]}", f"train.output_dir={folder}/runs/{data}"]
        overrides += [f"train.max_steps={STEPS}", "train.learning_rate=0.0", "train.checkpoint_every=100"]
        loader = partial(loader_of_data, folder, data, dp_rank=rank, dp_world_size=world)
        faces.train.make_loader = lambda *_, make=loader, **_here: make()
        found.clear()
        AcceleratorState._reset_state(reset_partial_state=True)
        example = runpy.run_path(str(ROOT / f"examples/{name}.py"))
        if name == "lightning_trainer":
            train_lightning(example, forebay.load_config(path, overrides=overrides), loader)
        else:
            example["main"](path, overrides)
        results[f"{name} {data}"] = list(found)
    (folder / f"rank_{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
