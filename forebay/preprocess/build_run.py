"""One run of a build: it keeps, links or makes its shards, and seals the cache when all are there."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from forebay.config.tree import Config
from forebay.errors import BuildError, ConfigError
from forebay.preprocess.assemble import assemble, messages_of, read_rows
from forebay.preprocess.build_report import COUNTS, BuildReport, Options
from forebay.preprocess.codec_trial import codec_costs
from forebay.preprocess.group import EXCLUDING, Cut
from forebay.preprocess.model_trial import ModelTrials
from forebay.preprocess.pool import Pool, Runner
from forebay.preprocess.prepared import Prepared
from forebay.preprocess.prepared import remove as remove_prepared
from forebay.preprocess.probes import require_promise, require_same_machine
from forebay.preprocess.runner.parts import PartLog, sole_driver
from forebay.preprocess.runner.ray import GPU, OnNode, stores_of
from forebay.preprocess.shard_task import BuildProgress, ShardTask, make_shard
from forebay.preprocess.stage_workspace import shard_place
from forebay.preprocess.workspace import Donors, Failure, Named, Receipt, origin_of, workspace_folder
from forebay.rows.columns_aside import bytes_aside, drop_pages, free_memory
from forebay.rows.manifest import described
from forebay.rows.named_files import require_unchanged
from forebay.steps.recipe import recipe_of
from forebay.store.key import differences, folder_name
from forebay.store.layout import TEXT, Array, Group
from forebay.store.lookup import Sealed
from forebay.store.memo import Memo
from forebay.store.remote.raw.arriving import Arriving, Fresh
from forebay.store.remote.raw.raw_sources import is_here, shown
from forebay.store.shared_disk import seen
from forebay.store.source_files import write_sources
from forebay.task_map import WorkerDied

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Run:
    """One run of a build: the state that its steps share."""

    def __init__(
        self, config: Config, options: Options, made: Prepared, pool: Pool, memo: Memo, *, runner: Runner | None = None
    ) -> None:
        """runner: makes the shards; None: the pool, which does all else."""
        self.runner = runner or pool
        self.token = ""
        self.host = made.host
        self.config = config
        self.options = options
        self.listing = listing = made.listing
        self.groups = listing.groups
        self.pool = pool
        self.memo = memo
        self.probe, self.constants, self.cuts = made.probe, made.constants, made.cuts
        if options.part is not None and options.part[1] > made.num_shards:
            raise ConfigError(
                f"--shards {options.part[0]}::{options.part[1]}: {config.path} has {made.num_shards} shards, and more "
                f"parts than shards leave some without work; run: forebay preprocess {config.named} --shards I::N with "
                f"N of at most {made.num_shards}"
            )
        self.num_shards = made.num_shards
        # A rebuild must not take up what an ordinary run left, but may go on from an interrupted rebuild.
        suffix = "-rebuild" if options.rebuild else ""
        origin = origin_of(config, listing.recipe.key)
        folder = workspace_folder(config, listing.key, suffix)
        self.workspace = shard_place(config, options, listing, folder=folder, origin=origin)
        self.counts: Counter[str] = Counter()
        self.failures = [Failure(sample_id=i, reason=r, message=m) for i, r, m in listing.manifest.failed()]
        self.num_rows = len(listing.rows) + len(self.failures)
        self.given: set[Path] = set()
        if listing.manifest.unused:
            logger.warning("%s: %s", "samples", described(listing.manifest.unused))

    def run(self, standing: Sealed | None) -> BuildReport:
        """Makes what is missing of this run's shards, and the sealed cache if no shard is missing then."""
        self._check_failures(len(self.failures))
        with self.workspace.occupied(), self._driving(), self._part_log() as log:
            require_same_machine(self.config.named, self.workspace.folder, self.constants.groups)
            self._collect()
            missing = [cut for cut in self._mine() if cut.key not in self.workspace.receipts]
            if self.options.seal_only:
                self._require_all(missing)
            self._trials(missing).require_room()
            self._make(missing, log)
            if not self.workspace.has_all(self._named(self.cuts), self.pool.map):
                return self._unsealed()
            report = self._seal(standing, self._compare_sources())
        self.workspace.remove()
        self.workspace.remove_superseded()
        remove_prepared(self.config, self.listing.recipe)
        return report

    def compare_probe(self, standing: Sealed) -> None:
        """Reports where the steps give other values here than where a cache of the same key was built."""
        for group in self.groups.names:
            if (stored := standing.metadata["probe"].get(group)) != self.probe[group]:
                differ = (
                    "the %s steps give other values here than where %s was built (probe %s, stored %s): no %s shard "
                    "of it is kept"
                )
                logger.warning(differ, group, standing.place, self.probe[group], stored, group)
        if not self.options.rebuild:
            stored_constants = standing.metadata["constants"]
            require_promise(self.config.named, stored_constants, self.constants.groups, where=f"in {standing.place}")

    def dry(self, standing: Sealed | None) -> BuildReport:
        """The work that `run` would do, and the size of the cache; raises BuildError where `run` stops at once."""
        self._check_failures(len(self.failures))
        donors = self._donors()
        mine = self._mine()
        named, missing = self._named(mine), []
        for cut, (_, key), receipt in zip(mine, named, self.workspace.load(named), strict=True):
            state = "kept" if receipt is not None else "linked" if key in donors else "written"
            self.counts[state] += 1
            missing += [cut] if state == "written" else []
        trials = self._trials(missing)
        trials.require_room()
        costs = trials.costs()
        size = self.groups.estimate_bytes(self.listing, {cost.model: cost.bytes_a_sample for cost in costs})
        target = self._target(standing)
        codecs = codec_costs(self.config, self.listing, self._made_by) if self.runner is self.pool else ()
        tried = {"estimated_bytes": size, "models": costs, "codecs": codecs}
        tried |= {str(kind): counts for kind, counts in self.listing.manifest.counts().items()}
        report = self._report(target, num_samples=len(self.listing.rows), sealed=False, **tried)
        return self._to_be(report, target)

    def _mine(self) -> list[Cut]:
        first, step = self.options.part or (0, 1)
        return [cut for cut in self.cuts if cut.index % step == first]

    def _named(self, cuts: Sequence[Cut]) -> list[Named]:
        return [(cut.group, cut.key) for cut in cuts]

    def _target(self, standing: Sealed | None) -> Path:
        return standing.folder if standing else self.config.cache_root / folder_name(self.config, self.listing.key)

    def _donors(self) -> Donors:
        """Where shards of this build stand already; a rebuild asks nobody."""
        wanted = {cut.key for cut in self.cuts}
        if self.options.rebuild:
            return {}
        recipe_key, here = self.listing.recipe.key, self.constants.groups
        return self.workspace.find_donors(self.config.cache_root, wanted, recipe_key=recipe_key, here=here)

    def _part_log(self) -> PartLog:
        return PartLog(
            self.workspace.folder,
            part=self.options.part,
            samples=len(self.listing.rows),
            shards=self.num_shards,
            groups=self.groups.names,
        )

    def _collect(self) -> None:
        """Keeps what an earlier run finished and links what other caches have, each after re-hashing it."""
        donors = self._donors()
        named = self._named(self._mine())
        if self.options.seal_only:  # before terabytes are hashed again
            absent = self._absent(named, donors)
            self._require_all([cut for cut in self._mine() if cut.key in absent])
        for (group, key), receipt in zip(named, self.workspace.load(named, self.pool.map), strict=True):
            if receipt is not None:
                self.counts["kept"] += 1
                self._note(receipt)
            elif self.workspace.adopt(group, key, donors):
                self.counts["linked"] += 1
                self.given |= {path.parents[1] for path, _ in donors.get(key, [])}

    def _trials(self, missing: Sequence[Cut]) -> ModelTrials:
        """Returns what tries the models of missing shards; the nodes of a cluster are not tried from here."""
        return ModelTrials(
            config=self.config,
            listing=self.listing,
            constants=self.constants,
            missing=missing if self.runner is self.pool else (),
            devices=self.pool.devices,
            run=self._made_by,
        )

    def _make(self, missing: Sequence[Cut], log: PartLog) -> None:
        missing = list({cut.key: cut for cut in missing}.values())  # shards of equal content are one file
        rows: dict[Group, int] = dict.fromkeys(self.groups.names, 0)
        for cut in missing:
            rows[cut.group] += cut.rows
        counted = self.groups.counted if rows[self.groups.counted] else TEXT
        log.begin(
            to_make=len(missing),
            rows_to_make=rows[counted],
            unit=self.groups.text.unit if counted == TEXT else self.groups.unit,
            kept=self.counts["kept"],
            linked=self.counts["linked"],
            under_way=lambda: sum(rows for task, rows in self.pool.at_work() if task.group == counted),
        )
        is_shown = self.options.progress
        with BuildProgress(rows, groups=self.groups, shown=is_shown, at_work=self.pool.at_work) as progress:
            try:
                for task, (receipt, made) in self._made(map(self._task, _in_order(self._here_first(missing)))):
                    self.workspace.receipts[task.key] = receipt
                    self.counts["written" if made else "kept"] += 1
                    progress.shard_done(task, receipt)
                    log.made(rows=len(task.rows) if task.group == counted else 0, by_this_run=made)
                    self._note(receipt)
            except WorkerDied as err:
                death = BuildError(self._death(err), code="FB302")
                for note in getattr(err, "__notes__", ()):
                    death.add_note(note)
                raise death from err

    def _made(self, tasks: Iterator[ShardTask]) -> Iterator[tuple[ShardTask, tuple[Receipt, bool]]]:
        """Yields every task with what it gave; what it reads of a store is downloaded ahead, if it is not here."""
        if self.runner is not self.pool:
            return self.runner.run(self._on_node(), tasks)
        return self._made_by(make_shard, tasks)

    def _made_by(self, function: Callable[[ShardTask], T], tasks: Iterator[ShardTask]) -> Iterator[tuple[ShardTask, T]]:
        files = self.listing.files
        if not files.is_of_store.any():
            return self.pool.run(function, tasks)
        return self.pool.run(Fresh(function), iter(Arriving(tasks, _media_paths, total=len(files))))

    @contextlib.contextmanager
    def _driving(self) -> Iterator[None]:
        """Refuses a second driver of this build on a cluster, whose nodes share the folder of the build."""
        if self.runner is self.pool or self.workspace.stage is not None:
            yield
            return
        with sole_driver(self.workspace.folder, config=self.config.named) as self.token:
            yield

    def _on_node(self) -> Callable[[ShardTask], Any]:
        """Returns `make_shard` with what a node looks at before; its downloads are the node's own."""
        return OnNode(
            function=make_shard,
            host=self.host,
            probe=dict(self.probe),
            constants=self.constants,
            device=GPU if self.config.run.num_gpus else None,
            driver=socket.gethostname(),
            token=self.token,
            stores=() if self.workspace.stage is not None else stores_of(self.listing.files),
            config=self.config.named,
        )

    def _here_first(self, cuts: Sequence[Cut]) -> list[Cut]:
        """Returns the shards with those first whose raw data is on this node: what a bound keeps is not fetched twice.

        In the order of the listing, least recently used first, each tar would be evicted just before its turn.
        """
        of_rows = {TEXT: self.listing.rows["group"].to_numpy()}
        of_rows |= {group: items.group for group, items in self.listing.items.items()}
        used = {cut.key: int(of_rows[cut.group][cut.start]) for cut in cuts}
        here = {number: is_here(self.listing.files[number].path) for number in set(used.values())}
        return sorted(cuts, key=lambda cut: not here[used[cut.key]])

    def _absent(self, named: Sequence[Named], donors: Donors) -> set[str]:
        """Returns the keys of what is not there, once all that other machines have finished is seen."""

        def absent() -> set[str]:
            return {key for _, key in self.workspace.absent(named)} - donors.keys()

        seen(lambda: not absent(), self.workspace.folder, what="shards that other machines may have finished")
        return absent()

    def _require_all(self, missing: Sequence[Cut]) -> None:
        """Raises BuildError where a part has not made all of its shards."""
        if not missing:
            return
        # By its name alone: this has been waited for, and only a part that has sealed meanwhile is still looked for.
        gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.workspace.folder.name)
        numbers = sorted({cut.index for cut in missing})
        shown = ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
        stage = f" --stage {self.options.stage}" if self.options.stage else ""
        raise BuildError(
            f"--seal: {len(numbers)} of {self.num_shards} shards of {self.config.path} are not finished ({shown}); all "
            f"others are kept; run the parts that are missing (forebay status {self.config.named} names them), or make "
            f"them here: forebay preprocess {self.config.named}{stage}",
            code="FB304",
        ) from gone

    def _task(self, cut: Cut) -> ShardTask:
        files, rows = self.groups.task_rows(self.listing, cut)
        drop_pages()
        return ShardTask(
            group=cut.group,
            key=cut.key,
            folder=self.workspace.folder,
            rows=rows,
            files=files,
            groups=self.groups,
            max_open_tars=self.config.run.max_open_tars,
            stage=self.workspace.stage,
        )

    def _death(self, err: WorkerDied) -> str:
        task: ShardTask = err.task
        cut = next(cut for cut in self.cuts if cut.key == task.key)
        name, samples = self.groups.used_by(self.listing, cut, err.position)
        excluded = ", ".join(f'"{sample}"' for sample in samples)
        return (
            f"{err} at {name} ({task.group} shard of {task.files[0].name}, row {err.position}); finished shards "
            f"are kept. If that is to blame, leave it out: [source] exclude = [{excluded}] in {self.config.path}; "
            f"then run: forebay preprocess {self.config.named}"
        )

    def _note(self, receipt: Receipt) -> None:
        """Counts the bad samples of a shard; too many stop the build, with their list, and finished shards stay."""
        self.failures += [f for f in receipt.failures if f.reason not in EXCLUDING]
        self._check_failures(len(self.failures))

    def _check_failures(self, count: int) -> None:
        rows, share = self.num_rows, self.config.run.max_failed_share
        if count <= share * rows:
            return
        alike = self._alike()[:20]
        listed = "".join(f"\n  {whose}: {reason}: {message}" for whose, _, reason, message in alike)
        rest = count - sum(number for _, number, *_ in alike)
        more = f"\n  and {rest} more" if rest > 0 else ""
        raise BuildError(
            f"{count} of {rows} samples are bad so far; run.max_failed_share = {share} allows {int(share * rows)}; "
            f"finished shards are kept:{listed}{more}\nmend them, or allow more: forebay preprocess "
            f"{self.config.named} --set run.max_failed_share={min(1.0, 2 * count / rows):.3g}",
            code="FB301",
        )

    def _compare_sources(self) -> Array:
        """Returns the stats of the sources, see `require_unchanged`.

        Raises BuildError where a source, tokenizer or processor is not what it was when it was listed.
        """
        stats = require_unchanged(self.listing.files, memo=self.memo, map_=self.pool.map)
        changed = differences(recipe_of(self.config).document, self.listing.recipe.document)
        if changed:
            raise BuildError(
                f"the files that {changed[0]['field']} of {self.config.path} names changed during the build (digest "
                f"{changed[0]['stored']}, now {changed[0]['wanted']}): nothing is sealed, finished shards are kept; "
                f"run: forebay preprocess {self.config.named}",
                code="FB303",
            )
        return stats

    def _seal(self, standing: Sealed | None, stats: Array) -> BuildReport:
        free_memory()
        finished = self.workspace.finished(
            {group: [cut.key for cut in self.cuts if cut.group == group] for group in self.groups.names}
        )
        root = self.config.cache_root
        write_memo = partial(self.memo.write, paths=self.listing.files.each_path(), stats=stats)
        files = {"hashes.memo": bytes_aside(write_memo, root)}
        del stats, write_memo
        self.memo.forget()
        files["sources.parquet"] = bytes_aside(lambda file: write_sources(file, self.listing.sources()), root)
        free_memory()
        rows = read_rows(self.listing, finished)
        free_memory()
        self.failures += rows.failures
        failures = [*(f for receipt in self.workspace.receipts.values() for f in receipt.failures), *rows.failures]
        messages = {(f.sample_id, f.reason): shown(f.message) for f in failures}
        for folder in self.given:
            messages = messages_of(folder) | messages
        contents = assemble(
            self.config,
            self.listing,
            finished,
            rows,
            probe=self.probe,
            constants=self.constants,
            files=files,
            messages=messages,
        )
        free_memory()
        # Linked shards bring failures of their own, which no receipt of this build has listed.
        self._check_failures(sum(contents.document["failed"].values()))
        self._name_failures()
        target = self._target(standing)
        place, transfer = self.workspace.seal(target, contents, replace=standing is not None)
        report = self._report(target, **{name: contents.document[name] for name in COUNTS})
        return replace(report, cache=place, pushed=transfer)

    def _name_failures(self) -> None:
        """Logs why rows are left out."""
        for whose, _, reason, message in self._alike():
            logger.warning("left out %s, %s: %s", whose, reason, message)

    def _alike(self) -> list[tuple[str, int, str, str]]:
        """Returns whose, how many, reason and message of failures; those of one missing recording stand together."""
        alike: dict[tuple[str, str], list[str]] = {}
        for failure in self.failures:
            alike.setdefault((failure.reason, failure.message), []).append(failure.sample_id)
        found = []
        for (reason, message), (first, *others) in alike.items():
            whose = f"{first} and {len(others)} more" if others else first
            found.append((whose, 1 + len(others), reason, message))
        return found

    def _unsealed(self) -> BuildReport:
        if self.options.part is None:
            raise BuildError(
                f"a finished shard vanished from {self.workspace.name}; run: forebay preprocess {self.config.named}"
            ) from FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.workspace.folder))
        target = self._target(None)
        return self._to_be(self._report(target, sealed=False), target)

    def _to_be(self, report: BuildReport, target: Path) -> BuildReport:
        """Returns a report that names the cache as it will be called."""
        root = self.config.remote_root
        return report if root is None else replace(report, cache=f"{root}/{target.name}")

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
    return [] if task.group == TEXT else [file.path for file in task.files]


def _in_order(cuts: Sequence[Cut]) -> list[Cut]:
    """Returns one shard of items, then the shards of text, then the rest of the items.

    Text is quick, and its mistakes should show early. The first worker measured the steps of items and has no tokenizer
    loaded, which takes longer than a small build.
    """
    items = [cut for cut in cuts if cut.group != TEXT]
    return [*items[:1], *(cut for cut in cuts if cut.group == TEXT), *items[1:]]
