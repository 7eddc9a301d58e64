"""The progress of long work: a bar on a terminal, else plain lines. A build counts clips or images, or else texts."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import terminal
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import build
from forebay.preprocess.pool import Pool
from forebay.preprocess.shard_task import BuildProgress
from forebay.task_map import mark
from forebay.terminal import Progress, duration, during
from forebay.visible import visible_output
from tests.text_corpus import demo_texts, text_config


class Terminal(io.StringIO):
    """Standard error where a person looks on."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(terminal, "QUIET_S", 0.01)
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    return stream


def in_log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.01)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    return stream


def wait_for(stream: io.StringIO, text: str) -> None:
    deadline_s = time.monotonic() + 60
    while text not in stream.getvalue():
        assert time.monotonic() < deadline_s, f"{text!r} never came: {stream.getvalue()!r}"
        time.sleep(0.005)


CLIPS: Any = SimpleNamespace(counted="audio", unit="clip", text=SimpleNamespace(unit="text"))
"""Groups of recordings and texts, as far as a bar asks them."""


def task(group: str, rows: int) -> Any:
    name, value = ("text", "a text") if group == "text" else ("duration_s", 1800.0)
    return SimpleNamespace(group=group, rows=pa.table({name: [value] * rows}))


def test_a_terminal_has_a_bar_with_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with Progress(40, desc="verify", unit="file", done=10) as bar:
        bar.update(10)
        bar.say("3 left out")
        wait_for(terminal, "20/40")
    shown = terminal.getvalue()
    assert re.search(r"verify:  50%.*20/40 \[00:00<00:00, +[\d.]+file/s, 3 left out\]", shown), shown
    assert shown.endswith("\n")


def test_a_bar_shows_that_time_goes_by_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with during("plan"):
        wait_for(terminal, "plan: 00:00")
    assert "it/s" not in terminal.getvalue(), "a rate of nothing"


def test_work_that_is_done_at_once_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with Progress(3, desc="export") as bar:
        bar.update(3)
    assert not stream.getvalue()


def test_a_log_file_has_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    log = in_log(monkeypatch)
    with Progress(13_100, desc="text", unit="text") as bar:
        bar.update(1_200)
        bar.say("2 left out")
        wait_for(log, "2 left out")
    lines = log.getvalue().splitlines()
    whole = re.compile(r"text: 1,200/13,100 texts, [\d,.e+]+ texts/s, \d+ (s|min) left(, 2 left out)?")
    assert all(whole.fullmatch(line) or line.startswith("text: 0/") for line in lines), lines
    assert "\r" not in log.getvalue()


def test_a_plain_line_comes_also_while_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    log = in_log(monkeypatch)
    with during("plan"):
        wait_for(log, "plan: for 0 s\n")
    assert set(log.getvalue().splitlines()) == {"plan: for 0 s"}


def test_what_was_done_before_says_nothing_of_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    log = in_log(monkeypatch)
    with Progress(2_000_000, desc="fetch", unit="B") as bar:
        bar.update(1_000_000, is_kept=True)
        wait_for(log, "fetch: 1 MB/2 MB, for 0 s")
        bar.rename("fetch: 1/2 files")
        bar.update(500_000)
        wait_for(log, "fetch: 1/2 files: 1.5 MB/2 MB, ")
    assert "/s, " in log.getvalue().splitlines()[-1]


@pytest.mark.parametrize("how", [{"is_shown": False}, {"needs_terminal": True}, {"total": 0}])
def test_a_log_file_stays_empty_where_nothing_is_to_be_shown(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = in_log(monkeypatch)
    with Progress(how.get("total", 5), desc="hash", **{k: v for k, v in how.items() if k != "total"}) as bar:
        bar.update(2)
        assert bar.done == 2
        assert not [thread for thread in threading.enumerate() if thread.name == "progress of hash"]
    assert not log.getvalue()


def test_over_counts_what_was_worked_on_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    log = in_log(monkeypatch)
    bar = Progress(3, desc="hash", unit="file")
    assert list(bar.over("abc")) == ["a", "b", "c"]
    assert bar.done == 3
    with pytest.raises(RuntimeError, match="stop"):
        fails(Progress(3, desc="hash"))
    assert not [thread for thread in threading.enumerate() if thread.name == "progress of hash"]
    assert "Traceback" not in log.getvalue()


def fails(bar: Progress) -> None:
    with bar:
        raise RuntimeError("stop")


def test_a_log_that_is_closed_stops_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    log = in_log(monkeypatch)
    with Progress(3, desc="hash") as bar:
        wait_for(log, "hash: 0/3")
        log.close()
        time.sleep(0.05)
        bar.update()
    assert bar.done == 1


def test_threads_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with Progress(4_000, desc="hash") as bar:
        threads = [threading.Thread(target=many_times, args=(bar.update,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_for(terminal, "4000/4000")
    assert bar.done == 4_000


@pytest.mark.usefixtures("bars")
@pytest.mark.parametrize("shows", [True, False])
def test_a_look_at_all_sources_says_how_far_it_is(*, shows: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with Pool(1, shows=shows) as pool:
        assert pool.map(len, ["a", "bc"]) == [1, 2]
    assert ("sources: 2/2 files" in capsys.readouterr().err) == shows


def many_times(update: Any) -> None:
    for _ in range(1_000):
        update()


@given(st.floats(0, 1e9))
def test_a_duration_has_two_digits_or_so(seconds: float) -> None:
    number, unit = duration(seconds).split(" ")
    per = {"s": 1, "min": 60, "h": 3600, "days": 86400}[unit]
    assert abs(float(number) * per - seconds) <= per * 0.51


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (12.3, "12 s"), (100, "2 min"), (3 * 3600, "3.0 h"), (3 * 86400, "3.0 days")],
)
def test_a_duration_is_said_as_a_person_says_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_beside_items_texts_show_by_their_failures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    receipt: Any = SimpleNamespace(failures=("one",))
    with visible_output(), BuildProgress({"audio": 5, "text": 6}, groups=CLIPS, shown=True) as bar:
        bar.shard_done(task("text", 6), receipt)
        bar.shard_done(task("audio", 4), receipt)
        wait_for(terminal, "4/5")
    shown = terminal.getvalue()
    assert "clip/s" in shown
    assert "2.00 h, 2 left out" in shown
    assert "x1b" not in shown  # tqdm moves the cursor where there are two bars, and commands escape that


def test_a_log_counts_the_rows_of_shards_that_are_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = in_log(monkeypatch)
    at_work = [(task("audio", 9), 3), (task("text", 9), 5), (None, 1)]
    with BuildProgress({"audio": 20, "text": 20}, groups=CLIPS, shown=True, at_work=lambda: at_work) as bar:
        wait_for(stream, "3/20 clips, ")
        bar.shard_done(task("audio", 9), SimpleNamespace(failures=()))  # type: ignore[arg-type]
        wait_for(stream, "12/20 clips, ")
    assert re.search(r"preprocess: 3/20 clips, [\d.,e+]+ clips/s, \d+ s left", stream.getvalue())


def test_a_worker_says_which_row_of_its_task_it_is_at() -> None:
    with Pool(1) as pool:
        seen = [pool.at_work() for _ in pool.run(marked, [4, 5])]
    assert [[each for each, _ in tasks] for tasks in seen] == [[5], []]
    assert all(position in (0, 5) for tasks in seen for _, position in tasks)


def marked(task: int) -> int:
    mark(task)
    return task


def test_where_only_texts_are_made_they_have_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with BuildProgress({"audio": 0, "text": 7}, groups=CLIPS, shown=True) as bar:
        bar.shard_done(task("text", 6), SimpleNamespace(failures=()))  # type: ignore[arg-type]
        wait_for(terminal, "6/7")
    assert "clip" not in terminal.getvalue()
    terminal.truncate(0)
    with BuildProgress({"audio": 4, "text": 6}, groups=CLIPS, shown=False) as bar:
        bar.shard_done(task("text", 6), SimpleNamespace(failures=()))  # type: ignore[arg-type]
    assert not terminal.getvalue()


def test_a_build_of_texts_alone_shows_its_bar(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process starts and loads a tokenizer: 2 s of CPU."""
    terminal = on_terminal(monkeypatch)
    build(text_config(tmp_path), Options(progress=True))
    assert f"{len(demo_texts())}/{len(demo_texts())}" in terminal.getvalue()
