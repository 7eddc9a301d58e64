"""`forebay doctor`: the arms one after the other, within a budget of seconds, then what they say."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config.plan import PackConfig
from forebay.config.tree import Config
from forebay.config.url import is_url
from forebay.doctor.advice import advice
from forebay.doctor.bench import Task
from forebay.doctor.child import Answer
from forebay.doctor.diagnosis import Measured
from forebay.doctor.figures import Steps, StepTime
from forebay.doctor.report import DoctorReport
from forebay.doctor.session import Session, session
from forebay.doctor.tune import apply, check_target, settings_of
from forebay.errors import ConfigError
from forebay.progress import Progress
from forebay.steps.recipe import plan_example
from forebay.visible import from_here

GRACE_S = 24.0
"""Beside `--seconds`, for imports, listing, models, and arms that hang; the rest of 30 s is the caller's own start."""
_FEW_ROWS = 256
"""Rows that are listed where listing all of them takes too long."""

_SHARES = {
    "find": 0.03,
    "listing": 0.1,
    "raw read": 0.05,
    "steps of a build": 0.15,
    "cache": 0.07,
    "plan": 0.05,
    "cached loader": 0.17,
    "uncached loader": 0.18,
    "step": 0.15,
    "uncached DataLoader": 0.1,
    "codecs": 0.05,
}
"""What each arm may measure, as a share of the seconds."""
_FIELDS = {
    "find": "opened",
    "listing": "listed",
    "raw read": "reads",
    "steps of a build": "made",
    "cache": "pieces",
    "plan": "plan",
    "cached loader": "cached",
    "uncached loader": "uncached",
    "uncached DataLoader": "workers",
    "codecs": "codecs",
    "step": "steps",
}
_OF_RAW = ("raw read", "steps of a build", "codecs", "uncached loader", "uncached DataLoader")
_OF_CACHE = ("cache", "plan", "cached loader", "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """What `forebay doctor` was asked for."""

    seconds: float = 30.0
    step_s: float | None = None
    """What a step takes; None: that of the config's model is measured."""
    apply: Path | None = None
    with_rebuild: bool = False
    """`apply` also has the settings that need a new build."""
    progress: bool = True
    passed_s: float = 0.0
    """Seconds that the command has taken already: they count."""
    prepare: str | None = None
    """`module:function` that the measuring process calls first: for benchmarks, which plant a bottleneck there."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds >= 1):
            raise ConfigError(f"--seconds is {self.seconds:g}, wanted 1 or more")
        if self.step_s is not None and not (math.isfinite(self.step_s) and self.step_s > 0):
            raise ConfigError(f"--step-s is {self.step_s:g}, wanted the seconds of a step, more than 0")


def doctor(config: Config, options: DoctorOptions | None = None) -> DoctorReport:
    """Returns what is slow about a config's data on this machine, and what to change.

    It ends within `seconds` and half a minute, whatever the data does: what hangs is killed and named. It writes into a
    temporary folder alone, and `apply`. Raises ConfigError for a config that cannot be measured.
    """
    options = options or DoctorOptions()
    check(config, options)
    began = time.monotonic() - options.passed_s
    root = tempfile.mkdtemp(prefix="forebay-doctor-")
    cores = len(os.sched_getaffinity(0))
    task = Task(config=config, root=root, parent=os.getpid(), cores=cores, prepare=options.prepare)
    try:
        with session(task, deadline_s=began + options.seconds + GRACE_S) as bench:
            found = _measured(bench, config, options, cores=cores)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    all_advice, applied = advice(found, config), None
    if options.apply is not None:
        settings = settings_of(all_advice, with_rebuild=options.with_rebuild)
        if settings:
            apply(config, options.apply, settings)
            applied = str(options.apply)
    return DoctorReport(
        config=config.path,
        seconds=time.monotonic() - began,
        found=found,
        advice=all_advice,
        applied=applied,
        wants_file=options.apply is not None,
    )


def check(config: Config, options: DoctorOptions) -> None:
    """Raises ConfigError for what cannot be measured, or written."""
    if config.plan is None:
        raise ConfigError(
            f"{config.path}: no [plan] section, so there are no batches to measure; add one, for example: "
            f"{plan_example(config)}",
            code="FB104",
        )
    if options.apply is not None:
        check_target(config, options.apply)


def _measured(bench: Session, config: Config, options: DoctorOptions, *, cores: int) -> Measured:
    found: dict[str, Any] = {} if options.step_s is None else {"steps": given_step(options.step_s)}
    missing: dict[str, str] = {}
    for arm in _arms(options):
        if arm == "step" and options.step_s is not None:
            continue
        if arm == "codecs" and not isinstance(config.plan, PackConfig):
            continue
        if (why := _pointless(arm, found, missing)) is not None:
            missing[arm] = why
            continue
        bench.pace_s = _pace_s(found, config, cores=cores)
        answer = bench.ask(arm, _SHARES[arm] * options.seconds)
        if arm == "listing" and answer.failed is not None:
            answer = _fewer(bench, answer, options)
        if answer.value is None:
            missing[arm] = answer.skipped or answer.failed or "it gave nothing"
        else:
            found[_FIELDS[arm]] = answer.value
        if arm == "listing":
            _require(found, missing, config)
    for arm in ("cached", "uncached", "workers"):
        if arm in found:
            names = {field: name for name, field in _FIELDS.items()}
            missing |= {f"{names[arm]} with {number}": why for number, why in found[arm].skipped.items()}
    return dataclasses.replace(_of(found, config, cores=cores, not_measured=missing), start_s=bench.start_s)


def _of(
    found: Mapping[str, Any], config: Config, *, cores: int, not_measured: Mapping[str, str] | None = None
) -> Measured:
    return Measured(
        cores=cores,
        prefetch=config.loader.prefetch,
        num_threads=config.loader.num_threads,
        num_workers=config.run.num_workers or 0,
        not_measured=not_measured or {},
        **found,
    )


def _pace_s(found: Mapping[str, Any], config: Config, *, cores: int) -> float:
    """Returns the seconds of a step for each of its samples; 0 where nobody knows them yet."""
    step = _of(found, config, cores=cores).step
    return 0.0 if step is None else step.ms / 1e3


def _arms(options: DoctorOptions) -> Iterator[str]:
    with Progress(len(_SHARES), desc="doctor", unit="arm", is_shown=options.progress) as progress:
        for arm in _SHARES:
            progress.say(arm)
            yield arm
            progress.update()


def _fewer(bench: Session, answer: Answer, options: DoctorOptions) -> Answer:
    """Returns the listing of the first rows, where that of all rows took too long; else why there is none."""
    if "did not end" not in (answer.failed or ""):
        return answer
    bench.limit(_FEW_ROWS)
    return bench.ask("listing", _SHARES["listing"] * options.seconds)


def _pointless(arm: str, found: dict[str, Any], missing: dict[str, str]) -> str | None:
    """Returns why an arm is not even tried."""
    if arm in _OF_RAW and "listing" in missing:
        return "there is no listing of the raw data"
    if arm in _OF_RAW and "raw read" in missing and "did not end" in missing["raw read"]:
        return "reading raw data hangs"
    is_sealed = "opened" in found and found["opened"].place is not None
    if arm in _OF_CACHE and not is_sealed and "made" not in found:
        return "there is no cache, and no sample of one could be made"
    if arm == "uncached DataLoader" and "uncached" not in found:
        return "the loader without a cache could not be measured"
    return None


def _require(found: Mapping[str, Any], missing: Mapping[str, str], config: Config) -> None:
    """Raises ConfigError where there is neither a cache nor raw data that this machine has."""
    is_sealed = "opened" in found and found["opened"].place is not None
    if is_sealed or "listing" not in missing:
        return
    if any(map(is_url, config.source.manifests)):
        raise ConfigError(
            f"{config.path}: source.manifest is a URL and no cache of it is sealed, so all that could be measured is "
            f"the download; build the cache first: forebay preprocess {from_here(config.path)}, or fetch the data: "
            "forebay fetch"
        )
    if config.mixture.source:
        raise ConfigError(f"{config.path}: {missing.get('find', missing['listing'])}")


def given_step(step_s: float) -> Steps:
    """Returns steps that take what the user says, whatever their batch; they need none of this machine's cores."""
    return Steps(device="given", times=(StepTime(bucket=0, samples=1, room=1, seconds=step_s, cpu_s=0.0, steps=0),))
