"""The process of an arm: turns over its pipe, and how its end is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import ConfigError, ForebayError
from forebay.measure.child_process import Child


@pytest.fixture
def children(tmp_path: Path) -> Iterator[list[Child]]:
    made: list[Child] = []
    yield made
    for child in made:
        child.kill()


def started(children: list[Child], work: str, task: object, *, log: Path) -> Child:
    child = Child(
        "the arm uncached", f"tests.measure.compare.works:{work}", log=log, advice="leave it out of --against"
    )
    children.append(child)
    assert child.receive() is None
    child.send(task)
    return child


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_does_what_it_is_told_turn_by_turn(tmp_path: Path, children: list[Child]) -> None:
    child = started(children, "doubled", 4, log=tmp_path / "logs" / "arm.log")
    assert child.receive() == 8
    for number in (1, 5):
        child.send(number)
        assert child.receive() == 2 * number
    child.send(None)
    with pytest.raises(ForebayError, match=r"the arm uncached died \(exit status 0\)"):
        child.receive()


def test_an_error_of_forebay_is_raised_as_it_is_with_the_arm_s_name(tmp_path: Path, children: list[Child]) -> None:
    child = started(children, "refusing", "hf", log=tmp_path / "arm.log")
    with pytest.raises(ConfigError, match="hf is not possible") as caught:
        child.receive()
    assert caught.value.__notes__ == [f"in the arm uncached, whose log is {tmp_path / 'arm.log'}"]


def test_a_child_that_dies_is_named_with_its_last_lines(tmp_path: Path, children: list[Child]) -> None:
    log = tmp_path / "arm.log"
    child = started(children, "failing", "a batch", log=log)
    with pytest.raises(ForebayError, match=r"the arm uncached died \(exit status 1\)") as caught:
        child.receive()
    message = str(caught.value)
    assert "RuntimeError: CUDA out of memory for a batch" in message
    assert str(log) in message
    assert "line 3\n" not in message  # it has the last lines alone
    assert "line 0\n" in log.read_text()


def test_a_child_that_says_nothing_is_named_with_its_status(tmp_path: Path, children: list[Child]) -> None:
    child = started(children, "killed", None, log=tmp_path / "arm.log")
    with pytest.raises(ForebayError, match=r"\(exit status 7\)(.|\n)*it printed nothing"):
        child.receive()
    child.send(1)  # to one that has died: no error, `receive` tells


def test_killing_ends_what_the_child_has_started_too(tmp_path: Path, children: list[Child]) -> None:
    child = started(children, "endless", None, log=tmp_path / "arm.log")
    pids = child.receive()
    assert all(map(is_alive, pids))
    child.kill()
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
