"""Three ranks in each framework learn from an epoch what one rank learns, the last, dealt step included."""

from __future__ import annotations

import json
import math

import pytest

from forebay.train.models.model_folder import load_model
from tests.processes import torchrun
from tests.sound_talks import packed_talks
from tests.train.integrations.split_worker import MODELS, STEPS, alone, loader_of_data
from tests.train.tiny_vl import qwen3_vl_folder

EXAMPLES = ("accelerate_loop", "hf_trainer", "lightning_trainer")


Gradients = list[list[float]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Gradients], list[dict[str, Gradients]]]:
    """The gradients of one rank alone, and of the examples as each of three ranks has them: one launch."""
    folder = tmp_path_factory.mktemp("split")
    qwen3_vl_folder(folder / "model")
    packed_talks(folder / "clips", "qwen2_audio")
    wanted = {
        data: alone(load_model(folder / model, seed=17, init="random"), loader_of_data(folder, data))  # the demo's seed
        for data, model in MODELS.items()
    }
    outcome = torchrun("tests.train.integrations.split_worker", folder, *EXAMPLES, num_ranks=3)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    return wanted, [json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in range(3)]


@pytest.mark.parametrize("data", MODELS)
@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.few
def test_the_gradient_of_every_step_is_that_of_one_rank_weighted_by_targets(
    ranks: tuple[dict[str, Gradients], list[dict[str, Gradients]]], example: str, data: str
) -> None:
    wanted, found = ranks
    assert len(wanted[data]) == STEPS
    for rank in found:
        for own, one in zip(rank[f"{example} {data}"], wanted[data], strict=True):
            # The Trainer clips the norm of the whole to 1.
            scale = min(1, 1 / math.hypot(*one)) if example.startswith("hf") else 1
            assert own == pytest.approx([scale * norm for norm in one], rel=2e-3, abs=1e-5)
