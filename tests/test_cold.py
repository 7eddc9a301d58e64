"""Each kind of process once as a user starts it: from nothing, not from the warm server of the other tests.

Beside these, commands that look (tests/test_light_imports.py, tests/test_imports.py) start cold. Two are `wide`: a
pool of the process that calls it, and `lint`.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import build
from forebay.store.cache import open_cache
from tests.preprocess.corpus import shard_bytes
from tests.preprocess.here_pool import build_here
from tests.processes import ROOT, python
from tests.train.evaluation.demo import demo_config
from tests.warm.worker import COLD

SET = '[[train.eval]]\nname = "dev"\nconfig = "THIS"\ngenerate_max_tokens = 4\nmax_samples = 2\n'


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of twelve demo recordings and a random model."""
    folder = tmp_path_factory.mktemp("cold")
    path = Path(demo_config(folder, "qwen3_asr", sets=SET).path)
    for each in folder.glob("*.toml"):
        text = each.read_text(encoding="utf-8")
        model = f'model = "{ROOT}/demo/speech/qwen3_asr_model"\ninit = "random"'
        each.write_text(text.replace('model = "qwen3_asr_model"', model), encoding="utf-8")
    return path


def cold(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Returns how Python ended that ran from nothing, and what it started too."""
    ended = python(*arguments, is_warm=False, FOREBAY_TEST_COLD="1")
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended


@pytest.fixture(scope="module")
def built(config: Path) -> Path:
    """The cache that `forebay preprocess` made by a worker process."""
    printed = json.loads(cold("-m", "forebay", "preprocess", config, "--json").stdout)
    return Path(printed["cache"])


@pytest.fixture(scope="module")
def trained(built: Path, config: Path) -> Path:
    """The checkpoint of `forebay train` under `accelerate launch`."""
    launch = ("-m", "accelerate.commands.launch", "--num_processes", 1, "--num_machines", 1, "--mixed_precision", "no")
    more = ("--dynamo_backend", "no", "--cpu", "-m", "forebay", "train", config, "--set", "train.max_steps=1")
    cold(*launch, *more, "--set", "train.eval=[]")
    return config.parent / "runs" / "qwen3_asr" / "checkpoint-00000001"


def test_preprocess_makes_the_bytes_of_a_build_in_one_process(built: Path, config: Path, tmp_path: Path) -> None:
    here = build_here(demo_config(tmp_path, "qwen3_asr"))
    assert here.key == open_cache(built).key
    assert shard_bytes(Path(here.cache)) == shard_bytes(built)


@pytest.mark.wide
def test_a_pool_of_the_process_that_calls_it_makes_them_too(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COLD, "1")
    report = build(demo_config(tmp_path, "qwen3_asr"), Options(progress=False))
    assert shard_bytes(Path(report.cache)) == shard_bytes(built)


@pytest.mark.wide
def test_lint_reads_raw_data(config: Path) -> None:
    [linted] = json.loads(cold("-m", "forebay", "lint", config, "--json").stdout)["sets"]
    assert (linted["is_raw"], linted["num_samples"]) == (True, 12)


def test_a_run_under_accelerate_launch_has_a_checkpoint_that_eval_takes(trained: Path, config: Path) -> None:
    assert (trained / "model.safetensors").is_file()
    [found] = json.loads(cold("-m", "forebay", "eval", config, "--checkpoint", trained, "--json").stdout)["sets"]
    assert (found["name"], found["step"], found["num_samples"]) == ("dev", 1, 2)
