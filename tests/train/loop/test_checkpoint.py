"""Checkpoints: what is in them, which of them stay, and every crash on the way leaves the one before in force."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from forebay.config import TrainConfig
from forebay.errors import ForebayError, ResumeError
from forebay.train.loop import checkpoint as module
from forebay.train.loop import learner
from forebay.train.loop.checkpoint import TrainState, find_checkpoint, load_optimizer, load_state
from forebay.train.loop.learner import Checkpoints
from forebay.train.models.model_folder import load_model, model_facts, processor_files
from tests.train.tiny import config_of, whisper_folder


class TinyModel:
    """Stands for a transformers model: one weight and a config.json."""

    def __init__(self, value: float) -> None:
        self.value = value

    def save_pretrained(self, folder: Path) -> None:
        save_file({"weight": torch.tensor([self.value])}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}", encoding="utf-8")


def state_of(step: int) -> TrainState:
    loader = {"epoch": 1, "position": 7 * step}
    return TrainState(step=step, loss_first=5.5, loss_last=1.0 / 3.0, loader=loader, settings={"seed": 3})


def save(folder: Path, step: int, *, run: Checkpoints | None = None) -> Path:
    """Saves a checkpoint whose weight and optimizer state are its step; of a new run, unless one is given."""
    optimizer = {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    source = folder.parent / "model"
    source.mkdir(parents=True, exist_ok=True)
    files = {path.name: path for path in source.iterdir()}
    run = run or Checkpoints(folder, TrainConfig())
    return run.save(state_of(step), model=TinyModel(step), optimizer=optimizer, processor=files)


def step_in_force(folder: Path) -> int:
    """Returns the step of the last checkpoint, after checking that all its parts are of that step."""
    checkpoint = find_checkpoint(folder)
    assert checkpoint is not None
    step = load_state(checkpoint).step
    assert load_file(checkpoint / "model.safetensors")["weight"].item() == step
    assert load_optimizer(checkpoint)["state"][0]["step"].item() == step
    return step


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_saved_state_comes_back_and_the_newest_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    run = Checkpoints(folder, TrainConfig(save_total_limit=2))
    assert find_checkpoint(folder) is None
    for step in (5, 10, 15):
        checkpoint = save(folder, step, run=run)
        assert find_checkpoint(folder) == checkpoint
        assert dataclasses.replace(load_state(checkpoint), files={}, kept=[]) == state_of(step)
        assert step_in_force(folder) == step
    assert load_state(checkpoint).kept == ["checkpoint-00000010", "checkpoint-00000015"]
    assert names_in(folder) == ["checkpoint-00000010", "checkpoint-00000015", "last.json"]


def test_new_run_in_an_old_folder_takes_over(tmp_path: Path) -> None:
    """Also where it reaches the step of the old checkpoint, or stays before it."""
    folder = tmp_path / "runs"
    save(folder, 10)
    assert save(folder, 10).name == "checkpoint-00000010-2"
    assert save(folder, 10).name == "checkpoint-00000010"
    save(folder, 5)
    assert step_in_force(folder) == 5
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-00000005", "last.json"]


def test_folders_of_the_user_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    kept = save(folder, 1).rename(folder / "best")
    save(folder, 2)
    assert load_state(kept).step == 1


def test_checkpoint_is_a_model_folder_with_its_processor(tmp_path: Path) -> None:
    source = whisper_folder(tmp_path / "model")
    for name in ("tokenizer.json", "preprocessor_config.json", "chat_template.jinja", "merges.txt"):
        (source / name).write_text(name, encoding="utf-8")
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json", "notes.md"):
        (source / name).write_text("left out", encoding="utf-8")
    model = load_model(whisper_folder(tmp_path / "config"), seed=4, init="random")
    files = processor_files(config_of(tmp_path, model=source), model_facts(source))
    run = Checkpoints(tmp_path / "runs", TrainConfig())
    checkpoint = run.save(state_of(1), model=model, optimizer={}, processor=files)
    assert (checkpoint / "chat_template.jinja").read_text(encoding="utf-8") == "chat_template.jinja"
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "optimizer.pt",
        "preprocessor_config.json",
        "state.json",
        "tokenizer.json",
    ]
    again = dict(load_model(checkpoint, seed=0).named_parameters())
    assert all(torch.equal(parameter, again[name]) for name, parameter in model.named_parameters())


DEAD_PID = 2**22 + 1
"""Above the largest number that Linux gives a process."""


class Killed(BaseException):
    """The process ends here: nothing after it runs, not even what tidies up."""


@contextlib.contextmanager
def dying_at(monkeypatch: pytest.MonkeyPatch, call: int) -> Iterator[list[str]]:
    """Makes call number `call` of those that make something durable the last thing that this process does.

    Yields the names of the calls so far, that one included.
    """
    done: list[str] = []

    def dying(name: str) -> Any:
        real = getattr(os, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            if len(done) == call + 1:
                raise Killed(name)
            return real(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as dead:
        for name in ("fsync", "rename", "replace"):
            dead.setattr(os, name, dying(name))
        dead.setattr(os, "getpid", lambda: DEAD_PID)  # what it leaves behind is that of a process that is gone
        dead.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        dead.setattr(Path, "unlink", lambda *args, **kwargs: None)
        yield done


@pytest.mark.parametrize("call", range(12))
def test_death_at_any_step_leaves_one_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Dies at the n-th system call that makes something durable, and does not tidy up."""
    folder = tmp_path / "runs"
    save(folder, 1)
    with dying_at(monkeypatch, call) as done:
        try:
            save(folder, 2)
            died = False
        except Killed:
            died = True
    assert died == (len(done) == call + 1)
    assert step_in_force(folder) in ((1, 2) if died else (2,))
    save(folder, 3)
    assert step_in_force(folder) == 3
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-00000003"]


@pytest.mark.parametrize("name", ["torch.save", "shutil.copyfile", "os.fsync", "os.rename", "write_bytes"])
def test_full_disk_is_an_error_and_the_checkpoint_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "runs"
    save(folder, 1)
    (tmp_path / "model" / "tokenizer.json").write_text("{}", encoding="utf-8")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(f"{(learner if name == 'write_bytes' else module).__name__}.{name}", full)
        with pytest.raises(
            ForebayError, match=r"cannot write checkpoint .*00000002 of step 2: .*No space left.*--resume"
        ):
            save(folder, 2)
    assert step_in_force(folder) == 1
    assert not list(folder.glob("*.tmp-*"))
    save(folder, 3)
    assert step_in_force(folder) == 3


def test_last_json_that_names_nothing_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.rmtree(save(folder, 1))
    with pytest.raises(ResumeError, match=r"last\.json names checkpoint-00000001, which is not a checkpoint"):
        find_checkpoint(folder)
    last = (folder / "last.json").read_bytes()
    save(folder, 2)
    (folder / "last.json").write_bytes(last)
    with pytest.raises(ResumeError, match=r'write {"checkpoint": "checkpoint-00000002"} there to go on from it, or'):
        find_checkpoint(folder)
    (folder / "last.json").unlink()  # of checkpoints that were copied alone, or where the first one was the last act
    assert step_in_force(folder) == 2
    (folder / "last.json").write_text("{", encoding="utf-8")
    with pytest.raises(ResumeError, match=r"cannot read .*last\.json"):
        find_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has version 2, this forebay reads 1"),
        ({"step": "five"}, "step is 'five', wanted a int"),
        ({"loader": None}, "loader is None, wanted a dict"),
        ({"scaler": 3}, "scaler is 3, wanted a dict"),
    ],
)
def test_state_of_another_version_or_type_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    checkpoint = save(tmp_path / "runs", 5)
    document = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    (checkpoint / "state.json").write_text(json.dumps({**document, **change}), encoding="utf-8")
    with pytest.raises(ResumeError, match=message):
        load_state(checkpoint)


@given(
    content=st.one_of(
        st.binary(max_size=40), st.recursive(st.none() | st.integers(), st.lists).map(str).map(str.encode)
    )
)
def test_any_other_state_is_a_resume_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "state"
    folder.mkdir(exist_ok=True)
    (folder / "state.json").write_bytes(content)
    with pytest.raises(ResumeError, match="train without --resume"):
        load_state(folder)


def test_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="is not a checkpoint of forebay"):
        load_state(tmp_path)


@given(name=st.sampled_from(["model.safetensors", "optimizer.pt"]), data=st.data())
def test_flipped_or_missing_bytes_are_found(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "flipped" / "runs"
    path = (find_checkpoint(folder) or save(folder, 1)) / name
    whole = path.read_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    damage = data.draw(st.integers(1, 255) | st.none())
    tail = b"" if damage is None else bytes([whole[position] ^ damage]) + whole[position + 1 :]
    path.write_bytes(whole[:position] + tail)
    try:
        with pytest.raises(ResumeError, match=rf"{name} has checksum [0-9a-f]{{32}}, state.json says [0-9a-f]{{32}}"):
            load_state(path.parent)
    finally:
        path.write_bytes(whole)
    assert load_state(path.parent).step == 1


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    checkpoint = save(tmp_path / "runs", 1)
    (checkpoint / name).unlink()
    with pytest.raises(ResumeError, match=name):
        load_state(checkpoint)


class Planted:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


def test_planted_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "runs", 1)
    torch.save({"state": Planted(tmp_path / "mark")}, checkpoint / "optimizer.pt")
    with pytest.raises(ResumeError, match=r"cannot read .*optimizer\.pt"):
        load_optimizer(checkpoint)
    (checkpoint / "optimizer.pt").write_bytes(pickle.dumps(Planted(tmp_path / "mark"), protocol=2))
    with pytest.raises(ResumeError, match=r"cannot read .*optimizer\.pt"):
        load_optimizer(checkpoint)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_truncated_optimizer_is_refused(tmp_path: Path, share: float) -> None:
    path = save(tmp_path / "runs", 1) / "optimizer.pt"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(ResumeError, match=r"cannot read .*optimizer\.pt"):
        load_optimizer(path.parent)


def test_optimizer_that_is_no_dict_or_absent_is_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "runs", 1)
    torch.save([torch.zeros(1)], checkpoint / "optimizer.pt")
    with pytest.raises(ResumeError, match="holds a list, wanted a dict"):
        load_optimizer(checkpoint)
    (checkpoint / "optimizer.pt").unlink()
    with pytest.raises(ResumeError, match=r"cannot read .*optimizer\.pt"):
        load_optimizer(checkpoint)
