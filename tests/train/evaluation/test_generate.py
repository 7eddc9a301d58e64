"""Prompts of a batch, and what is written behind them, against one sample at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.train.evaluation.evaluate import evaluating
from forebay.train.evaluation.generate import EncodedBatch, Generator, prompts_of
from forebay.train.models.model_folder import load_model, model_facts
from tests.train.tiny import whisper_batch, whisper_folder

PAD = 9
UNWRITTEN = 1
"""An id that the model of these tests does not write, so that no text ends by itself."""


def test_prompts_end_where_the_first_target_begins() -> None:
    ids = torch.tensor([[1, 5, 6, 7, 8], [1, 4, 3, 2, 2]])
    labels = torch.tensor([[-100, -100, 7, 8, 2], [-100, 3, 2, -100, -100]])
    shifted = prompts_of(ids, labels, labels_are_shifted=True, pad_token_id=PAD)
    assert shifted.ids.tolist() == [[1, 5, 6], [PAD, 1, 4]]
    assert shifted.mask.tolist() == [[1, 1, 1], [0, 1, 1]]
    causal = prompts_of(ids, labels, labels_are_shifted=False, pad_token_id=PAD)
    assert causal.ids.tolist() == [[1, 5], [PAD, 1]]


@pytest.fixture
def whisper(tmp_path: Path) -> tuple[Any, Any]:
    """A model whose texts hang on what was written before."""
    folder = whisper_folder(tmp_path / "model")
    model = load_model(folder, seed=3, init="random").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(5) if parameter.ndim > 1 else parameter.copy_(
                    torch.randn(parameter.shape, generator=generator)
                )
    return model, model_facts(folder)


def writer(model: Any, facts: Any, **changes: Any) -> Generator:
    return Generator(model=model, facts=facts, **{"end_ids": [UNWRITTEN], "max_tokens": 6, **changes})


def test_ragged_prompts_of_a_whisper_are_written_on_as_each_alone(whisper: tuple[Any, Any]) -> None:
    """An earlier text makes a prompt longer, and positions count from each prompt's own beginning."""
    model, facts = whisper
    batch = whisper_batch(4, num_tokens=(3, 4, 2))
    labels = batch["labels"].clone()
    labels[1, :4] = -100  # a prompt of five tokens beside one of two
    prompts = prompts_of(batch["decoder_input_ids"], labels, labels_are_shifted=True, pad_token_id=2)
    assert prompts.mask.sum(1).tolist() == [2, 5, 2]
    with torch.no_grad():
        encoded = model.get_encoder()(batch["input_features"]).last_hidden_state
        found = writer(model, facts).write({}, prompts, encoded=EncodedBatch(encoded))
        for row in range(3):
            width = int(prompts.mask[row].sum())
            alone = prompts_of(
                batch["decoder_input_ids"][row : row + 1, :width],
                torch.tensor([[-100] * (width - 1) + [3]]),
                labels_are_shifted=True,
                pad_token_id=2,
            )
            assert writer(model, facts).write({}, alone, encoded=EncodedBatch(encoded[row : row + 1])) == [found[row]]
    assert len({tuple(ids) for ids, _ in found}) > 1


def test_a_text_is_cut_at_the_limit_and_at_the_models_positions(whisper: tuple[Any, Any]) -> None:
    model, facts = whisper
    batch = whisper_batch(4)
    prompts = prompts_of(batch["decoder_input_ids"], batch["labels"], labels_are_shifted=True, pad_token_id=2)
    with torch.no_grad():
        encoded = model.get_encoder()(batch["input_features"]).last_hidden_state
        short = writer(model, facts, max_tokens=3).write({}, prompts, encoded=EncodedBatch(encoded))
        whole = writer(model, facts, max_tokens=None).write({}, prompts, encoded=EncodedBatch(encoded))
        ended = writer(model, facts, end_ids=[whole[0][0][1]]).write({}, prompts, encoded=EncodedBatch(encoded))
    assert all(is_cut and len(ids) == 3 for ids, is_cut in short)
    assert [ids[:3] for ids, _ in whole] == [ids for ids, _ in short]
    assert len(whole[0][0]) == facts.max_positions - prompts.ids.shape[1] == 14
    first = whole[0][0]
    assert ended[0] == (first[: first.index(first[1])], False)


def test_modes_and_compiled_calls_come_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    model[0].eval()
    model._compiled_call_impl = marker = object()  # type: ignore[assignment]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        assert model._compiled_call_impl is None
    assert [module.training for module in model.modules()] == [True, False, True]
    assert model._compiled_call_impl is marker


def test_what_the_loss_has_computed_gives_the_same_texts(whisper: tuple[Any, Any]) -> None:
    model, facts = whisper
    batch = whisper_batch(4, num_tokens=(3, 6, 5))
    prompts = prompts_of(batch["decoder_input_ids"], batch["labels"], labels_are_shifted=True, pad_token_id=2)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        output = model(**inputs, use_cache=True)
        encoded = EncodedBatch(output.encoder_last_hidden_state, output.past_key_values)
        found = writer(model, facts).write({}, prompts, encoded=encoded)
        wanted = writer(model, facts).write({}, prompts, encoded=EncodedBatch(output.encoder_last_hidden_state))
    assert found == wanted
    assert len({tuple(ids) for ids, _ in found}) > 1
