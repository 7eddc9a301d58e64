"""What `forebay doctor` prints: a table of stages, predictions, advice; or one document."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.measure.advice import Advice
from forebay.measure.diagnosis import MeasuredArms
from forebay.measure.shown_figures import duration, ms_text, percent, short_number
from forebay.terminal import human_number, paragraph, table
from forebay.visible import from_here, human_bytes

_TITLES = {"raw": "from raw data", "build": "a build, beside that", "cache": "from a cache", "step": "training"}


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """What `forebay doctor --json` prints; its fields are an interface."""

    config: str
    seconds: float
    found: MeasuredArms
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

    def lines(self) -> list[str]:
        """Returns what is printed, no line wider than the terminal."""
        parts = (self._head, self._stages, self._not_measured, self._predictions, self._advice)
        return [line for part in parts for line in part()]

    def _head(self) -> Iterator[str]:
        found = self.found
        where = "no cache is sealed"
        if found.opened is not None and found.opened.place is not None:
            hours = "" if found.opened.hours is None else f", {found.opened.hours:.3g} h"
            where = f"{from_here(found.opened.place)}: {found.opened.num_samples:,} samples{hours}"
        elif found.listed is not None:
            few = "" if found.listed.is_whole else "the first "
            where += f"; {few}{found.listed.num_rows:,} rows"
            where += "" if found.listed.hours is None else f", {found.listed.hours:.3g} h"
        yield from paragraph("", f"{from_here(self.config)}, {found.cores} cores: {where}")
        if (worst := found.bottleneck) is not None:
            yield from paragraph("bottleneck: ", f"{worst.name}, {ms_text(worst.ms)} a sample")

    def _stages(self) -> Iterator[str]:
        for kind, title in _TITLES.items():
            own = [stage for stage in self.found.stages if stage.kind == kind]
            total = sum(stage.ms for stage in own)
            rows = []
            for stage in own:
                rate = human_number(1e3 / stage.ms) if stage.ms else ""
                rows.append([stage.name, short_number(stage.ms), percent(stage.ms / total if total else 0.0), rate])
            if rows:
                yield ""
                yield from table([title, "ms a sample", "share", "samples/s"], rows, left=1)
        yield from self._cold()

    def _cold(self) -> Iterator[str]:
        reads, pieces = self.found.raw_read, self.found.pieces
        for what, told in (("raw read", reads), ("cached read", pieces)):
            if told is not None:
                cold, why = told.cold_ms, told.why_not_cold
                found = f"not measured, {why}" if cold is None else f"{ms_text(cold)} a sample"
                yield from paragraph("  ", f"{what} from the disk: {found}")

    def _not_measured(self) -> Iterator[str]:
        if self.found.not_measured:
            yield ""
        for name, why in self.found.not_measured.items():
            yield from paragraph("not measured: ", f"{name}: {why}")

    def _predictions(self) -> Iterator[str]:
        found = self.found
        yield ""
        if found.predictions:
            rows = []
            for each in found.predictions:
                idle = "?" if each.idle is None else percent(each.idle)
                rows.append([each.name, idle, duration(each.epoch_s), human_number(each.samples_per_s), each.sure])
            yield from table(["a run", "idle", "an epoch", "samples/s", "how sure"], rows, left=1, last_left=True)
            if found.steps is None:
                yield from paragraph("  ", "idle needs a step: a [train] model in the config, or --step-s")
        if found.build_s is not None and found.size_bytes is not None:
            yield from paragraph("a build: ", f"{duration(found.build_s)}, {human_bytes(found.size_bytes)}")

    def _advice(self) -> Iterator[str]:
        yield ""
        if self.found.is_empty:
            yield from paragraph("", "nothing could be measured, so nothing is said of what to change")
        elif not self.advice:
            yield from paragraph("", "nothing to change was found")
        for number, each in enumerate(self.advice, 1):
            yield from paragraph(f"{number}. ", f"{each.text}: {each.gain} ({each.sure})")
            yield from paragraph("   ", each.line)
        if self.applied is not None:
            yield from paragraph("written: ", from_here(self.applied))
        elif self.wants_file:
            yield from paragraph("", "nothing is written: no setting that --apply may change would be better")
