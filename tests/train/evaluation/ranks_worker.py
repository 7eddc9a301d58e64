"""Each rank of test_demo.py runs this, alone or under torchrun: `python -m tests.train.evaluation.ranks_worker A B`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from forebay.train.evaluation.evaluations import EvalReport, Evaluations, evaluate_alone
from forebay.train.loop.launch import make_accelerator, process_state
from forebay.train.models.model_folder import load_model, model_facts
from tests.train.evaluation.demo import MAX_TOKENS, demo_config

SETS = f'[[train.eval]]\nname = "dev"\nconfig = "THIS"\ngenerate_max_tokens = {MAX_TOKENS}\n'


def without_seconds(report: Any) -> dict[str, Any]:
    """Returns a result as JSON values, but for its seconds."""
    return {name: value for name, value in dataclasses.asdict(report).items() if name != "elapsed_s"}


def sharded(config: Any) -> dict[str, Any]:
    """Returns the result of a model whose weights are spread over the ranks; on one rank of a whole one."""
    from torch.distributed.fsdp import fully_shard

    process_state()
    accelerator = make_accelerator(config, has_text_alone=False)
    evaluations = Evaluations(config, facts=model_facts(Path(config.train.model)), accelerator=accelerator)
    model = load_model(Path(config.train.model), seed=0)
    if accelerator.num_processes > 1:
        for module in list(model.modules()):
            if type(module).__name__ in model._no_split_modules:
                fully_shard(module)
        fully_shard(model)
    [outcome] = evaluations.now(step=0, model=model)
    found = without_seconds(outcome.result)
    kept = {name: found[name] for name in ("wer", "cer", "num_samples", "languages")}
    return kept | {"num_batches": evaluations.sets[0].loader.plan.num_batches}


def main(demo: Path, folder: Path) -> None:
    """Evaluates on this rank and writes of_N.json on rank 0, N the number of ranks."""
    torch.set_num_threads(1)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    config = demo_config(demo, "qwen3_asr", sets=SETS) if rank == 0 else None
    if size > 1:
        process_state()
        torch.distributed.barrier()  # the config's file is written by rank 0
    config = config or demo_config(demo, "qwen3_asr", sets=SETS)
    of_shards = sharded(config)
    report = evaluate_alone(config)
    if rank == 0:
        assert isinstance(report, EvalReport)
        [outcome] = report.outcomes
        document = {
            "result": without_seconds(outcome.result),
            "worst": [(each.sample_id, each.hypothesis) for each, _ in outcome.worst],
            "sharded": of_shards,
        }
        (folder / f"of_{size}.json").write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
