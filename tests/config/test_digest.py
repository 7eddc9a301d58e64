from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ConfigError

SPEECH = Path(__file__).resolve().parents[2] / "demo" / "speech"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SPEECH / "qwen3_asr_model", tmp_path / "model"))


def test_digest_is_of_contents_and_not_of_the_path(folder: Path) -> None:
    assert tokenizer_digest(folder) == tokenizer_digest(SPEECH / "qwen3_asr_model")
    assert tokenizer_digest(folder) != tokenizer_digest(SPEECH / "model")
    assert len(tokenizer_digest(folder)) == 64


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_changed_tokenizer_file_changes_it(folder: Path, name: str) -> None:
    before = tokenizer_digest(folder)
    (folder / name).write_bytes((folder / name).read_bytes() + b" ")
    assert tokenizer_digest(folder) != before


@pytest.mark.parametrize("name", ["special_tokens_map.json", "merges.txt", "spiece.model", "chat_template.json"])
def test_a_new_tokenizer_file_changes_it(folder: Path, name: str) -> None:
    before = tokenizer_digest(folder)
    (folder / name).write_text("{}")
    assert tokenizer_digest(folder) != before


def test_a_named_template_in_its_own_folder_changes_it(folder: Path) -> None:
    before = tokenizer_digest(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("x")
    assert tokenizer_digest(folder) != before


def test_weights_and_model_sizes_do_not_change_it(folder: Path) -> None:
    before = tokenizer_digest(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "initializer_range": 0.5}))
    assert tokenizer_digest(folder) == before


def test_the_model_type_changes_it_because_it_chooses_the_tokenizer_class(folder: Path) -> None:
    before = tokenizer_digest(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    assert tokenizer_digest(folder) != before


def test_moving_bytes_from_one_file_to_the_next_changes_it(tmp_path: Path) -> None:
    digests = set()
    for index, (first, second) in enumerate([("ab", "c"), ("a", "bc"), ("abc", "")]):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "merges.txt").write_text(first)
        (folder / "vocab.json").write_text(second)
        digests.add(tokenizer_digest(folder))
    assert len(digests) == 3


def test_missing_folder_names_the_field_and_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"text\.tokenizer: .*nowhere is not a folder"):
        tokenizer_digest(tmp_path / "nowhere")


def test_folder_without_vocabulary_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds no tokenizer .*save_pretrained"):
        tokenizer_digest(tmp_path)


def test_broken_config_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        tokenizer_digest(folder)


def test_digest_loads_no_heavy_library() -> None:
    heavy = "{'torch', 'transformers', 'tokenizers', 'pyarrow', 'pydantic', 'tensordict'}"
    code = f"import sys, forebay.config.pretrained_folder; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=SPEECH.parents[1]
    )
    assert done.stdout.strip() == "[]"
