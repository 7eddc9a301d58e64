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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from forebay.cli.options import DONE, FAILED, add_config, command, completes, level, load, on_disk, printed
from forebay.config.tree import Config
from forebay.errors import ConfigError


def add_train(commands: Any) -> None:
    """Adds `forebay train`."""
    about = "a reference loop for any model of transformers that takes the batch and returns a loss"
    parser = command(commands, "train", _train, about)
    add_config(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint under train.output_dir")
    parser.add_argument("--dry-run", action="store_true", help="plan and loader alone, without a model")
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="optimizer steps, instead of train.max_steps or epochs; with --dry-run: micro-batches, 200 by default",
    )
    parser.add_argument(
        "--profile", type=int, nargs="?", const=20, metavar="N", help="where the time of N steps goes; default: 20"
    )


def _tell(options: argparse.Namespace) -> None:
    """Makes what a run says of itself be printed."""
    for room in ("forebay.train", "forebay.measure"):
        logging.getLogger(room).setLevel(min(logging.INFO, level(options)))


def _train(options: argparse.Namespace) -> int:
    _tell(options)
    if options.dry_run:
        return _dry_run(options)
    config = load(options)
    if options.steps is not None:
        config = _with_steps(config, options.steps)
    from forebay.train.loop.meter import Phases

    phases = Phases()
    with phases("imports"):
        from forebay.measure.profile import profile
        from forebay.train.loop.run import run

    report: Any = (
        run(config, resume=options.resume, phases=phases)
        if options.profile is None
        else profile(config, num_steps=options.profile, resume=options.resume, phases=phases)
    )
    if report is None:
        return DONE  # not the rank that reports
    code = printed(options, report)
    return FAILED if getattr(report, "evaluations_failed", 0) and not report.evaluations else code


def _with_steps(config: Config, steps: int) -> Config:
    if steps < 1:
        raise ConfigError(f"--steps is {steps}, wanted 1 or more")
    return replace(config, train=replace(config.train, max_steps=steps, epochs=None))


def _dry_run(options: argparse.Namespace) -> int:
    from forebay.train.loop.dry_run import dry_run

    if options.profile is not None:
        raise ConfigError("--profile does not go with --dry-run: without a model there are no steps to look at")
    if options.resume:
        raise ConfigError("--resume does not go with --dry-run, which has no checkpoint to go on from")
    return printed(options, dry_run(load(options), steps=200 if options.steps is None else options.steps))


def add_calibrate(commands: Any) -> None:
    """Adds `forebay calibrate`."""
    parser = command(commands, "calibrate", _calibrate, "find the largest batch of every bucket, or the largest pack")
    add_config(parser)
    parser.add_argument(
        "--bucket", action="append", default=[], metavar="B", help="only this bucket, by name or index: b_0_3 or 0"
    )
    parser.add_argument("--start-bs", type=int, metavar="N", help="first batch that is tried; default: that of a line")
    parser.add_argument("--min-bs", type=int, default=8, metavar="N", help="smallest batch that counts; default: 8")
    parser.add_argument(
        "--max-memory-gb", type=float, metavar="G", help="GB of 10^9 bytes; default: 91 %% of the CUDA device"
    )
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps of a trial; default: 5")
    parser.add_argument("--target-samples", type=int, metavar="N", help="samples of a step over all ranks: grad_acc")
    parser.add_argument("--out", type=on_disk, metavar="FILE", help="default: calibrated_bs.json beside the config")
    parser.add_argument("--mode", choices=("find", "verify-all"), default="find", help="verify-all: under torchrun")


def _calibrate(options: argparse.Namespace) -> int:
    from forebay.measure.calibrate import calibrate, verify
    from forebay.measure.calibrate_bench import CalibrateOptions

    names = ("start_bs", "min_bs", "max_memory_gb", "steps", "target_samples", "out")
    asked = CalibrateOptions(buckets=tuple(options.bucket), **{name: getattr(options, name) for name in names})
    out = sys.stderr if options.json else sys.stdout
    tell: Callable[[str], None] = partial(print, file=out, flush=True)
    if options.mode == "find":
        found = calibrate(load(options), asked, tell=tell)
        return DONE if found is None else printed(options, found)  # None: not the rank that reports
    verified = verify(load(options), asked, tell=tell)
    if verified is None:
        return DONE
    printed(options, verified)
    return FAILED if verified.problems else DONE


def add_compare(commands: Any) -> None:
    """Adds `forebay compare`."""
    parser = command(commands, "compare", _compare, "a config's way beside others on the same samples, or two runs")
    add_config(parser)
    parser.add_argument("other", metavar="RUN", nargs="?", help="with a run folder instead of CONFIG: the other run")
    parser.add_argument(
        "--against", metavar="ARMS", help="uncached, unbucketed, hf, uncached+unbucketed; several with commas"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps of the config's own way; default: 200")
    parser.add_argument("--out", metavar="DIR", type=on_disk, help="default: compare/ in the run's folder")


def _compare(options: argparse.Namespace) -> int:
    from forebay.measure.compare import CompareOptions, show

    _tell(options)
    asked = {name: getattr(options, name) for name in ("other", "against", "steps", "out")}
    first = Path(options.config)
    return printed(options, show(first if first.is_dir() else load(options), CompareOptions(**asked)))


def add_eval(commands: Any) -> None:
    """Adds `forebay eval`."""
    parser = command(commands, "eval", _eval, "WER, CER and loss of a checkpoint on the sets of [[train.eval]]")
    add_config(parser)
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=on_disk,
        help="default: the run's best one, else its last one, else train.model",
    )


def _eval(options: argparse.Namespace) -> int:
    from forebay.train.evaluation.alone import evaluate_alone

    report = evaluate_alone(load(options), checkpoint=options.checkpoint)
    if report is None:
        return DONE  # not the rank that reports
    code = printed(options, report)
    return code if report.outcomes else FAILED


def add_warm_start(commands: Any) -> None:
    """Adds `forebay warm-start`."""
    parser = command(commands, "warm-start", _warm_start, "put a model on a new tokenizer", has_caches=False)
    parser.add_argument("model", metavar="MODEL", type=on_disk, help="folder of a transformers model with weights")
    parser.add_argument("--tokenizer", metavar="DIR", type=on_disk, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--out", metavar="DIR", type=on_disk, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the new rows; default: 0")


def _warm_start(options: argparse.Namespace) -> int:
    from forebay.train.warm_start.new_vocabulary import warm_start

    return printed(options, warm_start(options.model, tokenizer=options.tokenizer, out=options.out, seed=options.seed))


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
    from forebay.measure.doctor import DoctorOptions, doctor

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


_ROLES = ("audio", "text", "language", "id", "image", "question", "answer", "messages", "label", "features")


def add_init(commands: Any) -> None:
    """Adds `forebay init`."""
    parser = command(commands, "init", _init, "look at data and write a config that builds", has_caches=False)
    data = parser.add_argument(
        "data",
        metavar="DATA",
        nargs="+",
        help="folders of recordings or images, tables, save_to_disk sets, tars, texts",
    )
    completes(data)
    model = parser.add_argument(
        "--model", metavar="DIR", help="folder of the model to train: it says features and prompt"
    )
    completes(model)
    parser.add_argument("--out", metavar="FILE", type=on_disk, help="the config to write; default: NAME.toml here")
    parser.add_argument("--yes", action="store_true", help="ask nothing: take the likelier reading, and say so")
    parser.add_argument("--force", action="store_true", help="replace a config that is there already")
    answers = parser.add_argument_group("answers to what may be asked")
    answers.add_argument("--kind", metavar="KIND", help="how the data is read: table, folder, webdataset, hf, ...")
    answers.add_argument(
        "--column",
        metavar="ROLE=NAME",
        action="append",
        default=[],
        type=_column,
        help=f"which column holds what: {', '.join(_ROLES)}",
    )
    answers.add_argument(
        "--prompt",
        choices=("chat", "label", "plain", "none"),
        help="what is read beside images: conversations, classes, texts, nothing",
    )
    answers.add_argument("--split", metavar="NAME", help="which split of a data set is read")
    answers.add_argument(
        "--audio-dir",
        "--image-dir",
        metavar="DIR",
        help="folder that the names in a table are relative to, where that is not found",
    )
    answers.add_argument(
        "--languages-from-folders", choices=("true", "false"), help="whether folders are named after languages"
    )
    answers.add_argument(
        "--weights", choices=("random", "pretrained"), help="what training begins with, where DIR holds no weights"
    )


def _column(text: str) -> tuple[str, str]:
    role, equals, name = text.partition("=")
    if not equals or not name or role not in _ROLES:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROLE=NAME with ROLE one of {', '.join(_ROLES)}")
    return role, name


def _given(options: argparse.Namespace) -> dict[str, str]:
    """Returns the answers of the command line, as a `Chooser` takes them."""
    plain = {
        "kind": options.kind,
        "prompt": options.prompt,
        "split": options.split,
        "audio-dir": options.audio_dir,
        "languages-from-folders": options.languages_from_folders,
        "weights": options.weights,
    }
    return {name: value for name, value in plain.items() if value is not None} | _columns(options.column)


def _columns(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    if len({role for role, _ in pairs}) < len(pairs):
        raise ConfigError(f"--column names {pairs[-1][0]} twice; name it once")
    return {f"column {role}": name for role, name in pairs}


def _init(options: argparse.Namespace) -> int:
    from forebay.init.questions import Chooser, ask_on_terminal, has_terminal
    from forebay.init.write_config import InitOptions, init

    chooser = Chooser(given=_given(options), takes_first=options.yes, ask=ask_on_terminal if has_terminal() else None)
    out = None if options.out is None else options.out.absolute()
    report = init(InitOptions(data=tuple(options.data), model=options.model, out=out, force=options.force), chooser)
    for said in report.decided:
        print(said, file=sys.stderr)
    return printed(options, report)
