"""Phases of a start: one line as each ends, one line of all when the first step begins, seconds in the report."""

from __future__ import annotations

import logging

import pytest

from forebay.train.loop.meter import Phases, shown


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "forebay.train.loop.meter"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0004, "0.000 s"), (0.02, "0.02 s"), (0.4, "0.4 s"), (6.24, "6.2 s"), (9.96, "10 s"), (184.2, "184 s")],
)
def test_durations_have_the_digits_that_a_person_needs(seconds: float, text: str) -> None:
    assert shown(seconds) == text


def test_a_line_as_each_phase_ends_and_all_of_them_when_the_first_step_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="forebay")
    phases = Phases()
    with phases("model"):
        assert messages(caplog) == []
    assert messages(caplog) == [f"phase model: {shown(phases.seconds['model'])}"]
    seen: list[int] = []
    for item in phases.started(iter([1, 2, 3])):
        if not seen:
            assert list(phases.seconds) == ["model", "first batch"]
            assert messages(caplog)[-1] == f"{phases.line()}; the first step begins"
        seen.append(item)
    assert seen == [1, 2, 3]
    assert list(phases.seconds) == ["model", "first batch", "first step"]
    assert len(messages(caplog)) == 4


def test_every_rank_tells_its_phases(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="forebay")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    phases = Phases()
    list(phases.started(iter([1])))
    assert len(messages(caplog)) == 1
    assert messages(caplog)[0].startswith("rank 3: first batch")


def test_phases_of_one_name_add_up_and_one_that_fails_is_not_counted() -> None:
    phases = Phases()
    for _ in range(2):
        with phases("data"):
            pass
    with pytest.raises(ValueError, match="broken"), phases("model"):
        raise ValueError("broken")
    assert list(phases.seconds) == ["data"]
    assert list(phases.started(iter([]))) == []


def test_other_ranks_are_silent_until_the_line_of_all_phases(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="forebay")
    monkeypatch.setenv("RANK", "1")
    phases = Phases()
    with phases("model"):
        pass
    assert (list(phases.seconds), messages(caplog)) == (["model"], [])
