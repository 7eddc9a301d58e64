"""`forebay calibrate` on the demo recordings, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay import load_config
from forebay.config import BucketConfig
from forebay.measure.step_runner import opened
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.make import plan_of
from forebay.preprocess import build
from tests.commands import run, run_json
from tests.processes import ROOT, torchrun
from tests.warm.worker import warm_python

SPEECH, VISION = ROOT / "configs" / "demo_speech.toml", ROOT / "configs" / "demo_vision.toml"
NAMES = ["b_0_3", "b_3_5", "b_5_7", "b_7_10", "b_10_15", "b_15_20", "b_20_30"]
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The caches of the demo recordings and photos, built once: 5 s of CPU."""
    root = tmp_path_factory.mktemp("caches")
    for path in (SPEECH, VISION):
        build(load_config(path, overrides=[f"run.cache_root={json.dumps(str(root))}"]))
    return root


@pytest.fixture
def calibrate(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setattr(sys, "executable", warm_python())

    def call(config: Path, *arguments: object) -> tuple[int, str, str]:
        out = tmp_path / "calibrated_bs.json"
        return run(capsys, "calibrate", config, "--cache-root", root, "--out", out, *arguments)

    return call


# 20 s of CPU: seven buckets, each with two probes and a trial, in one process that forks for them.
@pytest.mark.wide
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the way without a device")
def test_the_demo_is_calibrated_and_planned_and_kept(
    calibrate: Call, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code, out, err = calibrate(SPEECH, "--max-memory-gb", 1)
    assert code == 0, err
    [warning] = [record.getMessage() for record in caplog.records if "calibrate" in record.name]
    assert "no CUDA device here" in warning
    assert [line.partition(":")[0] for line in out.splitlines()[:7]] == NAMES
    assert 'for [plan], in the place of batch_seconds:\n  calibration = "calibrated_bs.json"' in out
    path = tmp_path / "calibrated_bs.json"
    entries = json.loads(path.read_bytes())
    assert list(entries) == NAMES
    for entry in entries.values():
        assert entry["peak_bytes"] <= 1e9
        assert entry["measured"] is False
        assert (entry["grad_acc"], entry["trials"], entry["world_size"]) == (1, 1, 1)
        assert sum(entry["memory"].values()) == pytest.approx(entry["peak_bytes"], rel=0.01)
        assert entry["cpu"]["peak_bytes"] > 0
    assert 40 < entries["b_20_30"]["batch_size"] <= entries["b_0_3"]["batch_size"] < 80
    config = load_config(SPEECH, overrides=[f"run.cache_root={json.dumps(str(root))}"])
    assert isinstance(config.plan, BucketConfig)
    settings = dataclasses.replace(config.plan, batch_seconds=None, calibration=str(path))
    planned = plan_of(dataclasses.replace(config, plan=settings), opened(config), keep=False).plan
    assert isinstance(planned, BucketPlan)
    assert planned.batch_sizes.tolist() == [entry["batch_size"] for entry in entries.values()]
    # Interrupted after the fourth, and going on: the kept ones are not made again, and grad_acc follows the target.
    kept = {name: {**entries[name], "step_s": 9.0} for name in NAMES[:4]}
    path.write_text(json.dumps(kept), encoding="utf-8")
    code, out, err = calibrate(SPEECH, "--max-memory-gb", 1, "--bucket", 0, "--bucket", "b_10_15")
    assert code == 0, err
    assert out.splitlines()[0].endswith("(kept, of the same settings)")
    assert "# still missing, and wanted by a plan: b_15_20, b_20_30" in out
    again = json.loads(path.read_bytes())
    assert list(again) == NAMES[:5]
    assert again["b_0_3"]["step_s"] == 9.0
    assert again["b_10_15"]["batch_size"] == entries["b_10_15"]["batch_size"]


@pytest.mark.wide
def test_packs_are_calibrated_in_tokens_and_patches(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the way without a device")
    asked = ("--cache-root", root, "--out", tmp_path / "packs.json", "--max-memory-gb", 0.1)
    document = run_json(capsys, "calibrate", VISION, *asked)
    entry = document["buckets"]["pack"]
    assert entry["seq_len"] % 128 == 0
    assert entry["max_patches"] % 4 == 0
    assert 3 * entry["seq_len"] < entry["max_patches"] < 4 * entry["seq_len"]
    assert document["settings"] == [f"seq_len = {entry['seq_len']}", f"max_patches = {entry['max_patches']}"]


@pytest.mark.wide
def test_grad_acc_makes_the_target_over_all_ranks(
    calibrate: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the way without a device")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = calibrate(SPEECH, "--max-memory-gb", 1, "--bucket", 6, "--target-samples", 1000)
    assert code == 0, err
    entry = json.loads((tmp_path / "calibrated_bs.json").read_bytes())["b_20_30"]
    assert entry["world_size"] == 2
    assert (entry["grad_acc"] - 1) * entry["batch_size"] * 2 < 1000 <= entry["grad_acc"] * entry["batch_size"] * 2
    assert entry["memory"]["ranks"] > 0


def test_a_bucket_that_does_not_fit_is_named_with_what_to_change(calibrate: Call) -> None:
    if torch.cuda.is_available():
        pytest.skip("the way without a device")
    code, out, err = calibrate(SPEECH, "--max-memory-gb", 0.05, "--bucket", "b_20_30")
    assert code == 1
    assert "b_20_30: does not fit at 8 samples" in out
    said = r"does not fit into 50 MB: b_20_30 at 8 samples \(takes about 1\d\d MB\); set train\.gradient_checkpointing"
    assert re.search(said, err)
    assert "[train.lora], a lower --min-bs" in err


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (SPEECH, ("--bucket", "b_0_4"), "--bucket b_0_4: the plan has no such bucket; the nearest: b_0_3"),
        (SPEECH, ("--bucket", "7"), "the plan has no such bucket; .*, or 0 to 6"),
        (SPEECH, ("--steps", "1"), "--steps is 1, wanted 2 or more"),
        (SPEECH, ("--max-memory-gb", "0"), "--max-memory-gb is 0, wanted more than 0"),
        (SPEECH, ("--start-bs", "4"), "--start-bs is 4 and --min-bs 8"),
    ],
)
def test_bad_input_ends_with_2(calibrate: Call, config: Path, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = calibrate(config, *arguments)
    assert (code, bool(re.search(message, err))) == (2, True), err


@pytest.mark.parametrize(
    ("pattern", "by", "message"),
    [
        (
            r'kind = "bucket"\nedges_s = .*',
            'kind = "window"',
            r'plan\.kind is "window", .*; set plan\.kind = "bucket" with ',
        ),
        (
            r"\n\[plan\](.|\n)*?\n(?=\n)",
            "",
            r"windows\.toml: no \[plan\] section; add one, for example: \[plan\] with batch_",
        ),
        (r"model = .*\ninit = .*", "", r"windows\.toml: train\.model is missing; name the folder of a model"),
    ],
)
def test_a_config_without_buckets_or_model_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pattern: str, by: str, message: str
) -> None:
    text, count = re.subn(pattern, by, SPEECH.read_text(encoding="utf-8").replace('"../', f'"{ROOT}/'))
    assert count == 1
    config = tmp_path / "windows.toml"
    config.write_text(text, encoding="utf-8")
    code, _, err = run(capsys, "calibrate", config, "--max-memory-gb", 1)
    assert (code, bool(re.search(message, err))) == (2, True), err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is the limit")
def test_without_a_device_the_limit_must_be_given(calibrate: Call) -> None:
    code, _, err = calibrate(SPEECH)
    assert code == 2
    assert "there is no CUDA device here whose memory could be the limit" in err
    assert "--max-memory-gb G" in err


def test_a_cache_that_is_not_there_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "calibrate", SPEECH, "--cache-root", tmp_path, "--max-memory-gb", 1)
    assert code == 3
    assert "run: forebay preprocess" in err


# 20 s of CPU: two ranks import torch and train.
@pytest.mark.wide
def test_two_ranks_verify_what_was_calibrated(root: Path, tmp_path: Path) -> None:
    table: dict[str, Any] = {name: {"batch_size": 2 + place, "grad_acc": 1} for place, name in enumerate(NAMES)}
    table = {name: table[name] for name in (NAMES[0], NAMES[6])}  # the others are not calibrated yet
    out = tmp_path / "sizes.json"
    out.write_text(json.dumps(table), encoding="utf-8")
    asked = ("--mode", "verify-all", "--steps", 2, "--bucket", 0, "--bucket", 6, "--out", out, "--cache-root", root)
    result = torchrun("forebay", "calibrate", SPEECH, *asked)
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("b_")]
    assert [row[:4] for row in rows] == [
        ["b_0_3", "0", "2", "2"],
        ["b_0_3", "1", "2", "2"],
        ["b_20_30", "0", "8", "2"],
        ["b_20_30", "1", "8", "2"],
    ]
    assert "all buckets train on 2 ranks, and the ranks agree" in result.stdout


def test_a_bucket_that_is_not_calibrated_is_not_verified(calibrate: Call, tmp_path: Path) -> None:
    (tmp_path / "calibrated_bs.json").write_text(json.dumps({"b_0_3": {"batch_size": 2, "grad_acc": 1}}))
    code, _, err = calibrate(SPEECH, "--mode", "verify-all", "--bucket", 6)
    assert code == 2
    assert "--bucket b_20_30: " in err
    assert "has no batch_size of it; run: forebay calibrate" in err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_device_batches_are_measured(calibrate: Call, tmp_path: Path) -> None:
    code, _, err = calibrate(SPEECH, "--max-memory-gb", 2, "--bucket", 0, "--bucket", 6)
    assert code == 0, err
    for entry in json.loads((tmp_path / "calibrated_bs.json").read_bytes()).values():
        assert entry["measured"] is True
        assert 1e9 < entry["peak_bytes"] <= 2e9
        assert 1 <= entry["trials"] <= 6
        assert entry["step_s"] > 0
