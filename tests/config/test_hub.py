"""Names of the Hub where a folder is wanted: the message ends with the command that says what to write."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path
from typing import get_args

import pytest

from forebay.config.pretrained_folder import Thing, hub_advice, processor_digest, tokenizer_digest, url_problem
from forebay.errors import ConfigError
from forebay.steps.recipe import load_config, recipe_of
from forebay.train.models.model_folder import model_facts


@pytest.mark.parametrize("thing", get_args(Thing))
@pytest.mark.parametrize("parent", ["project", "a $project", "a 'quoted' one"])
def test_a_dataset_has_a_line_of_python_and_a_model_the_command_that_names_its_commit(
    tmp_path: Path, thing: Thing, parent: str
) -> None:
    (tmp_path / parent).mkdir()
    folder = tmp_path / parent / "openai" / "whisper-small"
    said = hub_advice(folder, thing)
    if thing != "dataset":
        assert said.endswith("forebay fetch openai/whisper-small")
        return
    program, option, line = shlex.split(said.split("save it there: ")[1])
    assert (program, option) == ("python", "-c")
    strings = [node.value for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Constant)]
    assert {"openai/whisper-small", str(folder)} <= set(strings)


def test_other_paths_are_no_names(tmp_path: Path) -> None:
    (tmp_path / "models" / "here").mkdir(parents=True)
    for path in ("models/here", "models/gone", "gone", "very/far/gone"):
        assert hub_advice(tmp_path / path, "tokenizer") == ""


def test_every_field_of_a_folder_gives_the_line(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen" / "Qwen3-VL-4B-Instruct"
    with pytest.raises(ConfigError, match=r"text\.tokenizer: .* is not a folder.*fetch Qwen/Qwen3-VL-4B-Instruct$"):
        tokenizer_digest(folder)
    with pytest.raises(ConfigError, match=r"vision\.processor: .* is not a folder.*fetch Qwen/Qwen3-VL-4B-Instruct$"):
        processor_digest(folder)
    with pytest.raises(
        ConfigError, match=r"train\.model: cannot read .*config\.json \(No such file.*fetch Qwen/Qwen3-VL-4B-Instruct$"
    ):
        model_facts(folder)


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("https://huggingface.co/nvidia/parakeet-ctc-1.1b", "nvidia/parakeet-ctc-1.1b"),
        ("https://hf.co/google/vit/tree/main", "google/vit"),
        ("https://huggingface.co/-x/--y", ""),
        ("https://huggingface.co/datasets/a/b", ""),
        ("s3://bucket/vit", ""),
    ],
)
def test_a_url_in_the_place_of_a_folder_names_the_download(url: str, command: str) -> None:
    said = url_problem(url)
    assert said.startswith(f"{url} is a URL, and this is read from this machine: name a local path")
    assert said.partition("forebay fetch ")[2] == command


def test_a_folder_that_is_not_there_may_be_a_table_of_symbols(tmp_path: Path) -> None:
    sections = {"name": "x", "source": {"kind": "tar", "manifest": "x.parquet"}, "audio": {"features": "waveform"}}
    missing = str(tmp_path / "letters")
    config = load_config({**sections, "text": {"prompt": "plain", "tokenizer": missing}})
    with pytest.raises(ConfigError, match=r"letters is not a folder; .*symbols: forebay symbols .*"):
        recipe_of(config)
    config = load_config({**sections, "text": {"prompt": "plain", "tokenizer": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"holds no tokenizer .*save_pretrained\(folder\)$"):
        recipe_of(config)
    config = load_config(
        {**sections, "audio": {"features": "log_mel"}, "text": {"prompt": "whisper", "tokenizer": missing}}
    )
    with pytest.raises(ConfigError, match=r"letters is not a folder; point it at a folder with a tokenizer\.json$"):
        recipe_of(config)
