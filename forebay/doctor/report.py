"""What `forebay doctor` prints: a table of stages, predictions, advice; or one document."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.doctor.advice import Advice, duration, ms_text, percent
from forebay.doctor.diagnosis import Measured
from forebay.doctor.figures import Stage
from forebay.visible import from_here, human_bytes

_TITLES = {"raw": "from raw data", "build": "a build, beside that", "cache": "from a cache", "step": "training"}
_NARROW, _WIDEST = 60, 100


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """What `forebay doctor --json` prints; its fields are an interface."""

    config: str
    seconds: float
    found: Measured
    advice: Sequence[Advice]
    applied: str | None = None
    """The file that `--apply` wrote."""
    wants_file: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns all figures, predictions and advice as JSON values."""
        found = self.found
        bottleneck = found.bottleneck
        measured = dataclasses.asdict(found)
        plan = measured.get("plan")
        if plan is not None:
            del plan["batches"]
        return {
            "config": self.config,
            "seconds": round(self.seconds, 1),
            "cached": found.is_sealed,
            "bottleneck": None if bottleneck is None else bottleneck.name,
            "stages": [dataclasses.asdict(stage) for stage in found.stages],
            "predictions": [dataclasses.asdict(each) for each in found.predictions],
            "build_s": found.build_s,
            "size_bytes": found.size_bytes,
            "advice": [dataclasses.asdict(each) for each in self.advice],
            "applied": self.applied,
            "measured": measured,
        }

    def lines(self, width: int | None = None) -> list[str]:
        """Returns what is printed, in lines of at most so many columns; None: those of the terminal."""
        columns = min(width or shutil.get_terminal_size((80, 24)).columns, _WIDEST)
        parts = (self._head, self._stages, self._not_measured, self._predictions, self._advice)
        return [line for part in parts for line in part(columns)]

    def _head(self, width: int) -> Iterator[str]:
        found = self.found
        where = "no cache is sealed"
        if found.opened is not None and found.opened.place is not None:
            hours = "" if found.opened.hours is None else f", {found.opened.hours:.3g} h"
            where = f"{from_here(found.opened.place)}: {found.opened.num_samples:,} samples{hours}"
        elif found.listed is not None:
            few = "" if found.listed.is_whole else "the first "
            where += f"; {few}{found.listed.num_rows:,} rows"
            where += "" if found.listed.hours is None else f", {found.listed.hours:.3g} h"
        yield from _wrapped(f"{from_here(self.config)}, {found.cores} cores: {where}", width)
        if (worst := found.bottleneck) is not None:
            yield from _wrapped(f"bottleneck: {worst.name}, {ms_text(worst.ms)} a sample", width)

    def _stages(self, width: int) -> Iterator[str]:
        yield ""
        is_narrow = width < _NARROW
        name_width = 16 if is_narrow else 22
        head = f"{'stage':<{name_width}} {'ms/sample':>9} {'share':>7}"
        yield head if is_narrow else f"{head} {'samples/s':>10}"
        for kind, title in _TITLES.items():
            own = [stage for stage in self.found.stages if stage.kind == kind]
            total = sum(stage.ms for stage in own)
            if not own:
                continue
            yield title
            for stage in own:
                share = percent(stage.ms / total if total else 0.0)
                line = f"  {stage.name:<{name_width - 2}} {_number(stage.ms):>9} {share:>7}"
                yield line if is_narrow else f"{line} {_rate(stage):>10}"
        yield from self._cold(width)

    def _cold(self, width: int) -> Iterator[str]:
        reads, pieces = self.found.reads, self.found.pieces
        told: list[tuple[str, float | None, str]] = []
        if reads is not None:
            told.append(("raw read", reads.cold_ms, reads.why_not_cold))
        if pieces is not None:
            told.append(("cached read", pieces.cold_ms, pieces.why_not_cold))
        for what, cold, why in told:
            found = f"not measured, {why}" if cold is None else f"{ms_text(cold)} a sample"
            yield from _wrapped(f"{what} from the disk: {found}", width)

    def _not_measured(self, width: int) -> Iterator[str]:
        for name, why in self.found.not_measured.items():
            yield from _wrapped(f"not measured: {name}: {why}", width)

    def _predictions(self, width: int) -> Iterator[str]:
        found = self.found
        if found.predictions:
            yield ""
            is_narrow = width < _NARROW
            name_width = 20 if is_narrow else 38
            head = f"{'a run':<{name_width}} {'idle':>6} {'epoch':>8}"
            yield head if is_narrow else f"{head} {'samples/s':>10}  {'how sure':<12}"
            for each in found.predictions:
                idle = "?" if each.idle is None else percent(each.idle)
                name = each.name.replace(" workers", "").replace(" threads", "") if is_narrow else each.name
                name = name.replace("DataLoader", "DL") if is_narrow else name
                line = f"{name:<{name_width}} {idle:>6} {duration(each.epoch_s):>8}"
                yield line if is_narrow else f"{line} {each.samples_per_s:>10.4g}  {each.sure}"
        if found.steps is None and found.predictions:
            yield from _wrapped("idle needs a step: a [train] model in the config, or --step-s", width)
        if found.build_s is not None and found.size_bytes is not None:
            yield from _wrapped(f"a build: {duration(found.build_s)}, {human_bytes(found.size_bytes)}", width)

    def _advice(self, width: int) -> Iterator[str]:
        yield ""
        if not self.advice:
            yield "nothing to change was found"
        for number, each in enumerate(self.advice, 1):
            yield from _wrapped(f"{number}. {each.text}: {each.gain} ({each.sure})", width, indent=3)
            yield from _wrapped(f"   {each.line}", width, indent=3)
        if self.applied is not None:
            yield from _wrapped(f"written: {from_here(self.applied)}", width)
        elif self.wants_file:
            yield from _wrapped("nothing is written: no setting that --apply may change would be better", width)


def _wrapped(text: str, width: int, *, indent: int = 2) -> list[str]:
    return textwrap.wrap(
        text, max(width, 20), subsequent_indent=" " * indent, break_long_words=True, break_on_hyphens=False
    )


def _number(ms: float) -> str:
    return f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}"


def _rate(stage: Stage) -> str:
    return f"{1e3 / stage.ms:.4g}" if stage.ms else ""
