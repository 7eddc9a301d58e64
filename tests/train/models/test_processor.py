"""The files beside the weights: where they come from, and what is said where they are missing."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from forebay.config import Config
from forebay.train.models.model_folder import model_facts, processor_class, processor_files, warn_of_missing
from tests.train.tiny import config_of, qwen3_asr_folder, whisper_folder


def write(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


def config_with(folder: Path, *, model: Path, tokenizer: Path, model_type: str = "whisper") -> Config:
    config = config_of(folder, model=model, model_type=model_type)
    assert config.text is not None
    object.__setattr__(config.text, "tokenizer", str(tokenizer))
    return config


def test_the_models_folder_comes_first(tmp_path: Path) -> None:
    model = write(whisper_folder(tmp_path / "model"), "tokenizer.json", "merges.txt", "preprocessor_config.json")
    tokenizer = write(tmp_path / "tokenizer", "tokenizer.json", "special_tokens_map.json")
    files = processor_files(config_with(tmp_path, model=model, tokenizer=tokenizer), model_facts(model))
    assert {name: path.parent for name, path in files.items()} == dict.fromkeys(
        ("tokenizer.json", "merges.txt", "preprocessor_config.json"), model
    )


def test_a_tokenizer_that_the_model_lacks_comes_from_the_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write(qwen3_asr_folder(tmp_path / "model"), "tokenizer_config.json", "preprocessor_config.json")
    tokenizer = write(
        tmp_path / "tokenizer", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "a.txt"
    )
    config = config_with(tmp_path, model=model, tokenizer=tokenizer, model_type="qwen3_asr")
    facts = model_facts(model)
    files = processor_files(config, facts)
    assert {name: path.parent.name for name, path in files.items()} == {
        "tokenizer.json": "tokenizer",
        "tokenizer_config.json": "tokenizer",
        "chat_template.jinja": "tokenizer",
        "preprocessor_config.json": "model",
    }
    with caplog.at_level(logging.WARNING):
        warn_of_missing(files, facts)
    assert not caplog.text


def test_what_belongs_to_other_weights_stays_behind(tmp_path: Path) -> None:
    """A checkpoint of an earlier run can be `train.model`."""
    names = ("state.json", "adapter_config.json", "trainer_state.json", "generation_config.json", "notes.md")
    model = write(whisper_folder(tmp_path / "model"), *names, "model.safetensors.index.json", "normalizer.json")
    files = processor_files(config_with(tmp_path, model=model, tokenizer=tmp_path / "none"), model_facts(model))
    assert list(files) == ["normalizer.json"]


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [
        ("whisper", ["tokenizer (tokenizer.json)", "processor (preprocessor_config.json)"]),
        (
            "qwen3_asr",
            ["tokenizer (tokenizer.json)", "processor (preprocessor_config.json)", "prompt (chat_template.jinja)"],
        ),
    ],
)
def test_what_is_missing_is_named_once(
    tmp_path: Path, model_type: str, missing: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = (whisper_folder if model_type == "whisper" else qwen3_asr_folder)(tmp_path / "model")
    facts = model_facts(folder)
    with caplog.at_level(logging.WARNING):
        warn_of_missing(processor_files(config_of(tmp_path, model=folder, model_type=model_type), facts), facts)
    assert len(caplog.records) == 1
    assert f"lack what inference needs: {', '.join(missing)}; put the files into {folder}" in caplog.text


def test_a_template_may_stand_in_the_tokenizers_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(qwen3_asr_folder(tmp_path / "model"), "tokenizer.json", "preprocessor_config.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}), encoding="utf-8")
    facts = model_facts(folder)
    with caplog.at_level(logging.WARNING):
        warn_of_missing(processor_files(config_of(tmp_path, model=folder, model_type="qwen3_asr"), facts), facts)
    assert not caplog.records


def test_the_processors_class_is_named_where_no_file_names_it(tmp_path: Path) -> None:
    folder = write(whisper_folder(tmp_path / "model"), "tokenizer_config.json", "preprocessor_config.json")
    files = {path.name: path for path in folder.iterdir() if path.name != "config.json"}
    assert processor_class(files, "whisper") == "WhisperProcessor"
    assert processor_class(files, "qwen3_asr") == "Qwen3ASRProcessor"
    assert processor_class(files, "qwen3") is None
    named = json.dumps({"processor_class": "WhisperProcessor"})
    (folder / "preprocessor_config.json").write_text(named, encoding="utf-8")
    assert processor_class(files, "whisper") is None
