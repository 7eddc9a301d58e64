"""TRL's own SFTTrainer with the mixin; whole runs, of texts, images and packs: tests/test_examples.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from forebay.plan.pack.pack_plan import PackPlan
from forebay.train.integrations.hf import LoaderMixin
from tests.processes import ROOT
from tests.train.integrations.hf_worker import pack_loader
from tests.train.integrations.test_hf import LoaderTrainer
from tests.train.tiny_vl import IMAGE, PAD, conversations, pixel_values, qwen3_vl

pytestmark = [pytest.mark.usefixtures("fresh_accelerate"), pytest.mark.filterwarnings("ignore")]


SAMPLES = conversations(3, 38)
"""Those of `pack_loader`."""


class SftTrainer(LoaderMixin, SFTTrainer):
    """TRL's trainer of the tests."""


def trainer_of(kind: type[Any], folder: Path, **data: Any) -> Any:
    more = {"bf16": False, "gradient_checkpointing": False} if kind is SftTrainer else {}
    arguments = (SFTConfig if kind is SftTrainer else TrainingArguments)(
        output_dir=str(folder / "run"),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        num_train_epochs=1,
        learning_rate=0.0,
        **more,
    )
    tokens = {"processing_class": AutoTokenizer.from_pretrained(ROOT / "demo/text/model")} if more else {}
    return kind(model=qwen3_vl(folder / "model"), args=arguments, **tokens, **data)


def test_sft_trainer_has_the_steps_and_the_losses_of_the_trainer(tmp_path: Path) -> None:
    """It prepares nothing, also where nobody told it so; each data set may be a loader, or a dict of them."""
    found = {}
    for kind in (LoaderTrainer, SftTrainer):
        data = {"train_dataset": pack_loader(), "eval_dataset": {"one": pack_loader(seed=9)}}
        trainer = trainer_of(kind, tmp_path / kind.__name__, **data)
        assert trainer.train_dataset is data["train_dataset"]
        losses = [trainer.evaluate()["eval_one_loss"], trainer.evaluate(pack_loader())["eval_loss"]]
        assert trainer.eval_dataset is data["eval_dataset"]
        found[kind] = [*losses, trainer.train().training_loss, trainer.state.global_step]
    assert found[SftTrainer] == pytest.approx(found[LoaderTrainer], abs=1e-4)
    assert found[SftTrainer][-1] == 11


def padded(rows: list[dict[str, int]]) -> dict[str, Any]:
    """The model's own inputs of some samples, padded to the longest: no packs, no positions."""
    samples = [SAMPLES[row["place"]] for row in rows]
    size = max(len(sample["input_ids"]) for sample in samples)

    def row(values: Any, empty: int) -> torch.Tensor:
        return torch.tensor([*map(int, values), *[empty] * (size - len(values))])

    ids = torch.stack([row(sample["input_ids"], PAD) for sample in samples])
    learnt = torch.stack([row(sample["label_mask"], 0) for sample in samples])
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(learnt == 0, -100),
        "attention_mask": torch.stack([row(np.ones_like(sample["input_ids"]), 0) for sample in samples]),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.cat([pixel_values(sample) for sample in samples if sample["patches"]]),
        "image_grid_thw": torch.cat([torch.tensor(sample["image_grid_thw"]) for sample in samples]),
    }


def test_packs_train_as_trl_trains_without_packing(tmp_path: Path) -> None:
    """Each step is an epoch: of packs with the mixin, in TRL's own trainer of one padded batch."""
    loader = pack_loader()
    assert isinstance(loader.plan, PackPlan)
    packed = sorted(loader.plan.members.tolist())
    assert 20 < len(packed) <= len(SAMPLES)
    rows = Dataset.from_list([{"input_ids": [0], "labels": [0], "place": place} for place in packed])
    found = {}
    for kind, data, sizes in (
        (SftTrainer, {"train_dataset": loader}, (1, len(loader))),
        (SFTTrainer, {"train_dataset": rows, "data_collator": padded}, (len(packed), 1)),
    ):
        arguments = SFTConfig(
            output_dir=str(tmp_path / kind.__name__),
            dataset_kwargs={"skip_prepare_dataset": True},
            per_device_train_batch_size=sizes[0],
            gradient_accumulation_steps=sizes[1],
            **{"learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0},
            **{"remove_unused_columns": False, "gradient_checkpointing": False, "bf16": False, "use_cpu": True},
            **{"num_train_epochs": 3, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True},
        )
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo/text/model")
        trainer = kind(model=qwen3_vl(tmp_path / "model"), args=arguments, processing_class=tokenizer, **data)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found[kind] = losses, dict(trainer.model.named_parameters())
    (own, weights), (theirs, wanted) = found[SftTrainer], found[SFTTrainer]
    assert len(own) == 3
    assert own == pytest.approx(theirs, abs=1e-5)
    assert own[0] - own[2] > 0.01
    for name, values in wanted.items():
        assert torch.allclose(weights[name], values, atol=1e-5), name
