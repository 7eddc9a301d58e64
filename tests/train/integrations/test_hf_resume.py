"""transformers' Trainer on forebay's loaders, killed and resumed: on one rank, on two under torch.distributed.run."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.processes import torchrun
from tests.sound_talks import packed_talks
from tests.train.integrations.hf_worker import SCENARIOS

Lines = list[dict[str, Any]]


def launch(part: str, folder: Path, *, world_size: int) -> subprocess.CompletedProcess[str]:
    """Runs the worker on one rank or two; a rank that is killed takes the other with it."""
    return torchrun("tests.train.integrations.hf_worker", part, folder, num_ranks=world_size)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.wide), 2])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Lines]:
    """Records of all ranks: two launches for all scenarios (8 s CPU a rank): starting processes takes most of it."""
    folder, world_size = tmp_path_factory.mktemp("hf"), request.param
    packed_talks(folder / "talks", "qwen2_5_omni")
    first = launch("first", folder, world_size=world_size)
    assert first.returncode != 0
    assert first.returncode == -signal.SIGKILL or "SIGKILL" in first.stderr, first.stderr[-4000:]
    second = launch("second", folder, world_size=world_size)
    assert second.returncode == 0, second.stderr[-4000:]
    paths = [folder / f"rank_{rank}.jsonl" for rank in range(world_size)]
    return [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in paths]


def steps(lines: Lines, scenario: str, run: str) -> list[tuple[int, str, float]]:
    """The micro-batches of a run in order: optimizer step, digest of the tokens, loss."""
    return [
        (line["step"], line["ids"], line["loss"])
        for line in lines
        if (line["scenario"], line["run"]) == (scenario, run) and "ids" in line
    ]


def logs(lines: Lines, scenario: str, run: str) -> Lines:
    return [line["log"] for line in lines if (line["scenario"], line["run"]) == (scenario, run) and "log" in line]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_resumed_run_learns_what_an_uninterrupted_one_learns(ranks: list[Lines], scenario: str) -> None:
    for lines in ranks:
        whole, stopped = steps(lines, scenario, "whole"), steps(lines, scenario, "stopped")
        resumed = steps(lines, scenario, "stopped_resumed")
        stop = SCENARIOS[scenario].stop_in_step
        assert stopped == whole[: len(stopped)]
        # What was read for the step that was not taken comes again.
        assert max(step for step, _, _ in stopped) == (stop if SCENARIOS[scenario].grad_acc > 1 else stop - 1)
        assert [step for step, _, _ in whole] == sorted(step for step, _, _ in whole)
        assert resumed == [line for line in whole if line[0] >= stop]
        assert len(resumed) > 2


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_losses_and_evaluations_of_all_steps_are_those_of_the_uninterrupted_run(
    ranks: list[Lines], scenario: str
) -> None:
    whole, resumed = (logs(ranks[0], scenario, run) for run in ("whole", "stopped_resumed"))
    evaluations = [entry["eval_loss"] for entry in whole if "eval_loss" in entry]
    assert len(evaluations) > 2
    assert resumed == whole


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_epoch_gives_each_rank_its_share_once(ranks: list[Lines], scenario: str) -> None:
    """Digests of all ranks in one epoch differ, and the next epoch brings them again in another order."""
    runs = [steps(lines, scenario, "whole") for lines in ranks]
    half = len(runs[0]) // 2
    epochs = [{ids for run in runs for _, ids, _ in run[part]} for part in (slice(0, half), slice(half, None))]
    assert all(len(epoch) == half * len(ranks) for epoch in epochs)
    assert [ids for _, ids, _ in runs[0][:half]] != [ids for _, ids, _ in runs[0][half:]]


def test_metrics_have_the_rows_of_all_ranks_and_none_of_fillers(ranks: list[Lines]) -> None:
    """An evaluation of 11 packs ends in a filler on two ranks."""
    rows = [entry["eval_rows"] for entry in logs(ranks[0], "packs", "whole") if "eval_rows" in entry]
    assert set(rows) == {11}
