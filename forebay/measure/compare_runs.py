"""Two runs of `forebay train` beside each other: `forebay compare RUN_A RUN_B`."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forebay.errors import ConfigError
from forebay.measure.shown_figures import (
    OTHERS,
    OURS,
    TableRow,
    cells,
    largest_difference,
    markdown_table,
    new_figure,
    write_figure,
    write_report,
    written_line,
)
from forebay.train.evaluation.evaluate import HIGHER_IS_BETTER
from forebay.train.loop.meter import FILE_NAME, VERSION, read_lines
from forebay.visible import from_here, printable

_logger = logging.getLogger(__name__)

_EVALUATIONS = "eval.jsonl"
_MAX_LISTED = 8
_RATES = {"wer": "WER", "cer": "CER", "accuracy": "accuracy", "f1": "F1", "loss": "loss"}
"""The figures of evaluations that are compared."""


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
            found = ", ".join(sorted(repr(each.name) for each in folder.iterdir())[:_MAX_LISTED]) or "nothing"
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
            evaluations=[line for line in read_lines(folder / _EVALUATIONS) if "step" in line and "name" in line],
        )

    @property
    def final(self) -> dict[str, Any]:
        """Returns what the run came to: figures of the last line, medians over the lines of what is per line."""
        first, last = self.steps[0], self.steps[-1]
        middle = {name: _median(self.steps, name) for name in ("samples_per_s", "data_wait_share")}
        return {
            "steps": last["step"],
            "loss_first": first["loss"],
            "loss_last": last["loss"],
            **middle,
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
        losses = [[[line["step"], line["loss"]] for line in run.steps] for run in self.runs]
        return {
            "version": 1,
            "runs": [str(run.folder) for run in self.runs],
            "final": [run.final for run in self.runs],
            "losses": losses,
            "loss_difference": largest_difference(
                *({line["step"]: line["loss"] for line in run.steps} for run in self.runs)
            ),
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
        draw, lines = partial(draw_runs, document), _markdown(document)
        write_report(out, "compare", document, draw, log=_logger.warning, lines=lines)


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
    yield from _settings(document["settings"], names)


def _settings(found: dict[str, list[Any]], names: Sequence[str]) -> Iterator[str]:
    if not found:
        yield "\nTheir settings are the same."
        return
    yield "\nSettings that differ:\n"
    yield from markdown_table(
        ["", *names], [[name, *(_short(value) for value in pair)] for name, pair in found.items()]
    )


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


def draw_runs(document: dict[str, Any], path: Path) -> None:
    """Makes `path` a PNG of the loss curves of two runs. Raises MissingExtraError where matplotlib is not installed."""
    figure = new_figure(9, 4.5)
    axes = figure.subplots()
    for name, curve, colour in zip(document["runs"], document["losses"], (OURS, OTHERS[0]), strict=True):
        label = printable(from_here(name)).replace("$", r"\$")
        axes.plot(*zip(*curve, strict=True), color=colour, label=label, linewidth=1.2)
    axes.set_title("loss by step, mean since the log line before", loc="left", fontsize=10)
    axes.legend(fontsize=8)
    write_figure(figure, path)
