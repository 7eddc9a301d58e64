"""`forebay lint`: measures the sets that are named, lets the checks look at them, and says what they found.

`[filter]` of a config that is linted: what it leaves out has no findings, and is no twin of another sample. The report
is a table, the document of --json, and the ids that are better left out.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from forebay.config.remote import RemoteConfig, is_url, url_or_path
from forebay.config.tree import Config, FilterConfig
from forebay.errors import ConfigError
from forebay.inspect.checks.judge import comparable, duplicates, judged, leaks
from forebay.inspect.checks.limits import BY_NAME, CHECKS, SEVERITIES, Limits, Severity
from forebay.inspect.checks.measured import Finding, Measured
from forebay.inspect.checks.raw_data import measure_raw
from forebay.inspect.checks.sealed_cache import measure_cache
from forebay.steps.recipe import load_config, recipe_of
from forebay.steps.text.script import scripts_of
from forebay.store.by_hand import read_ids
from forebay.store.cache import Cache, open_cache
from forebay.store.files import write_bytes
from forebay.store.layout import TEXT, Array
from forebay.store.lookup import find_cache
from forebay.store.metadata import check_description, foreign_values
from forebay.store.output import check_output
from forebay.store.remote.raw.raw_sources import naming_urls
from forebay.store.selection import Filter
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
    """The findings, the worst first. drop_ids: the file that ids were written to. shown: findings a check in lines.

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
            "findings": [asdict(each) for each in self.findings],
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
        rows = [(check, severity, str(count)) for (severity, check), count in self._by_check().items()]
        yield from table(("check", "severity", "findings"), rows, left=2) if rows else ()
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
            # A build's message begins with the id, which stands in front of it already.
            said = each.message.removeprefix(f"sample {each.sample_id}: ").removeprefix(f"{each.sample_id}: ")
            head = " ".join(part for part in (each.sample_id, f"({where})" if where else "") if part)
            yield from paragraph("  ", printable(f"{head}: {said}" if head else each.message))
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


def _fits_a_line(sample_id: str) -> bool:
    return sample_id != "" and "\n" not in sample_id and not sample_id.endswith("\r")


def chosen_of_raw(found: Measured, settings: FilterConfig) -> Measured:
    """Returns measured raw data without what the lists of a filter leave out. Raises ConfigError for a bad list.

    Conditions and quotas are of the columns of a cache: a note says that they were not looked at.
    """
    if not settings.is_given:
        return found
    is_dropped = np.zeros(len(found), bool)
    lists: Mapping[str, str | None] = {"ids": settings.ids, "drop_ids": settings.drop_ids}
    for name, path in lists.items():
        if path is not None:
            ids = read_ids(Path(path), setting=f"filter.{name}", may_be_empty=name == "drop_ids")
            is_listed = np.asarray(pc.is_in(found.ids, value_set=ids).to_numpy(zero_copy_only=False), bool)
            is_dropped |= is_listed if name == "drop_ids" else ~is_listed
    others = [name for name in ("where", "quota") if getattr(settings, name)]
    note = f"[filter] {' and '.join(others)}: of a cache's columns, and not looked at in raw data"
    return _without(found, is_dropped, *([note] if others else []))


def _without(found: Measured, is_dropped: Array, *notes: str) -> Measured:
    count = int(is_dropped.sum())
    said = [f"[filter] leaves out {count} of {len(found)} samples, which have no findings"] if count else []
    return replace(found, dropped=is_dropped, notes=[*found.notes, *said, *notes])


@dataclass(frozen=True, kw_only=True)
class Target:
    """A set that is linted, or compared with: a config or the place of a cache. first: so many of it count."""

    config: Config | None = None
    place: str = ""
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    first: int | None = None

    @property
    def name(self) -> str:
        """The name of the set."""
        return self.place if self.config is None else self.config.path

    def is_same(self, other: Target) -> bool:
        """Returns whether two targets are the same file or folder."""
        if is_url(self.name) or is_url(other.name):
            return self.name == other.name
        return os.path.realpath(self.name) == os.path.realpath(other.name)


@dataclass(frozen=True, kw_only=True)
class LintOptions:
    """The options of lint. severity: from which on an id is dropped, and `--strict` fails. skip: checks left out.

    is_raw: raw data is read also where a cache has it. most: samples of each cache that are looked at.
    """

    limits: Limits = field(default_factory=Limits)
    severity: Severity = "error"
    drop_ids: Path | None = None
    skip: Sequence[str] = ()
    is_raw: bool = False
    workers: int | None = None
    most: int | None = None
    shown: int = 3
    progress: bool = True


def lint(targets: Sequence[Target], against: Sequence[Target], options: LintOptions) -> LintReport:
    """Returns what the checks find in some sets, in the order of severity, check, set and place.

    against: sets whose content must not be in these; those that a config is evaluated on come beside them.
    Raises ConfigError, ManifestError or a CacheError where a set cannot be read, and what reading raises for the
    machine. A row that cannot be used is a finding.
    """
    started_s = time.monotonic()
    for name in options.skip:
        # A build's reasons are checks too, and which there are is for the build to say.
        if name not in BY_NAME and not name.replace("_", "").isalpha():
            raise ConfigError(f"--skip {name}: wanted the name of a check; all of them: forebay lint --explain-checks")
    if options.drop_ids is not None:
        for target in targets:
            folder = None if target.config is not None or is_url(target.place) else Path(target.place)
            check_output(options.drop_ids, "--drop-ids", folder=folder, config=target.config)
    measured = [_measured(target, options) for target in targets]
    findings = [
        each for found in measured for each in (*judged(found, options.limits), *duplicates(found, options.limits))
    ]
    notes = [
        f"{target.name}: the sources of its [mixture] are not read; name their configs or caches too"
        for target in targets
        if target.config is not None and target.config.mixture.source
    ]
    findings += _leaks(targets, measured, against, options, notes)
    kept = sorted((each for each in findings if each.check not in options.skip), key=Finding.order)
    report = LintReport(
        sets=[_linted(found) for found in measured],
        findings=kept,
        notes=notes,
        severity=options.severity,
        limits=options.limits,
        drop_ids=None if options.drop_ids is None else str(options.drop_ids),
        shown=options.shown,
        seconds=time.monotonic() - started_s,
    )
    if options.drop_ids is not None:
        write_bytes(options.drop_ids, "".join(f"{name}\n" for name in report.dropped()).encode())
    return report


def _measured(target: Target, options: LintOptions) -> Measured:
    """Returns what is known of a target: of a config its raw data, or a cache of it that keeps as much."""
    if target.config is None:
        return _of_cache(open_cache(target.place, remote=target.remote), target, options)
    config, recipe = target.config, recipe_of(target.config)
    if not options.is_raw:
        with naming_urls():
            lookup = find_cache(config, recipe)
        if lookup.found is not None:
            cache = open_cache(lookup.found.place, remote=config.remote)
            # A cache keeps no sizes of images, and of recordings enough only with their waveforms.
            if lookup.state == "absent" or "waveform" in cache.fields or cache.groups == (TEXT,):
                return _of_cache(cache, target, options)
    found = measure_raw(config, recipe, options.limits, name=target.name, progress=options.progress)
    return chosen_of_raw(found, config.filter)


def _of_cache(cache: Cache, target: Target, options: LintOptions) -> Measured:
    workers = options.workers if target.config is None else target.config.run.num_workers
    check_description(cache.folder, cache.metadata)
    with foreign_values(cache.folder):
        found = measure_cache(
            cache,
            options.limits,
            name=target.name,
            remote=target.remote if target.config is None else target.config.remote,
            workers=workers,
            most=options.most,
            progress=options.progress,
        )
    if target.config is None or not target.config.filter.is_given:
        return found
    is_kept = np.zeros(len(cache), bool)
    is_kept[Filter.of(target.config.filter).choose(cache, name=cache.place).places] = True
    return _without(found, ~is_kept[: len(found)])


def _linted(found: Measured) -> Linted:
    known = [
        f"{name!r} ({count} samples)"
        for number, name in enumerate(found.languages)
        if name and scripts_of(name) is None and (count := int((found.language_of == number).sum()))
    ]
    note = f"languages whose script is not known: {', '.join(known[:10])}"
    notes = [note + (f" and {len(known) - 10} more" if len(known) > 10 else "")] if known else []
    return Linted(
        name=found.name,
        is_raw=found.is_raw,
        num_samples=len(found),
        left_out={each.name: found.left_out[each.needs] for each in CHECKS if each.needs in found.left_out},
        excluded=found.excluded,
        notes=[*found.notes, *notes],
    )


def _leaks(
    targets: Sequence[Target],
    measured: Sequence[Measured],
    against: Sequence[Target],
    options: LintOptions,
    notes: list[str],
) -> Iterator[Finding]:
    for number, found in enumerate(measured):
        for other in measured[number + 1 :]:
            yield from _compared(found, other, options, notes, first=None)
    for other_target in _others(targets, against, notes):
        other = _measured(other_target, options)
        for found in measured:
            yield from _compared(found, other, options, notes, first=other_target.first)


def _compared(
    found: Measured, other: Measured, options: LintOptions, notes: list[str], *, first: int | None
) -> Iterator[Finding]:
    if not comparable(found, other, options.limits):
        notes.append(
            f"{found.name} and {other.name} were not compared: they keep no content of the same form; name the configs "
            "of both, with --raw"
        )
    yield from leaks(found, other, options.limits, first=first)


def _others(targets: Sequence[Target], against: Sequence[Target], notes: list[str]) -> list[Target]:
    """Returns the sets to compare with, each once: those that were named, and those that configs are evaluated on."""
    others: list[Target] = []
    for other in [*against, *(each for target in targets for each in evaluated(target, notes))]:
        if any(other.is_same(target) for target in targets):
            notes.append(f"{other.name} is a set that is linted: it is not compared with itself")
        elif not any(other.is_same(each) for each in others):
            others.append(other)
    return others


def evaluated(target: Target, notes: list[str]) -> Iterator[Target]:
    """Yields the sets of `[[train.eval]]` of a target, first under the cache root that the command gives."""
    config = target.config
    if config is None:
        return
    for entry in config.train.eval:
        if entry.cache is not None:
            yield Target(place=url_or_path(entry.cache), remote=config.remote, first=entry.max_samples)
            continue
        assert entry.config is not None
        if not Path(entry.config).exists():
            notes.append(f"[[train.eval]] {entry.name}: {entry.config} is not there; nothing was compared with it")
            continue
        root = [each for each in config.given if each.partition("=")[0].strip() == "run.cache_root"]
        found = load_config(entry.config, overrides=root)
        if root and find_cache(found, recipe_of(found)).found is None:
            found = load_config(entry.config)
        yield Target(config=found, first=entry.max_samples)
