"""`forebay train --profile`: the demo's profile has every part, adds up, and leaves the run's folder as it was."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay import cli
from forebay.errors import ConfigError
from forebay.measure.profile import Beside, ProfileReport, Shares, profile, read_trace, shares_of
from forebay.spans import span
from forebay.train.loop.meter import StepLog
from forebay.train.loop.recorder import Recorder, named_parts
from forebay.train.loop.run import train
from forebay.train.models.model_folder import load_model
from tests.commands import run
from tests.processes import ROOT
from tests.train.tiny import ListLoader, config_of, real_loader_model, whisper_batch, whisper_folder

CONFIG = ROOT / "configs" / "demo_speech.toml"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    # A clip a batch: the demo's own batches take seconds each.
    evaluated = f'{{name="dev",config="{CONFIG}",every=3,max_samples=1,generate_max_tokens=2}}'
    settings = ["plan.batch_seconds=1", "train.max_steps=2", "train.log_every=1", f"train.eval=[{evaluated}]"]
    settings.append(f"train.output_dir={tmp_path}/runs")
    return [str(CONFIG), f"--cache-root={tmp_path}/caches", *(f"--set={setting}" for setting in settings)]


@pytest.mark.usefixtures("fresh_accelerate")
def test_the_demo_s_profile_adds_up_and_shows_what_ran_beside(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Takes 8 s of CPU: Whisper pads the clip of each of the six steps to 30 s."""
    code, out, err = run(capsys, "train", *arguments, "--profile", 5, "--json")
    assert code == 0, err
    document = json.loads(out)
    folder = tmp_path / "runs" / "prompts" / "profile"
    assert document == json.loads((folder / "profile.json").read_bytes())
    assert (document["num_steps"], document["num_ranks"], document["folder"]) == (5, 1, str(folder))
    main = document["main"]
    assert math.fsum(part["seconds"] for part in main.values()) == pytest.approx(document["wall_s"], rel=1e-9)
    assert math.fsum(part["share"] for part in main.values()) == pytest.approx(1, rel=1e-9)
    parts = {"copy to device", "forward: encoder", "forward: decoder", "forward: rest", "backward", "optimizer"}
    assert parts | {"idle: waiting for data", "bookkeeping", "log", "evaluation", "unclaimed"} == set(main)
    # Uncached, so that a sample is decoded and its features are made, in the loader's threads.
    assert set(document["threads"]) == {"read", "raw read", "decode", "features", "tokens", "collate"}
    assert 1 <= document["num_threads"] <= 4  # two of the run's loader, two of the evaluation's
    assert "encoder.layers.self_attn" in document["modules"]
    assert (folder / "profile.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((folder / "trace.json").read_bytes())["traceEvents"]
    assert sum(event["name"].startswith("ProfilerStep#") for event in events) == 5
    # Nothing else: no checkpoint, no usage log. And 6 steps although the run has 2, the first one not recorded.
    assert sorted(os.listdir(folder.parent)) == ["profile"]
    assert sorted(os.listdir(folder)) == ["profile.json", "profile.png", "prompts", "trace.json"]
    assert sorted(os.listdir(folder / "prompts")) == ["eval", "eval.jsonl", "logs"]
    assert os.listdir(folder / "prompts" / "logs") == ["steps.jsonl"]
    assert [f"step {step}:" in caplog.text for step in (1, 6, 7)] == [True, True, False]


@pytest.fixture
def tiny(tmp_path: Path) -> Any:
    return config_of(tmp_path, model=whisper_folder(tmp_path / "model"), log_every=1, max_steps=9, learning_rate=1e-3)


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_recorded_run_has_the_losses_of_one_that_is_not(tiny: Any) -> None:
    batches = [whisper_batch(seed) for seed in range(2)]
    losses: list[list[float]] = []
    for recorder in (None, Recorder(num_steps=3)):
        lines: list[StepLog] = []
        train(tiny, loader=ListLoader(batches), source_kind="cache", log=lines.append, recorder=recorder)
        losses.append([line.loss for line in lines])
    assert losses[1] == losses[0][:4]
    with span("nobody listens") as nothing:
        assert nothing is None


@pytest.mark.usefixtures("fresh_accelerate")
def test_activations_that_are_made_again_have_a_row(tiny: Any, tmp_path: Path) -> None:
    config = dataclasses.replace(tiny, train=dataclasses.replace(tiny.train, gradient_checkpointing=True))
    recorder = Recorder(num_steps=2)
    train(config, loader=ListLoader([whisper_batch(0)]), source_kind="cache", recorder=recorder)
    recorder.write(tmp_path / "trace.json")
    shares = shares_of(read_trace(json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]))
    assert shares.num_steps == 2
    assert shares.main["backward: recompute"] > 0
    assert math.fsum(shares.main.values()) == pytest.approx(shares.wall_s, rel=1e-9)
    assert "encoder.layers.self_attn" in shares.modules


@pytest.mark.usefixtures("fresh_accelerate")
def test_hooks_and_listener_are_gone_after_an_error(tiny: Any) -> None:
    recorder = Recorder(num_steps=2)
    model = load_model(Path(tiny.train.model), seed=0, init="random")
    assert recorder.watch(model) == 3
    assert any(module._forward_hooks for module in model.modules())
    with pytest.raises(KeyboardInterrupt, match="stopped"), recorder:
        raise KeyboardInterrupt("stopped")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with span("nobody listens") as nothing:
        assert nothing is None


def test_layers_that_are_alike_are_one_part(tmp_path: Path) -> None:
    model = load_model(whisper_folder(tmp_path / "model"), seed=0, init="random")
    names = [name for _, name in named_parts(model)]
    assert names.count("encoder") == names.count("decoder") == 1
    assert names.count("encoder.layers") == names.count("decoder.layers.encoder_attn") == 2  # two layers each
    assert not any("attn.q_proj" in name for name in names)
    qwen = load_model(real_loader_model(tmp_path / "qwen"), seed=0, init="random")
    assert {name.partition(".")[0] for _, name in named_parts(qwen)} == {"encoder", "decoder"}


def test_a_compiled_model_keeps_its_graph(tmp_path: Path) -> None:
    model = load_model(whisper_folder(tmp_path / "model"), seed=0, init="random")
    model.compile(backend="eager")
    assert Recorder(num_steps=4).watch(model) == 5
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("steps", [0, -3])
def test_less_than_one_step_is_refused(tiny: Any, steps: int) -> None:
    with pytest.raises(ConfigError, match=f"--profile is {steps}, wanted 1 step or more"):
        profile(tiny, num_steps=steps)


def test_a_dry_run_has_no_profile(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "train", *arguments, "--dry-run", "--profile", 5)
    assert code == cli.BAD_CONFIG
    assert "--profile does not go with --dry-run" in err


REPORT = ProfileReport(
    shares=Shares(
        num_steps=5,
        wall_s=1.0,
        main={"backward": 0.6, "idle: waiting for data": 0.37, "unclaimed": 0.03},
        modules={"encoder": 0.1},
        threads={"collate": Beside(seconds=0.5, beside=0.25)},
        num_threads=2,
        device={"backward": 0.7, "idle": 0.3},
        hidden={"copy to device": 0.05},
    ),
    device="NVIDIA H200",
    num_ranks=8,
    folder="runs/x/profile",
)


def test_the_tables_read_well() -> None:
    assert list(REPORT.lines()) == [
        "5 steps of 200.0 ms on NVIDIA H200, rank 0 of 8",
        "main thread                    share  ms a step",
        "  backward                    60.0 %     120.00",
        "  idle: waiting for data      37.0 %      74.00",
        "  unclaimed                    3.0 %       6.00",
        "2 other threads               beside  ms a step",
        "  collate                     25.0 %     100.00",
        "device                         share  ms a step",
        "  backward                    70.0 %     140.00",
        "  idle                        30.0 %      60.00",
        "device, under its kernels      share  ms a step",
        "  copy to device               5.0 %      10.00",
        "written to runs/x/profile: profile.json, trace.json (ui.perfetto.dev), profile.png",
    ]


def test_without_matplotlib_the_picture_is_left_out_and_a_line_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="forebay")
    for name in ("matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    dataclasses.replace(REPORT, folder=str(tmp_path)).write()
    assert os.listdir(tmp_path) == ["profile.json"]
    assert "pip install 'forebay[report]'" in caplog.text
