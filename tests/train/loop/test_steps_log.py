"""`logs/steps.jsonl`: a head with the settings, a line a log line, cut back where a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ForebayError
from forebay.train.loop.meter import FILE_NAME, StepLog, StepsLog, read_lines
from tests.train.tiny import config_of


def line(step: int) -> StepLog:
    return StepLog(
        step=step, loss=1.0 / step, learning_rate=1e-3, samples_per_s=7.5, data_wait_share=0.25, padding=0.125
    )


def written(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "logs" / FILE_NAME)


def test_a_new_run_begins_the_file_anew(tmp_path: Path) -> None:
    for seed in (3, 4):
        log = StepsLog(config_of(tmp_path, model=tmp_path, seed=seed), tmp_path, step=0)
        for step in (5, 10):
            log.add(line(step))
    head, *lines = written(tmp_path)
    assert (head["version"], head["name"], head["settings"]["loader"]["seed"]) == (1, "tiny", 4)
    assert [each["step"] for each in lines] == [5, 10]
    assert lines[0]["loss"] == 0.2


def test_a_resumed_run_keeps_what_leads_to_its_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path, model=tmp_path)
    log = StepsLog(config, tmp_path, step=0)
    for step in (5, 10, 15):
        log.add(line(step))
    with open(tmp_path / "logs" / FILE_NAME, "ab") as file:
        file.write(b'{"step": 20, "lo')  # a crash cut it short
    resumed = StepsLog(config, tmp_path, step=12)
    assert len(written(tmp_path)) == 4  # nothing is touched before the first line
    resumed.add(line(17))
    assert [each["step"] for each in written(tmp_path)[1:]] == [5, 10, 17]


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    log = StepsLog(config_of(tmp_path, model=tmp_path), tmp_path, step=0)
    with pytest.raises(ForebayError, match=r"cannot write the log lines to .*steps\.jsonl.*; make room"):
        log.add(line(5))
