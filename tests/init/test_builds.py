"""Every config that `forebay init` writes builds at once, and its cache has the samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay import cli, open_cache
from tests.commands import run_json
from tests.init import layouts
from tests.init.layouts import QWEN3_ASR, QWEN3_VL, WHISPER, clips


def built(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> Path:
    """The cache of what `forebay init ARGUMENTS` writes in a folder, built by the command that it prints."""
    with contextlib.chdir(folder):
        report = run_json(capsys, "init", *arguments)
        words = report["next"][0].split()
        assert words[:2] == ["forebay", "preprocess"]
        document = run_json(capsys, *words[1:], "--no-progress", "--workers", "1")
        assert document["failed"] == {}
        return folder / str(document["cache"])


SPEECH: list[Callable[[Path], Path]] = [layouts.webdataset, layouts.jsonl, layouts.ljspeech]


@pytest.mark.parametrize("layout", SPEECH, ids=lambda layout: layout.__name__)
def test_recordings_without_a_model(
    layout: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = layout(tmp_path / "prompts")
    cache = open_cache(built(tmp_path, capsys, data))
    assert cache.folder.name.startswith("prompts-train-")
    assert cache.samples["text"].to_pylist() == [clip.text for clip in clips()]
    assert set(cache[0]) >= {"input_features"}


def test_recordings_for_whisper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = layouts.webdataset(tmp_path / "prompts")
    cache = open_cache(built(tmp_path, capsys, data, "--model", WHISPER, "--weights", "random"))
    assert len(cache) == len(clips())
    assert (cache.constants["prompt"], cache.constants["n_mels"]) == ("whisper", 80)


def test_recordings_for_qwen3_asr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = layouts.jsonl(tmp_path / "prompts")
    cache = open_cache(built(tmp_path, capsys, data, "--model", QWEN3_ASR, "--yes"))
    assert len(cache) == len(clips())
    assert cache.constants["prompt"] == "qwen3_asr"


def test_photos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = layouts.photos(tmp_path / "zoo")
    cache = open_cache(built(tmp_path, capsys, data, "--model", QWEN3_VL, "--weights", "random"))
    assert len(cache) == 10
    assert cache.folder.name.startswith("zoo-train-")


def test_from_a_folder_to_a_training_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = layouts.photos(tmp_path / "zoo")
    with contextlib.chdir(tmp_path):
        commands = run_json(capsys, "init", data, "--model", QWEN3_VL, "--weights", "random")["next"]
        assert [command.split()[1] for command in commands] == ["preprocess", "inspect", "train"]
        assert commands[-1].endswith("zoo.toml --steps 30")
        for command in commands:
            assert cli.main(command.replace("--steps 30", "--steps 1").split()[1:]) == 0, capsys.readouterr().err
    assert (tmp_path / "runs" / "zoo").is_dir()
