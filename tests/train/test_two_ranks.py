"""Two CPU ranks under torch.distributed.run do what one rank does that accumulates both ranks' micro-batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.plan.plan_usage import read_usage
from forebay.train.loop.run import train
from tests.processes import torchrun
from tests.train.two_ranks_worker import NUM_STEPS, RESUME_AT, SCENARIOS, loader_of, make_models, scenario

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The records of both ranks about all scenarios: one launch, since starting two processes is most of the time."""
    folder = tmp_path_factory.mktemp("two_ranks")
    make_models(folder)
    outcome = torchrun("tests.train.two_ranks_worker", folder)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    first, second = (json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    return first, second


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_have_the_losses_of_one_that_accumulates(
    tmp_path: Path, ranks: tuple[dict[str, Any], dict[str, Any]], name: str
) -> None:
    """Rank r takes micro-batches r, r + 2, ...; the two ranks' run was also stopped and resumed on its way."""
    grad_acc = SCENARIOS[name][2]
    make_models(tmp_path)
    losses: list[float] = []
    train(
        scenario(tmp_path, name, grad_acc=2 * grad_acc),
        loader=loader_of(name),
        source_kind="cache",
        log=lambda line: losses.append(line.loss),
    )
    assert len(losses) == NUM_STEPS
    assert ranks[0][name]["losses"] == pytest.approx(losses, rel=1e-4)
    assert ranks[1][name]["last"] == ranks[0][name]["last"]


def test_only_rank_0_logs_and_names_the_checkpoint(ranks: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for name in SCENARIOS:
        assert ranks[1][name]["losses"] == []
        assert ranks[0][name]["checkpoint"].endswith(f"{name}/checkpoint-{NUM_STEPS:08d}")
        assert len(ranks[0][name]["losses"]) == NUM_STEPS > RESUME_AT
    assert ranks[0]["backend"] == "gloo"


def test_checkpoint_of_two_ranks_goes_on_with_one(ranks: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    checkpoint = Path(ranks[0]["even"]["checkpoint"])
    make_models(tmp_path)
    config = scenario(tmp_path, "even", grad_acc=2, max_steps=NUM_STEPS + 1)
    report = train(config, loader=loader_of("even"), source_kind="cache", resume=checkpoint)
    assert report.steps == NUM_STEPS + 1
    assert report.loss_first == ranks[0]["even"]["losses"][0]
    assert report.loss_last < report.loss_first


def test_rank_0_logs_what_both_ranks_have_used(ranks: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Three steps of two ranks, a checkpoint, two more after a resume: all 8 of the first epoch, then 0 and 1."""
    path = Path(ranks[0]["real_loader"]["checkpoint"]).parent / "logs" / "data_usage.jsonl"
    head, lines = read_usage(path)
    assert [(line["from_step"], line["step"]) for line in lines] == [(0, RESUME_AT), (RESUME_AT, NUM_STEPS)]
    assert [(line["batches"], line["dp_world_size"]) for line in lines] == [(6, 2), (4, 2)]
    assert lines[1]["to"] == {"epoch": 1, "position": 2}
    assert lines[0]["samples"] + lines[1]["samples"] > head["num_samples"]
    assert not (path.parents[1] / "even" / "logs").exists()  # a loader that has no plan
