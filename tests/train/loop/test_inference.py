"""A checkpoint is a model folder as it lies: from_pretrained reads it, and generate transcribes a demo recording."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from forebay.config import BucketConfig, Config, EvalConfig, LoraConfig
from forebay.config.load import read_config
from forebay.train.loop.run import run
from forebay.train.loop.trainable import checkpoint_model, new_model
from forebay.train.models.lora import base_of
from forebay.train.models.model_folder import model_facts

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
ROOT = Path(__file__).parents[3]


def demo_config(folder: Path, name: str, **train: Any) -> Config:
    """Returns the config of a demo that trains two steps on the raw recordings."""
    config = read_config(ROOT / "configs" / f"demo_{name}.toml")
    return dataclasses.replace(
        config,
        plan=BucketConfig(edges_s=(3.0,), batch_size=2),
        loader=dataclasses.replace(config.loader, cache="off"),
        train=dataclasses.replace(config.train, max_steps=2, output_dir=str(folder / "runs"), **train),
    )


def trained(config: Config) -> Path:
    report = run(config)
    assert report is not None
    assert report.checkpoint is not None
    return Path(report.checkpoint)


@pytest.fixture(scope="module")
def recording() -> np.ndarray:
    """A demo recording, float32 at 16 kHz."""
    with tarfile.open(ROOT / "demo" / "speech" / "train-00000.tar") as tar:
        member = tar.extractfile("en_digits_oh.flac")
        assert member is not None
        audio, rate_hz = soundfile.read(io.BytesIO(member.read()), dtype="float32")
    assert rate_hz == 16_000
    return np.asarray(audio)


def transcribe(model: Any, folder: Path, audio: np.ndarray) -> tuple[str, torch.Tensor]:
    """Returns the text that a model writes for a recording, by the processor in `folder` alone, and its tokens."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    if hasattr(processor, "apply_transcription_request"):
        inputs = processor.apply_transcription_request(audio=audio)
    else:
        inputs = processor(audio, sampling_rate=16_000, return_tensors="pt")
    with torch.no_grad():
        ids = model.eval().generate(**inputs, max_new_tokens=8)
    start = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
    return processor.batch_decode(ids[:, start:])[0], ids


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in base_of(model).state_dict().items() if "rotary" not in name}


@pytest.mark.parametrize("name", ["speech", "qwen3_asr"])
def test_a_checkpoint_transcribes(tmp_path: Path, name: str, recording: np.ndarray) -> None:
    import transformers

    config = demo_config(tmp_path, name)
    checkpoint = trained(config)
    facts = model_facts(Path(str(config.train.model)))
    model = getattr(transformers, facts.model_class).from_pretrained(checkpoint, local_files_only=True)
    text, _ = transcribe(model, checkpoint, recording)
    assert text
    before, after = weights_of(new_model(config, facts)), weights_of(checkpoint_model(config, facts, checkpoint))
    loaded = weights_of(model)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in after.items())
    assert sum(not torch.equal(loaded[key], tensor) for key, tensor in before.items()) > len(before) / 2
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "preprocessor_config.json"}
    wanted |= {"chat_template.jinja"} if name == "qwen3_asr" else set()
    assert wanted <= {path.name for path in checkpoint.iterdir()}


@pytest.mark.parametrize(
    ("name", "init"),
    [
        ("speech", "pretrained"),
        ("qwen3_asr", "random"),
        *(pytest.param(*each, marks=pytest.mark.wide) for each in (("speech", "random"), ("qwen3_asr", "pretrained"))),
    ],
)
@pytest.mark.few("speech-pretrained")
def test_a_checkpoint_with_adapters_transcribes(tmp_path: Path, name: str, init: str, recording: np.ndarray) -> None:
    """peft, transformers' class and its Auto class read it; the base lies in train.model or in the checkpoint.

    Trained, evaluated and chosen as the best on the demo recordings.
    """
    import peft
    import transformers

    dev = EvalConfig(
        name="dev", config=str(ROOT / "configs" / f"demo_{name}.toml"), max_samples=2, generate_max_tokens=2
    )
    lora = LoraConfig(rank=4, alpha=64.0)
    config = demo_config(
        tmp_path, name, lora=lora, learning_rate=0.1, eval=(dev,), save_best="loss", repetition_limit=1.0
    )
    source = Path(str(config.train.model))
    if init == "pretrained":
        folder = tmp_path / "model"
        shutil.copytree(source, folder)
        new_model(demo_config(tmp_path, name), model_facts(source)).save_pretrained(folder)
        train = dataclasses.replace(config.train, model=str(folder), init="pretrained")
        config, source = dataclasses.replace(config, train=train), folder
    checkpoint = trained(config)
    facts = model_facts(source)
    stored = json.loads((checkpoint / "adapter_config.json").read_bytes())["base_model_name_or_path"]
    assert stored == str(source if init == "pretrained" else checkpoint / "base")
    assert (checkpoint / "base").exists() == (init == "random")
    own = checkpoint_model(config, facts, checkpoint)
    text, ids = transcribe(own, checkpoint, recording)
    assert text
    auto = transformers.AutoModelForSpeechSeq2Seq if name == "speech" else transformers.AutoModelForMultimodalLM
    for loader in (peft.AutoPeftModel, getattr(transformers, facts.model_class), auto):
        assert torch.equal(transcribe(loader.from_pretrained(checkpoint), checkpoint, recording)[1], ids)
    before = weights_of(new_model(config, facts))
    moved = {key for key, tensor in weights_of(own).items() if not torch.equal(tensor, before[key])}
    best, result = (json.loads((checkpoint.parent / name).read_bytes()) for name in ("best.json", "eval.jsonl"))
    assert best == {
        "checkpoint": checkpoint.name,
        "step": 2,
        "name": "dev",
        "metric": "loss",
        "value": result["loss"],
    }
    assert moved
    assert all(".lora_" in key for key in moved)
