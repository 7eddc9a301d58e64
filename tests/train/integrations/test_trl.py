"""TRL's own SFTTrainer with the mixin; whole runs, of texts, images and packs: tests/test_examples.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from forebay.train.integrations.hf import LoaderMixin
from tests.processes import ROOT
from tests.train.integrations.hf_worker import pack_loader
from tests.train.integrations.test_hf import LoaderTrainer
from tests.train.tiny_vl import qwen3_vl

pytestmark = [pytest.mark.usefixtures("fresh_accelerate"), pytest.mark.filterwarnings("ignore")]


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
