"""Two run folders beside each other: what their files tell, and which folders are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ConfigError
from forebay.measure.compare import compare_runs

Line = dict[str, Any]


def run_folder(folder: Path, losses: dict[int, float], *, evaluations: list[Line] | None = None, **train: Any) -> Path:
    head = {"version": 1, "name": "toy", "config": "toy.toml", "settings": {"name": "toy", "train": train}}
    lines = [
        {"step": step, "loss": loss, "samples_per_s": 10.0 * step, "data_wait_share": 0.01, "padding": 0.2}
        for step, loss in losses.items()
    ]
    (folder / "logs").mkdir(parents=True)
    (folder / "logs/steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    if evaluations is not None:
        (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    return folder


def evaluation(step: int, wer: float | None, *, loss: float = 1.0) -> Line:
    return {"name": "dev", "step": step, "wer": wer, "cer": None, "loss": loss}


def test_losses_are_compared_at_equal_steps_and_settings_by_name(tmp_path: Path) -> None:
    first = run_folder(tmp_path / "a", {5: 3.0, 10: 2.0, 15: 1.5}, learning_rate=1e-4, lora=None)
    other = run_folder(tmp_path / "b", {10: 2.25, 15: 1.5, 20: 1.0}, learning_rate=2e-4, lora={"rank": 8})
    found = compare_runs(first, other)
    document = found.to_json()
    assert document["loss_difference"] == {"equal_steps": 2, "step": 10, "difference": 0.25}
    assert document["settings"] == {"train.learning_rate": [1e-4, 2e-4], "train.lora.rank": [None, 8]}
    final = document["final"][1]
    assert (final["steps"], final["loss_first"], final["loss_last"], final["samples_per_s"]) == (20, 2.25, 1.0, 150.0)
    printed = "\n".join(found.lines())
    assert "| loss, last line | 1.5000 | 1.0000 |" in printed
    assert "| samples/s, median of lines | 100.0 | 150.0 |" in printed
    assert "at 2 equal steps is 0.25, at step 10." in printed
    assert "| train.learning_rate | 0.0001 | 0.0002 |" in printed
    assert "skipped steps | - | - |" in printed


def test_evaluations_are_told_last_and_best(tmp_path: Path) -> None:
    lines = [evaluation(5, 0.5), evaluation(10, 0.25), evaluation(15, 0.3)]
    first = run_folder(tmp_path / "a", {5: 3.0}, evaluations=lines)
    other = run_folder(tmp_path / "b", {5: 3.0}, evaluations=[evaluation(5, None, loss=0.5)])
    printed = "\n".join(compare_runs(first, other).lines())
    assert "| dev WER, last (best) | 30.00 % (25.00 %) | - |" in printed
    assert "| dev loss, last (best) | 1.000 (1.000) | 0.500 (0.500) |" in printed
    assert "dev CER" not in printed
    assert "Their settings are the same." in printed
    assert "is 0, at step 5." in printed


def test_runs_without_an_equal_step_say_so(tmp_path: Path) -> None:
    found = compare_runs(run_folder(tmp_path / "a", {5: 3.0}), run_folder(tmp_path / "b", {6: 3.0}))
    assert found.to_json()["loss_difference"] == {"equal_steps": 0, "step": None, "difference": None}
    assert "No log line of one run stands at a step of the other's: set train.log_every alike." in "\n".join(
        found.lines()
    )


def test_out_gets_the_table_and_the_document(tmp_path: Path) -> None:
    found = compare_runs(
        run_folder(tmp_path / "a", {5: 3.0}), run_folder(tmp_path / "b", {5: 3.5}), out=tmp_path / "out"
    )
    found.write()
    assert json.loads((tmp_path / "out/compare.json").read_text()) == found.to_json()
    assert "| loss, last line | 3.0000 | 3.5000 |" in (tmp_path / "out/compare.md").read_text()
    assert (tmp_path / "out/compare.png").read_bytes().startswith(b"\x89PNG")
    assert list(found.lines())[-1].endswith("compare.json, compare.md, compare.png")


def test_a_foreign_folder_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    good = run_folder(tmp_path / "a", {5: 3.0})
    with pytest.raises(ConfigError, match=r"nowhere: no such folder; name a run's"):
        compare_runs(good, tmp_path / "nowhere")
    (tmp_path / "photos/2026").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"it lacks logs/steps\.jsonl and holds '2026'; name a folder that forebay"):
        compare_runs(tmp_path / "photos", good)


@pytest.mark.parametrize("text", ["", '{"version": 2, "settings": {}}\n', "not JSON\n", '{"step": 5, "loss": 1}\n'])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    good, bad = run_folder(tmp_path / "a", {5: 3.0}), run_folder(tmp_path / "b", {5: 3.0})
    (bad / "logs/steps.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"steps\.jsonl begins with .*, wanted a head of version 1"):
        compare_runs(good, bad)


def test_a_run_that_has_only_begun_is_refused(tmp_path: Path) -> None:
    good, begun = run_folder(tmp_path / "a", {5: 3.0}), run_folder(tmp_path / "b", {})
    with pytest.raises(ConfigError, match=r"has no log line yet; wait for step train\.log_every"):
        compare_runs(good, begun)
