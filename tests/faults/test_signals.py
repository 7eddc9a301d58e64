"""SIGTERM and Ctrl-C at any call that changes a file, of the command as it runs on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from forebay import cli
from forebay.preprocess import pool
from tests.faults.building import NUM_WORKERS, Site, check_caches, check_settled, finished_shards, forked_workers, site
from tests.faults.row import Row, dice
from tests.faults.shim import Fault, Shim

_ESCAPES = (b"\x1b[?25l", b"\x1b[?1049h")
"""What hides the cursor, and what turns to another screen."""


def interrupted(place: Site, number: int, folder: Path) -> str:
    chance = dice("signal", number)
    root = folder / "caches"
    fault = Fault(at=chance.randrange(place.num_calls["builder"]), what=chance.choice(["SIGTERM", "SIGINT"]))
    ended = place.children.run(_on_a_terminal, place.config, root, fault)
    assert ended.error is None, ended.error
    status, text, is_intact = ended.value
    assert is_intact
    assert not any(escape in text for escape in _ESCAPES)
    assert status == (-15 if fault.what == "SIGTERM" else cli.INTERRUPTED), text
    assert fault.what == "SIGTERM" or b"interrupted; what was finished is kept" in text
    check_caches(root, place.wanted)
    finished = finished_shards(root)
    again = place.build(root)
    assert again.error is None, again.error
    assert again.value["already_sealed"] or again.value["shards_kept"] == finished
    check_settled(root, place.wanted)
    return f"{fault.what}: ended, went on"


def _on_a_terminal(config: Path, root: Path, fault: Fault) -> tuple[int, bytes, bool]:
    """Returns exit status, what was written, and whether the terminal is set as before. No process is left then."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = os.fork()
    if not process:
        os.setpgid(0, 0)
        os._exit(_command(theirs, config, root, fault))
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    is_intact = termios.tcgetattr(theirs) == before
    os.set_blocking(ours, False)
    text = b""
    with contextlib.suppress(BlockingIOError):  # nothing was written
        text = os.read(ours, 1 << 16)
    return status, text, is_intact


def _command(terminal: int, config: Path, root: Path, fault: Fault) -> int:
    os.dup2(terminal, 2)
    sys.stdout = sys.stderr
    arguments = ["preprocess", str(config), "--cache-root", str(root), "--workers", str(NUM_WORKERS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool.Pool, "_start", forked_workers(Shim(patch, fault)))
        code = cli.main(arguments)
    sys.stderr.flush()
    return code


ROW: Row[Any] = Row(
    name="signal",
    fault="SIGTERM, Ctrl-C",
    outcome="finished shards kept, prompt exit, no orphans, nothing stale after the next run, terminal intact",
    prepared=site,
    trial=interrupted,
    short=6,
    long=100,
)


def test_an_interrupted_command_ends_and_goes_on(tmp_path: Path) -> None:
    assert sum(ROW.check(tmp_path).values()) == ROW.short
