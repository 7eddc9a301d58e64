"""Builds a part of a config and stops for ever after its first shard; run as a process, which a test then kills."""

import sys
import time
from typing import Any

import pytest

from forebay import load_config
from forebay.preprocess.shard_task import make_shard
from tests.preprocess.here_pool import build_here

if __name__ == "__main__":
    made: list[Any] = []

    def first_only(task: Any) -> Any:
        if made:
            print("held", flush=True)
            time.sleep(600)
        made.append(task)
        return make_shard(task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.preprocess.build_run.make_shard", first_only)
        build_here(load_config(sys.argv[1]), part=(0, 2))
