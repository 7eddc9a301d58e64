"""The command that looks for what is slow: `doctor`."""

from __future__ import annotations

import argparse
from typing import Any

from forebay.cli.options import add_config, command, load, on_disk, printed


def add_doctor(commands: Any) -> None:
    """Adds `forebay doctor`."""
    parser = command(commands, "doctor", _doctor, "measure why the device waits for data here, and what to change")
    add_config(parser)
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="to measure in; default: 30")
    parser.add_argument("--step-s", type=float, metavar="X", help="what a training step takes, instead of measuring it")
    parser.add_argument("--apply", type=on_disk, metavar="FILE", help="write the config with the advice into a new file")
    parser.add_argument(
        "--with-rebuild", action="store_true", help="with --apply: also settings that need a new build"
    )
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _doctor(options: argparse.Namespace) -> int:
    from forebay.doctor.command import DoctorOptions, doctor

    asked = DoctorOptions(
        seconds=options.seconds,
        step_s=options.step_s,
        apply=options.apply,
        with_rebuild=options.with_rebuild,
        progress=not options.no_progress,
    )
    return printed(options, doctor(load(options), asked))
