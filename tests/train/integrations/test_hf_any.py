"""Models of no family in transformers' Trainer: fields that nobody reads, scales of losses, weights of other names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from forebay.config import BucketConfig
from forebay.errors import CacheMismatchError, ResumeError
from forebay.plan.make_buckets import bucket_plan
from forebay.train.integrations.hf import LoaderMixin
from forebay.train.integrations.renamed import load_renamed
from forebay.train.loader import Loader
from forebay.train.models.model_folder import load_model
from tests.train.fake_source import FakeSource
from tests.train.loaders import loader_of
from tests.train.models import foreign

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of torch's DataLoader about pinned memory
]

Make = Callable[[int], dict[str, torch.Tensor]]


class LoaderTrainer(LoaderMixin, Trainer):
    """The Trainer of the tests."""


class Given:
    """Makes of one sample the batch of its number of frames."""

    def __init__(self, make: Make) -> None:
        self._make = make

    def collate(self, samples: Any, *, allocate: Any) -> dict[str, torch.Tensor]:
        return self._make(len(samples[0]["input_features"]))

    def count_frames(self, samples: Any) -> tuple[int, int]:
        return 1, 1


def loader(make: Make) -> Loader:
    """Returns a loader of eight batches."""
    source = FakeSource(range(10, 18))
    settings = BucketConfig(batch_size=1, lockstep=1, tail="drop")
    plan = bucket_plan(source.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=settings)
    return loader_of(source, plan, collator=Given(make), dp_rank=0, dp_world_size=1)


def with_mask(seed: int) -> dict[str, torch.Tensor]:
    """Returns a batch of classes with a field that no ViT reads."""
    return {**foreign.classes(seed), "pixel_mask": torch.ones(4, 16, 16)}


def trainer_of(model: Any, make: Make | None, out: Path, *, kind: type[Any] = LoaderTrainer, **changes: Any) -> Any:
    defaults = {"max_steps": 1, "logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no", "report_to": []}
    arguments = TrainingArguments(output_dir=str(out), disable_tqdm=True, use_cpu=True, **{**defaults, **changes})
    data = {} if make is None else {"train_dataset": loader(make), "eval_dataset": loader(make)}
    return kind(model=model, args=arguments, **data)


def random(folder: Path) -> Any:
    return load_model(folder, seed=0, init="random")


def test_a_field_that_no_module_reads_is_refused_in_training_and_in_evaluation(tmp_path: Path) -> None:
    """ViT takes any keyword, num_items_in_batch of the Trainer too; pixel_mask would be passed over."""
    trainer = trainer_of(random(foreign.vit(tmp_path / "vit")), with_mask, tmp_path)
    wanted = r"the Trainer's ViTForImageClassification does not read pixel_mask of the batch .* takes .*pixel_values"
    with pytest.raises(CacheMismatchError, match=wanted + r".* pop the field in a compute_loss of your Trainer"):
        trainer.train()
    with pytest.raises(CacheMismatchError, match="does not read pixel_mask"):
        trainer_of(trainer.model, with_mask, tmp_path).evaluate()


def test_a_field_that_a_forward_has_no_place_for_is_named(tmp_path: Path) -> None:
    model = random(foreign.wav2vec2(tmp_path / "model"))
    trainer = trainer_of(model, lambda seed: {**foreign.sound(seed), "language": torch.zeros(2)}, tmp_path)
    with pytest.raises(CacheMismatchError, match=r"Wav2Vec2ForCTC does not read language of .* takes attention_mask"):
        trainer.train()


class Popping(Trainer):
    """Uses a field up."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert inputs.pop("pixel_mask").shape == (4, 16, 16)
        return super().compute_loss(model, inputs, *args, **kwargs)


class PoppingTrainer(LoaderMixin, Popping):
    """The same on loaders."""


class Own(nn.Module):
    """A user's own model, which hands on what it takes and looks at it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Any) -> NotThere:  # type: ignore[name-defined]  # noqa: F821
        assert batch.pop("pixel_mask") is not None
        return self.inner(**batch)


@pytest.mark.parametrize(("kind", "is_own"), [(PoppingTrainer, False), (LoaderTrainer, True)])
def test_what_the_user_s_own_code_takes_is_left_to_it(kind: type[Any], tmp_path: Path, is_own: bool) -> None:  # noqa: FBT001
    vit = random(foreign.vit(tmp_path / "vit"))
    trainer = trainer_of(Own(vit) if is_own else vit, with_mask, tmp_path, kind=kind)
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.evaluate()["eval_samples_per_second"] > 0


def test_other_data_sets_are_not_looked_at(tmp_path: Path) -> None:
    trainer = trainer_of(random(foreign.vit(tmp_path / "vit")), None, tmp_path, remove_unused_columns=False)
    trainer.train_dataset = [{name: value[0] for name, value in with_mask(seed).items()} for seed in range(8)]
    trainer.train()
    assert trainer.state.global_step == 1


class Losses(TrainerCallback):
    """Keeps what the Trainer logs."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        self.seen += [logs["loss"]] if "loss" in logs else []


def several(seed: int) -> dict[str, torch.Tensor]:
    """Returns a batch of images with several classes each."""
    batch = foreign.classes(seed)
    return {**batch, "labels": torch.nn.functional.one_hot(batch["labels"], 3).float()}


@pytest.mark.parametrize(
    ("make", "batch"),
    [(foreign.parakeet, foreign.mel), (foreign.vit, foreign.classes), (foreign.vit, several)],
    ids=["ctc", "classes", "several classes"],
)
def test_accumulated_losses_are_a_mean_whatever_the_model_divides_by(
    make: Callable[..., Path], batch: Make, tmp_path: Path
) -> None:
    """The Trainer takes it that a model with `**kwargs` divides by num_items_in_batch; CTC and BCE do not."""
    model = random(make(tmp_path / "model", **({"ctc_loss_reduction": "mean"} if batch is foreign.mel else {})))
    trainer = trainer_of(model, batch, tmp_path, gradient_accumulation_steps=2, max_steps=2, learning_rate=0.0)
    losses = Losses()
    trainer.add_callback(losses)
    trainer.train()
    model.train()
    own = [model(**each).loss.item() for each in loader(batch)][:4]
    assert losses.seen == pytest.approx([(own[0] + own[1]) / 2, (own[2] + own[3]) / 2], rel=1e-4)


def test_pairs_are_evaluated_with_their_loss(tmp_path: Path) -> None:
    model = random(foreign.siglip(tmp_path / "model"))
    trainer = trainer_of(model, foreign.pairs, tmp_path)
    own = [model(**each, return_loss=True).loss.item() for each in loader(foreign.pairs)]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(own) / len(own), rel=1e-4)


def test_a_resume_has_the_weights_of_the_checkpoint_under_their_names_of_today(tmp_path: Path) -> None:
    """A ViT is written with the names of 2020; the Trainer alone would go on with random layers."""
    folder = foreign.vit(tmp_path / "vit")
    arguments: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    whole = trainer_of(random(folder), foreign.classes, tmp_path / "whole", max_steps=3)
    whole.args.lr_scheduler_type = "constant"
    whole.train()
    trainer_of(random(folder), foreign.classes, tmp_path / "run", max_steps=2, **arguments).train()
    resumed = trainer_of(random(folder), foreign.classes, tmp_path / "run", max_steps=3, **arguments)
    resumed.train(resume_from_checkpoint=True)
    stored = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")
    assert set(stored) - set(whole.model.state_dict())
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_weights_that_are_in_no_file_are_named(tmp_path: Path) -> None:
    model = random(foreign.vit(tmp_path / "vit"))
    model.save_pretrained(tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    assert kept.pop("vit.encoder.layer.0.attention.attention.key.weight") is not None
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ResumeError, match=r"lack vit\.layers\.0\..*k_proj\.weight \(and 0 more\) of a ViTForImage"):
        load_renamed(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"vit.encoder.x": "a"}}))
    with pytest.raises(ResumeError, match="cannot load the weights in"):
        load_renamed(model, tmp_path)
