"""Every config that `forebay init` writes builds at once, and its cache has the samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.here_pool import HerePool
from forebay import cli, load_config, open_cache
from forebay.train import make_loader
from tests.commands import run_json
from tests.init import layouts
from tests.init.layouts import QWEN3_ASR, QWEN3_VL, WHISPER, clips
from tests.preprocess.here_pool import build_here


def built(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> Path:
    """The cache of what `forebay init ARGUMENTS` writes in a folder, built as the command that it prints does."""
    with contextlib.chdir(folder):
        report = run_json(capsys, "init", *arguments)
        words = report["next"][0].split()
        assert words[:2] == ["forebay", "preprocess"]
        done = build_here(load_config(words[2], overrides=["run.num_workers=1"]))
    assert done.failed == {}
    return Path(done.cache)


Layout = Callable[[Path], Path]

SPEECH: list[Layout] = [
    layouts.webdataset,
    layouts.jsonl,
    layouts.ljspeech,
    layouts.table,
    layouts.beside,
    layouts.librispeech,
    layouts.named,
    layouts.save_to_disk,
    layouts.dataset_dict,
    layouts.parquet,
]
WITHOUT_LANGUAGE = (layouts.ljspeech, layouts.librispeech)
VISION: list[Layout] = [layouts.photos, layouts.photo_table, layouts.photo_parquet, layouts.photo_tars]


@pytest.mark.parametrize("layout", SPEECH, ids=lambda layout: layout.__name__)
def test_recordings_without_a_model(layout: Layout, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = layout(tmp_path / "prompts")
    cache = open_cache(built(tmp_path, capsys, data))
    assert cache.folder.name.startswith("prompts-train-")
    wanted = sorted((clip.text, clip.language) for clip in clips())
    found = cache.samples.select(["text", "language"]).to_pydict()
    assert sorted(found["text"]) == [text for text, _ in wanted]
    if layout not in WITHOUT_LANGUAGE:
        assert sorted(zip(*found.values(), strict=True)) == wanted
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


@pytest.mark.parametrize("layout", VISION, ids=lambda layout: layout.__name__)
def test_photos(layout: Layout, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = layout(tmp_path / "zoo")
    cache = open_cache(built(tmp_path, capsys, data, "--model", QWEN3_VL, "--weights", "random"))
    assert len(cache) == 10
    assert cache.folder.name.startswith("zoo-train-")


def test_common_voice_takes_the_train_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = layouts.common_voice(tmp_path / "cv-corpus")
    cache = open_cache(built(tmp_path, capsys, data))
    assert cache.samples["text"].to_pylist() == [clip.text for clip in clips()[2:]]
    assert cache.samples["language"].to_pylist() == [clip.language for clip in clips()[2:]]


def test_a_kept_column_that_is_uncommented_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = layouts.table(tmp_path / "prompts")
    with contextlib.chdir(tmp_path):
        run_json(capsys, "init", data)
        config = tmp_path / "prompts.toml"
        text = config.read_text()
        assert '# keep_columns = ["speaker"]\n' in text
        config.write_text(text.replace("# keep_columns", "keep_columns"))
        cache = open_cache(build_here(load_config(config)).cache)
    assert cache.samples["speaker"].to_pylist() == [f"s{number % 3}" for number in range(len(clips()))]


def test_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = layouts.texts(tmp_path / "prompts")
    cache = open_cache(built(tmp_path, capsys, data, "--model", WHISPER, "--weights", "random"))
    assert cache.samples["text"].to_pylist() == [clip.text for clip in clips()]


def test_recordings_and_texts_are_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speech, texts = layouts.webdataset(tmp_path / "prompts"), layouts.texts(tmp_path / "books")
    with contextlib.chdir(tmp_path):
        report = run_json(capsys, "init", speech, texts, "--model", WHISPER, "--weights", "random", "--out", "my.toml")
        assert report["configs"] == ["my.toml", "my-webdataset.toml", "my-text.toml"]
        assert [words.split()[1:3] for words in report["next"]] == [
            ["preprocess", "my-webdataset.toml"],
            ["preprocess", "my-text.toml"],
            ["inspect", "my-webdataset.toml"],
            ["train", "my.toml"],
        ]
        for name in report["configs"][1:]:
            build_here(load_config(name))
        loader = make_loader(load_config("my.toml", overrides=["loader.cache=require"]))
        fields = {frozenset(batch) for batch in loader}
    assert {"input_features" in names for names in fields} == {True, False}


@pytest.mark.usefixtures("fresh_accelerate")
def test_from_a_folder_to_a_training_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.preprocess.pipeline.Pool", HerePool)
    data = layouts.photos(tmp_path / "zoo")
    with contextlib.chdir(tmp_path):
        commands = run_json(capsys, "init", data, "--model", QWEN3_VL, "--weights", "random")["next"]
        assert [command.split()[1] for command in commands] == ["preprocess", "inspect", "train"]
        assert commands[-1].endswith("zoo.toml --steps 30")
        for command in commands:
            assert cli.main(command.replace("--steps 30", "--steps 1").split()[1:]) == 0, capsys.readouterr().err
    assert (tmp_path / "runs" / "zoo").is_dir()
