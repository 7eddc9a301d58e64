"""Adding a family of models: one file, one line in the table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from forebay.config import AudioConfig, SourceConfig
from forebay.errors import CacheMismatchError, ConfigError
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import train
from forebay.train.models import families
from forebay.train.models.model_folder import check_batch, check_config, check_constants, load_model, model_facts
from tests.train.tiny import ListLoader, config_of, qwen3_asr_folder

PACKAGE = Path(families.__file__).parent


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a tiny Qwen3 whose family the table has."""
    monkeypatch.setitem(families.FAMILIES, "qwen3", "tests.train.models.toy")
    document = json.loads((qwen3_asr_folder(tmp_path / "asr") / "config.json").read_bytes())
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "config.json").write_text(json.dumps(document["text_config"]), encoding="utf-8")
    return tmp_path / "toy"


def texts() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 30, (2, 6), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


OTHERS = {
    "__init__",
    "ctc",
    "facts",
    "families",
    "generic",
    "lora",
    "model_folder",
    "objective",
}


def test_every_file_of_a_family_is_in_the_table() -> None:
    files = {path.stem for path in PACKAGE.glob("*.py")} - OTHERS
    assert {f"forebay.train.models.{name}" for name in files} == set(families.FAMILIES.values())


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_family_of_one_file_and_one_line_is_trained(toy: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, model=toy, model_type="plain", max_steps=3, learning_rate=1e-2, log_every=1)
    source = SourceConfig(kind="text", manifest=str(tmp_path / "train.jsonl"))
    config = dataclasses.replace(config, source=source, audio=AudioConfig(features="none"))
    lines: list[StepLog] = []
    report = train(config, loader=ListLoader([texts()]), source_kind="cache", log=lines.append)
    assert report.steps == 3
    assert lines[-1].loss < lines[0].loss
    assert report.checkpoint is not None
    assert type(load_model(Path(report.checkpoint), seed=0)).__name__ == "Qwen3ForCausalLM"
    lines.clear()
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=4))
    train(longer, loader=ListLoader([texts()]), source_kind="cache", resume=True, log=lines.append)
    assert [line.step for line in lines] == [4]


def test_the_checks_speak_of_the_family(toy: Path, tmp_path: Path) -> None:
    facts = model_facts(toy)
    with pytest.raises(ConfigError, match=r'is a qwen3 model and takes "none"'):
        check_config(facts, config_of(tmp_path, model=toy))
    check_constants(facts, {"features": "none", "prompt": "plain"})
    with pytest.raises(CacheMismatchError, match=r"features: the model in .* wants 'none', the cache has 'log_mel'"):
        check_constants(facts, {"features": "log_mel", "prompt": "plain"})
    with pytest.raises(CacheMismatchError, match=r"batch has no field labels .* which a qwen3 model needs"):
        check_batch(facts, {"input_ids": texts()["input_ids"]})


def test_a_model_type_that_transformers_lacks_is_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "wisper"}')
    with pytest.raises(ConfigError, match=r"'wisper', which the installed .* not have; the nearest is 'whisper'"):
        model_facts(tmp_path)
