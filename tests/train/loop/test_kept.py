"""Which checkpoints of a run stay, and what last.json and best.json name, after crashes, resumes and new runs."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import EvalConfig, TrainConfig
from forebay.errors import ForebayError, ResumeError
from forebay.store.files import write_bytes
from forebay.train.evaluation.evaluate import EvalResult
from forebay.train.loop import learner as module
from forebay.train.loop.checkpoint import find_checkpoint, load_state
from forebay.train.loop.learner import Checkpoints
from tests.train.loop.test_checkpoint import Killed, dying_at, save

WERS = (0.9, 0.5, 0.7, 0.6, 0.4, 0.8)
"""Of steps 1 to 6: the best ones are of steps 1, 2 and 5."""


def new_run(folder: Path, limit: int = 2) -> Checkpoints:
    sets = (EvalConfig(name="dev", cache="/caches/dev"),)
    return Checkpoints(folder, TrainConfig(save_total_limit=limit, eval=sets, save_best="wer"))


def evaluate(run: Checkpoints, step: int, wer: float) -> bool:
    result = EvalResult(name="dev", step=step, loss=1.0, wer=wer, cer=None, num_samples=1, elapsed_s=0.1, text="none")
    return run.best.consider([result])


def train(run: Checkpoints, folder: Path, steps: Sequence[int], wers: Sequence[float] = WERS) -> None:
    """Evaluates and saves after every one of `steps`."""
    for step in steps:
        evaluate(run, step, wers[step - 1])
        save(folder, step, run=run)


def go_on(folder: Path, checkpoint: Path | None = None, limit: int = 2) -> tuple[Checkpoints, int]:
    """Returns a new process's checkpoints after a resume, and the step that it resumes from."""
    checkpoint = checkpoint or find_checkpoint(folder)
    assert checkpoint is not None
    state = load_state(checkpoint)
    run = new_run(folder, limit)
    run.go_on(checkpoint, state)
    return run, state.step


def contents(folder: Path) -> dict[str, Any]:
    """Returns names, last.json, best.json and what each state.json keeps: what two equal runs have alike."""
    states = {path.name: load_state(path) for path in sorted(folder.glob("checkpoint-*"))}
    named = {path.name: json.loads(path.read_bytes()) for path in folder.glob("*.json")}
    return {"named": named, "states": states, "names": sorted(path.name for path in folder.iterdir())}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "runs"
    train(new_run(folder), folder, range(1, 7))
    return folder


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    run = new_run(folder)
    expected = {1: [1], 2: [1, 2], 3: [2, 3], 4: [2, 3, 4], 5: [4, 5], 6: [5, 6]}
    for step, staying in expected.items():
        train(run, folder, [step])
        assert [load_state(path).step for path in sorted(folder.glob("checkpoint-*"))] == staying
        best = min(range(1, step + 1), key=lambda each: WERS[each - 1])
        assert json.loads((folder / "best.json").read_bytes()) == {
            "checkpoint": f"checkpoint-{best:08d}",
            "step": best,
            "name": "dev",
            "metric": "wer",
            "value": WERS[best - 1],
        }
        assert json.loads((folder / "last.json").read_bytes()) == {"checkpoint": f"checkpoint-{step:08d}"}


@pytest.mark.parametrize("limit", [1, 2, 3, 10])
@given(wers=st.lists(st.floats(0, 1), min_size=1, max_size=6), stops=st.sets(st.integers(1, 5)))
@pytest.mark.few("3")
def test_a_run_that_was_stopped_has_the_folder_of_one_that_was_not(
    tmp_path_factory: pytest.TempPathFactory, limit: int, wers: list[float], stops: set[int]
) -> None:
    undisturbed, stopped = (tmp_path_factory.mktemp("run") / "runs" for _ in range(2))
    steps = range(1, len(wers) + 1)
    train(new_run(undisturbed, limit), undisturbed, steps, wers)
    run = new_run(stopped, limit)
    for step in steps:
        train(run, stopped, [step], wers)
        if step in stops:
            run, at = go_on(stopped, limit=limit)
            assert at == step
    assert contents(stopped) == contents(undisturbed)


@pytest.mark.parametrize("call", range(20))
@pytest.mark.few("0", "3", "7", "11", "15", "19")
def test_death_in_a_save_and_resume_give_the_folder_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, call: int
) -> None:
    """Dies at the n-th system call that makes something durable, and does not tidy up; the save is the best one's."""
    folder = tmp_path / "runs"
    run = new_run(folder)
    train(run, folder, range(1, 5))
    with dying_at(monkeypatch, call) as done:
        try:
            train(run, folder, [5])
        except Killed:
            assert len(done) == call + 1
    run, step = go_on(folder)
    assert step in (4, 5)
    best = json.loads((folder / "best.json").read_bytes())["checkpoint"]
    assert load_state(folder / best).step == (5 if step == 5 else 2)
    train(run, folder, range(step + 1, 7))
    assert contents(folder) == contents(whole)


def test_what_is_later_than_the_resumed_checkpoint_is_forgotten(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "runs"
    train(new_run(folder, limit=10), folder, range(1, 7), wers=(0.9, 0.5, 0.3, 0.2, 0.1, 0.05))
    run, step = go_on(folder, folder / "checkpoint-00000002")
    assert step == 2
    assert json.loads((folder / "last.json").read_bytes()) == {"checkpoint": "checkpoint-00000002"}
    assert json.loads((folder / "best.json").read_bytes())["step"] == 2
    assert len(list(folder.glob("checkpoint-*"))) == 6  # nothing goes before something new is in force
    assert save(folder, 3, run=run).name == "checkpoint-00000003"
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-00000002", "checkpoint-00000003"]
    run, step = go_on(folder)
    train(run, folder, [4, 5, 6])
    assert contents(folder)["names"] == contents(whole)["names"]
    assert contents(folder)["named"] == contents(whole)["named"]


def test_a_best_checkpoint_that_is_gone_is_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "runs"
    train(new_run(folder), folder, range(1, 5))
    shutil.rmtree(folder / "checkpoint-00000002")
    with caplog.at_level(logging.WARNING):
        run, _ = go_on(folder)
    assert "the best checkpoint so far (checkpoint-00000002, wer 0.5000 on dev) is not in the run folder" in caplog.text
    assert not (folder / "best.json").exists()
    assert evaluate(run, 5, 0.99)


def test_a_new_run_in_an_old_folder_warns_and_takes_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "runs"
    train(new_run(folder), folder, range(1, 7))
    run = new_run(folder)
    with caplog.at_level(logging.WARNING):
        run.begin()
    assert "holds checkpoints of an earlier run (checkpoint-00000005, checkpoint-00000006)" in caplog.text
    assert "--resume" in caplog.text
    assert len(list(folder.glob("checkpoint-*"))) == 2
    save(folder, 1, run=run)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-00000001", "last.json"]
    train(run, folder, [2, 3])
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-00000002", "checkpoint-00000003"]


def test_a_checkpoint_of_another_folder_starts_a_line_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(new_run(tmp_path / "first"), tmp_path / "first", range(1, 4))
    train(new_run(tmp_path / "second"), tmp_path / "second", range(1, 4))
    checkpoint = find_checkpoint(tmp_path / "first")
    with caplog.at_level(logging.WARNING):
        run, step = go_on(tmp_path / "second", checkpoint)
    assert step == 3
    assert "of an earlier run (checkpoint-00000002, checkpoint-00000003)" in caplog.text
    assert save(tmp_path / "second", 4, run=run).name == "checkpoint-00000004"
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == ["checkpoint-00000004", "last.json"]
    assert len(list((tmp_path / "first").glob("checkpoint-*"))) == 2


def test_only_checkpoints_of_forebay_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    run = new_run(folder, limit=1)
    save(folder, 1, run=run)
    shutil.copytree(folder / "checkpoint-00000001", folder / "checkpoint-best")
    shutil.copytree(folder / "checkpoint-00000001", folder / "checkpoint-00000001.kept")
    shutil.copytree(folder / "checkpoint-00000001", tmp_path / "elsewhere")
    (folder / "checkpoint-00000009").symlink_to(tmp_path / "elsewhere")
    for name, state in (("checkpoint-500", None), ("checkpoint-00000500", None), ("checkpoint-00000501", "{}")):
        (folder / name).mkdir()
        (folder / name / "trainer_state.json").write_text("{}", encoding="utf-8")
        if state is not None:
            (folder / name / "state.json").write_text(state, encoding="utf-8")
    (folder / "checkpoint-00000502").write_text("a file", encoding="utf-8")
    before = {path.name for path in folder.iterdir()}
    save(folder, 2, run=run)
    after = {path.name for path in folder.iterdir()}
    assert (before - after, after - before) == ({"checkpoint-00000001"}, {"checkpoint-00000002"})
    assert (tmp_path / "elsewhere" / "state.json").is_file()
    assert save(folder, 500, run=run).name == "checkpoint-00000500-2"


@pytest.mark.parametrize("write", [1, 2])
def test_a_full_disk_at_last_json_or_best_json_is_an_error_and_resume_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, write: int
) -> None:
    folder = tmp_path / "runs"
    run, done = new_run(folder), 0
    train(run, folder, range(1, 5))
    real = write_bytes

    def full(path: Path, data: bytes) -> None:
        nonlocal done
        done += 1
        if done == write:
            raise OSError(28, "No space left on device", str(path))
        real(path, data)

    with monkeypatch.context() as disk:
        disk.setattr(f"{module.__name__}.write_bytes", full)
        with pytest.raises(ForebayError, match=r"of step 5: .*No space left.*make room.*--resume"):
            train(run, folder, [5])
    assert not list(folder.glob("*.tmp-*"))
    assert json.loads((folder / "best.json").read_bytes())["step"] == 2
    run, step = go_on(folder)
    assert step == (4 if write == 1 else 5)
    assert json.loads((folder / "best.json").read_bytes())["step"] == (2 if write == 1 else 5)
    train(run, folder, range(step + 1, 7))
    assert contents(folder) == contents(whole)


def test_states_of_before_have_no_best_and_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    path = save(folder, 4) / "state.json"
    document = json.loads(path.read_bytes())
    path.write_text(
        json.dumps({key: document[key] for key in document if key not in ("kept", "best", "base")}), encoding="utf-8"
    )
    run, step = go_on(folder)
    assert step == 4
    train(run, folder, [5])
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-00000004", "checkpoint-00000005"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"best": {"checkpoint": 3}}, r"best is {'checkpoint': 3}, wanted checkpoint, step, name, metric, value"),
        ({"best": []}, r"best is \[\], wanted"),
        ({"kept": None}, "kept is None, wanted a list"),
        ({"kept": [3]}, r"kept is \[3\], wanted names"),
        ({"base": []}, r"base is \[\], wanted a dict"),
    ],
)
def test_a_state_with_another_best_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = save(tmp_path / "runs", 5) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}), encoding="utf-8")
    with pytest.raises(ResumeError, match=message):
        load_state(path.parent)
