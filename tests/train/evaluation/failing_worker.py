"""Each rank of test_failures.py runs this: `python -m tests.train.evaluation.failing_worker CONFIG FOLDER WAY`."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.models.whisper.modeling_whisper import WhisperAttention

from forebay import load_config
from forebay.train import make_loader
from forebay.train.evaluation.evaluate import Evaluator
from forebay.train.loop.launch import process_state
from forebay.train.loop.run import train

FAILS_AT = 2


def fail_here() -> None:
    """Makes the second evaluation of this rank end in the middle of the model, behind its encoder."""
    passes, own_pass, own_forward = [], Evaluator._pass, WhisperAttention.forward

    def counted(self: Evaluator, each: Any) -> Any:
        passes.append(each)
        return own_pass(self, each)

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        if len(passes) == FAILS_AT and self.is_decoder and not self.training:
            raise RuntimeError("out of memory")
        return own_forward(self, *given, **named)

    Evaluator._pass = counted  # type: ignore[method-assign]
    WhisperAttention.forward = forward


def main(config: str, folder: Path, way: str) -> None:
    """Trains twice, the second time with an evaluation that fails on rank 1, and writes what rank 0 has seen."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    if way == "fsdp2":
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    rank, found = process_state().process_index, {}
    for name in ("whole", "failing"):
        if name == "failing" and rank == 1:
            fail_here()
        losses: list[float] = []
        each = load_config(config, overrides=[f'train.output_dir="{folder / name}"'])
        loader = make_loader(each)
        constants = loader.source.constants
        report = train(
            each,
            loader=loader,
            source_kind="cache",
            constants=constants,
            log=lambda line, to=losses: to.append(line.loss),  # type: ignore[misc]
        )
        counts = [report.steps, report.evaluations, report.evaluations_failed]
        found[name] = {"losses": losses, "counts": counts, "last": report.lines()[-1]}
    if rank == 0:
        (folder / f"{way}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
