"""Each rank of test_two_nodes.py runs this: `torchrun -m tests.remote.two_nodes_worker CONFIG FOLDER ROOT`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from forebay import load_config
from forebay.train.select import make_loader


def main(config: Path, folder: Path, root: str) -> None:
    """Reads an epoch on a node of this rank's own, and writes down what it was read from."""
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    node = folder / (f"node_{rank}" if root.endswith("/apart") else "node")
    overrides = [f"run.cache_root={root.removesuffix('/apart')}", f"remote.shard_dir={node}", "loader.cache=require"]
    loader = make_loader(load_config(config, overrides=overrides))
    samples = sum(len(batch["input_values"]) for batch in loader)
    source = loader.source
    found = {
        "place": getattr(source, "place", ""),
        "folder": str(getattr(source, "folder", "")),
        "samples": samples,
        "plan_key": loader.plan_key,
    }
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
