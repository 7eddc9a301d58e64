"""How far a build is, by what is on disk: shards, parts, rate, what is left, and the command to run next."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forebay.config.tree import Config
from forebay.errors import RemoteError
from forebay.preprocess.listing_folder import Outline, outline, submission_file
from forebay.preprocess.runner.parts import BuildRate, PartRecord, compressed, rate_of, read_parts, seconds_left
from forebay.preprocess.workspace import finished_keys, folders_of, workspace_folder, workspaces_of
from forebay.steps.recipe import Recipe, recipe_of
from forebay.store.key import SHORT
from forebay.store.layout import Array, Group
from forebay.store.lookup import Sealed, find_cache
from forebay.store.memo import Memo
from forebay.store.remote.raw.raw_sources import naming_urls
from forebay.terminal import CommandReport, duration
from forebay.visible import from_here


@dataclass(frozen=True, kw_only=True)
class SeenParts:
    """A build as it stands on disk at one moment.

    sealed: its cache. unknown: a cache of its recipe, if the raw data would have to be hashed to know whether it is
    this one. workspace: where finished shards stand; None where no run has begun. parts: what the runs say, oldest
    first. submission: the jobs that were last submitted. problem: what could not be looked at.
    """

    now: float
    sealed: Sealed | None
    unknown: Sealed | None
    prepared: Outline | None
    workspace: Path | None
    parts: Sequence[PartRecord]
    submission: Mapping[str, Any] | None
    problem: str | None

    @cached_property
    def keys(self) -> Mapping[Group, list[str]]:
        """The keys of all shards by group, in their order; empty where nothing is prepared."""
        if self.prepared is None:
            return {}
        return {group: cuts["key"].to_pylist() for group, cuts in self.prepared.by_group.items()}

    @cached_property
    def finished(self) -> Mapping[Group, set[str]]:
        """The keys of the finished shards by group."""
        if self.workspace is None:
            return {}
        return {group: finished_keys(self.workspace / group) for group in self.keys or folders_of(self.workspace)}

    @cached_property
    def is_finished(self) -> Mapping[Group, Array]:
        """Says of every shard of a prepared build whether it is finished, by group."""
        return {
            group: np.fromiter(map(self.finished.get(group, set()).__contains__, keys), bool, len(keys))
            for group, keys in self.keys.items()
        }

    @property
    def is_staged(self) -> bool:
        """Whether finished shards stand in a store, and only the records of this node's runs are seen from here."""
        return self.workspace is not None and self.workspace.name.endswith("-stage")

    @property
    def num_shards(self) -> int:
        """How many shards the group has that has most; 0 where nothing is prepared."""
        return max(map(len, self.keys.values()), default=0)

    def missing_parts(self, num_parts: int) -> list[int]:
        """Returns which of so many parts of a prepared build have shards that are not finished."""
        missing: Array = np.flatnonzero(~self._whole_cuts())
        return [int(part) for part in np.unique(missing % num_parts)]

    def _whole_cuts(self) -> Array:
        whole: Array = np.ones(self.num_shards, bool)
        for is_there in self.is_finished.values():
            whole[: len(is_there)] &= is_there
        return whole


def seen_of(config: Config, recipe: Recipe) -> SeenParts:
    """Returns what is on disk of a config's build; a root in a store is asked for its caches."""
    now = time.time()
    config = replace(config, loader=replace(config.loader, cache_dir=None))
    with naming_urls():
        sealed, unknown, problem = _caches(config, recipe)
        prepared = outline(config, recipe)
    workspace = _workspace(config, recipe, None if prepared is None else prepared.key)
    return SeenParts(
        now=now,
        sealed=sealed,
        unknown=unknown,
        prepared=prepared,
        workspace=workspace,
        parts=[] if workspace is None else read_parts(workspace, now=now),
        submission=_submission(config, recipe),
        problem=problem,
    )


def _caches(config: Config, recipe: Recipe) -> tuple[Sealed | None, Sealed | None, str | None]:
    try:
        lookup = find_cache(config, recipe, may_hash=False, memo=Memo.of(config))
    except RemoteError as err:
        return None, None, f"whether the cache is sealed is not known: {err}"
    found = lookup.found
    if found is not None and found.metadata.get("codec") == config.codec:
        return found, None, None
    return None, lookup.nearest if lookup.state == "unknown" else None, None


def _workspace(config: Config, recipe: Recipe, key: str | None) -> Path | None:
    """Returns the folder of a build: of the prepared one, else of the one that was begun last."""
    begun = workspaces_of(config, recipe.key)
    if key is not None:
        named = [workspace_folder(config, key, suffix) for suffix in ("", "-rebuild", "-stage")]
        begun = [folder for folder in begun if folder in named]
    return next(iter(begun), None)


def _submission(config: Config, recipe: Recipe) -> Mapping[str, Any] | None:
    try:
        document = json.loads(submission_file(config, recipe).read_bytes())
        return {name: document[name] for name in ("num_parts", "jobs", "logs", "label", "submitted")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


BuildState = Literal["sealed", "not begun", "prepared", "building", "finished"]
PartState = Literal["done", "running", "failed", "interrupted", "lost", "incomplete", "not started"]
_SHOWN = 8
"""Parts of a state that are listed one by one."""
_ORDER: tuple[PartState, ...] = ("done", "running", "failed", "interrupted", "lost", "incomplete", "not started")


@dataclass(frozen=True, kw_only=True)
class PartStatus:
    """One part of a build, or a run of all of it (`part` is None).

    state: `done`: all of its shards are finished. `running`, `failed`, `interrupted`: what its last run says. `lost`:
    by its record it runs, but its process is gone, or has not been heard of for minutes. `incomplete`: its last run
    ended well, and shards are gone since. `not started`: no run has begun it.
    host, pid, job: of that run; job: of Slurm. heard_s: seconds since it said something. to_make, made: shards.
    under_way: rows of shards that are not finished. error: the first line of what ended it. log: where its messages
    are, if that is a file.
    """

    part: int | None
    state: PartState
    runner: str | None = None
    host: str | None = None
    pid: int | None = None
    job: str | None = None
    heard_s: float | None = None
    to_make: int = 0
    made: int = 0
    under_way: int = 0
    error: str | None = None
    log: str | None = None


@dataclass(frozen=True, kw_only=True)
class StatusReport(CommandReport):
    """How far a build is; its fields are those of `forebay status --json`.

    state: `sealed`; `not begun`; `prepared`: listed and hashed; `building`; `finished`: all shards are there, and the
    cache is not sealed.
    config, key (None: not known without hashing), cache (of a sealed one). samples, shards: of the build, where they
    are known; shards of one group. all_shards: of all groups. finished: shards by group; share: of all shards.
    num_parts: of the array that was last begun, 0 for a build in one piece. parts: each of them; a build in one piece
    has its last run here.
    shards_a_second, rows_a_second: over the last window_s seconds, all runs together; unit: what a row is.
    seconds_left: None where nothing moves. next: commands, the first is the one to run. notes: what else is to be
    known.
    """

    config: str
    state: BuildState
    key: str | None = None
    cache: str | None = None
    samples: int | None = None
    shards: int | None = None
    all_shards: int | None = None
    finished: dict[str, int] = field(default_factory=dict)
    share: float | None = None
    num_parts: int = 0
    parts: tuple[PartStatus, ...] = ()
    shards_a_second: float = 0.0
    rows_a_second: float = 0.0
    unit: str = "sample"
    window_s: float = 0.0
    seconds_left: float | None = None
    next: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yields what `forebay status` prints."""
        size = "" if self.samples is None else f", {self.samples} samples"
        size += "" if self.all_shards is None else f" in {self.all_shards} shards"
        if self.state == "sealed":
            yield f"sealed: {from_here(self.cache or '')}{size}"
        else:
            named = "" if self.key is None else f": key {self.key[:SHORT]}"
            yield f"{self.state}{named}{size}"
            yield from self._progress()
        yield from self.notes
        yield from (
            f"next: {command}" if not number else f"  or: {command}" for number, command in enumerate(self.next)
        )

    def _progress(self) -> Iterator[str]:
        if self.finished:
            of = "" if self.all_shards is None else f" of {self.all_shards}"
            share = "" if self.share is None else f" ({self.share:.1%})"
            counts = ", ".join(f"{group} {count}" for group, count in self.finished.items())
            yield f"finished: {sum(self.finished.values())}{of} shards{share}: {counts}"
        if self.window_s:
            rates = f"{self.shards_a_second:.3g} shards/s, {self.rows_a_second:.3g} {self.unit}s/s"
            left = "" if self.seconds_left is None else f"; about {duration(self.seconds_left)} left"
            yield f"rate: {rates} over the last {duration(self.window_s)}{left}"
        if self.parts:
            yield from self._part_lines()

    def _part_lines(self) -> Iterator[str]:
        counts = Counter(part.state for part in self.parts)
        if self.num_parts:
            named = ", ".join(f"{counts[state]} {state}" for state in _ORDER if counts[state])
            yield f"parts: {named} of {self.num_parts}"
        for state in _ORDER:
            parts = [part for part in self.parts if part.state == state]
            if state in ("done", "not started") and self.num_parts:
                if parts and state == "not started" and (plain := [p for p in parts if p.error is None]):
                    yield f"  not started: {compressed(part.part or 0 for part in plain)}"
                parts = [part for part in parts if part.error is not None]
            for part in parts[:_SHOWN]:
                yield f"  {_part_line(part)}"
            if len(parts) > _SHOWN:
                yield f"  and {len(parts) - _SHOWN} more {state}: " + compressed(p.part or 0 for p in parts[_SHOWN:])


def _part_line(part: PartStatus) -> str:
    name = "this build" if part.part is None else f"part {part.part}"
    where = [] if part.host is None else [f"on {part.host}, process {part.pid}"]
    where += [] if part.job is None else [f"job {part.job}"]
    text = f"{name} {part.state}" + (f" {', '.join(where)}" if where else "")
    if part.state in ("running", "lost"):
        text += f": {part.made} of {part.to_make} shards made"
        text += f", {part.under_way} rows of the next" if part.under_way else ""
        text += "" if part.heard_s is None else f", heard of {duration(part.heard_s)} ago"
    text += f": {part.error}" if part.error else ""
    return text + (f"; its log: {from_here(part.log)}" if part.log and part.state != "running" else "")


def status_of(config: Config) -> StatusReport:
    """Returns how far the build of a config is. Nothing is written, and no raw data is read."""
    seen = seen_of(config, recipe_of(config))
    notes = _notes(seen)
    is_alone = seen.workspace is None and seen.prepared is None
    # Of a cache whose raw data has the same names and sizes nothing better is known without reading them.
    sealed = seen.sealed or (seen.unknown if is_alone else None)
    if sealed is not None:
        metadata = sealed.metadata
        return StatusReport(
            config=config.path,
            state="sealed",
            key=sealed.key,
            cache=sealed.place,
            samples=metadata["num_samples"],
            shards=max(shape["num_shards"] for shape in metadata["groups"].values()),
            all_shards=sum(shape["num_shards"] for shape in metadata["groups"].values()),
            share=1.0,
            notes=tuple(notes),
        )
    if is_alone:
        here = (f"forebay preprocess {config.named}", f"forebay preprocess {config.named} --runner slurm --submit")
        return StatusReport(config=config.path, state="not begun", next=here, notes=tuple(notes))
    return _unsealed(config, seen, notes)


def _unsealed(config: Config, seen: SeenParts, notes: Sequence[str]) -> StatusReport:
    last = seen.parts[-1] if seen.parts else None
    finished = _finished(seen)
    samples: int | None
    if seen.prepared is not None:
        samples, key, total = seen.prepared.num_samples, seen.prepared.key, len(seen.prepared.cuts)
    else:  # a build that nobody prepared: what its last run has listed
        samples, total = (None, 0) if last is None else (last.samples, last.shards * len(finished))
        if last is not None and last.part is None:  # it has said what it found of all groups
            total = last.to_make + last.kept + last.linked or total
        key = "" if seen.workspace is None else seen.workspace.name.partition("-")[0]
    num_parts = _num_parts(seen)
    parts = _parts(seen, num_parts)
    rate = rate_of((record.history for record in seen.parts), now=seen.now)
    is_whole = total > 0 and sum(finished.values()) >= total
    is_begun = seen.parts or any(finished.values())
    state: BuildState = "finished" if is_whole else "building" if is_begun else "prepared"
    return StatusReport(
        config=config.path,
        state=state,
        key=key,
        samples=samples,
        shards=(seen.num_shards if seen.prepared is not None else 0 if last is None else last.shards) or None,
        all_shards=total or None,
        finished=finished,
        share=sum(finished.values()) / total if total else None,
        num_parts=num_parts,
        parts=tuple(parts),
        shards_a_second=rate.shards,
        rows_a_second=rate.rows,
        unit="sample" if last is None else last.unit,
        window_s=rate.window_s if rate.shards or rate.rows else 0.0,
        seconds_left=_seconds_left(seen, rate, total - sum(finished.values())),
        next=tuple(_next(config, state, parts, num_parts, seen)),
        notes=tuple(notes),
    )


def _finished(seen: SeenParts) -> dict[str, int]:
    """Returns the number of finished shards of each group that the build has."""
    if seen.prepared is not None:
        return {group: int(is_there.sum()) for group, is_there in seen.is_finished.items()}
    groups = seen.parts[-1].groups if seen.parts else tuple(seen.finished)
    return {group: len(seen.finished.get(group, ())) for group in groups}


def _notes(seen: SeenParts) -> list[str]:
    notes = [] if seen.problem is None else [seen.problem]
    if seen.unknown is not None:
        notes.append(
            f"{from_here(seen.unknown.place)} is of these settings, and of raw data of these names and sizes; whether "
            "that is the same would have to be hashed"
        )
    if seen.prepared is not None and seen.prepared.moved is not None and seen.sealed is None:
        notes.append(
            f"{seen.prepared.moved} is not what it was when the build was prepared: the next run lists again what "
            "changed, and keeps the shards that are the same"
        )
    if seen.is_staged:
        notes.append("finished shards stand in the bucket and are not counted; what is said is of this node's runs")
    if seen.submission is not None and seen.sealed is None:
        jobs = ", ".join(f"{name} {job}" for name, job in seen.submission["jobs"].items())
        notes.append(f"jobs of Slurm, as submitted: {jobs}; logs: {from_here(seen.submission['logs'])}")
    return notes


def _num_parts(seen: SeenParts) -> int:
    """Returns the parts of the array that was begun or submitted last, 0 where the build is in one piece."""
    last = seen.parts[-1] if seen.parts else None
    if seen.submission is not None and (last is None or last.part or seen.submission["submitted"] > last.started):
        return int(seen.submission["num_parts"])
    return 0 if last is None or last.part is None else last.part[1]


def _parts(seen: SeenParts, num_parts: int) -> list[PartStatus]:
    if not num_parts:
        return [_status(None, seen.parts[-1], seen)] if seen.parts else []
    newest = {record.part[0]: record for record in seen.parts if record.part and record.part[1] == num_parts}
    missing = set(seen.missing_parts(num_parts))
    done = set(range(num_parts)) - missing if seen.prepared is not None else set()
    found = []
    for number in range(num_parts):
        record = newest.get(number)
        if number in done and (record is None or record.state != "running"):
            # All of its shards are there; what ended its run then, will end the seal too.
            ended = record if record is not None and record.state == "failed" else None
            log, line = (None, None) if ended is None else (ended.log, ended.error)
            found.append(PartStatus(part=number, state="done", log=log, error=line))
        elif record is None:
            log, line = _log_of_unstarted(seen, number)
            found.append(PartStatus(part=number, state="not started", log=log, error=line))
        else:
            found.append(_status(number, record, seen))
    return found


def _status(number: int | None, record: PartRecord, seen: SeenParts) -> PartStatus:
    state: PartState = record.state
    if state == "done" and number is not None and seen.prepared is not None:
        state = "incomplete"
    of_record = ("runner", "host", "pid", "job", "to_make", "made", "under_way", "error", "log")
    said: dict[str, Any] = {name: getattr(record, name) for name in of_record}
    return PartStatus(part=number, state=state, heard_s=max(0.0, seen.now - record.last_sign), **said)


def _log_of_unstarted(seen: SeenParts, number: int) -> tuple[str | None, str | None]:
    """Returns the log of a job that wrote something and began no shard, and what it said last."""
    jobs: Mapping[str, str] = {} if seen.submission is None else seen.submission["jobs"]
    if seen.submission is None or "parts" not in jobs:
        return None, None
    path = os.path.join(seen.submission["logs"], f"part-{jobs['parts']}_{number}.log")
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("forebay: ")] or lines
        if told:
            return path, told[-1].removeprefix("forebay: ")
    return None, None


def _seconds_left(seen: SeenParts, rate: BuildRate, shards_left: int) -> float | None:
    """Returns how long the rest takes: by rows, of which shards have different numbers, where they are known."""
    if shards_left <= 0:
        return None
    if seen.prepared is None:
        running = [record for record in seen.parts if record.state == "running" and record.part is None]
        left = sum(record.rows_to_make - record.rows - record.under_way for record in running)
        return seconds_left(left, rate.rows) if running and left else None
    group = next(iter(seen.keys))  # of items, if there are any: they take the time
    left = int(seen.prepared.num_rows(group)[~seen.is_finished[group]].sum())
    return seconds_left(left, rate.rows) if left else seconds_left(shards_left, rate.shards)


def _next(
    config: Config, state: BuildState, parts: Sequence[PartStatus], num_parts: int, seen: SeenParts
) -> Iterator[str]:
    name = config.named + " --stage URL" * seen.is_staged
    if any(part.state == "running" for part in parts):
        return
    if state == "finished":
        yield f"forebay preprocess {name} --seal"
    for part in parts:
        if part.state in ("failed", "interrupted", "lost", "incomplete") and part.log:
            yield f"tail {shlex.quote(from_here(part.log))}"
            break
    if state != "finished" and (seen.submission is not None or any(part.runner == "slurm" for part in parts)):
        yield f"forebay preprocess {name} --runner slurm --submit"
    elif state != "finished" and num_parts:
        missing = [part.part for part in parts if part.state != "done" and part.part is not None]
        yield from (f"forebay preprocess {name} --shards {part}::{num_parts}" for part in missing[:1])
    elif state != "finished":
        yield f"forebay preprocess {name}"
