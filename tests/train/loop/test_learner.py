"""The loss of a step against that of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forebay.train.models.model_folder import load_model, model_facts
from forebay.train.models.objective import count_targets, summed_loss
from tests.train.tiny import qwen3_asr_batch, qwen3_asr_folder, whisper_batch, whisper_folder


@pytest.mark.parametrize("model_type", ["whisper", "qwen3_asr"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.few
def test_summed_loss_over_targets_is_the_loss_of_transformers(tmp_path: Path, model_type: str, seed: int) -> None:
    whisper = model_type == "whisper"
    folder = (whisper_folder if whisper else qwen3_asr_folder)(tmp_path)
    facts, model = model_facts(folder), load_model(folder, seed=seed, init="random")
    batch = (whisper_batch if whisper else qwen3_asr_batch)(seed)
    output = model(**batch)
    total = summed_loss(output.logits, batch["labels"], labels_are_shifted=facts.labels_are_shifted)
    count = count_targets(batch["labels"], labels_are_shifted=facts.labels_are_shifted)
    assert (total / count).item() == pytest.approx(output.loss.item(), rel=1e-6)


def test_batch_without_targets_has_loss_and_gradient_zero() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = summed_loss(logits, torch.full((2, 3), -100), labels_are_shifted=True)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))
