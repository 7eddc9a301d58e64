"""The board: a bar on a terminal and none elsewhere, log lines above it, trackers finished whatever happens."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils import logging as transformers_logging

from forebay.train.loop.after_step import Board
from forebay.train.loop.meter import StepLog
from tests.train.tiny import config_of

LINE = StepLog(step=3, loss=2.5, learning_rate=1e-3, samples_per_s=9.0, data_wait_share=0.0, padding=0.1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logged_to(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what makes a stream standard error, and the root logger's only target, as the command line does."""

    def use(stream: io.StringIO) -> io.StringIO:
        monkeypatch.setattr("sys.stderr", stream)
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
        logging.getLogger("forebay.train").setLevel(logging.INFO)  # conftest takes it back
        return stream

    return use


def show(tmp_path: Path, *, is_main: bool = True) -> None:
    accelerator = SimpleNamespace(is_main_process=is_main, trackers=[])
    with Board(config_of(tmp_path, model=tmp_path), accelerator, step=2, last=10) as board:
        board.step_done()
        has_bar = is_main and sys.stderr.isatty()
        assert transformers_logging.is_progress_bar_enabled() != has_bar  # a second bar would move the cursor
        board.show(LINE)
        board.step_done()


def test_a_terminal_has_a_bar_and_log_lines_stand_whole_above_it(tmp_path: Path, logged_to: Any) -> None:
    terminal = logged_to(Terminal())
    handlers = list(logging.getLogger().handlers)
    show(tmp_path)
    shown = terminal.getvalue()
    assert "tiny:  20%" in shown
    assert "2/10" in shown
    assert f"\rINFO forebay.train.loop.after_step: {LINE}\n" in shown
    assert logging.getLogger().handlers == handlers


def test_a_file_has_log_lines_alone(tmp_path: Path, logged_to: Any) -> None:
    file = logged_to(io.StringIO())
    show(tmp_path)
    assert file.getvalue() == f"INFO forebay.train.loop.after_step: {LINE}\n"


def test_other_ranks_show_nothing(tmp_path: Path, logged_to: Any) -> None:
    terminal = logged_to(Terminal())
    show(tmp_path, is_main=False)
    assert terminal.getvalue() == ""


def test_trackers_are_finished_and_the_bar_is_gone_after_an_error(tmp_path: Path, logged_to: Any) -> None:
    terminal = logged_to(Terminal())
    finished = []
    tracker = SimpleNamespace(finish=lambda: finished.append(True))
    accelerator = SimpleNamespace(is_main_process=True, trackers=[tracker])
    config = config_of(tmp_path, model=tmp_path)
    with pytest.raises(KeyboardInterrupt, match="stopped"), Board(config, accelerator, step=0, last=10):
        raise KeyboardInterrupt("stopped")
    assert finished == [True]
    assert terminal.getvalue().endswith("\r")
