"""The config's own way and others, in turns on the same samples: `forebay compare CONFIG --against ...`.

Each arm is a process with a copy of the model from the same weights. The steps of the config's plan are dealt to
blocks. Each arm in its turn trains on the samples of a block, while the others rest; who begins changes from block to
block, so that what else the machine does falls on all of them alike.

`forebay compare RUN_A RUN_B` puts two runs of `forebay train` beside each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.config.tree import Config
from forebay.errors import CacheNotFoundError, ConfigError, ForebayError, MissingExtraError
from forebay.extras import install_line
from forebay.inspect.picture import new_figure
from forebay.measure.child_process import Child
from forebay.measure.compare_report import ArmComparison, ArmFigures, bucket_labels
from forebay.measure.compared_ways import (
    Arm,
    ArmTask,
    Block,
    Setup,
    arms_of,
    dealt,
    num_blocks,
    planned_steps,
    sample_key,
)
from forebay.measure.machine import ArmTurn, machine
from forebay.measure.shown_figures import (
    OTHERS,
    OURS,
    TableRow,
    cells,
    largest_difference,
    markdown_table,
    write_report,
    written_line,
)
from forebay.measure.step_runner import checked_model
from forebay.steps.recipe import recipe_of
from forebay.store.lookup import find_cache, not_found_message
from forebay.store.source import without_audio
from forebay.train.evaluation.evaluate import HIGHER_IS_BETTER
from forebay.train.loader import Loader
from forebay.train.loop.checkpoint import run_folder
from forebay.train.loop.meter import FILE_NAME, VERSION, read_lines
from forebay.train.loop.schedule import run_steps
from forebay.train.select import make_loader
from forebay.visible import from_here, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)
_RATES = {"wer": "WER", "cer": "CER", "accuracy": "accuracy", "f1": "F1", "loss": "loss"}
"""The figures of evaluations that are compared."""


def compare(config: Config, *, against: str, steps: int | None = None, out: Path | None = None) -> ArmComparison:
    """Returns how the config's own way and the arms `against` trained on the samples of `steps` steps of its plan.

    against: for example `uncached,uncached+unbucketed,hf`. out: where tables and logs go; left out,
    `<train.output_dir>/<name>/compare`.
    Raises ConfigError for what cannot be compared, CacheNotFoundError where the config's cache is not sealed,
    ForebayError where an arm died.
    """
    steps = 200 if steps is None else steps
    if steps < 1:
        raise ConfigError(f"--steps is {steps}, wanted 1 or more")
    arms = arms_of(against, config)
    _check(config, arms)
    folder = out or run_folder(config) / "compare"
    loader = make_loader(arms[0].config(config, folder=str(folder)), dp_rank=0, dp_world_size=1)
    _check_batches(config, arms, loader, steps=steps)
    about = {"machine": machine(), "name": config.name, "config": config.path, "model": config.train.model}
    with tempfile.TemporaryDirectory(prefix="forebay-compare-") as scratch:
        tasks = tasks_of(config, loader, arms, steps=steps, folder=scratch)
        found = _run(tasks, logs=folder / "logs")
    return ArmComparison(
        about={**about, "source_key": loader.source.key},
        folder=folder,
        blocks=tasks[0].blocks,
        seconds=_seconds(loader, tasks[0].blocks),
        buckets=bucket_labels(loader.plan),
        precision=config.train.mixed_precision,
        arms=tuple(found),
    )


def tasks_of(config: Config, loader: Loader, arms: Sequence[Arm], *, steps: int, folder: str) -> list[ArmTask]:
    """Returns the task of each arm: the same samples, dealt to the same blocks.

    loader: of the config's own way. folder: where arms may write what nobody keeps. Learning rates are those of the
    beginning of the config's run; one that is shorter than `steps` would end at a learning rate of 0 before them.
    """
    most, source = max(run_steps(config.train, loader, steps_done=0), steps), loader.source
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=most, epochs=None))
    endless = planned_steps(loader.plan, seed=config.loader.seed, grad_acc=config.train.grad_acc)
    blocks = tuple(dealt(list(itertools.islice(endless, steps)), num_blocks(steps)))
    used = sorted({index for block in blocks for index in block.samples})
    frames = source.lengths["num_frames" if "num_frames" in source.lengths else "num_tokens"]
    table: dict[str, Any] = {
        "ids": {i: sample_key(source, i) for i in used},
        "frames": {i: int(frames[i]) for i in used},
    }
    return [ArmTask(config=config, arm=arm, blocks=blocks, folder=folder, **table) for arm in arms]


def _check(config: Config, arms: Sequence[Arm]) -> None:
    if config.train.model is None:
        raise ConfigError(
            f"{config.path}: train.model is missing; name the folder of the model that all arms train", code="FB108"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("compare runs on one rank, and WORLD_SIZE is above 1; start it without torchrun")
    checked_model(config)
    try:
        import accelerate  # noqa: F401
    except ImportError as err:
        raise MissingExtraError(f"forebay compare needs accelerate; run: {install_line('train')}") from err
    if config.mixture.source:
        return  # each source is looked for when the loader is made
    lookup = find_cache(config, recipe_of(config))
    if lookup.found is None:
        raise CacheNotFoundError(not_found_message(config, lookup))
    raw = [arm.name for arm in arms if arm.is_uncached or arm.is_plain]
    if raw and lookup.state == "absent":
        raise ConfigError(
            f"--against names {', '.join(raw)}, but the raw data of {lookup.found.place} is not here; put it where "
            f"{config.path} says, or give --against unbucketed"
        )


def _check_batches(config: Config, arms: Sequence[Arm], loader: Loader, *, steps: int) -> None:
    """Raises ConfigError for too few steps: random batches of a block of one bucket have next to no padding."""
    texts = without_audio(loader.source)
    random = [arm.name for arm in arms if arm.is_unbucketed]
    if random and texts is not None and not texts.all():
        raise ConfigError(
            f"--against names {', '.join(random)}, but {config.path} has samples with audio and without, which stand "
            "in no batch together; give --against uncached"
        )
    random = [arm.name for arm in arms if arm.is_unbucketed or arm.is_plain]
    order = loader.plan.order(loader.settings.seed, 0)
    least = 2 * len(np.unique(order.buckets(range(len(order)))))
    if random and steps < least:
        raise ConfigError(
            f"--steps is {steps}, but {', '.join(random)} has random batches, and blocks of so few steps lack lengths "
            f"that these would have: their padding would be too small; give --steps {least} or more",
            code="FB615",
        )


def _seconds(loader: Loader, blocks: Sequence[Block]) -> list[float] | None:
    """Returns the seconds of audio of each block, None where samples have none."""
    lengths, rate = loader.source.lengths, loader.source.constants.get("sample_rate_hz")
    if "num_audio_samples" not in lengths or not rate:
        return None
    return [float(np.asarray(lengths["num_audio_samples"])[block.samples].sum() / rate) for block in blocks]


def _run(tasks: Sequence[ArmTask], *, logs: Path) -> list[ArmFigures]:
    """Returns the figures of each task's arm; no process is left, whatever happens."""
    count, blocks = len(tasks), tasks[0].blocks
    with contextlib.ExitStack() as stack:
        children = []
        for task in tasks:
            name = task.arm.name
            work = "forebay.measure.plain_loop:work" if task.arm.is_plain else "forebay.measure.compared_ways:work"
            child = Child(f"the arm {name}", work, log=logs / f"{name}.log", advice="leave it out of --against")
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            child.receive()  # it has imported what it needs
        setups: list[Setup] = []
        for task, child in zip(tasks, children, strict=True):  # one at a time: how long it takes is a figure
            child.send(task)
            setups.append(child.receive())
            logger.info("arm %s: data %.2f s, model %.2f s", task.arm.name, setups[-1].data_s, setups[-1].model_s)
        turns: list[list[ArmTurn]] = [[] for _ in tasks]
        for number in range(len(blocks)):
            for place in ((number + each) % count for each in range(count)):  # another arm begins in each block
                children[place].send(number)
                turns[place].append(children[place].receive())
            _tell_block(tasks, [own[-1] for own in turns], number=number)
        figures = []
        for task, child, setup, own_turns in zip(tasks, children, setups, turns, strict=True):
            child.send(None)
            figures.append(ArmFigures(arm=task.arm.name, setup=setup, turns=tuple(own_turns), finish=child.receive()))
        return figures


def _tell_block(tasks: Sequence[ArmTask], turns: Sequence[ArmTurn], *, number: int) -> None:
    """Logs how fast the arms were in a block. Raises ForebayError where they did not train on the same samples."""
    rates = []
    for task, turn in zip(tasks, turns, strict=True):
        if turn.ids != turns[0].ids:
            raise ForebayError(
                f"block {number + 1}: the arm {task.arm.name} trained on {len(turn.ids)} samples and the arm "
                f"{tasks[0].arm.name} on {len(turns[0].ids)} others; the figures would not compare"
            )
        rates.append(f"{task.arm.name} {len(turn.ids) / turn.seconds:.1f}")
    logger.info("block %d of %d: %s samples/s", number + 1, len(tasks[0].blocks), ", ".join(rates))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    """The log of a run's folder. steps, evaluations: the lines of steps.jsonl behind its head, and of eval.jsonl."""

    folder: Path
    settings: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @classmethod
    def of(cls, folder: Path) -> RunLog:
        """Returns the run in a folder. Raises ConfigError, naming what is missing, where it is none."""
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; name a run's, which is <train.output_dir>/<name>")
        path = folder / "logs" / FILE_NAME
        if not path.is_file():
            found = ", ".join(sorted(repr(each.name) for each in folder.iterdir())[:8]) or "nothing"
            raise ConfigError(
                f"{folder} is no folder of a run: it lacks logs/{FILE_NAME} and holds {found}; name a folder that "
                "forebay train has written, <train.output_dir>/<name>"
            )
        head, *steps = read_lines(path) or [{}]
        if head.get("version") != VERSION or not isinstance(head.get("settings"), dict):
            raise ConfigError(f"{path} begins with {_short(head)}, wanted a head of version {VERSION}; train again")
        # A line has no loss if all of its steps were skipped.
        steps = [line for line in steps if isinstance(line.get("step"), int) and _is_number(line.get("loss"))]
        if not steps:
            raise ConfigError(f"{path} has no log line yet; wait for step train.log_every, or train again")
        return cls(
            folder=folder,
            settings=head["settings"],
            steps=steps,
            evaluations=[line for line in read_lines(folder / "eval.jsonl") if "step" in line and "name" in line],
        )

    @property
    def final(self) -> dict[str, Any]:
        """Returns what the run came to: figures of the last line, medians over the lines of what is per line."""
        first, last = self.steps[0], self.steps[-1]
        return {
            "steps": last["step"],
            "loss_first": first["loss"],
            "loss_last": last["loss"],
            **{name: _median(self.steps, name) for name in ("samples_per_s", "data_wait_share")},
            "padding": last.get("padding"),
            "skipped_steps": last.get("skipped_steps"),
            "evaluations": {name: self._evaluation(name) for name in (str(line["name"]) for line in self.evaluations)},
        }

    def _evaluation(self, name: str) -> dict[str, Any]:
        own = [line for line in self.evaluations if str(line["name"]) == name]
        found: dict[str, Any] = {"step": own[-1]["step"]}
        for what in _RATES:
            known = [line[what] for line in own if _is_number(line.get(what))]
            best = max if what in HIGHER_IS_BETTER else min
            found |= {what: own[-1].get(what), f"best_{what}": best(known, default=None)}
        return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _median(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [line[name] for line in lines if _is_number(line.get(name))]
    return statistics.median(known) if known else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """Two runs beside each other."""

    runs: tuple[RunLog, RunLog]
    out: Path | None

    def to_json(self) -> dict[str, Any]:
        """Returns the document; its fields are an interface."""
        first, other = self.runs
        losses = [[(line["step"], line["loss"]) for line in run.steps] for run in self.runs]
        return {
            "version": 1,
            "runs": [str(run.folder) for run in self.runs],
            "final": [run.final for run in self.runs],
            "losses": [list(map(list, own)) for own in losses],
            "loss_difference": largest_difference(*map(dict, losses)),
            "settings": settings_that_differ(first.settings, other.settings),
        }

    def lines(self) -> Iterator[str]:
        """Yields what `forebay compare RUN_A RUN_B` prints, which is Markdown."""
        yield from _markdown(self.to_json())
        if self.out is not None:
            yield "\n" + written_line(self.out, [path.name for path in sorted(self.out.glob("compare.*"))])

    def write(self) -> None:
        """Makes the folder `out`, if there is one, hold compare.md, compare.json, and compare.png with matplotlib."""
        if (out := self.out) is None:
            return
        document = self.to_json()
        draw = partial(draw_runs, document)
        write_report(out, "compare", document, draw, log=logger.warning, lines=_markdown(document))


def compare_runs(first: Path, other: Path, *, out: Path | None = None) -> RunComparison:
    """Returns two runs beside each other, by what their folders tell. Raises ConfigError where one is no run."""
    return RunComparison(runs=(RunLog.of(first), RunLog.of(other)), out=out)


def settings_that_differ(first: dict[str, Any], other: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns both values of every setting that differs, by its dotted name."""
    one, two = dict(_flat(first)), dict(_flat(other))
    names = [*one, *(name for name in two if name not in one)]
    return {name: [one.get(name), two.get(name)] for name in names if one.get(name) != two.get(name)}


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _markdown(document: dict[str, Any]) -> Iterator[str]:
    names = [printable(from_here(path)) for path in document["runs"]]
    yield f"# {names[0]} and {names[1]}\n"
    rows = cells(_ROWS, document["final"])
    sets = dict.fromkeys(name for final in document["final"] for name in final["evaluations"])
    for name in sets:
        own = [final["evaluations"].get(name) for final in document["final"]]
        for what, label in _RATES.items():
            if any(each is not None and each[what] is not None for each in own):
                rows.append([f"{printable(name)} {label}, last (best)", *(_evaluation(each, what) for each in own)])
    yield from markdown_table(["", *names], rows)
    found = document["loss_difference"]
    if found["difference"] is None:
        yield "\nNo log line of one run stands at a step of the other's: set train.log_every alike."
    else:
        yield (
            f"\nThe largest difference between the losses at {found['equal_steps']} equal steps is "
            f"{found['difference']:.3g}, at step {found['step']}."
        )
    differing = [[name, *map(_short, pair)] for name, pair in document["settings"].items()]
    yield "\nSettings that differ:\n" if differing else "\nTheir settings are the same."
    if differing:
        yield from markdown_table(["", *names], differing)


def _evaluation(found: dict[str, Any] | None, what: str) -> str:
    if found is None or found[what] is None:
        return "-"
    factor, unit, digits = (1, "", 3) if what == "loss" else (100, " %", 2)
    return f"{factor * found[what]:.{digits}f}{unit} ({factor * found[f'best_{what}']:.{digits}f}{unit})"


def _short(value: Any) -> str:
    shown = printable(repr(value)).replace("|", "\\|")
    return shown if len(shown) <= 80 else shown[:77] + "..."


_ROWS: tuple[TableRow, ...] = (
    ("steps", "steps"),
    ("loss, first line", "loss_first", "{:.4f}"),
    ("loss, last line", "loss_last", "{:.4f}"),
    ("samples/s, median of lines", "samples_per_s", "{:.1f}"),
    ("waiting for data, median of lines", "data_wait_share", "{:.1f} %", 100),
    ("padding", "padding", "{:.1f} %", 100),
    ("skipped steps", "skipped_steps"),
)


def draw_runs(document: dict[str, Any]) -> Figure:
    """Returns the loss curves of two runs. Raises MissingExtraError where matplotlib is not installed."""
    figure = new_figure(9, 4.5, why="the picture needs matplotlib")
    axes = figure.subplots()
    for name, curve, colour in zip(document["runs"], document["losses"], (OURS, OTHERS[0]), strict=True):
        label = printable(from_here(name)).replace("$", r"\$")
        axes.plot(*zip(*curve, strict=True), color=colour, label=label, linewidth=1.2)
    axes.set_title("loss by step, mean since the log line before", loc="left", fontsize=10)
    axes.legend(fontsize=8)
    return figure
