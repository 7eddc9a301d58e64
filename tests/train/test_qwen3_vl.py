"""Packs in a tiny random Qwen3-VL: equal to its samples one by one, few shapes to compile; and what leaks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.config import TrainConfig
from forebay.train.collate.packed import PackCollator, PackShapes
from forebay.train.collate.patches import to_model_inputs
from forebay.train.evaluation.evaluate import evaluating
from forebay.train.loop import trainable
from forebay.train.loop.trainable import set_passes
from forebay.train.models.model_folder import check_constants, model_facts
from forebay.train.models.objective import count_targets, summed_loss
from tests.train.tiny_vl import (
    CONSTANTS,
    IMAGE,
    FakeVlSource,
    conversation,
    conversations,
    older_folder,
    pixel_values,
    qwen3_vl,
)

SAMPLES = conversations(7, 5)
SHAPES = PackShapes(seq_len=400, patch_classes=(64, 128, 256))


@pytest.fixture(scope="module", params=["eager", "sdpa"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return qwen3_vl(tmp_path_factory.mktemp("vl"), attention=request.param)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def older(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return qwen3_vl(tmp_path_factory.mktemp("vl"), model_type=request.param)


def alone(model: Any, sample: dict[str, Any]) -> torch.Tensor:
    """Returns the logits [tokens, vocabulary] of one sample as a processor gives it to the model, without mrope."""
    ids = torch.from_numpy(sample["input_ids"]).long()[None]
    images = {}
    if sample["patches"]:
        images = {"pixel_values": pixel_values(sample), "image_grid_thw": torch.from_numpy(sample["image_grid_thw"])}
    logits: torch.Tensor = model(
        input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), use_cache=False, **images
    ).logits
    return logits[0]


def packed(model: Any, batch: dict[str, Any], **changes: Any) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits: torch.Tensor = model(**{**inputs, **changes}).logits
    return logits[0]


def pack(samples: Sequence[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    batch = PackCollator(FakeVlSource(), **settings)(samples)
    assert isinstance(batch, dict)
    return batch


def differences(model: Any, batch: dict[str, Any], samples: Sequence[dict[str, Any]], **changes: Any) -> list[float]:
    """Returns for each sample how far its logits in the pack are from those alone, at most."""
    with torch.no_grad():
        logits = packed(model, batch, **changes)
        starts = np.cumsum([0, *(len(sample["input_ids"]) for sample in samples)])
        return [
            float((logits[start:end] - alone(model, sample)).abs().max())
            for (start, end), sample in zip(itertools.pairwise(starts), samples, strict=True)
        ]


@pytest.mark.parametrize("shapes", [None, SHAPES])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.few
def test_packed_equals_separate(model: Any, shapes: PackShapes | None, *, varlen: bool) -> None:
    batch = pack(SAMPLES, shapes=shapes, varlen=varlen)
    assert max(differences(model, batch, SAMPLES)) < 1e-5


@pytest.mark.parametrize("shapes", [None, SHAPES])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.few
def test_packed_equals_separate_in_older_families(older: Any, shapes: PackShapes | None, *, varlen: bool) -> None:
    batch = pack(SAMPLES, shapes=shapes, varlen=varlen)
    assert max(differences(older, batch, SAMPLES)) < 1e-5
    together = older(**batch).loss
    terms = [older(**pack([sample], shapes=shapes)).loss for sample in SAMPLES]
    counts = [count_targets(pack([sample])["labels"], labels_are_shifted=False) for sample in SAMPLES]
    apart = sum(term * count for term, count in zip(terms, counts, strict=True)) / sum(counts)
    assert together.item() == pytest.approx(apart.item(), rel=1e-5)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_older_families_take_packs(tmp_path: Path, model_type: str) -> None:
    facts = model_facts(older_folder(tmp_path, model_type))
    assert (facts.model_type, facts.takes_packs, facts.own_loss) == (model_type, True, None)
    check_constants(facts, CONSTANTS)


def test_pack_of_text_alone_equals_separate(model: Any) -> None:
    samples = [conversation(np.random.default_rng(i), []) for i in range(3)]
    for shapes in (None, SHAPES):
        assert max(differences(model, pack(samples, shapes=shapes), samples)) < 1e-5


@pytest.mark.parametrize("shapes", [None, SHAPES])
def test_gradients_are_the_sum_of_those_of_the_samples(model: Any, shapes: PackShapes | None) -> None:
    model.zero_grad()
    for sample in SAMPLES:
        labels = torch.from_numpy(np.where(sample["label_mask"] == 1, sample["input_ids"], -100)).long()
        summed_loss(alone(model, sample)[None], labels[None], labels_are_shifted=False).backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    batch = pack(SAMPLES, shapes=shapes)
    summed_loss(packed(model, batch)[None], batch["labels"], labels_are_shifted=False).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5 * float(wanted[name].abs().max())), (
            name
        )


def test_the_models_own_loss_is_that_of_the_samples(model: Any) -> None:
    batch = pack(SAMPLES, shapes=SHAPES, varlen=True)
    with torch.no_grad():
        found = model(**to_model_inputs(batch, CONSTANTS)).loss
        total, count = torch.zeros(()), 0
        for sample in SAMPLES:
            labels = torch.from_numpy(np.where(sample["label_mask"] == 1, sample["input_ids"], -100)).long()
            total += summed_loss(alone(model, sample)[None], labels[None], labels_are_shifted=False)
            count += int((labels[1:] != -100).sum())
    assert found.item() == pytest.approx((total / count).item(), rel=1e-5)


@pytest.mark.parametrize("way", ["three rows", "mask", "cache"])
def test_other_ways_to_pack_leak(model: Any, way: str) -> None:
    batch = pack(SAMPLES)
    wrong: dict[str, Any] = {
        "three rows": {"position_ids": batch["position_ids"][1:]},
        "mask": {"attention_mask": torch.ones_like(batch["input_ids"])},
        "cache": {"use_cache": None},  # what the model does where nothing is said
    }[way]
    first, *others = differences(model, batch, SAMPLES, **wrong)
    assert first < 1e-5  # nothing stands before it
    assert min(others) > 1e-2


def test_packs_of_fixed_shapes_are_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of the language model are compiled, which are alike; the vision tower is not."""
    model, plain = qwen3_vl(tmp_path), qwen3_vl(tmp_path)
    graphs: list[Any] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(trainable, "BACKEND", count)
    set_passes(model, TrainConfig(compile=True))
    shapes = set()
    with torch.no_grad():
        for seed in range(50):
            samples = conversations(seed, 1 + seed % 5)
            batch = pack(samples, shapes=SHAPES)
            logits = packed(model, batch)
            shapes.add((batch["input_ids"].shape[1], len(batch["pixel_values"])))
            if seed in (0, 49):
                assert torch.allclose(logits[: len(samples[0]["input_ids"])], alone(plain, samples[0]), atol=1e-5)
        with evaluating(model):  # not compiled: other lengths are no graphs of their own
            packed(model, pack(samples[:1]))
    torch._dynamo.reset()
    assert len(shapes) == len(SHAPES.patch_classes)
    assert len(graphs) == 1
