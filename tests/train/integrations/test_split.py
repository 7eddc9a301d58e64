"""Three ranks in each framework learn from an epoch what one rank learns, the last, dealt step included."""

from __future__ import annotations

import json
import math

import pytest

from forebay.train.models.model_folder import load_model
from tests.processes import torchrun
from tests.train.integrations.split_worker import STEPS, alone
from tests.train.tiny_vl import qwen3_vl_folder

EXAMPLES = ("accelerate_loop", "hf_trainer", "lightning_trainer")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[float]], list[dict[str, list[list[float]]]]]:
    """The gradients of one rank alone, and of the examples as each of three ranks has them: one launch."""
    folder = tmp_path_factory.mktemp("split")
    wanted = alone(load_model(qwen3_vl_folder(folder / "model"), seed=17, init="random"))  # as the demo says
    outcome = torchrun("tests.train.integrations.split_worker", folder, *EXAMPLES, num_ranks=3)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    return wanted, [json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in range(3)]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_gradient_of_every_step_is_that_of_one_rank_weighted_by_targets(
    ranks: tuple[list[list[float]], list[dict[str, list[list[float]]]]], example: str
) -> None:
    wanted, found = ranks
    assert len(wanted) == STEPS
    for rank in found:
        assert len(rank[example]) == STEPS
        for own, one in zip(rank[example], wanted, strict=True):
            # The Trainer clips the norm of the whole to 1.
            scale = min(1, 1 / math.hypot(*one)) if example.startswith("hf") else 1
            assert own == pytest.approx([scale * norm for norm in one], rel=2e-3, abs=1e-5)
