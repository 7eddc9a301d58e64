"""A cluster of one machine for tests: a fake `sbatch`, and a server that runs the commands of its jobs in this process.

The scripts are run by bash as they are; only the Python that they name is another one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest

from benchmarks.here_pool import HerePool
from forebay import cli

HERE = Path(__file__).parent


class Cluster:
    """Submitted jobs by number; `commands`: the arguments of every forebay that ran in a job.

    before: called with the arguments of each before it runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[list[str]] = []
        self.before: Callable[[list[str]], None] = lambda _: None

    def job(self, number: int) -> dict[str, Any]:
        """Returns options, state and script of a job."""
        document: dict[str, Any] = json.loads((self.folder / f"{number}.json").read_text())
        return document

    def states(self) -> list[str]:
        """Returns how the jobs ended, in the order of their submission."""
        return [self.job(int(path.stem))["state"] for path in sorted(self.folder.glob("*.json"))]


def executable(path: Path, script: Path) -> Path:
    """Makes a command that runs one of these files by this Python, without what that loads at its start."""
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{script}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Puts a fake `sbatch` on PATH and serves the commands of its jobs."""
    made = Cluster(folder / "slurm")
    made.folder.mkdir()
    bin_folder = folder / "bin of slurm"
    bin_folder.mkdir()
    executable(bin_folder / "sbatch", HERE / "fake_sbatch.py")
    python = executable(bin_folder / "python", HERE / "fake_python.py")
    address = str(folder / "server")
    with pytest.MonkeyPatch.context() as patch, Listener(address, "AF_UNIX") as listener:
        patch.setenv("PATH", str(bin_folder), prepend=os.pathsep)
        patch.setenv("FAKE_SLURM", str(made.folder))
        patch.setenv("FAKE_SERVER", address)
        patch.setattr(sys, "executable", str(python))
        patch.setattr("forebay.preprocess.pipeline.Pool", HerePool)
        thread = threading.Thread(target=_serve, args=(listener, made), daemon=True)
        thread.start()
        try:
            yield made
        finally:
            with Client(address, "AF_UNIX") as last:
                last.send(None)
            thread.join()


def _serve(listener: Listener, made: Cluster) -> None:
    while True:
        with listener.accept() as job:
            asked = job.recv()
            if asked is None:
                return
            arguments, environment = asked
            made.commands.append(arguments)
            made.before(arguments)
            job.send(_run(arguments, environment))


def _run(arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    assert arguments[:2] == ["-m", "forebay"]
    slurm_only = {name: value for name, value in environment.items() if name.startswith("SLURM_")}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for name, value in slurm_only.items():
            patch.setenv(name, value)
        code = cli.main(arguments[2:])
    return code, out.getvalue(), err.getvalue()
