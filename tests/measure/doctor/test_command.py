"""`forebay doctor` as a whole: which arms are asked for, wrong use, and a run on the demo."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ConfigError
from forebay.measure import doctor as command
from forebay.measure.diagnosis import MeasuredArms
from forebay.measure.doctor import ARMS, Answer, DoctorOptions, doctor
from forebay.measure.predict import StepTime, StepTimes
from forebay.steps.recipe import load_config
from tests.commands import run
from tests.measure.doctor.figures import demo, measured, sealed


class Scripted:
    """A session whose arms tell what a test says; all else is that of `measured`."""

    def __init__(self, found: MeasuredArms, **answers: Answer | list[Answer]) -> None:
        self._found, self._answers = found, answers
        self.pace_s = self.start_s = 0.0
        self.asked: list[str] = []
        self.limits: list[int] = []

    def ask(self, arm: str, seconds: float) -> Answer:
        assert seconds > 0
        self.asked.append(arm)
        answer = self._answers.get(arm.replace(" ", "_"))
        if isinstance(answer, list):
            answer = answer.pop(0)
        value = getattr(self._found, ARMS[arm].field)
        return answer or (Answer(why="nothing is said of it") if value is None else Answer(value=value))

    def limit(self, rows: int) -> None:
        self.limits.append(rows)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what makes the doctor ask a scripted session."""

    def use(found: MeasuredArms, **answers: Answer | list[Answer]) -> Scripted:
        made = Scripted(found, **answers)

        @contextlib.contextmanager
        def session(*_: Any, **__: Any) -> Iterator[Scripted]:
            yield made

        monkeypatch.setattr(command, "DoctorSession", session)
        return made

    return use


QUIET = DoctorOptions(seconds=2, progress=False)
HUNG = Answer(why="it did not end in 6 s and was stopped")


def test_all_arms_are_asked_for_and_the_temporary_folder_is_gone(scripted: Any, tmp_path: Path) -> None:
    bench = scripted(measured())
    report = doctor(demo(), QUIET)
    assert bench.asked == [arm for arm in ARMS if arm != "codecs"]
    assert report.advice[0].line == "forebay preprocess configs/demo_speech.toml"
    assert sum(arm.share for arm in ARMS.values()) <= 1.11


def test_a_step_that_is_given_is_not_measured(scripted: Any) -> None:
    bench = scripted(measured())
    report = doctor(demo(), DoctorOptions(seconds=2, progress=False, step_s=0.5))
    assert "step" not in bench.asked
    given = StepTime(bucket=0, samples=1, room=1, seconds=0.5, cpu_s=0.0, steps=0)
    assert report.found.steps == StepTimes(device="given", times=(given,))


def test_the_first_rows_are_listed_where_all_take_too_long(scripted: Any) -> None:
    listed = Answer(value=measured().listed)
    bench = scripted(measured(), listing=[HUNG, listed])
    doctor(demo(), QUIET)
    assert bench.asked.count("listing") == 2
    assert bench.limits == [256]


def test_a_reader_that_hangs_is_asked_once(scripted: Any) -> None:
    bench = scripted(measured(), raw_read=HUNG)
    report = doctor(demo(), QUIET)
    assert not {"steps of a build", "uncached loader", "uncached DataLoader", "cache", "step"} & set(bench.asked)
    assert report.found.not_measured["steps of a build"] == "reading raw data hangs"
    assert "no sample of one could be made" in report.found.not_measured["step"]
    assert report.found.not_measured["raw read"] == HUNG.why


def test_a_sealed_cache_is_measured_whatever_the_raw_data_is(scripted: Any) -> None:
    bench = scripted(sealed(), listing=Answer(why="source.manifest is a URL"))
    report = doctor(demo('source.manifest="s3://bucket/train.parquet"'), QUIET)
    assert {"cache", "plan", "cached loader", "step"} <= set(bench.asked)
    assert report.found.not_measured["uncached loader"] == "there is no listing of the raw data"
    assert report.found.bottleneck is not None


def test_raw_data_in_a_store_needs_a_cache(scripted: Any) -> None:
    scripted(measured(), listing=Answer(why="source.manifest is a URL"))
    with pytest.raises(ConfigError, match=r"source\.manifest is a URL and no cache of it is sealed"):
        doctor(demo('source.manifest="s3://bucket/train.parquet"'), QUIET)


def test_wrong_use_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    config = load_config("configs/demo_speech.toml")

    with pytest.raises(ConfigError, match=r"no \[plan\] section"):
        doctor(dataclasses.replace(config, plan=None), QUIET)
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        doctor(config, DoctorOptions(apply=Path(config.path)))
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="--seconds is"):
            DoctorOptions(seconds=wrong)
    for wrong in (0.0, float("nan")):
        with pytest.raises(ConfigError, match="--step-s is"):
            DoctorOptions(step_s=wrong)


def test_what_is_recommended_is_written_beside_the_config(scripted: Any, tmp_path: Path) -> None:
    text = Path("configs/demo_speech.toml").read_text(encoding="utf-8")
    file = tmp_path / "mine.toml"
    text = text.replace('"../demo', f'"{Path("demo").absolute()}').replace("num_workers = 2", "num_workers = 1")
    file.write_text(text, encoding="utf-8")
    scripted(measured(num_workers=1))
    report = doctor(load_config(str(file)), DoctorOptions(seconds=2, progress=False, apply=tmp_path / "tuned.toml"))
    assert report.applied == str(tmp_path / "tuned.toml")
    cores = len(os.sched_getaffinity(0))
    if cores > 1:
        assert load_config(str(tmp_path / "tuned.toml")).run.num_workers == cores


def test_the_command_refuses_impossible_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "doctor", "configs/demo_speech.toml", "--seconds", "0")
    assert (code, "--seconds is 0" in err) == (2, True)


@pytest.mark.wide
def test_the_demo_is_examined_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Takes 10 s of CPU: the process that measures imports torch, and makes a sample of a cache."""
    root = f'run.cache_root="{tmp_path / "caches"}"'
    began = time.monotonic()
    arguments = ["--seconds", 3, "--step-s", 0.05, "--json", "--set", root, "--no-progress"]
    code, out, err = run(capsys, "doctor", "configs/demo_speech.toml", *arguments)
    assert code == 0, err
    assert time.monotonic() - began < 33 + 10  # of a machine that others use too
    document = json.loads(out)
    assert document["cached"] is False
    assert {"decode", "features"} <= {stage["name"] for stage in document["stages"]}
    assert document["advice"]
    assert not (tmp_path / "caches").exists()
