"""Every example runs on the demo configs, as a user would start it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches and runs of all examples: the first one builds, the others find what it built."""
    return tmp_path_factory.mktemp("examples")


def output_of(example: str, folder: Path) -> str:
    overrides = [f"run.cache_root={folder}/caches", f"train.output_dir={folder}/runs", "train.max_steps=2"]
    outcome = subprocess.run(
        [sys.executable, f"examples/{example}.py", "configs/demo_speech.toml", *overrides],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    return outcome.stdout


def test_plain_loop_and_hf_trainer_learn_from_the_same_batches(folder: Path) -> None:
    plain = output_of("plain_loop", folder)
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", plain)]
    assert len(losses) == 2
    assert "the next batch is micro-batch 2 of epoch 0" in plain
    trainer = re.search(r"2 steps, mean loss ([\d.]+)", output_of("hf_trainer", folder))
    assert trainer is not None
    # The Trainer's first step is taken at a rate of 0, so only the losses before and after one update differ a little.
    assert float(trainer[1]) == pytest.approx(sum(losses) / 2, rel=0.05)


def test_torch_dataloader_gives_the_batches_of_the_loader(folder: Path) -> None:
    lines = output_of("torch_dataloader", folder).splitlines()
    assert len(lines) > 5
    assert all(line.endswith("equal: True") for line in lines)
    assert sum(int(re.findall(r": (\d+) samples", line)[0]) for line in lines) >= 40
