"""`forebay train --profile`: a short look at where a run's time goes, which leaves the run as it is.

What it hands out: profile.json, the lines of a table, and a picture.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.measure.machine import device_name
from forebay.measure.profile_shares import UNCLAIMED, Shares, read_trace, shares_of
from forebay.measure.shown_figures import new_figure, write_figure, write_report, written_line
from forebay.train.loop.checkpoint import find_checkpoint, run_folder
from forebay.train.loop.meter import Phases, StepLog
from forebay.train.loop.recorder import Recorder
from forebay.train.loop.run import run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_logger = logging.getLogger(__name__)

_DOCUMENT, _TRACE, _PICTURE = "profile.json", "trace.json", "profile.png"
_FOLDER = "profile"
"""Under the run's folder."""
_NEVER = 10**9
"""Steps: more than any run has, so nothing of a run's end happens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileReport:
    """The document of `forebay train --profile --json`; its fields are an interface."""

    shares: Shares
    device: str
    """`cpu`, or the name of the GPU."""
    num_ranks: int
    """Ranks of the run; rank 0 is the one that was recorded."""
    folder: str
    """Where profile.json, trace.json and profile.png are."""

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values; `main` and `device` have `seconds` and `share` by part."""
        found = dataclasses.asdict(self.shares)
        for name in ("main", "device"):
            found[name] = {
                part: {"seconds": seconds, "share": seconds / self.shares.wall_s}
                for part, seconds in found[name].items()
            }
        facts = {name: getattr(self, name) for name in ("num_ranks", "folder")}
        return {**found, "device_name": self.device, **facts}

    def lines(self) -> Iterator[str]:
        """Yields the tables that `forebay train --profile` prints."""
        shares = self.shares
        each_ms = 1e3 * shares.wall_s / shares.num_steps
        yield f"{shares.num_steps} steps of {each_ms:.1f} ms on {self.device}, rank 0 of {self.num_ranks}"
        yield from self._rows("main thread", shares.main)
        title = f"{shares.num_threads} other thread{'s' * (shares.num_threads > 1)}"
        beside = {name: found.beside for name, found in shares.threads.items()}
        yield from self._rows(title, {name: found.seconds for name, found in shares.threads.items()}, beside)
        yield from self._rows("device", shares.device)
        yield from self._rows("device, under its kernels", shares.hidden)
        yield written_line(self.folder, [_DOCUMENT, f"{_TRACE} (ui.perfetto.dev)", _PICTURE])

    def _rows(
        self, title: str, seconds: Mapping[str, float], beside: Mapping[str, float] | None = None
    ) -> Iterator[str]:
        """Yields a table, nothing where there are no rows. beside: the shares that it shows; None: of the wall time."""
        if seconds:
            yield f"{title:<28} {'share' if beside is None else 'beside':>7} {'ms a step':>10}"
        for name, taken in seconds.items():
            share = taken / self.shares.wall_s if beside is None else beside[name]
            yield f"  {name:<26} {100 * share:>5.1f} % {1e3 * taken / self.shares.num_steps:>10.2f}"

    def write(self) -> None:
        """Makes profile.json, and profile.png if matplotlib is installed; a line names the extra if it is not."""
        draw = partial(draw_shares, self.shares, self.device)
        write_report(Path(self.folder), "profile", self.to_json(), draw, log=_logger.info)


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
    trace = folder / _FOLDER / _TRACE
    recorder.write(trace)
    with open(trace, encoding="utf-8") as file:
        shares = shares_of(read_trace(json.load(file)["traceEvents"]))
    made = ProfileReport(
        shares=shares,
        device=device_name() or "cpu",
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
        output_dir=str(folder / _FOLDER),
    )
    return dataclasses.replace(config, train=settings)


def draw_shares(shares: Shares, device: str, path: Path) -> None:
    """Makes `path` a PNG: a bar for the main thread, one for the other threads, one for the device if there is one.

    Raises MissingExtraError where matplotlib is not installed.
    """
    bars = {"main thread": shares.main, "device": shares.device}
    bars = {title: parts for title, parts in bars.items() if parts}
    panels = len(bars) + bool(shares.threads)
    rows = [len(parts) for parts in bars.values()] + [len(shares.threads)] * bool(shares.threads)
    why = "the profile goes without its picture, which needs matplotlib"
    figure = new_figure(9, 0.9 * panels + 0.28 * sum(rows), why=why)
    axes = list(figure.subplots(panels, 1, squeeze=False, sharex=True, height_ratios=[row + 1 for row in rows])[:, 0])
    for title, parts in bars.items():
        _draw_parts(axes.pop(0), title, {name: seconds / shares.wall_s for name, seconds in parts.items()})
    if axes:
        _draw_threads(axes[0], shares)
    figure.suptitle(f"{shares.num_steps} steps of {1e3 * shares.wall_s / shares.num_steps:.1f} ms on {device}")
    write_figure(figure, path)


def _draw_parts(axes: Axes, title: str, shares: Mapping[str, float]) -> None:
    names = list(shares)[::-1]
    colours = ["tab:gray" if name.startswith("idle") or name == UNCLAIMED else "tab:blue" for name in names]
    bars = axes.barh(names, [100 * shares[name] for name in names], color=colours)
    axes.bar_label(bars, labels=[f"{100 * shares[name]:.1f} %" for name in names], padding=3, fontsize=8)
    axes.set_title(f"{title}, % of the wall time", loc="left", fontsize=9)
    axes.margins(x=0.12)


def _draw_threads(axes: Axes, shares: Shares) -> None:
    names = list(shares.threads)[::-1]
    found = [shares.threads[name] for name in names]
    beside = [100 * each.seconds * each.beside / shares.wall_s for each in found]
    alone = [100 * each.seconds * (1 - each.beside) / shares.wall_s for each in found]
    axes.barh(names, beside, color="tab:green", label="while the main thread works")
    axes.barh(names, alone, left=beside, color="tab:orange", label="while the main thread waits")
    axes.set_title("other threads, % of the wall time", loc="left", fontsize=9)
    axes.legend(fontsize=8)
