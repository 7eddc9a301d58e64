"""The command that looks for what is slow: `doctor`."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from forebay.cli.options import FAILED, add_config, command, load, on_disk, printed

_MOST_AGE_S = 8.0
"""What is counted of a process that did other things before."""


def add_doctor(commands: Any) -> None:
    """Adds `forebay doctor`."""
    parser = command(commands, "doctor", _doctor, "measure why the device waits for data here, and what to change")
    add_config(parser)
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="to measure in; default: 30")
    parser.add_argument("--step-s", type=float, metavar="X", help="seconds of a training step, instead of measuring it")
    parser.add_argument(
        "--apply", type=on_disk, metavar="FILE", help="write the config with the advice into a new file"
    )
    parser.add_argument("--with-rebuild", action="store_true", help="with --apply: also settings that need a new build")
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _doctor(options: argparse.Namespace) -> int:
    from forebay.doctor.command import DoctorOptions, doctor

    asked = DoctorOptions(
        seconds=options.seconds,
        step_s=options.step_s,
        apply=options.apply,
        with_rebuild=options.with_rebuild,
        progress=not options.no_progress,
        passed_s=_age_s(),
    )
    report = doctor(load(options), asked)
    code = printed(options, report)
    return FAILED if report.found.is_empty else code


def _age_s() -> float:
    """Returns the seconds since this process began: its imports are a part of what the user waits for."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return min(max(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s, 0.0), _MOST_AGE_S)
