"""`forebay train --profile`: a short look at where a run's time goes, which leaves the run as it is."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.train.loop.checkpoint import find_checkpoint, run_folder
from forebay.train.loop.meter import StepLog
from forebay.train.loop.phases import Phases
from forebay.train.loop.run import run
from forebay.train.profile.recorder import Recorder
from forebay.train.profile.report import TRACE, ProfileReport
from forebay.train.profile.shares import shares_of
from forebay.train.profile.trace import read_trace

FOLDER = "profile"
"""Under the run's folder."""

_NEVER = 10**9
"""Steps: more than any run has, so nothing of a run's end happens."""


def profile(
    config: Config,
    *,
    num_steps: int = 20,
    resume: bool = False,
    log: Callable[[StepLog], None] | None = None,
    phases: Phases | None = None,
) -> ProfileReport | None:
    """Returns where the time of `num_steps` steps went, None on ranks other than 0; `<run>/profile/` has it then, too.

    The steps are those that `train` would do, from the first one or, with `resume`, from the last checkpoint, after a
    warm-up step that is not recorded. Then the run ends: without a checkpoint, a usage log or a tracker. An evaluation
    that is due on the way is part of the profile. Its line, and log lines, go to files under `<run>/profile/`, too.
    Raises ConfigError for less than one step, and what `run` raises.
    """
    if num_steps < 1:
        raise ConfigError(f"--profile is {num_steps}, wanted 1 step or more")
    folder = run_folder(config)
    recorder = Recorder(num_steps=num_steps)
    report = run(
        _short(config, folder),
        resume=(find_checkpoint(folder) or False) if resume else False,
        log=log,
        phases=phases,
        recorder=recorder,
    )
    if report is None:
        return None
    trace = folder / FOLDER / TRACE
    recorder.write(trace)
    with open(trace, encoding="utf-8") as file:
        shares = shares_of(read_trace(json.load(file)["traceEvents"]))
    made = ProfileReport(
        shares=shares,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
        folder=str(trace.parent),
    )
    made.write()
    return made


def _short(config: Config, folder: Path) -> Config:
    """Returns a config whose run writes nothing but under `<run>/profile/`, and has no end before the profile's."""
    settings = dataclasses.replace(
        config.train,
        max_steps=_NEVER,
        epochs=None,
        checkpoint_every=0,
        usage_every=0,
        save_best=None,
        trackers=(),
        output_dir=str(folder / FOLDER),
    )
    return dataclasses.replace(config, train=settings)
