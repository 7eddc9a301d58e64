"""The mixin for transformers' Trainer: what it hands over, evaluates on and refuses. Whole runs: test_hf_resume.py."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments

from forebay.errors import ConfigError, MissingExtraError, ResumeError
from forebay.train.collate.packed import PackCollator
from forebay.train.collate.patches import as_filler
from forebay.train.integrations.hf import STATE_NAME, LoaderMixin
from forebay.train.loader import Loader
from tests.train.integrations.hf_worker import pack_loader
from tests.train.loaders import loader_of
from tests.train.tiny_vl import qwen3_vl

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

# of torch's DataLoader about pinned memory, which this machine has none of
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class LoaderTrainer(LoaderMixin, Trainer):
    """The Trainer of the tests."""


class LoaderSeq2SeqTrainer(LoaderMixin, Seq2SeqTrainer):
    """The same of the other Trainer."""


class PlainTrainer(Trainer):
    """The class that one would write without the mixin."""

    loader: Loader

    def get_train_dataloader(self) -> Any:
        return self.loader


class Stop(TrainerCallback):
    """Ends the training within optimizer step `step`, behind its first micro-batch."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_substep_end(self, _args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = control.should_save = state.global_step == self._step
        return control


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Any]:
    """Makes a Trainer of packs, of other arguments where they are given."""

    def make(kind: type[Any] = LoaderTrainer, callbacks: Any = None, data: Any = None, **changes: Any) -> Any:
        of_seq2seq = issubclass(kind, Seq2SeqTrainer)
        defaults = {"max_steps": 3, "save_steps": 1, "logging_steps": 1, "gradient_accumulation_steps": 2}
        arguments = (Seq2SeqTrainingArguments if of_seq2seq else TrainingArguments)(
            output_dir=str(tmp_path / "run"), report_to=[], disable_tqdm=True, use_cpu=True, **{**defaults, **changes}
        )
        made = kind(
            model=qwen3_vl(tmp_path / "model"),
            args=arguments,
            callbacks=callbacks,
            **(data or {"train_dataset": pack_loader(), "eval_dataset": pack_loader()}),
        )
        if kind is PlainTrainer:
            made.loader = pack_loader()
        return made

    return make


def test_a_run_that_is_stopped_within_a_step_saves_what_it_has_learnt(
    trainer: Callable[..., Any], tmp_path: Path
) -> None:
    """The Trainer has read both micro-batches of the step by then; its weights are those of the step before."""
    stopped = trainer(callbacks=[Stop(1)])
    stopped.train()
    state = json.loads((tmp_path / "run" / "checkpoint-1" / "trainer_state.json").read_bytes())
    assert state["global_step"] == 1
    assert state["stateful_callbacks"][STATE_NAME]["position"] == 2
    assert stopped.train_dataset.state_dict()["position"] == 4
    resumed = trainer()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.train_dataset.state_dict()["position"] == 6
    assert resumed.state.epoch == pytest.approx(6 / 11)


def test_training_again_begins_at_the_head_of_the_first_epoch(trainer: Callable[..., Any]) -> None:
    made = trainer(max_steps=1, save_strategy="no", learning_rate=0.0)
    losses = [made.train().training_loss for _ in range(2)]
    assert losses[0] == losses[1]


def test_evaluations_are_of_one_epoch_and_move_nothing_else(trainer: Callable[..., Any]) -> None:
    data: dict[str, Any] = {
        "train_dataset": pack_loader(),
        "eval_dataset": {"one": pack_loader(), "two": pack_loader(seed=9)},
    }
    made = trainer(data=data)
    first, second = made.evaluate(), made.evaluate()
    assert first["eval_one_loss"] == second["eval_one_loss"] == pytest.approx(first["eval_two_loss"])
    assert made.num_examples(data["eval_dataset"]["one"]) == 38
    assert data["train_dataset"].state_dict()["position"] == 0
    assert made.predict(pack_loader()).metrics["test_loss"] == pytest.approx(first["eval_one_loss"])
    with pytest.raises(
        ConfigError, match=r"eval_dataset is the loader of the training, .* make another with make_loader"
    ):
        made.evaluate(data["train_dataset"])


def test_uint8_patches_stop_at_the_model(trainer: Callable[..., Any]) -> None:
    loader = pack_loader()
    stored = loader_of(
        loader.source, loader.plan, plan_key="0", seed=1, collator=PackCollator(loader.source, dtype=None)
    )
    with pytest.raises(TypeError, match="to_model_inputs"):
        trainer(data={"train_dataset": stored}).train()


def test_other_data_sets_are_the_trainer_s(trainer: Callable[..., Any]) -> None:
    batch = {name: value for name, value in next(iter(pack_loader())).items() if name in ("input_ids", "labels")}
    rows = [{name: value[0] for name, value in batch.items()} for _ in range(2)]
    made = trainer(data={"train_dataset": rows, "eval_dataset": rows}, max_steps=1, save_strategy="no")
    made.train()
    assert made.evaluate()["eval_loss"] > 0
    assert made.num_examples(made.get_train_dataloader()) == 2
    assert len(made.get_test_dataloader(rows)) == 1


# Refused


def test_loaders_of_other_ranks_are_refused(trainer: Callable[..., Any]) -> None:
    for role in ("train_dataset", "eval_dataset"):
        made = trainer(data={"train_dataset": pack_loader(), "eval_dataset": pack_loader()})
        setattr(made, role, pack_loader(dp_rank=1, dp_world_size=2))
        with pytest.raises(ConfigError, match=r"of rank 1 of 2, the Trainer's is rank 0 of 1; .*dp_world_size=1"):
            made.train() if role == "train_dataset" else made.evaluate()


def test_a_filler_counts_nothing(trainer: Callable[..., Any]) -> None:
    made = trainer()
    batch = next(iter(pack_loader()))
    filler = as_filler(batch)
    targets = made._get_num_items_in_batch([batch], made.args.device)
    assert made._get_num_items_in_batch([batch, filler], made.args.device) == targets
    assert made.compute_loss(made.model, batch, num_items_in_batch=targets) > 0
    assert made.compute_loss(made.model, filler, num_items_in_batch=targets) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size is true, but batches are those of the plan"),
        (
            {"label_smoothing_factor": 0.1},
            "label_smoothing_factor is 0.1, .* token of a Qwen3VLForConditionalGeneration",
        ),
    ],
)
def test_settings_that_would_train_on_something_else_are_refused(
    trainer: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(**changes).train()


def test_several_gpus_of_one_process_are_refused(trainer: Callable[..., Any]) -> None:
    made = trainer()
    made.args._n_gpu = 2
    with pytest.raises(
        ConfigError, match="cut each batch for 2 GPUs of one process; start a process a GPU with torchrun"
    ):
        made.evaluate()


def test_packs_are_not_generated_from(trainer: Callable[..., Any]) -> None:
    made = trainer(LoaderSeq2SeqTrainer, predict_with_generate=True)
    with pytest.raises(ConfigError, match="predict_with_generate is true and the batches are packs"):
        made.evaluate()


def test_a_calibration_that_wants_other_accumulation_is_refused(trainer: Callable[..., Any]) -> None:
    loader = pack_loader()
    loader.plan = SimpleNamespace(grad_accs=(2, 4), tail="drop", num_batches=11)
    with pytest.raises(ConfigError, match=r"wants grad_acc \[2, 4\], the Trainer has gradient_accumulation_steps = 2"):
        trainer(data={"train_dataset": loader}).train()


def test_checkpoints_that_do_not_fit_are_refused(trainer: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"no checkpoint in .*run; call train\(\) without resume_from_checkpoint"):
        trainer().train(resume_from_checkpoint=True)
    trainer(max_steps=1).train()
    with pytest.raises(
        ResumeError,
        match=r"step 1 stands at micro-batch 2 of epoch 0; with 1 ranks .*steps = 1 .* go on at 1 of epoch 0",
    ):
        trainer(gradient_accumulation_steps=1).train(resume_from_checkpoint=True)
    path = tmp_path / "run" / "checkpoint-1" / "trainer_state.json"
    state = json.loads(path.read_bytes())
    path.write_text(json.dumps({**state, "stateful_callbacks": {}}), encoding="utf-8")
    with pytest.raises(ResumeError, match=r"has no state of a forebay loader: .* a Trainer without LoaderMixin"):
        trainer().train(resume_from_checkpoint=True)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ResumeError, match=r"cannot read .*trainer_state\.json"):
        trainer().train(resume_from_checkpoint=str(path.parent))


def test_a_trainer_without_the_mixin_says_so_when_it_is_resumed(trainer: Callable[..., Any]) -> None:
    trainer(PlainTrainer, max_steps=1).train()
    with pytest.raises(
        AttributeError, match=r"a forebay Loader has no dataset .*forebay\.train\.integrations\.hf\.LoaderMixin"
    ):
        trainer(PlainTrainer).train(resume_from_checkpoint=True)


def test_a_trainer_without_the_mixin_goes_on_at_the_end_of_an_epoch(trainer: Callable[..., Any]) -> None:
    trainer(PlainTrainer, max_steps=6, save_steps=6).train()
    resumed = trainer(PlainTrainer, max_steps=7)
    resumed.train(resume_from_checkpoint=True)
    assert (resumed.loader.state.epoch, resumed.loader.state.position) == (1, 2)


def test_a_checkpoint_goes_on_with_as_many_micro_batches_a_step(trainer: Callable[..., Any], tmp_path: Path) -> None:
    """One rank that accumulated two is followed by two ranks that accumulate none."""
    trainer(max_steps=2).train()
    two_ranks, made = pack_loader(dp_rank=1, dp_world_size=2), trainer(gradient_accumulation_steps=1)
    made._restore(two_ranks, tmp_path / "run" / "checkpoint-2")
    assert (two_ranks.state.epoch, two_ranks.state.position) == (0, 4)


def test_without_accelerate_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "forebay.train.integrations.hf")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match=r"needs accelerate; run: pip install 'forebay\[train\]'"):
        importlib.import_module("forebay.train.integrations.hf")
