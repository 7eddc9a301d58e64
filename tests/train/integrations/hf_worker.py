"""The program of test_hf_resume.py's processes: `python -m tests.train.integrations.hf_worker first|second FOLDER`.

`first` trains every scenario to its end, and again up to where it is interrupted: by an error in mid-step, the last by
SIGKILL. `second` goes on from the checkpoints. Each micro-batch and each log of the Trainer is a line of rank_R.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from forebay.config import PackConfig
from forebay.plan.interface import Tail
from forebay.plan.names import plan_key
from forebay.plan.pack.pack_plan import pack_plan
from forebay.train.collate.packed import PackCollator
from forebay.train.integrations.hf import LoaderMixin
from forebay.train.loader import Loader
from forebay.train.models.model_folder import load_model
from tests.sound_talks import talk_loader
from tests.train.loaders import loader_of
from tests.train.tiny import real_loader_model, text_loader
from tests.train.tiny_vl import FakeVlSource, conversations, qwen3_vl_folder


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A loader, the settings of a run and the optimizer step in which the run is interrupted."""

    loader: Callable[..., Loader]
    model: Callable[[Path], Path]
    grad_acc: int
    stop_in_step: int
    """From 0 on; behind a checkpoint, in the middle of an epoch."""
    arguments: dict[str, Any]
    evaluated: dict[str, Any] = field(default_factory=dict)
    """How the loader of the evaluation differs, where its rows are counted by `compute_metrics`."""


def pack_loader(*, dp_rank: int = 0, dp_world_size: int = 1, seed: int = 1, tail: Tail = "drop") -> Loader:
    """Returns a rank's loader of 11 packs: for one rank and for two the steps of an epoch are odd."""
    source = FakeVlSource(conversations(3, 38))
    settings = PackConfig(seq_len=50, tail=tail)
    plan = pack_plan(source.lengths["num_tokens"], settings=settings)
    return loader_of(
        source,
        plan,
        plan_key=plan_key(source.key, settings),
        seed=seed,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        collator=PackCollator(source),
    )


def _talks(**place: Any) -> Loader:
    return talk_loader(Path(sys.argv[2]) / "talks", **place)


SCENARIOS = {
    "talks": Scenario(
        loader=_talks,
        model=lambda folder: folder.parent / "talks" / "qwen2_5_omni",
        grad_acc=2,
        stop_in_step=4,
        arguments={"ddp_find_unused_parameters": True},
    ),
    "packs": Scenario(
        loader=pack_loader,
        model=qwen3_vl_folder,
        grad_acc=2,
        stop_in_step=4,
        arguments={},
        evaluated={"tail": "short"},
    ),
    "mixture": Scenario(
        loader=partial(text_loader, tail="drop"),
        model=real_loader_model,
        grad_acc=1,
        stop_in_step=5,
        arguments={"ignore_data_skip": True, "ddp_find_unused_parameters": True},
    ),
}
NUM_EPOCHS = 2


class InterruptedRunError(Exception):
    """Ends a run as a fault of its own code would."""


class RecordingTrainer(LoaderMixin, Trainer):
    """Writes down what the model is given."""

    record: Callable[[dict[str, Any]], None]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        ids = hashlib.sha256(inputs["input_ids"].numpy().tobytes()).hexdigest()
        self.record({"step": self.state.global_step, "ids": ids, "loss": loss.item()})
        return loss


class Fault(TrainerCallback):
    """Ends the run in a step: after its first micro-batch where there are several."""

    def __init__(self, step: int, fault: Callable[[], None]) -> None:
        self._step, self._fault = step, fault

    def on_step_begin(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == self._step and args.gradient_accumulation_steps == 1:
            self._fault()

    def on_substep_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._fault()


def interrupt() -> None:
    raise InterruptedRunError


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(
    folder: Path, name: str, run_name: str, *, fault: Callable[[], None] | None = None, resume: bool = False
) -> None:
    """Trains a scenario on this rank; each line that it appends says which scenario and run it is of."""
    scenario = SCENARIOS[name]
    arguments = TrainingArguments(
        output_dir=str(folder / name / run_name.removesuffix("_resumed")),
        num_train_epochs=NUM_EPOCHS,
        gradient_accumulation_steps=scenario.grad_acc,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=1,
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        **scenario.arguments,
    )
    place = {"dp_rank": arguments.process_index, "dp_world_size": arguments.world_size}
    trainer = RecordingTrainer(
        model=load_model(
            scenario.model(folder / f"{name}_{run_name}_{arguments.process_index}"), seed=0, init="random"
        ),
        args=arguments,
        train_dataset=scenario.loader(**place),
        eval_dataset=scenario.loader(**place, **scenario.evaluated),
        compute_metrics=(lambda found: {"rows": len(found.label_ids)}) if scenario.evaluated else None,
        callbacks=[Fault(scenario.stop_in_step, fault)] if fault else None,
    )
    lines = folder / f"rank_{arguments.process_index}.jsonl"

    def record(line: dict[str, Any]) -> None:
        with lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"scenario": name, "run": run_name, **line}) + "\n")

    trainer.record = record
    trainer.train(resume_from_checkpoint=resume)
    for entry in trainer.state.log_history:
        kept = {
            key: entry[key] for key in ("step", "epoch", "loss", "eval_loss", "eval_rows", "grad_norm") if key in entry
        }
        record({"log": kept})


def main(part: str, folder: Path) -> None:
    torch.set_num_threads(1)
    for name in SCENARIOS:
        if part == "second":
            run(folder, name, "stopped_resumed", resume=True)
            continue
        run(folder, name, "whole")
        try:
            run(folder, name, "stopped", fault=kill if name == list(SCENARIOS)[-1] else interrupt)
        except InterruptedRunError:
            continue
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
