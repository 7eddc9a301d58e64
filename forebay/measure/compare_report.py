"""The figures of a comparison: medians over blocks with their quartiles, ratios within a block, tables and JSON.

The picture of a comparison: speed with its spread, loss curves, step times by bucket, where the time went.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.config.plan import bucket_names
from forebay.errors import MissingExtraError
from forebay.extras import install_line
from forebay.measure.compared_ways import OWN, Block
from forebay.measure.machine import peak_flops
from forebay.measure.step_clock import ArmFinish, ArmTurn, Setup, Shapes, num_elements
from forebay.plan.bucket.bucket_plan import BucketPlan
from forebay.plan.interface import Plan
from forebay.store.files import write_bytes
from forebay.visible import from_here, human_bytes, json_text, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_FILES = ("compare.md", "compare.json", "compare.png", "logs")

MIXED = "random batches"
"""What tables call the bucket of batches that are of none."""


@dataclass(frozen=True, slots=True)
class Quartiles:
    """The median of some values, and the quartiles below and above it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Returns the spread of at least one value."""
        low, median, high = np.percentile(np.asarray(values, np.float64), [25, 50, 75]).tolist()
        return cls(median, low, high)

    def to_json(self) -> dict[str, float]:
        """Returns the three values by name."""
        return {"median": self.median, "low": self.low, "high": self.high}


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmFigures:
    """What one arm has told, and what follows from it.

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
        """Of all steps."""
        return [loss for turn in self.turns for loss in turn.losses]

    def share(self, part: Callable[[ArmTurn], float]) -> float:
        """Returns the sum of something over the measured blocks, a second of theirs."""
        return sum(map(part, self.measured)) / sum(turn.seconds for turn in self.measured)

    @property
    def padding(self) -> float:
        """Share of padded frames in all frames."""
        room = sum(turn.room for turn in self.measured)
        return 1 - sum(turn.frames for turn in self.measured) / room if room else 0.0

    @property
    def utilisation(self) -> float | None:
        """Share of time in which the device computed."""
        found = [share for turn in self.measured for _, share in turn.utilisation]
        return statistics.fmean(found) if found else None

    @property
    def device_bytes(self) -> int | None:
        """Most memory that torch had on the device in a step."""
        found = [step.device_bytes for turn in self.turns for step in turn.steps if step.device_bytes is not None]
        return max(found, default=None)

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
            memory = [step.device_bytes for step in own if step.device_bytes is not None]
            busy = [share for place, share in looks if place == bucket]
            found[bucket] = {
                "steps": len(own),
                "step_s": statistics.median(step.seconds for step in own),
                "device_bytes": max(memory, default=None),
                "utilisation": statistics.fmean(busy) if busy else None,
            }
        return found


def flops_of(shapes: Shapes, counted: dict[Shapes, float]) -> float:
    """Returns the FLOPs of a micro-batch; of shapes that were not counted, a line between those of about its size."""
    if shapes in counted:
        return counted[shapes]
    sizes = sorted((num_elements(shapes), flops) for shapes, flops in counted.items())
    return float(np.interp(num_elements(shapes), *np.array(sizes, np.float64).T))


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmComparison:
    """What `forebay compare CONFIG` found. arms: the config's own first.

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
        own, speed = self.arms[0], figures.flops_per_s
        peak = peak_flops(figures.setup.device or "", precision=self.precision)
        return {
            "samples_per_s": Quartiles.of(figures.rates).to_json(),
            "ratio": Quartiles.of([a / b for a, b in zip(figures.rates, own.rates, strict=True)]).to_json(),
            "own_ratio": Quartiles.of([b / a for a, b in zip(figures.rates, own.rates, strict=True)]).to_json(),
            "audio_hours_per_h": self._audio_speed(figures),
            "step_s": statistics.median(step.seconds for turn in figures.measured for step in turn.steps),
            "buckets": {self.label(bucket): row for bucket, row in figures.by_bucket().items()},
            "padding": figures.padding,
            "first_batch_s": figures.setup.data_s + figures.turns[0].first_batch_s,
            "model_s": figures.setup.model_s,
            "wait_share": figures.share(lambda turn: turn.wait_s),
            "utilisation": figures.utilisation,
            "device_bytes": figures.device_bytes,
            "host_bytes": figures.finish.host_bytes,
            "cpu_percent": 100 * figures.share(lambda turn: turn.cpu_s),
            "cpu_s_per_sample": statistics.median(turn.cpu_s / len(turn.ids) for turn in figures.measured),
            "tflops": None if speed is None else speed / 1e12,
            "mfu": None if speed is None or peak is None else speed / peak,
            "compilations": figures.finish.compilations,
            "skipped_steps": sum(turn.skipped for turn in figures.turns),
            "workers": figures.setup.workers,
            "agreement": figures.setup.agreement,
            "losses": figures.losses,
            "loss_difference": largest_difference(own.losses, figures.losses),
        }

    def _audio_speed(self, figures: ArmFigures) -> float | None:
        if self.seconds is None:
            return None
        measured = self.seconds[-len(figures.measured) :]
        return statistics.median(audio / turn.seconds for audio, turn in zip(measured, figures.measured, strict=True))

    def label(self, bucket: int) -> str:
        """Returns the name of a bucket."""
        return MIXED if bucket < 0 else self.buckets.get(bucket, f"class {bucket}")

    def lines(self) -> Iterator[str]:
        """Yields what `forebay compare` prints, which is Markdown."""
        yield from markdown(self.to_json())
        names = [name for name in _FILES if (self.folder / name).exists()]
        yield f"\nwritten to {from_here(self.folder)}: {', '.join(names)}"

    def write(self) -> None:
        """Makes the folder hold compare.md and compare.json."""
        document = self.to_json()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_bytes(self.folder / "compare.json", json_text(document).encode())
        write_bytes(self.folder / "compare.md", ("\n".join(markdown(document)) + "\n").encode())


def bucket_labels(plan: Plan) -> dict[int, str]:
    """Returns the names of a plan's shape classes, as far as they have one: `b_0_3` of 0 to 3 s."""
    if not isinstance(plan, BucketPlan):
        return {}
    return dict(enumerate(bucket_names(plan.edges_s, num_buckets=len(plan.batch_sizes))))


def largest_difference(first: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Returns the largest difference between two curves at equal steps, and the step, from 1, where it is.

    Steps at which a loss is not finite, as under fp16, are passed over. Without a step both are 0.
    """
    found = {step: abs(one - two) for step, (one, two) in enumerate(zip(first, other, strict=False), start=1)}
    finite = {step: value for step, value in found.items() if math.isfinite(value)}
    step = max(finite, key=lambda each: finite[each], default=0)
    return {"step": step, "difference": finite.get(step, 0.0)}


def markdown(document: dict[str, Any]) -> Iterator[str]:
    """Yields the tables of a comparison's document."""
    arms: dict[str, dict[str, Any]] = document["arms"]
    hours = "" if document["audio_hours"] is None else f", {document['audio_hours']:.3g} h of audio"
    yield f"# {document['name']}: the config's own way against {', '.join(name for name in arms if name != OWN)}\n"
    yield (
        f"{document['steps']} steps in {document['blocks']} blocks, {document['samples']} samples{hours}. "
        f"{_machine(document)}\n"
    )
    yield from table(["", *arms], [[label, *map(show, arms.values())] for label, show in _ROWS])
    yield "\nStep time by bucket, and device memory and utilisation where there is a device:\n"
    labels = list(dict.fromkeys(label for arm in arms.values() for label in arm["buckets"]))
    rows = [[label, *(_bucket(arm["buckets"].get(label)) for arm in arms.values())] for label in labels]
    yield from table(["", *arms], rows)
    yield ""
    for name, arm in arms.items():
        if name != OWN:
            yield from _sentences(name, arm)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


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


def _machine(document: dict[str, Any]) -> str:
    machine = document["machine"]
    where = document["device"] or "no GPU"
    shared = f"load {machine['load_1_min']} at the beginning"
    return f"{machine['cpu']}, {machine['cores']} cores, {where}, torch {machine['torch']}, {shared}."


def _bucket(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    shown = f"{1000 * row['step_s']:.0f} ms x {row['steps']}"
    if row["device_bytes"] is not None:
        shown += f", {human_bytes(row['device_bytes'])}"
    return shown if row["utilisation"] is None else f"{shown}, {100 * row['utilisation']:.0f} %"


def _spread(name: str, digits: str) -> Callable[[dict[str, Any]], str]:
    return lambda arm: "{median:{d}} ({low:{d}} to {high:{d}})".format(**arm[name], d=digits)


def _number(name: str, form: str, *, factor: float = 1.0) -> Callable[[dict[str, Any]], str]:
    return lambda arm: "-" if arm[name] is None else form.format(factor * arm[name])


def _bytes(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda arm: "-" if arm[name] is None else human_bytes(arm[name])


_ROWS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("samples/s (quartiles of blocks)", _spread("samples_per_s", ".1f")),
    ("samples/s, times the config's own", _spread("ratio", ".2f")),
    ("audio hours an hour", _number("audio_hours_per_h", "{:.1f}")),
    ("step, median", _number("step_s", "{:.0f} ms", factor=1000)),
    ("padding", _number("padding", "{:.1f} %", factor=100)),
    ("time to the first batch", _number("first_batch_s", "{:.2f} s")),
    ("waiting for data", _number("wait_share", "{:.1f} %", factor=100)),
    ("device utilisation", _number("utilisation", "{:.0f} %", factor=100)),
    ("device memory, most", _bytes("device_bytes")),
    ("host memory, most", _bytes("host_bytes")),
    ("CPU, 100 % a core", _number("cpu_percent", "{:.0f} %")),
    ("CPU time a sample", _number("cpu_s_per_sample", "{:.1f} ms", factor=1000)),
    ("TFLOP/s", _number("tflops", "{:.3g}")),
    ("MFU", _number("mfu", "{:.1f} %", factor=100)),
    ("compilations", _number("compilations", "{:.0f}")),
    ("skipped steps", _number("skipped_steps", "{:.0f}")),
    ("loss, first step", lambda arm: f"{arm['losses'][0]:.4f}"),
    ("loss, last step", lambda arm: f"{arm['losses'][-1]:.4f}"),
)


_DPI = 120
_OURS, _OTHERS = "#c2410c", ("#52606d", "#2b6cb0", "#9aa5b1", "#2f855a", "#805ad5")


def draw(document: dict[str, Any], path: Path) -> None:
    """Makes `path` a PNG of a comparison's document. Raises MissingExtraError where matplotlib is not installed."""
    figure = _new_figure(12, 8)
    arms: dict[str, dict[str, Any]] = document["arms"]
    colours = dict(zip(arms, (_OURS, *_OTHERS * len(arms)), strict=False))
    (speed, losses), (steps, shares) = figure.subplots(2, 2)
    _speed(speed, arms, colours)
    _losses(losses, arms, colours)
    _steps(steps, arms, colours)
    _shares(shares, arms, colours)
    title = f"{printable(document['name'])}: {document['steps']} steps, {document['samples']} samples, "
    figure.suptitle(title + (document["device"] or document["machine"]["cpu"]), parse_math=False)
    _write(figure, path)


def draw_runs(document: dict[str, Any], path: Path) -> None:
    """Makes `path` a PNG of the loss curves of two runs. Raises MissingExtraError where matplotlib is not installed."""
    figure = _new_figure(9, 4.5)
    axes = figure.subplots()
    for name, curve, colour in zip(document["runs"], document["losses"], (_OURS, _OTHERS[0]), strict=True):
        label = printable(from_here(name)).replace("$", r"\$")
        axes.plot(*zip(*curve, strict=True), color=colour, label=label, linewidth=1.2)
    axes.set_title("loss by step, mean since the log line before", loc="left", fontsize=10)
    axes.legend(fontsize=8)
    _write(figure, path)


def _new_figure(width_in: float, height_in: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        raise MissingExtraError(f"the picture needs matplotlib ({err}); run: {install_line('report')}") from err
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _write(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    write_bytes(path, buffer.getbuffer())


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
    width = 0.8 / len(arms)
    for number, (name, arm) in enumerate(arms.items()):
        found = [(labels.index(label), 1000 * row["step_s"]) for label, row in arm["buckets"].items()]
        places = [place + (number - (len(arms) - 1) / 2) * width for place, _ in found]
        axes.bar(places, [value for _, value in found], width=width, color=colours[name])
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
    axes.set_title("median step by bucket, ms", loc="left", fontsize=10)


def _shares(axes: Axes, arms: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    names = {"waiting for data": "wait_share", "padding": "padding", "device busy": "utilisation", "MFU": "mfu"}
    known = {label: key for label, key in names.items() if any(arm[key] is not None for arm in arms.values())}
    width = 0.8 / len(arms)
    for number, (name, arm) in enumerate(arms.items()):
        places = [place + (number - (len(arms) - 1) / 2) * width for place in range(len(known))]
        axes.bar(places, [100 * (arm[key] or 0.0) for key in known.values()], width=width, color=colours[name])
    axes.set_xticks(range(len(known)), list(known))
    axes.set_title("shares, %", loc="left", fontsize=10)
