"""The last line of a run that waited for its data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from forebay.config.tree import Config
from forebay.train.loader import FillTimes
from forebay.train.loop.meter import waiting_line
from forebay.train.loop.run import train
from tests.train.loaders import loader_of
from tests.train.tiny import ListLoader, config_of, real_loader, real_loader_model, whisper_batch, whisper_folder


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A config whose path is what the commands name."""
    found = config_of(tmp_path, model=whisper_folder(tmp_path / "model"), max_steps=2)
    return dataclasses.replace(found, path="my.toml")


def line(config: Config, *, share: float, is_uncached: bool = False, loader: Any = None) -> str | None:
    return waiting_line(config, real_loader() if loader is None else loader, share=share, is_uncached=is_uncached)


def with_times(**seconds: float) -> Any:
    loader = real_loader()
    loader._totals.times = FillTimes(**seconds)
    return loader


def test_a_run_that_hardly_waited_says_nothing(config: Config) -> None:
    assert line(config, share=0.05) is None
    assert line(config, share=float("nan")) is None


def test_a_run_without_a_cache_names_the_build(config: Config) -> None:
    found = line(config, share=0.382, is_uncached=True)
    assert found == "waited 38 % of the time for data: samples are made on the fly; run: forebay preprocess my.toml"


def test_a_run_with_a_cache_names_what_took_the_threads_their_time(config: Config) -> None:
    collate = line(config, share=0.2, loader=with_times(read_s=1.0, read_cpu_s=0.9, collate_s=3.0))
    assert collate is not None
    assert "collating took 75 % of the work" in collate
    assert collate.endswith("run: forebay doctor my.toml")
    read = line(config, share=0.2, loader=with_times(read_s=3.0, read_cpu_s=2.9, collate_s=1.0))
    assert read is not None
    assert "reading the cache took 75 % of the work" in read
    assert "cold disk" not in read
    cold = line(config, share=0.2, loader=with_times(read_s=3.0, read_cpu_s=0.1, collate_s=1.0))
    assert cold is not None
    assert "most of it waiting for a cold disk" in cold


def test_batches_in_the_step_s_own_thread_are_named(config: Config) -> None:
    source = real_loader()
    loader = loader_of(source.source, source.plan, num_threads=0)
    found = line(config, share=0.2, loader=loader)
    assert found is not None
    assert "loader.num_threads = 0 fills batches in the step's own thread" in found


def test_another_loader_has_no_reason_to_give(config: Config) -> None:
    found = line(config, share=0.2, loader=ListLoader([whisper_batch(0)]))
    assert found == "waited 20 % of the time for data; run: forebay doctor my.toml"


def test_a_loader_counts_what_filling_takes() -> None:
    loader = real_loader()
    assert loader.fill_times == FillTimes()
    for _ in loader:
        pass
    first = loader.fill_times
    assert min(first.read_s, first.collate_s) > 0
    assert 0 <= first.read_cpu_s <= first.read_s + first.collate_s
    for _ in loader:
        pass
    assert loader.fill_times.read_s > first.read_s


@pytest.mark.usefixtures("fresh_accelerate")
def test_the_line_is_the_last_one_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.train.loop.meter.WORTH_A_LINE", -1.0)
    model = real_loader_model(tmp_path / "model")
    config = config_of(tmp_path, model=model, model_type="qwen3_asr", max_steps=2)
    report = train(config, loader=real_loader(), source_kind="uncached")
    assert report.waiting is not None
    assert report.lines()[-1] == report.waiting
    assert "forebay preprocess" in report.waiting
    assert report.to_json()["waiting"] == report.waiting
