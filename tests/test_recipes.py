"""Every recipe of docs/recipes.md runs as it stands, on the demo recordings; what needs more hardware is parsed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import cli
from forebay.cli.program import make_parser
from forebay.measure import doctor

ROOT = Path(__file__).parents[1]
_ELSEWHERE = ("s3://", "--submit")
"""In a command that needs a bucket or Slurm."""
_STARTERS = ("torchrun", "accelerate")


def _recipes() -> dict[str, list[tuple[str, str]]]:
    """The code blocks of each recipe, with their languages."""
    sections = re.split(r"^## (.+)$", (ROOT / "docs/recipes.md").read_text(), flags=re.MULTILINE)
    blocks = {
        name: re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for name, text in _pairs(sections)
    }
    assert len(blocks) > 8
    assert all(blocks.values())
    return blocks


def _pairs(sections: list[str]) -> Iterator[tuple[str, str]]:
    yield from zip(sections[1::2], sections[2::2], strict=True)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder as a clone is, with the caches and runs of the recipes before; tests run in it."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "demo").symlink_to(ROOT / "demo")
    shutil.copytree(ROOT / "configs", folder / "configs")
    speech = folder / "configs/demo_speech.toml"
    speech.write_text(speech.read_text().replace("num_workers = 2", "num_workers = 1"))
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def _run(line: str) -> None:
    words = shlex.split(line, comments=True)
    if words[0] in _STARTERS:
        assert words[-3:-1] == ["-m", "forebay.train"]
        make_parser().parse_args(["train", words[-1]])
    elif words[0] != "forebay":
        subprocess.run(words, check=True)
    elif any(mark in line for mark in _ELSEWHERE):
        make_parser().parse_args(words[1:])
    else:
        assert cli.main(words[1:]) == 0, line


TRAINING = ("Train, then evaluate", "Stop, and resume elsewhere", "Find out where the time goes")


@pytest.mark.parametrize("name", [name for name in _recipes() if name not in TRAINING])
def test_a_recipe_runs_as_it_stands(name: str, clone: Path) -> None:
    assert _run_recipe(name) > 0


def test_the_batches_without_torch_run_as_they_stand(clone: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/frameworks.md").read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "frameworks"}
    exec(compile(block, "frameworks", "exec"), names)
    features, ids = names["batch"]["input_features"], names["batch"]["input_ids"]
    assert (features.ndim, features.shape[2], len(features)) == (3, 80, len(ids))
    assert names["state"]["position"] == 1
    again = names["NumpyBatches"](forebay.load_config("configs/demo_speech.toml"))
    again.cursor.load_state_dict(names["state"])
    assert sum(len(batch["input_ids"]) for batch in again) + len(ids) == 52
    assert again.cursor.state_dict()["epoch"] == 1


@pytest.mark.wide
def test_the_recipes_of_training_run_as_they_stand(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_GRACE_S", 600)  # beside other work its processes take long to start
    assert cli.main(["preprocess", "configs/demo_speech.toml", "--no-progress"]) == 0
    for name in TRAINING:
        _run_recipe(name)
    assert sorted(path.name for path in (clone / "eval").glob("*_eval.tar"))[0] == "en_eval.tar"
    assert list((clone / "runs/prompts").glob("checkpoint-*6"))


def _run_recipe(name: str) -> int:
    """Returns how many blocks of a recipe ran."""
    for language, body in _recipes()[name]:
        if language == "python":
            exec(compile(body, name, "exec"), {})
        elif language == "bash":
            subprocess.run(["bash", "-n", "-c", body], check=True)
        elif language == "toml":
            forebay.load_config({**tomllib.loads(Path("configs/demo_speech.toml").read_text()), **tomllib.loads(body)})
        else:
            for line in body.splitlines():
                _run(line)
    return len(_recipes()[name])


def test_the_recipes_leave_what_they_promise(clone: Path) -> None:
    assert len(list((clone / "caches").glob("prompts-train-*"))) == 2  # with 40 recordings, and with all
    assert (clone / "mel.png").exists()
    assert (clone / "rows.parquet").exists()
