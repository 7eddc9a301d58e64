"""`forebay compare` as a person calls it: the tables of a config's arms and of two runs, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import cli
from forebay.errors import ConfigError, MissingExtraError
from forebay.measure.compare import compare
from forebay.measure.compare_report import draw_arms
from tests.commands import run, run_json
from tests.processes import ROOT, python

CONFIG = ROOT / "configs/demo_speech.toml"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of the demo recordings, under `caches`."""
    root = tmp_path_factory.mktemp("compare")
    forebay.preprocess.build(forebay.load_config(CONFIG, overrides=[f"run.cache_root={root}/caches"]))
    return root


def arguments(root: Path, *more: str, steps: int = 20, against: str = "uncached") -> list[str]:
    """`forebay compare configs/demo_speech.toml --against ... --steps ...` with a cache and a folder of the test's."""
    shown = ["compare", str(CONFIG), "--against", against, "--steps", str(steps)]
    return [*shown, "--cache-root", f"{root}/caches", "--set", f"train.output_dir={root}/runs", *more]


@pytest.fixture(scope="module")
def printed(root: Path) -> str:
    """The output of the documented command.

    It takes 40 s of CPU: two processes import torch and train on 30 s of audio a clip. Batches of a clip or two instead
    of the config's make it a third of what it would be.
    """
    outcome = python("-m", "forebay", *arguments(root, "--set", "plan.batch_seconds=8"))
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    assert "block 3 of 3: config" in outcome.stderr
    return outcome.stdout


@pytest.fixture(scope="module")
def document(root: Path, printed: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "runs/prompts/compare/compare.json").read_text())
    return found


@pytest.mark.wide
def test_the_documented_command_prints_its_table_and_writes_it(root: Path, printed: str) -> None:
    folder = root / "runs/prompts/compare"
    assert printed.startswith("# prompts: the config's own way against uncached\n")
    for label in ("samples/s (quartiles of blocks)", "audio hours an hour", "waiting for data", "MFU", "b_3_5"):
        assert f"| {label} |" in printed
    assert (folder / "compare.md").read_text() in printed
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["config.log", "uncached.log"]


@pytest.mark.wide
def test_cached_and_uncached_losses_are_equal_to_the_last_bit(document: dict[str, Any]) -> None:
    own, uncached = document["arms"]["config"], document["arms"]["uncached"]
    assert len(own["losses"]) == 20
    assert uncached["losses"] == own["losses"]
    assert uncached["loss_difference"]["difference"] == 0
    assert uncached["padding"] == own["padding"]
    assert own["losses"][-1] < own["losses"][0]


@pytest.mark.wide
def test_the_document_has_the_figures_of_a_cpu(document: dict[str, Any]) -> None:
    assert (document["steps"], document["blocks"], document["device"]) == (20, 3, None)
    for arm in document["arms"].values():
        assert arm["samples_per_s"]["low"] <= arm["samples_per_s"]["median"] <= arm["samples_per_s"]["high"]
        assert (arm["utilisation"], arm["device_bytes"], arm["mfu"], arm["compilations"]) == (None, None, None, 0)
        assert arm["tflops"] > 0
        assert arm["host_bytes"] > 100_000_000
        assert sum(row["steps"] for row in arm["buckets"].values()) == 13  # the first block of 7 warms up
    assert document["arms"]["uncached"]["first_batch_s"] > 0


@pytest.mark.wide
def test_the_run_s_folder_has_no_checkpoint_of_a_comparison(root: Path, printed: str) -> None:
    assert sorted(path.name for path in (root / "runs/prompts").iterdir()) == ["compare"]


@pytest.mark.wide
def test_without_matplotlib_a_line_names_the_extra(printed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"the picture needs matplotlib .*pip install 'forebay\[report\]'"):
        draw_arms({})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--against", "uncachd"), "names 'uncachd', wanted uncached, unbucketed, hf"),
        (("--steps", "0"), "--steps is 0, wanted 1 or more"),
        ((), None),
    ],
)
def test_bad_use_ends_with_2_before_anything_is_read(
    root: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str | None
) -> None:
    given = arguments(root, *more) if message else ["compare", str(CONFIG)]
    code, out, err = run(capsys, *given)
    assert (code, out) == (2, "")
    assert (message or "compare CONFIG needs --against, one or more of uncached, unbucketed, hf") in err


def test_fewer_steps_than_random_batches_need_are_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *arguments(root, steps=3, against="uncached,unbucketed"))
    assert (code, out) == (2, "")
    assert "--steps is 3, but unbucketed has random batches" in err
    assert "give --steps 14 or more" in err  # two of each of seven buckets


def test_a_config_without_a_model_is_refused() -> None:
    config = forebay.load_config(CONFIG)
    bare = dataclasses.replace(config, train=dataclasses.replace(config.train, model=None))
    with pytest.raises(ConfigError, match=r"train\.model is missing; name the folder of the model that all arms train"):
        compare(bare, against="uncached")


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"compare runs on one rank, and WORLD_SIZE is above 1"):
        compare(forebay.load_config(CONFIG), against="uncached")


def test_a_cache_that_is_not_sealed_is_named_with_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *arguments(tmp_path))
    assert code == 3
    assert "run: forebay preprocess" in err


@pytest.mark.parametrize("against", ["hf", "uncached", "uncached+unbucketed"])
def test_raw_data_that_is_not_here_is_told(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], against: str
) -> None:
    """A node that got the cache alone."""
    shutil.copytree(ROOT / "demo", tmp_path / "demo")
    (tmp_path / "configs").mkdir()
    config = tmp_path / "configs/demo_speech.toml"
    shutil.copy(CONFIG, config)
    for path in (tmp_path / "demo/speech").glob("train*"):
        path.unlink()
    code, _, err = run(capsys, "compare", config, "--against", against, "--cache-root", root / "caches")
    assert code == 2
    assert f"--against names {against}, but the raw data of " in err
    assert "give --against unbucketed" in err


@pytest.mark.wide
def test_ctrl_c_ends_the_arms(root: Path) -> None:
    """The arms' processes take 10 s of CPU to begin, which is when they are interrupted."""
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay", *arguments(root, "--out", f"{root}/interrupted", steps=1000)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores Ctrl-C, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    children: list[int] = []
    deadline = time.monotonic() + 120
    while len(children) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
        children = [pid for pid in _children(process.pid) if b"forebay.measure.child_process" in _command(pid)]
    assert len(children) == 2
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()  # a comparison that goes on would take the cores of all later tests
        process.wait()
    assert process.returncode == cli.INTERRUPTED
    assert "interrupted" in err
    assert not any(b"forebay.measure.child_process" in _command(pid) for pid in children)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


# Two runs beside each other.


@pytest.fixture(scope="module")
def runs(root: Path) -> tuple[Path, Path]:
    """Two runs of the config that differ in their seed; they take 25 s of CPU, most of it two imports of torch."""
    folders = []
    for seed in (1, 2):
        overrides = {"train.output_dir": f"{root}/seed-{seed}", "loader.seed": seed, "train.max_steps": 4}
        overrides |= {"train.log_every": 2, "plan.batch_seconds": 8}
        more = [part for name, value in overrides.items() for part in ("--set", f"{name}={value}")]
        outcome = python("-m", "forebay", "train", CONFIG, "--cache-root", root / "caches", *more)
        assert outcome.returncode == 0, outcome.stderr[-4000:]
        folders.append(root / f"seed-{seed}/prompts")
    return folders[0], folders[1]


@pytest.mark.wide
def test_two_runs_stand_beside_each_other(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(capsys, "compare", *runs, "--out", tmp_path)
    assert found["settings"]["loader.seed"] == [1, 2]
    assert set(found["settings"]) == {"loader.seed", "train.output_dir"}
    assert [final["steps"] for final in found["final"]] == [4, 4]
    assert found["loss_difference"]["equal_steps"] == 2
    assert found["loss_difference"]["difference"] > 0
    assert [[step for step, _ in curve] for curve in found["losses"]] == [[2, 4], [2, 4]]
    code, out, _ = run(capsys, "compare", runs[0], runs[0])
    assert code == 0
    assert "| train WER, last (best) |" in out
    assert "Their settings are the same." in out
    assert "at 2 equal steps is 0, at step" in out
    assert (tmp_path / "compare.md").read_text().startswith("# ")
    assert (tmp_path / "compare.png").is_file()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("RUN",), "is a folder; name another run's folder behind it"),
        (("RUN", "nowhere"), "nowhere: no such folder; name a run's"),
        (("RUN", "RUN", "--steps", "3"), "--against and --steps go with a config"),
        (("CONFIG", "RUN", "--against", "uncached"), "give a config alone, or two run folders"),
        (("RUN", "demo"), "is no folder of a run: it lacks logs/steps.jsonl"),
    ],
)
def test_bad_use_of_two_runs_ends_with_2(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], given: tuple[str, ...], message: str
) -> None:
    named = {"RUN": runs[0], "CONFIG": CONFIG, "demo": ROOT / "demo"}
    code, out, err = run(capsys, "compare", *(named.get(part, part) for part in given))
    assert (code, out) == (2, "")
    assert message in err
