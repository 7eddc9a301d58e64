"""A config to a sealed cache: list, hash, cut, make or link every shard, seal. Run again, it goes on where it was."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.config.tree import Config
from forebay.config.url import is_url
from forebay.errors import BuildError
from forebay.plan.make import plan_example, plan_of
from forebay.preprocess.arriving import Arriving, Fresh
from forebay.preprocess.assemble import EXCLUDING, assemble
from forebay.preprocess.cut import Cut
from forebay.preprocess.listing import resolve
from forebay.preprocess.modality import Finished, Listing, Modality
from forebay.preprocess.pool import Pool, WorkerDied
from forebay.preprocess.published import check_options, pushed, require_whole
from forebay.preprocess.report import COUNTS, BuildReport, Options
from forebay.preprocess.shard_task import Progress, ShardTask, make_shard
from forebay.preprocess.sources.naming import manifest_files
from forebay.preprocess.sources.rows import described
from forebay.preprocess.unchanged import require_unchanged
from forebay.preprocess.workspace import Donors, Failure, Receipt, Workspace
from forebay.steps.recipe import recipe_of
from forebay.store.cache import open_cache
from forebay.store.files import require_writable
from forebay.store.key import SHORT, differences, digest, folder_name
from forebay.store.layout import Group
from forebay.store.lookup import Lookup, Sealed, failures_of, find_cache
from forebay.store.memo import Memo
from forebay.store.remote.raw.sources import is_here, localized, naming_urls
from forebay.store.seal import seal
from forebay.store.temporary import sweep
from forebay.store.verify import quick_problems, verify_folder
from forebay.visible import from_here

logger = logging.getLogger(__name__)

_WRITTEN_FOLDERS = ("", "plans", "tar_index", ".building")
"""Folders of a cache root in which a run that was killed may have left something unfinished."""

Unit = tuple[Cut, Group]
"""One shard of one group: the unit of work, commit and resume."""


def build(config: Config, options: Options | None = None) -> BuildReport:
    """Makes the sealed cache of a config, then its plan, and returns what was done; what is there already stays.

    A shard that is on disk and whole is kept, an equal one of any cache under the root is linked, the rest is made by
    worker processes. Interrupted at any instant, running it again goes on from the shards that were finished.
    Raises ManifestError or ConfigError where the input as a whole cannot be used, BuildError where more than
    `run.max_failed_share` of the samples are bad, a source changes meanwhile, a worker keeps dying, or the cache root
    cannot be written; PlanError where the samples of the sealed cache give no plan.
    Under a cache root in a store all this happens in what stands for the root on this node. The sealed cache is then
    pushed; RemoteError where the store does not take it.
    """
    options = options or Options()
    check_options(config, options)
    with naming_urls():
        report = _build_cache(config, options)
    if options.dry_run or not report.sealed:
        return report
    if config.remote_root is not None and not is_url(report.cache):
        report = pushed(config, report, options)
    return _with_plan(config, report)


def _with_plan(config: Config, report: BuildReport) -> BuildReport:
    if config.plan is None:
        where, example = from_here(config.path), plan_example(config)
        line = f"plan: none, {where} has no [plan] section; training needs one, for example: {example}"
        return replace(report, plan=line)
    planned = plan_of(config, open_cache(report.cache, remote=config.remote))
    folder = None if planned.folder is None else str(planned.folder)
    return replace(report, plan=planned.summary(), plan_folder=folder)


def _build_cache(config: Config, options: Options) -> BuildReport:
    started_s = time.monotonic()
    if not options.dry_run:
        for folder in _WRITTEN_FOLDERS:
            sweep(config.cache_root / folder)
    memo = Memo.of(config)
    # `loader.cache_dir` names what training reads; a build makes the cache of the config.
    config = replace(config, loader=replace(config.loader, cache_dir=None))
    recipe = recipe_of(config)
    lookup = find_cache(config, recipe, memo=memo)
    standing = _standing(config, lookup)
    if standing is not None and _usable(config, standing, options):
        if (failures := failures_of(config, standing)) is not None:
            raise BuildError(failures)
        if not options.dry_run:  # a builder that was killed after it had sealed left its folder
            Workspace(_workspace_folder(config, standing.key)).remove()
        return BuildReport.of_standing(standing, seconds=time.monotonic() - started_s)
    if not options.dry_run:
        setting = "run.cache_root" if config.remote_root is None else "remote.shard_dir"
        require_writable(config.cache_root, setting=setting)
    with Pool(config.run.num_workers or os.cpu_count() or 1) as pool:
        run = _Build(config, options, resolve(config, memo, pool.map, recipe=recipe), pool, memo)
        if standing is not None:
            run.compare_probe(standing)
        try:
            report = run.dry(standing) if options.dry_run else run.run(standing)
        except FileNotFoundError:
            # Where locks do nothing, a builder that has sealed takes the folder away from under this one.
            other = find_cache(config, recipe, memo=memo).found
            if other is None or not _usable(config, other, options):
                raise
            run.workspace.remove()
            return BuildReport.of_standing(other, seconds=time.monotonic() - started_s)
    return replace(report, seconds=time.monotonic() - started_s)


def _standing(config: Config, lookup: Lookup) -> Sealed | None:
    """Returns the sealed cache that was found, if it is in the codec of the config."""
    found = lookup.found
    if lookup.state == "absent":
        # A mistyped manifest must not pass for raw data that was taken away.
        manifest_files(localized(config).source)
        logger.warning("%s is not compared: some of its raw data is not here", found.place if found else "")
    if found is not None and found.metadata.get("codec") != config.codec:
        logger.info("%s has the same values in another codec", found.place)
        return None
    return found


class _Build:
    """One run of a build: the state that its steps share."""

    def __init__(self, config: Config, options: Options, listing: Listing, pool: Pool, memo: Memo) -> None:
        self.config = config
        self.options = options
        self.listing = listing
        self.modality = listing.modality
        self.pool = pool
        self.memo = memo
        # In workers, so that they are made under the same pinned threads as the shards; in two, because one needs torch
        # and the other transformers, and those take longer to load than a small build.
        groups = self.modality.groups
        measured = dict(zip(groups, pool.map(_measure, [(self.modality, group) for group in groups]), strict=True))
        self.probe = {group: digest for group, (digest, _) in measured.items()}
        self.constants = measured["text"][1]
        rows_per_shard = config.layout.rows_per_shard
        self.cuts = list(self.modality.cuts(listing, probe=self.probe, rows_per_shard=rows_per_shard))
        # A rebuild must not take up what an ordinary run left, but may go on from an interrupted rebuild.
        suffix = "-rebuild" if options.rebuild else ""
        manifests = [name if is_url(name) else os.path.abspath(name) for name in config.source.manifests]
        origin = digest({"recipe": listing.recipe.key, "manifests": manifests})
        self.workspace = Workspace(_workspace_folder(config, listing.key, suffix), origin)
        self.counts: Counter[str] = Counter()
        self.failures = [Failure(sample_id=i, reason=r, message=m) for i, r, m in listing.manifest.failed()]
        self.num_rows = len(listing.rows) + len(self.failures)
        if listing.manifest.unused:
            logger.warning("%s: %s", self.modality.row_unit, described(listing.manifest.unused))

    def run(self, standing: Sealed | None) -> BuildReport:
        self._check_failures(len(self.failures))
        with self.workspace.occupied():
            self._collect()
            self._make([unit for unit in self._mine() if self._key(unit) not in self.workspace.receipts])
            if any(self.workspace.load(unit[1], self._key(unit)) is None for unit in self._all()):
                return self._unsealed()
            self._compare_sources()
            report = self._seal(standing)
        self.workspace.remove()
        self.workspace.remove_superseded()
        return report

    def compare_probe(self, standing: Sealed) -> None:
        """Reports where the steps give other values here than where a cache of the same key was built."""
        for group in self.modality.groups:
            if (stored := standing.metadata["probe"].get(group)) != self.probe[group]:
                differ = (
                    "the %s steps give other values here than where %s was built (probe %s, stored %s): no %s shard "
                    "of it is kept"
                )
                logger.warning(differ, group, standing.place, self.probe[group], stored, group)

    def dry(self, standing: Sealed | None) -> BuildReport:
        """What `run` would do, and how large the cache would be."""
        donors = self._donors()
        for unit in self._mine():
            key = self._key(unit)
            kept = self.workspace.load(unit[1], key) is not None
            self.counts["kept" if kept else "linked" if key in donors else "written"] += 1
        size = self.modality.estimate_bytes(self.listing)
        target = self._target(standing)
        report = self._report(target, num_samples=len(self.listing.rows), sealed=False, estimated_bytes=size)
        return (
            report
            if self.config.remote_root is None
            else replace(report, cache=f"{self.config.remote_root}/{target.name}")
        )

    def _all(self) -> list[Unit]:
        return [(cut, group) for cut in self.cuts for group in self.modality.groups]

    def _mine(self) -> list[Unit]:
        first, step = self.options.part or (0, 1)
        return [(cut, group) for cut in self.cuts[first::step] for group in self.modality.groups]

    def _key(self, unit: Unit) -> str:
        return unit[0].keys[unit[1]]

    def _target(self, standing: Sealed | None) -> Path:
        return standing.folder if standing else self.config.cache_root / folder_name(self.config, self.listing.key)

    def _donors(self) -> Donors:
        """Where shards of this build stand already; a rebuild asks nobody."""
        wanted = set(map(self._key, self._all()))
        if self.options.rebuild:
            return {}
        return self.workspace.find_donors(self.config.cache_root, wanted, recipe_key=self.listing.recipe.key)

    def _collect(self) -> None:
        """Keeps what an earlier run finished and links what other caches have, each after re-hashing it."""
        donors = self._donors()
        for unit in self._mine():
            key, group = self._key(unit), unit[1]
            receipt = self.workspace.load(group, key)
            if receipt is not None:
                self.counts["kept"] += 1
                self._note(receipt)
            elif self.workspace.adopt(group, key, donors):
                self.counts["linked"] += 1

    def _make(self, missing: Sequence[Unit]) -> None:
        missing = list({self._key(unit): unit for unit in missing}.values())  # shards of equal content are one file
        rows: dict[Group, int] = dict.fromkeys(self.modality.groups, 0)
        for cut, group in missing:
            rows[group] += cut.num_media if group == "media" else cut.stop - cut.start
        with Progress(rows, media_unit=self.modality.media_unit, shown=self.options.progress) as progress:
            try:
                for task, (receipt, made) in self._made(map(self._task, _in_order(self._here_first(missing)))):
                    self.workspace.receipts[task.key] = receipt
                    self.counts["written" if made else "kept"] += 1
                    progress.shard_done(task, receipt)
                    self._note(receipt)
            except WorkerDied as err:
                raise BuildError(self._death(err)) from err

    def _made(self, tasks: Iterator[ShardTask]) -> Iterator[tuple[ShardTask, tuple[Receipt, bool]]]:
        """Yields every task with what it gave; what it reads of a store is downloaded ahead, if it is not here."""
        files = self.listing.files
        if all(file.stat is None or file.stat[0] >= 0 for file in files):
            return self.pool.run(make_shard, tasks)
        arriving = Arriving(_media_paths, total=len(files))
        return self.pool.run(Fresh(make_shard), arriving.ahead_of(tasks))

    def _here_first(self, units: Sequence[Unit]) -> list[Unit]:
        """Returns the units with those first whose raw data is on this node: what a bound keeps is not fetched twice.

        In the order of the listing, least recently used first, each tar would be evicted just before its turn.
        """
        group = self.listing.rows["group"].to_numpy()
        used = set(group[[unit[0].start for unit in units]].tolist()) if units else set()
        here = {number: is_here(self.listing.files[number].path) for number in used}
        return sorted(units, key=lambda unit: not here[int(group[unit[0].start])])

    def _task(self, unit: Unit) -> ShardTask:
        cut, group = unit
        files, rows = self.modality.task_rows(self.listing, cut, group)
        return ShardTask(
            group=group,
            key=cut.keys[group],
            folder=self.workspace.folder,
            rows=rows,
            files=files,
            modality=self.modality,
            max_open_tars=self.config.run.max_open_tars,
        )

    def _death(self, err: WorkerDied) -> str:
        task: ShardTask = err.task
        name, samples = self.modality.used_by(self.listing, task.rows, group=task.group, position=err.position)
        excluded = ", ".join(f'"{sample}"' for sample in samples)
        return (
            f"{err} at {name} ({task.group} shard of {task.files[0].name}, row {err.position}); finished shards "
            f"are kept. If that is to blame, leave it out: [source] exclude = [{excluded}] in {self.config.path}; "
            f"then run: forebay preprocess {self.config.path}"
        )

    def _note(self, receipt: Receipt) -> None:
        """Counts the bad samples of a shard; too many stop the build, with their list, and finished shards stay."""
        self.failures += [f for f in receipt.failures if f.reason not in EXCLUDING]
        self._check_failures(len(self.failures))

    def _check_failures(self, count: int) -> None:
        rows, share = self.num_rows, self.config.run.max_failed_share
        if count <= share * rows:
            return
        listed = "".join(f"\n  {f.sample_id}: {f.reason}: {f.message}" for f in self.failures[:20])
        more = f"\n  and {count - 20} more" if count > 20 else ""
        raise BuildError(
            f"{count} of {rows} samples are bad so far; run.max_failed_share = {share} allows {int(share * rows)}; "
            f"finished shards are kept:{listed}{more}\nmend them, or allow more: forebay preprocess {self.config.path} "
            f"--set run.max_failed_share={min(1.0, 2 * count / rows):.3g}"
        )

    def _compare_sources(self) -> None:
        """Raises BuildError where a source, tokenizer or processor is not what it was when it was listed."""
        require_unchanged(self.listing.files, memo=self.memo, map_=self.pool.map)
        changed = differences(recipe_of(self.config).document, self.listing.recipe.document)
        if changed:
            raise BuildError(
                f"the files that {changed[0]['field']} of {self.config.path} names changed during the build (digest "
                f"{changed[0]['stored']}, now {changed[0]['wanted']}): nothing is sealed, finished shards are kept; "
                f"run: forebay preprocess {self.config.path}"
            )

    def _seal(self, standing: Sealed | None) -> BuildReport:
        finished: Finished = {
            group: [
                (self.workspace.path(group, c.keys[group]), self.workspace.receipts[c.keys[group]].entry)
                for c in self.cuts
            ]
            for group in self.modality.groups
        }
        memo = self.memo.dump([file.path for file in self.listing.files])
        rows = self.modality.read_rows(finished, self.listing)
        self.failures += rows.failures
        contents = assemble(
            self.config, self.listing, finished, rows, probe=self.probe, constants=self.constants, memo=memo
        )
        # Linked shards bring failures of their own, which no receipt of this build has listed.
        self._check_failures(sum(contents.document["failed"].values()))
        for failure in self.failures:
            logger.warning("left out %s, %s: %s", failure.sample_id, failure.reason, failure.message)
        target = self._target(standing)
        sealed_here = seal(target, contents, scratch=self.workspace.folder, replace=standing is not None)
        logger.info("%s %s", "sealed" if sealed_here else "another builder sealed", target)
        return self._report(target, **{name: contents.document[name] for name in COUNTS})

    def _unsealed(self) -> BuildReport:
        if self.options.part is None:
            raise BuildError(
                f"a finished shard vanished from {self.workspace.folder}; run: forebay preprocess {self.config.path}"
            )
        return self._report(self._target(None), sealed=False)

    def _report(self, target: Path, **values: Any) -> BuildReport:
        return BuildReport(
            key=self.listing.key,
            cache=str(target),
            shards_written=self.counts["written"],
            shards_linked=self.counts["linked"],
            shards_kept=self.counts["kept"],
            **values,
        )


def _media_paths(task: ShardTask) -> list[Path]:
    return [file.path for file in task.files] if task.group == "media" else []


def _workspace_folder(config: Config, key: str, suffix: str = "") -> Path:
    return config.cache_root / ".building" / f"{key[:SHORT]}{suffix}"


def _measure(part: tuple[Modality, Group]) -> tuple[str, Mapping[str, Any]]:
    """Returns a group's probe, and with that of the text the constants."""
    modality, group = part
    return modality.probe(group), modality.constants() if group == "text" else {}


def _in_order(units: Sequence[Unit]) -> list[Unit]:
    """Returns one media shard, then the text shards, then the rest of the media.

    Text is quick, and its mistakes should show early. The first worker measured the media steps and has no tokenizer
    loaded, which takes longer than a small build.
    """
    media = [unit for unit in units if unit[1] == "media"]
    return [*media[:1], *(unit for unit in units if unit[1] == "text"), *media[1:]]


def _usable(config: Config, standing: Sealed, options: Options) -> bool:
    """Whether a sealed cache is left alone: all files are there and of the right size, and right by hash if asked.

    Raises BuildError for one in a store that is not to be left alone.
    """
    if standing.url is not None:
        require_whole(config, standing, options)
        return True
    if options.rebuild:
        return False
    folder = standing.folder
    problems = verify_folder(folder, progress=options.progress).problems if options.verify else quick_problems(folder)
    for problem in problems:
        logger.warning("mending %s", problem)
    return not problems
