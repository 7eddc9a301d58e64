"""The figures of a comparison: medians over blocks with their quartiles, ratios within a block, tables and JSON."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.inspect.picture import new_figure
from forebay.measure.compared_ways import OWN, Block, Setup
from forebay.measure.machine import ArmFinish, ArmTurn, Shapes, TimedStep, num_elements, peak_flops
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
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.interface import Plan
from forebay.visible import human_bytes, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)
_FILES = ("compare.md", "compare.json", "compare.png", "logs")


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Returns the median of at least one value, and the quartiles below and above it."""
    low, median, high = np.percentile(np.asarray(values, np.float64), [25, 50, 75]).tolist()
    return {"median": median, "low": low, "high": high}


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmFigures:
    """The figures that one arm has told, and those that follow from them.

    The first of three or more blocks is left out of speeds and shares: it warms up.
    """

    arm: str
    setup: Setup
    turns: tuple[ArmTurn, ...]
    finish: ArmFinish

    @property
    def measured(self) -> tuple[ArmTurn, ...]:
        """The turns that speeds and shares are of."""
        return self.turns[1:] if len(self.turns) > 2 else self.turns

    @property
    def rates(self) -> list[float]:
        """Samples/s of each measured block."""
        return [len(turn.ids) / turn.seconds for turn in self.measured]

    @property
    def losses(self) -> list[float]:
        """The losses of all steps."""
        return [loss for turn in self.turns for loss in turn.losses]

    def share(self, part: Callable[[ArmTurn], float]) -> float:
        """Returns the sum of something over the measured blocks, a second of theirs."""
        return sum(map(part, self.measured)) / sum(turn.seconds for turn in self.measured)

    @property
    def flops_per_s(self) -> float | None:
        """Median over blocks of the model's FLOP/s, those spent on padding included."""
        if not self.finish.flops:
            return None
        return statistics.median(
            sum(flops_of(shapes, self.finish.flops) for shapes in turn.shapes) / turn.seconds for turn in self.measured
        )

    def by_bucket(self) -> dict[int, dict[str, Any]]:
        """Returns steps, median seconds, device memory and utilisation by bucket."""
        found: dict[int, dict[str, Any]] = {}
        steps = [step for turn in self.measured for step in turn.steps]
        looks = [look for turn in self.measured for look in turn.utilisation]
        for bucket in sorted({step.bucket for step in steps}):
            own = [step for step in steps if step.bucket == bucket]
            found[bucket] = {
                "steps": len(own),
                "step_s": statistics.median(step.seconds for step in own),
                "device_bytes": _most_bytes(own),
                "utilisation": _mean([share for place, share in looks if place == bucket]),
            }
        return found


def _most_bytes(steps: Sequence[TimedStep]) -> int | None:
    """Returns the most memory that torch had on the device in a step."""
    return max((step.device_bytes for step in steps if step.device_bytes is not None), default=None)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def flops_of(shapes: Shapes, counted: dict[Shapes, float]) -> float:
    """Returns the FLOPs of a micro-batch; of shapes that were not counted, a line between those of about its size."""
    if shapes in counted:
        return counted[shapes]
    sizes = sorted((num_elements(shapes), flops) for shapes, flops in counted.items())
    return float(np.interp(num_elements(shapes), *np.array(sizes, np.float64).T))


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmComparison:
    """The result of `forebay compare CONFIG`. arms: the config's own first.

    about: name, config, model and machine. seconds: of audio, of each block; None where samples have none. buckets:
    names of the plan's shape classes. precision: `train.mixed_precision`.
    """

    about: dict[str, Any]
    folder: Path
    blocks: tuple[Block, ...]
    seconds: list[float] | None
    buckets: dict[int, str]
    precision: str
    arms: tuple[ArmFigures, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns what `compare.json` holds; its fields are an interface."""
        return {
            "version": 1,
            **self.about,
            "device": self.arms[0].setup.device,
            "steps": sum(len(block.steps) for block in self.blocks),
            "blocks": len(self.blocks),
            "samples": sum(len(block.samples) for block in self.blocks),
            "audio_hours": None if self.seconds is None else sum(self.seconds) / 3600,
            "arms": {figures.arm: self._arm(figures) for figures in self.arms},
        }

    def _arm(self, figures: ArmFigures) -> dict[str, Any]:
        own, measured, speed = self.arms[0], figures.measured, figures.flops_per_s
        peak = peak_flops(figures.setup.device or "", precision=self.precision)
        room = sum(turn.room for turn in measured)
        differ = largest_difference(*(dict(enumerate(each.losses, 1)) for each in (own, figures)))
        return {
            "samples_per_s": quartiles(figures.rates),
            "ratio": quartiles([a / b for a, b in zip(figures.rates, own.rates, strict=True)]),
            "own_ratio": quartiles([b / a for a, b in zip(figures.rates, own.rates, strict=True)]),
            "audio_hours_per_h": self._audio_speed(figures),
            "step_s": statistics.median(step.seconds for turn in measured for step in turn.steps),
            "buckets": {self._label(bucket): row for bucket, row in figures.by_bucket().items()},
            "padding": 1 - sum(turn.frames for turn in measured) / room if room else 0.0,
            "first_batch_s": figures.setup.data_s + figures.turns[0].first_batch_s,
            "model_s": figures.setup.model_s,
            "wait_share": figures.share(lambda turn: turn.wait_s),
            "utilisation": _mean([share for turn in measured for _, share in turn.utilisation]),
            "device_bytes": _most_bytes([step for turn in figures.turns for step in turn.steps]),
            "host_bytes": figures.finish.host_bytes,
            "cpu_percent": 100 * figures.share(lambda turn: turn.cpu_s),
            "cpu_s_per_sample": statistics.median(turn.cpu_s / len(turn.ids) for turn in measured),
            "tflops": None if speed is None else speed / 1e12,
            "mfu": None if speed is None or peak is None else speed / peak,
            "compilations": figures.finish.compilations,
            "skipped_steps": sum(turn.skipped for turn in figures.turns),
            "workers": figures.setup.workers,
            "agreement": figures.setup.agreement,
            "losses": figures.losses,
            "loss_difference": {"step": differ["step"] or 0, "difference": differ["difference"] or 0.0},
        }

    def _audio_speed(self, figures: ArmFigures) -> float | None:
        if self.seconds is None:
            return None
        measured = self.seconds[-len(figures.measured) :]
        return statistics.median(audio / turn.seconds for audio, turn in zip(measured, figures.measured, strict=True))

    def _label(self, bucket: int) -> str:
        return "random batches" if bucket < 0 else self.buckets.get(bucket, f"class {bucket}")

    def lines(self) -> Iterator[str]:
        """Yields what `forebay compare` prints, which is Markdown."""
        yield from _markdown(self.to_json())
        yield "\n" + written_line(self.folder, [name for name in _FILES if (self.folder / name).exists()])

    def write(self) -> None:
        """Makes the folder hold compare.md and compare.json, and compare.png if matplotlib is installed."""
        document = self.to_json()
        draw = partial(draw_arms, document)
        write_report(self.folder, "compare", document, draw, log=logger.warning, lines=_markdown(document))


def bucket_labels(plan: Plan) -> dict[int, str]:
    """Returns the names of a plan's shape classes, as far as they have one: `b_0_3` of 0 to 3 s."""
    return dict(enumerate(plan.names)) if isinstance(plan, BucketPlan) else {}


def _markdown(document: dict[str, Any]) -> Iterator[str]:
    """Yields the tables of a comparison's document."""
    arms: dict[str, dict[str, Any]] = document["arms"]
    hours = "" if document["audio_hours"] is None else f", {document['audio_hours']:.3g} h of audio"
    machine = document["machine"]
    ends = [{**arm, "loss_first": arm["losses"][0], "loss_last": arm["losses"][-1]} for arm in arms.values()]
    yield f"# {document['name']}: the config's own way against {', '.join(name for name in arms if name != OWN)}\n"
    yield (
        f"{document['steps']} steps in {document['blocks']} blocks, {document['samples']} samples{hours}. "
        f"{machine['cpu']}, {machine['cores']} cores, {document['device'] or 'no GPU'}, torch {machine['torch']}, "
        f"load {machine['load_1_min']} at the beginning.\n"
    )
    yield from markdown_table(["", *arms], cells(_ROWS, ends))
    yield "\nStep time by bucket, and device memory and utilisation where there is a device:\n"
    labels = list(dict.fromkeys(label for arm in arms.values() for label in arm["buckets"]))
    rows = [[label, *(_bucket(arm["buckets"].get(label)) for arm in arms.values())] for label in labels]
    yield from markdown_table(["", *arms], rows)
    yield ""
    for name, arm in arms.items():
        if name != OWN:
            yield from _sentences(name, arm)


def _sentences(name: str, arm: dict[str, Any]) -> Iterator[str]:
    own, found = arm["own_ratio"], arm["loss_difference"]
    yield (
        f"- The config's own way has {own['median']:.2f} times the samples/s of {name} (quartiles {own['low']:.2f} to "
        f"{own['high']:.2f}); the largest difference between the losses is {found['difference']:.3g}, at step "
        f"{found['step']}."
    )
    if arm["agreement"] is not None:
        yield _agreement(name, arm["agreement"])
    if arm["workers"]:
        tried = ", ".join(f"{number}: {rate:.3g}" for number, rate in arm["workers"].items())
        yield f"- DataLoader workers of {name} and their samples/s on the first block: {tried}; the best was taken."


def _agreement(name: str, found: dict[str, Any]) -> str:
    """Returns whether batches of the cache are those of the processor, in a sentence."""
    compared = f"{found['batches']} batches of {found['samples']} samples of the cache and of {name}"
    fields = ", ".join(found["differences"])
    promise = f"the promise is: {found['promise']}"
    if found["is_kept"]:
        largest = max(found["differences"].values(), default=0.0)
        how = "equal bit for bit" if not largest else f"equal within {largest:.3g}"
        return f"- {compared} are {how} ({fields}); {promise}."
    differ = ", ".join(
        f"{field} in shape, dtype or that one has it" if value is None else f"{field} by up to {value:.3g}"
        for field, value in found["differences"].items()
        if value is None or value
    )
    return f"- {compared} DIFFER: {differ}; {promise}."


def _bucket(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    shown = f"{1000 * row['step_s']:.0f} ms x {row['steps']}"
    if row["device_bytes"] is not None:
        shown += f", {human_bytes(row['device_bytes'])}"
    return shown if row["utilisation"] is None else f"{shown}, {100 * row['utilisation']:.0f} %"


_ROWS: tuple[TableRow, ...] = (
    ("samples/s (quartiles of blocks)", "samples_per_s", "{:.1f}"),
    ("samples/s, times the config's own", "ratio", "{:.2f}"),
    ("audio hours an hour", "audio_hours_per_h", "{:.1f}"),
    ("step, median", "step_s", "{:.0f} ms", 1000),
    ("padding", "padding", "{:.1f} %", 100),
    ("time to the first batch", "first_batch_s", "{:.2f} s"),
    ("waiting for data", "wait_share", "{:.1f} %", 100),
    ("device utilisation", "utilisation", "{:.0f} %", 100),
    ("device memory, most", "device_bytes", "bytes"),
    ("host memory, most", "host_bytes", "bytes"),
    ("CPU, 100 % a core", "cpu_percent", "{:.0f} %"),
    ("CPU time a sample", "cpu_s_per_sample", "{:.1f} ms", 1000),
    ("TFLOP/s", "tflops", "{:.3g}"),
    ("MFU", "mfu", "{:.1f} %", 100),
    ("compilations", "compilations"),
    ("skipped steps", "skipped_steps"),
    ("loss, first step", "loss_first", "{:.4f}"),
    ("loss, last step", "loss_last", "{:.4f}"),
)


def draw_arms(document: dict[str, Any]) -> Figure:
    """Returns a comparison's document as a picture. Raises MissingExtraError where matplotlib is not installed."""
    figure = new_figure(12, 8, why="the picture needs matplotlib")
    arms: dict[str, dict[str, Any]] = document["arms"]
    colours = dict(zip(arms, (OURS, *OTHERS * len(arms)), strict=False))
    (speed, losses), (steps, shares) = figure.subplots(2, 2)
    _speed(speed, arms, colours)
    _losses(losses, arms, colours)
    _steps(steps, arms, colours)
    _shares(shares, arms, colours)
    title = f"{printable(document['name'])}: {document['steps']} steps, {document['samples']} samples, "
    figure.suptitle(title + (document["device"] or document["machine"]["cpu"]), parse_math=False)
    return figure


def _speed(axes: Axes, arms: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    for place, (name, arm) in enumerate(reversed(arms.items())):
        rate = arm["samples_per_s"]
        reach = [[rate["median"] - rate["low"]], [rate["high"] - rate["median"]]]
        axes.barh(place, rate["median"], xerr=reach, color=colours[name], capsize=3)
        axes.text(0, place, f" {rate['median']:.3g}", va="center", color="white", fontsize=9)
    axes.set_yticks(range(len(arms)), list(reversed(arms)))
    axes.set_title("samples/s: median and quartiles of blocks", loc="left", fontsize=10)


def _losses(axes: Axes, arms: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    for name, arm in reversed(arms.items()):
        axes.plot(range(1, len(arm["losses"]) + 1), arm["losses"], color=colours[name], label=name, linewidth=1.2)
    axes.set_title("loss by step", loc="left", fontsize=10)
    axes.legend(fontsize=8)


def _steps(axes: Axes, arms: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    labels = list(dict.fromkeys(label for arm in arms.values() for label in arm["buckets"]))
    heights = {
        name: {label: 1000 * row["step_s"] for label, row in arm["buckets"].items()} for name, arm in arms.items()
    }
    _beside(axes, labels, heights, colours)
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
    axes.set_title("median step by bucket, ms", loc="left", fontsize=10)


def _shares(axes: Axes, arms: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    names = {"waiting for data": "wait_share", "padding": "padding", "device busy": "utilisation", "MFU": "mfu"}
    known = {label: key for label, key in names.items() if any(arm[key] is not None for arm in arms.values())}
    heights = {name: {label: 100 * (arm[key] or 0.0) for label, key in known.items()} for name, arm in arms.items()}
    _beside(axes, list(known), heights, colours)
    axes.set_xticks(range(len(known)), list(known))
    axes.set_title("shares, %", loc="left", fontsize=10)


def _beside(axes: Axes, labels: list[str], heights: dict[str, dict[str, float]], colours: dict[str, str]) -> None:
    """Draws the bars of all arms beside each other at each label."""
    width = 0.8 / len(heights)
    for number, (name, found) in enumerate(heights.items()):
        places = [labels.index(label) + (number - (len(heights) - 1) / 2) * width for label in found]
        axes.bar(places, list(found.values()), width=width, color=colours[name])
