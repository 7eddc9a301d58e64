"""What `forebay lint` says: a table, the document of --json, and the ids that are better left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forebay.inspect.checks.limits import SEVERITIES, Limits, Severity
from forebay.inspect.checks.measured import Finding
from forebay.terminal import paragraph, table, wrapped
from forebay.visible import from_here, printable


@dataclass(frozen=True, kw_only=True)
class Linted:
    """A set that was linted. left_out: why checks were not made, by name. excluded: samples, by a config's settings."""

    name: str
    is_raw: bool
    num_samples: int
    left_out: Mapping[str, str]
    excluded: Mapping[str, int]
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class LintReport:
    """What was found, the worst first. drop_ids: the file that ids were written to. shown: findings a check in lines.

    severity: from which on ids are dropped, and `--strict` fails.
    """

    sets: Sequence[Linted]
    findings: Sequence[Finding]
    notes: Sequence[str]
    severity: Severity
    limits: Limits
    drop_ids: str | None = None
    shown: int = 3
    seconds: float = 0.0

    def counts(self) -> dict[str, int]:
        """Returns the number of findings by severity."""
        found = Counter(each.severity for each in self.findings)
        return {severity: found[severity] for severity in SEVERITIES}

    def at_least(self, severity: Severity) -> list[Finding]:
        """Returns the findings of a severity and of worse ones."""
        wanted = SEVERITIES[: SEVERITIES.index(severity) + 1]
        return [each for each in self.findings if each.severity in wanted]

    def dropped(self) -> list[str]:
        """Returns the ids that `--drop-ids` writes, each once, by set and place; one with a line end has no line."""
        names = [each.name for each in self.sets]
        found = sorted(self.at_least(self.severity), key=lambda each: (names.index(each.set), each.row, each.sample_id))
        return list(dict.fromkeys(each.sample_id for each in found if _fits_a_line(each.sample_id)))

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON document."""
        return {
            "sets": [asdict(each) for each in self.sets],
            "counts": self.counts(),
            "checks": [
                {"check": check, "severity": severity, "findings": count}
                for (severity, check), count in self._by_check().items()
            ],
            "findings": [each.to_json() for each in self.findings],
            "notes": list(self.notes),
            "limits": asdict(self.limits),
            "drop_ids": self.drop_ids,
            "dropped": len(self.dropped()) if self.drop_ids is not None else None,
            "seconds": self.seconds,
        }

    def lines(self) -> Iterator[str]:
        """Yields what `forebay lint` prints."""
        for each in self.sets:
            yield from _set_lines(each)
        yield from _table(self._by_check())
        for (_, check), _count in self._by_check().items():
            yield from self._check_lines(check)
        for note in self.notes:
            yield from wrapped("note: ", printable(note))
        counts = ", ".join(f"{count} of {severity}" for severity, count in self.counts().items() if count)
        yield from wrapped("", f"{len(self.findings)} findings{f': {counts}' if counts else ''}; {self.seconds:.1f} s")
        if self.drop_ids is not None:
            yield from self._drop_lines(self.drop_ids)

    def _drop_lines(self, path: str) -> Iterator[str]:
        yield from wrapped(
            "",
            f"wrote {len(self.dropped())} ids of {self.severity} or worse to {from_here(path)}: "
            f'[filter] drop_ids = "{from_here(path)}" leaves them out',
        )
        lost = {each.sample_id for each in self.at_least(self.severity) if not _fits_a_line(each.sample_id)}
        if lost:
            text = f"{len(lost)} ids hold a line end and stand in no list of lines; leave them out by source.exclude"
            yield from wrapped("", text)

    def _by_check(self) -> dict[tuple[Severity, str], int]:
        found = Counter((each.severity, each.check) for each in self.findings)
        return dict(sorted(found.items(), key=lambda item: (SEVERITIES.index(item[0][0]), item[0][1])))

    def _check_lines(self, check: str) -> Iterator[str]:
        found = [each for each in self.findings if each.check == check]
        if not self.shown:
            return
        yield f"{check}:"
        for each in found[: self.shown]:
            of_set = from_here(each.set) if len(self.sets) > 1 else ""
            place = f"row {each.row}" if each.row >= 0 else ""
            where = ", ".join(part for part in (of_set, place, each.source) if part)
            head = " ".join(part for part in (each.sample_id, f"({where})" if where else "") if part)
            yield from paragraph("  ", printable(f"{head}: {_without_id(each)}" if head else each.message))
        if len(found) > self.shown:
            yield f"  and {len(found) - self.shown} more: --show {len(found)}, or --json"


def _set_lines(each: Linted) -> Iterator[str]:
    read = "raw data" if each.is_raw else "its cache"
    yield printable(f"{from_here(each.name)}: {each.num_samples} samples, by {read}")
    if each.excluded:
        counts = ", ".join(f"{reason} {count}" for reason, count in each.excluded.items())
        yield from wrapped("  excluded by its settings: ", counts)
    for why in dict.fromkeys(each.left_out.values()):
        names = ", ".join(name for name, said in each.left_out.items() if said == why)
        yield from wrapped("  not checked: ", printable(f"{names}: {why}"))
    for note in each.notes:
        yield from wrapped("  ", printable(note))


def _table(counts: Mapping[tuple[Severity, str], int]) -> Iterator[str]:
    if not counts:
        return
    rows = [(check, severity, str(count)) for (severity, check), count in counts.items()]
    yield from table(("check", "severity", "findings"), rows, left=2)


def _without_id(each: Finding) -> str:
    """A build's message begins with the id, which stands in front of it already."""
    return each.message.removeprefix(f"sample {each.sample_id}: ").removeprefix(f"{each.sample_id}: ")


def _fits_a_line(sample_id: str) -> bool:
    return sample_id != "" and "\n" not in sample_id and not sample_id.endswith("\r")
