"""Adapters: what learns, what a checkpoint holds of them, and which adapters a run goes on from."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config import Config, LoraConfig
from forebay.config.train import AugmentConfig
from forebay.errors import ConfigError, MissingExtraError, ResumeError
from forebay.train.loop.checkpoint import find_checkpoint, run_folder
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import train
from forebay.train.loop.trainable import checkpoint_model, new_model
from forebay.train.models.lora import base_of, is_adapted, load_adapter, with_adapters
from forebay.train.models.model_folder import load_model, model_facts
from tests.train.tiny import ListLoader, config_of, qwen3_asr_batch, qwen3_asr_folder, whisper_batch, whisper_folder

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
LORA = LoraConfig(rank=4, alpha=16.0)
FAMILIES = {"whisper": (whisper_folder, whisper_batch), "qwen3_asr": (qwen3_asr_folder, qwen3_asr_batch)}


def lora_config(folder: Path, model_type: str = "whisper", *, init: str = "pretrained", **settings: Any) -> Config:
    """Returns a config whose model's folder has weights, unless they are to be random."""
    model = FAMILIES[model_type][0](folder / "model")
    if init == "pretrained" and not (model / "model.safetensors").exists():
        load_model(model, seed=3, init="random").save_pretrained(model)
    train = {"max_steps": 6, "learning_rate": 0.05, "log_every": 1, "lora": LORA, "init": init, **settings}
    return config_of(folder, model=model, model_type=model_type, **train)


def losses_of(config: Config, **options: Any) -> list[float]:
    lines: list[StepLog] = []
    make = FAMILIES[model_facts(Path(str(config.train.model))).model_type][1]
    loader = ListLoader([make(seed) for seed in range(2)])
    train(config, loader=loader, source_kind="cache", **{"log": lines.append, **options})
    return [line.loss for line in lines]


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.few("whisper")
def test_the_adapters_alone_learn(tmp_path: Path, model_type: str, caplog: pytest.LogCaptureFixture) -> None:
    config = lora_config(tmp_path, model_type, max_steps=12)
    with caplog.at_level(logging.INFO):
        losses = losses_of(config)
    assert losses[-2] < 0.97 * losses[0]  # the same batch
    facts = model_facts(Path(str(config.train.model)))
    before = new_model(config, facts)
    learning = {name: parameter.numel() for name, parameter in before.named_parameters() if parameter.requires_grad}
    total = sum(parameter.numel() for parameter in before.parameters())
    assert f"{sum(learning.values()):,} of {total:,} parameters learn" in caplog.text
    assert all(".lora_" in name and (".q_proj." in name or ".v_proj." in name) for name in learning)
    checkpoint = find_checkpoint(run_folder(config))
    assert checkpoint is not None
    after = checkpoint_model(config, facts, checkpoint).state_dict()
    moved = {name for name, tensor in before.state_dict().items() if not torch.equal(tensor, after[name])}
    assert moved == set(learning)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.few("qwen3_asr")
def test_the_first_loss_is_that_of_the_model_without_adapters(tmp_path: Path, model_type: str) -> None:
    config = lora_config(tmp_path, model_type, max_steps=1)
    plain = dataclasses.replace(config, train=dataclasses.replace(config.train, lora=None))
    assert losses_of(config) == losses_of(plain)


@pytest.mark.parametrize(
    ("model_type", "init", "stop_after"),
    [
        ("whisper", "pretrained", 2),
        ("whisper", "random", 3),
        ("qwen3_asr", "pretrained", 3),
        ("qwen3_asr", "random", 2),
    ],
)
@pytest.mark.few("whisper-random-3", "qwen3_asr-pretrained-3")
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(
    tmp_path: Path, model_type: str, init: str, stop_after: int
) -> None:
    """Bit for bit, with dropout in front of the adapters; also where the base lies in the checkpoint alone."""
    lora = dataclasses.replace(LORA, dropout=0.2)
    config = lora_config(tmp_path, model_type, init=init, lora=lora, checkpoint_every=1)
    whole = losses_of(config)
    lines: list[StepLog] = []

    def stop(line: StepLog) -> None:
        lines.append(line)
        if line.step == stop_after + 1:
            raise KeyboardInterrupt("stopped")

    with pytest.raises(KeyboardInterrupt, match="stopped"):
        losses_of(config, log=stop)
    assert [line.loss for line in lines] == whole[: stop_after + 1]
    other_seed = dataclasses.replace(config.loader, seed=99) if init == "random" else config.loader
    if init == "random":  # the base is read, not made again
        facts, checkpoint = model_facts(Path(str(config.train.model))), find_checkpoint(run_folder(config))
        assert checkpoint is not None
        models = [
            checkpoint_model(dataclasses.replace(config, loader=each), facts, checkpoint)
            for each in (config.loader, other_seed)
        ]
        states = [model.state_dict() for model in models]
        assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    torch.manual_seed(123)
    assert losses_of(config, resume=True) == whole[stop_after:]


def test_adapters_are_a_function_of_the_seed(tmp_path: Path) -> None:
    folder = whisper_folder(tmp_path / "model")
    states = []
    for seed, noise in ((1, 5), (1, 6), (2, 5)):
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        model = with_adapters(load_model(folder, seed=0, init="random"), LORA, seed=seed, base=None)
        assert torch.equal(state, torch.get_rng_state())
        states.append(model.state_dict())
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert any(not torch.equal(tensor, states[2][name]) for name, tensor in states[0].items())


def test_base_of_a_model_is_transformers_model(tmp_path: Path) -> None:
    model = load_model(whisper_folder(tmp_path / "model"), seed=0, init="random")
    assert not is_adapted(model)
    assert base_of(model) is model
    adapted = with_adapters(model, LORA, seed=0, base=None)
    assert is_adapted(adapted)
    assert base_of(adapted) is model
    assert adapted.training


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"freeze": ("encoder",)}])
def test_settings_of_the_loop_go_with_adapters(tmp_path: Path, settings: dict[str, Any]) -> None:
    plain, changed = losses_of(lora_config(tmp_path)), losses_of(lora_config(tmp_path, **settings))
    assert changed[-2] < changed[0]  # the same batch
    assert (changed == pytest.approx(plain, rel=1e-5)) == ("gradient_checkpointing" in settings)


def test_frozen_modules_have_adapters_that_rest(tmp_path: Path) -> None:
    config = lora_config(tmp_path, freeze=("encoder",), max_steps=2)
    losses_of(config)
    facts, checkpoint = model_facts(Path(str(config.train.model))), find_checkpoint(run_folder(config))
    assert checkpoint is not None
    before, after = (
        model.state_dict() for model in (new_model(config, facts), checkpoint_model(config, facts, checkpoint))
    )
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved
    assert not any(".encoder." in name for name in moved)


def test_nothing_is_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants
    import transformers

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"asked the network: {args}, {kwargs}")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    config = lora_config(tmp_path, max_steps=1)
    losses_of(config)
    losses_of(dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=2)), resume=True)
    checkpoint = find_checkpoint(run_folder(config))
    assert checkpoint is not None
    model = transformers.WhisperForConditionalGeneration.from_pretrained(checkpoint, local_files_only=True)
    assert any(".lora_" in name for name in model.state_dict())
    assert not (checkpoint / "README.md").exists()


@pytest.mark.parametrize(
    ("target", "near"),
    [
        ("q_prj", "'q_proj'"),
        ("query", "'.*q_proj"),
        ("self_attn.qproj", "'self_attn.q_proj'"),
        ("encoder", "'encoder_attn|'conv1', 'conv2', 'embed_positions', .*'v_proj'"),
    ],
)
def test_a_target_without_a_module_names_the_nearest(tmp_path: Path, target: str, near: str) -> None:
    config = lora_config(tmp_path, lora=LoraConfig(targets=("v_proj", target)))
    message = rf"train\.lora\.targets: no layer of WhisperForConditionalGeneration is called '{target}'; .*{near}"
    with pytest.raises(ConfigError, match=message):
        losses_of(config)
    assert not run_folder(config).exists()


@pytest.mark.parametrize("target", ["fc1", "encoder_attn.q_proj", "embed_positions", "conv1"])
def test_every_kind_of_layer_can_be_a_target(tmp_path: Path, target: str) -> None:
    model = with_adapters(
        load_model(whisper_folder(tmp_path / "model"), seed=0, init="random"),
        LoraConfig(rank=2, targets=(target,)),
        seed=0,
        base=None,
    )
    assert all(f".{target}." in name for name, parameter in model.named_parameters() if parameter.requires_grad)


def test_peft_that_is_not_installed_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = lora_config(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'forebay\[lora\]'"):
        losses_of(config)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (dataclasses.replace(LORA, rank=8), r"train\.lora\.rank is 4 in .*checkpoint-00000001 and 8 in the config"),
        (dataclasses.replace(LORA, alpha=8.0), r"train\.lora\.alpha is 16\.0 in .* and 8\.0 in the config"),
        (
            dataclasses.replace(LORA, targets=("fc1",)),
            r"train\.lora\.targets is \['q_proj', 'v_proj'\] in .* and \['fc1'\] in the config",
        ),
        (None, r"has LoRA adapters and \[train\.lora\] wants none"),
    ],
)
def test_resume_refuses_other_adapters(tmp_path: Path, lora: LoraConfig | None, message: str) -> None:
    losses_of(lora_config(tmp_path, max_steps=1))
    with pytest.raises(ResumeError, match=message):
        losses_of(lora_config(tmp_path, max_steps=2, lora=lora), resume=True)


def test_resume_refuses_a_checkpoint_without_adapters(tmp_path: Path) -> None:
    losses_of(lora_config(tmp_path, max_steps=1, lora=None))
    with pytest.raises(ResumeError, match=r"has no adapters and \[train\.lora\] wants some"):
        losses_of(lora_config(tmp_path, max_steps=2), resume=True)


def test_targets_in_another_order_are_the_same_adapters(tmp_path: Path) -> None:
    losses_of(lora_config(tmp_path, max_steps=1))
    lora = dataclasses.replace(LORA, targets=LORA.targets[::-1])
    assert len(losses_of(lora_config(tmp_path, max_steps=2, lora=lora), resume=True)) == 1


def test_another_dropout_is_told_on_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    losses_of(lora_config(tmp_path, max_steps=1))
    lora = dataclasses.replace(LORA, dropout=0.3)
    noise = AugmentConfig(kind="noise", cache="/here/noises", snr_db=(5.0, 20.0))
    changed = dataclasses.replace(lora_config(tmp_path, max_steps=2, lora=lora), augment=(noise,))
    with caplog.at_level(logging.WARNING):
        losses_of(changed, resume=True)
    assert "settings differ from those of the checkpoint" in caplog.text
    assert "'dropout': 0.3" in caplog.text
    assert (
        "augment [] -> [{'kind': 'noise', 'probability': 1.0, 'cache': 'noises', 'snr_db': [5.0, 20.0]" in caplog.text
    )


def test_resume_refuses_other_weights_under_the_adapters(tmp_path: Path) -> None:
    config = lora_config(tmp_path, max_steps=1)
    losses_of(config)
    folder = Path(str(config.train.model))
    load_model(folder, seed=4, init="random").save_pretrained(folder)
    with pytest.raises(
        ResumeError, match=r"model have checksums .*model\.safetensors.* were trained on .*train\.model"
    ):
        losses_of(lora_config(tmp_path, max_steps=2), resume=True)


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    config = lora_config(tmp_path, max_steps=1)
    losses_of(config)
    checkpoint = find_checkpoint(run_folder(config))
    assert checkpoint is not None
    deeper = whisper_folder(tmp_path / "deeper", decoder_layers=3)
    model = with_adapters(load_model(deeper, seed=0, init="random"), LORA, seed=0, base=None)
    with pytest.raises(ResumeError, match=r"the adapters in .* are not those of the model in train\.model: .*lora_"):
        load_adapter(model, checkpoint)
    (checkpoint / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ResumeError, match=r"cannot read .*adapter_model\.safetensors"):
        load_adapter(model, checkpoint)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_adapter_config_is_refused(tmp_path: Path, content: str) -> None:
    losses_of(lora_config(tmp_path, max_steps=1))
    checkpoint = find_checkpoint(run_folder(lora_config(tmp_path)))
    assert checkpoint is not None
    (checkpoint / "adapter_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ResumeError, match=r"adapter_config\.json"):
        losses_of(lora_config(tmp_path, max_steps=2), resume=True)


def test_a_damaged_base_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    config = lora_config(tmp_path, max_steps=1, init="random")
    losses_of(config)
    checkpoint = find_checkpoint(run_folder(config))
    assert checkpoint is not None
    path = checkpoint / "base" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ResumeError, match=r"base/model\.safetensors has checksum"):
        losses_of(lora_config(tmp_path, max_steps=2, init="random"), resume=True)


def test_a_checkpoint_is_small(tmp_path: Path) -> None:
    """It holds the adapters and their moments, and names the folder of the rest by its absolute path."""
    config = lora_config(tmp_path, max_steps=1)
    losses_of(config)
    checkpoint = find_checkpoint(run_folder(config))
    assert checkpoint is not None
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "generation_config.json",
        "optimizer.pt",
        "processor_config.json",
        "state.json",
    ]
    document = json.loads((checkpoint / "adapter_config.json").read_bytes())
    assert document["base_model_name_or_path"] == str((tmp_path / "model").resolve())
    assert (checkpoint / "adapter_model.safetensors").stat().st_size < 60_000


def test_a_checkpoint_of_adapters_as_the_model_names_the_command_that_merges(tmp_path: Path) -> None:
    config = lora_config(tmp_path, max_steps=1)
    losses_of(config)
    checkpoint = find_checkpoint(run_folder(config))
    assert checkpoint is not None
    with pytest.raises(ConfigError, match=r"holds adapters without the weights under them: merge both with") as error:
        model_facts(checkpoint)
    code = (
        str(error.value).partition('python -c "')[2].removesuffix('"').replace("'merged'", f"{str(tmp_path / 'm')!r}")
    )
    exec(code, {})
    merged = load_model(tmp_path / "m", seed=0)
    trained = checkpoint_model(config, model_facts(Path(str(config.train.model))), checkpoint)
    batch = whisper_batch(0)
    with torch.no_grad():
        torch.testing.assert_close(merged.eval()(**batch).logits, trained.eval()(**batch).logits)
