"""The commands about training: `train`, `calibrate`, `compare`, `eval`, `warm-start`.

The command that looks for what is slow: `doctor`.

`forebay init`: from a folder of data to a config.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from forebay.cli.options import DONE, FAILED, Command, ConfigCommand, argument, command, model_folder, option
from forebay.errors import ConfigError


def _tell(asked: Command) -> None:
    """Makes what a run says of itself be printed."""
    for room in ("forebay.train", "forebay.measure"):
        logging.getLogger(room).setLevel(min(logging.INFO, asked.log_level))


@command("train")
class TrainCommand(ConfigCommand):
    """A reference loop for any model of transformers that takes the batch and returns a loss."""

    resume: bool = option("go on from the last checkpoint under train.output_dir")
    dry_run: bool = option("plan and loader alone, without a model")
    steps: int | None = option(
        "optimizer steps, instead of train.max_steps or epochs; with --dry-run: micro-batches, 200 by default", "N"
    )
    profile: int | None = option("where the time of N steps goes; default: 20", "N", nargs="?", const=20)

    def run(self) -> int:
        _tell(self)
        if self.dry_run:
            return self._dry_run()
        config = self.loaded()
        if self.steps is not None:
            if self.steps < 1:
                raise ConfigError(f"--steps is {self.steps}, wanted 1 or more")
            config = replace(config, train=replace(config.train, max_steps=self.steps, epochs=None))
        from forebay.train.loop.meter import Phases

        phases = Phases()
        with phases("imports"):
            from forebay.measure.profile import profile
            from forebay.train.loop.run import run

        report: Any = (
            run(config, resume=self.resume, phases=phases)
            if self.profile is None
            else profile(config, num_steps=self.profile, resume=self.resume, phases=phases)
        )
        if report is None:
            return DONE  # not the rank that reports
        code = self.printed(report)
        return FAILED if getattr(report, "evaluations_failed", 0) and not report.evaluations else code

    def _dry_run(self) -> int:
        from forebay.train.loop.run import dry_run

        if self.profile is not None:
            raise ConfigError("--profile does not go with --dry-run: without a model there are no steps to look at")
        if self.resume:
            raise ConfigError("--resume does not go with --dry-run, which has no checkpoint to go on from")
        return self.printed(dry_run(self.loaded(), steps=200 if self.steps is None else self.steps))


@command("calibrate")
class CalibrateCommand(ConfigCommand):
    """Find the largest batch of every bucket, or the largest pack."""

    bucket: list[str] = option("only this bucket, by name or index: b_0_3 or 0", "B")
    start_bs: int | None = option("first batch that is tried; default: that of a line", "N")
    min_bs: int = option("smallest batch that counts; default: 8", "N", default=8)
    max_memory_gb: float | None = option("GB of 10^9 bytes; default: 91 %% of the CUDA device", "G")
    steps: int = option("optimizer steps of a trial; default: 5", "N", default=5)
    target_samples: int | None = option("samples of a step over all ranks: grad_acc", "N")
    out: Path | None = option("default: calibrated_bs.json beside the config", "FILE")
    mode: Literal["find", "verify-all"] = option("verify-all: under torchrun", default="find")

    def run(self) -> int:
        from forebay.measure.calibrate import calibrate, verify
        from forebay.measure.calibrate_bench import CalibrateOptions

        asked = self.into(CalibrateOptions, buckets=tuple(self.bucket))
        tell: Callable[[str], None] = partial(print, file=sys.stderr if self.json else sys.stdout, flush=True)
        if self.mode == "find":
            found = calibrate(self.loaded(), asked, tell=tell)
            return DONE if found is None else self.printed(found)  # None: not the rank that reports
        verified = verify(self.loaded(), asked, tell=tell)
        if verified is None:
            return DONE
        self.printed(verified)
        return FAILED if verified.problems else DONE


@command("compare")
class CompareCommand(ConfigCommand):
    """A config's way beside others on the same samples, or two runs."""

    other: str | None = argument("RUN", "with a run folder instead of CONFIG: the other run", nargs="?")
    against: str | None = option("uncached, unbucketed, hf, uncached+unbucketed; several with commas", "ARMS")
    steps: int | None = option("optimizer steps of the config's own way; default: 200", "N")
    out: Path | None = option("default: compare/ in the run's folder", "DIR")

    def run(self) -> int:
        from forebay.measure.compare import compare, compare_runs
        from forebay.measure.compared_ways import PARTS

        _tell(self)
        first = Path(self.config)
        if first.is_dir():
            if self.other is None:
                raise ConfigError(f"{first} is a folder; name another run's folder behind it, or a config file instead")
            if self.given("against", "steps"):
                raise ConfigError(
                    "--against and --steps go with a config; two runs are compared by what their folders tell"
                )
            found: Any = compare_runs(first, Path(self.other), out=self.out)
        else:
            config = self.loaded()
            if self.other is not None:
                raise ConfigError(
                    f"{config.path} is a config and {self.other} stands behind it; give a config alone, or two run "
                    "folders"
                )
            if self.against is None:
                parts = ", ".join(PARTS)
                raise ConfigError(f"compare CONFIG needs --against, one or more of {parts} separated by commas")
            found = compare(config, against=self.against, steps=self.steps, out=self.out)
        found.write()
        return self.printed(found)


@command("eval")
class EvalCommand(ConfigCommand):
    """WER, CER and loss of a checkpoint on the sets of [[train.eval]]."""

    checkpoint: Path | None = option("default: the run's best one, else its last one, else train.model", "DIR")

    def run(self) -> int:
        from forebay.train.evaluation.evaluations import evaluate_alone

        report = evaluate_alone(self.loaded(), checkpoint=self.checkpoint)
        if report is None:
            return DONE  # not the rank that reports
        code = self.printed(report)
        return code if report.outcomes else FAILED


@command("warm-start")
class WarmStartCommand(Command):
    """Put a model on a new tokenizer."""

    model: Path = argument(
        "MODEL", "folder of a transformers model with weights, or owner/name@COMMIT of the Hub", type=model_folder
    )
    tokenizer: Path = option(
        "folder with a tokenizer.json, or owner/name@COMMIT of the Hub", "DIR", required=True, type=model_folder
    )
    out: Path = option("folder to make", "DIR", required=True)
    seed: int = option("of the new rows; default: 0", "N", default=0)

    def run(self) -> int:
        from forebay.train.warm_start import warm_start

        return self.printed(warm_start(self.model, tokenizer=self.tokenizer, out=self.out, seed=self.seed))


@command("doctor")
class DoctorCommand(ConfigCommand):
    """Measure why the device waits for data here, and what to change."""

    seconds: float = option("to measure in; default: 30", "S", default=30.0)
    step_s: float | None = option("seconds of a training step, instead of measuring it", "X")
    apply: Path | None = option("write the config with the advice into a new file", "FILE")
    with_rebuild: bool = option("with --apply: also settings that need a new build")
    no_progress: bool = option("no bars")

    def run(self) -> int:
        from forebay.measure.doctor import DoctorOptions, doctor

        report = doctor(self.loaded(), self.into(DoctorOptions, passed_s=_age_s()))
        code = self.printed(report)
        return FAILED if report.found.is_empty else code


def _age_s() -> float:
    """Returns the seconds since this process began: its imports are a part of what the user waits for."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    return min(max(age_s, 0.0), 8.0)  # no more is counted of a process that did other things before


_ROLES = ("audio", "text", "language", "id", "image", "question", "answer", "messages", "label", "features")
_ANSWERS = "answers to what may be asked"


def _column(text: str) -> tuple[str, str]:
    role, equals, name = text.partition("=")
    if not equals or not name or role not in _ROLES:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROLE=NAME with ROLE one of {', '.join(_ROLES)}")
    return role, name


@command("init")
class InitCommand(Command):
    """Look at data and write a config that builds."""

    data: list[str] = argument(
        "DATA", "folders of recordings or images, tables, save_to_disk sets, tars, texts", nargs="+", completes=True
    )
    model: str | None = option(
        "the model to train, a folder or owner/name@COMMIT of the Hub: it says features and prompt",
        "DIR",
        completes=True,
    )
    out: Path | None = option("the config to write; default: NAME.toml here", "FILE")
    yes: bool = option("ask nothing: take the likelier reading, and say so")
    force: bool = option("replace a config that is there already")
    kind: str | None = option("how the data is read: table, folder, webdataset, hf, ...", "KIND", group=_ANSWERS)
    column: list[tuple[str, str]] = option(
        f"which column holds what: {', '.join(_ROLES)}", "ROLE=NAME", group=_ANSWERS, type=_column
    )
    prompt: Literal["chat", "label", "plain", "none"] | None = option(
        "what is read beside images: conversations, classes, texts, nothing", group=_ANSWERS
    )
    split: str | None = option("which split of a data set is read", "NAME", group=_ANSWERS)
    audio_dir: str | None = option(
        "folder that the names in a table are relative to, where that is not found",
        "DIR",
        flags=("--audio-dir", "--image-dir"),
        group=_ANSWERS,
    )
    languages_from_folders: Literal["true", "false"] | None = option(
        "whether folders are named after languages", group=_ANSWERS
    )
    weights: Literal["random", "pretrained"] | None = option(
        "what training begins with, where DIR holds no weights", group=_ANSWERS
    )

    def run(self) -> int:
        from forebay.init.questions import Chooser, ask_on_terminal, has_terminal
        from forebay.init.write_config import InitOptions, init

        ask = ask_on_terminal if has_terminal() else None
        chooser = Chooser(given=self._answers(), takes_first=self.yes, ask=ask)
        out = None if self.out is None else self.out.absolute()
        report = init(self.into(InitOptions, data=tuple(self.data), out=out), chooser)
        for said in report.decided:
            print(said, file=sys.stderr)
        return self.printed(report)

    def _answers(self) -> dict[str, str]:
        """Returns the answers of the command line, as a `Chooser` takes them."""
        columns = {f"column {role}": name for role, name in self.column}
        if len(columns) < len(self.column):
            raise ConfigError(f"--column names {self.column[-1][0]} twice; name it once")
        names = ("kind", "prompt", "split", "audio_dir", "languages_from_folders", "weights")
        return {flag[2:]: getattr(self, name) for name in names for flag in self.given(name)} | columns
