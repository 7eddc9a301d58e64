"""Ctrl-C while a command waits for a store that accepted the request and never answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.objects.server import environment
from forebay import cli
from tests.faults.row import Row, dice, nothing
from tests.processes import ROOT
from tests.remote.fake_store import Answer, Asked, fake_store, listing

_COMMANDS = (
    ("inspect", "s3://bucket/cache"),
    ("cache", "ls", "s3://bucket/caches"),
    ("fetch", "s3://bucket/data", "--output", "out"),
    ("cache", "pull", "s3://bucket/cache", "out"),
)


def interrupted(place: Path, number: int, folder: Path) -> str:
    chance = dice("interrupt", number)
    command = _COMMANDS[number % len(_COMMANDS)]
    is_listed = chance.random() < 0.5 and "ls" not in command  # a list without a cache ends `cache ls`
    hangs, let_go = threading.Event(), threading.Event()

    def answers(asked: Asked) -> Answer:
        if is_listed and "list-type" in asked.query:
            return listing(3)(asked)
        hangs.set()
        let_go.wait()
        return Answer(status=404)

    profiles = folder / "profiles"
    profiles.mkdir()
    with fake_store(answers) as store:
        variables = environment(store.endpoint, profiles=profiles) | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-m", "forebay", *command],
            cwd=folder,
            env=variables | {"HOME": str(folder)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            assert hangs.wait(60), process.communicate()[1]
            for _ in range(3):  # an impatient user
                os.kill(process.pid, signal.SIGINT)
                time.sleep(0.1)
            said = process.communicate(timeout=20)[1]  # the store is silent for good, and timeout_s is 60
        finally:
            process.kill()
            let_go.set()
    assert process.returncode == cli.INTERRUPTED, said
    assert said == b"forebay: interrupted; what was finished is kept, run the command again to go on\n", said.decode()
    return f"{' '.join(command[:2])} ended"


ROW: Row[Path] = Row(
    name="interrupt",
    fault="Ctrl-C while a store does not answer",
    outcome="one is enough: the command says so and ends, whatever request hangs",
    prepared=nothing,
    trial=interrupted,
    short=4,
    long=60,
)


def test_one_interrupt_ends_a_command_that_waits_for_a_store(tmp_path: Path) -> None:
    assert sum(ROW.check(tmp_path).values()) == ROW.short
