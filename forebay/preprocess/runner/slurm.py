"""A build as jobs of Slurm: one prepares, an array makes the parts, one seals. Text, and one call of `sbatch` a job.

The child process of a Ray worker, in which shards are made: a sample that kills it does not take Ray's worker along.

The child stays between the tasks of its Ray worker, has one thread, and ends with it. Nothing here imports more than a
pool needs: what a shard needs is loaded in the child.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forebay.config.tree import Config
from forebay.errors import BuildError, ConfigError
from forebay.preprocess.fetch_models import fetch_models
from forebay.preprocess.listing_folder import folder_of, submission_file
from forebay.preprocess.pool import PINNED, Pool
from forebay.preprocess.prepared import require_parts
from forebay.preprocess.runner.parts import compressed
from forebay.preprocess.runner.status import SeenParts, seen_of
from forebay.preprocess.stage_workspace import check_stage
from forebay.steps.recipe import Recipe, recipe_of
from forebay.store.files import require_writable, write_bytes
from forebay.store.key import SHORT
from forebay.store.layout import BUILDING
from forebay.store.seal import quick_problems
from forebay.task_map import WorkerDied
from forebay.terminal import CommandReport
from forebay.visible import from_here, json_text, quoted

DEFAULT_PARTS = 64
"""Parts of an array that nobody has said the size of; fewer where there are fewer shards."""
_OURS = ("array", "chdir", "dependency", "error", "job-name", "kill-on-invalid-dep", "output", "parsable", "wrap")
"""Options of sbatch that this file sets, or that would break what it relies on."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request of the command line.

    config: as it was named. num_parts: of the array; None: what there was last, or a default. limit: of the tasks that
    run at once. logs: the folder of the log files. options: those of the command line that each job gets as they are.
    workers: processes of a job; None: the config's. stage: where finished shards stand, if nodes share no disk.
    """

    config: str
    num_parts: int | None = None
    limit: int | None = None
    logs: str | None = None
    options: Sequence[str] = ()
    workers: int | None = None
    stage: str | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job: options of sbatch, what it waits for (how, and the job's name or number), and its script."""

    name: str
    options: tuple[str, ...]
    after: tuple[tuple[str, str], ...]
    script: str


@dataclass(frozen=True, kw_only=True)
class Submission(CommandReport):
    """The findings and acts of `forebay preprocess --runner slurm`; its fields are those of its JSON document.

    named: the config as words of a command. sealed: the cache, if there is nothing to do. num_parts: of the
    whole array; parts: those that are to run, as sbatch takes them. ids: of the jobs that were submitted, by name.
    """

    config: str
    named: str
    key: str | None
    sealed: str | None = None
    num_parts: int = 0
    parts: str = ""
    logs: str = ""
    notes: tuple[str, ...] = ()
    jobs: tuple[Job, ...] = ()
    ids: dict[str, str] | None = None

    def lines(self) -> Iterator[str]:
        """Yields a shell script that submits the jobs; or, where they are submitted, their numbers."""
        if self.sealed is not None:
            yield f"# already sealed: {from_here(self.sealed)}; nothing is to be submitted"
        elif self.ids is None:
            yield from self._script()
        else:
            named = ", ".join(f"{name} {number}" for name, number in self.ids.items())
            yield f"submitted: {named}" + (f" (parts {self.parts} of {self.num_parts})" if self.parts else "")
            yield from self.notes
            yield f"logs: {from_here(self.logs)}"
            yield f"to see how it goes: forebay status {self.named}"

    def _script(self) -> Iterator[str]:
        again = f"forebay preprocess {self.named} --runner slurm"
        yield "#!/bin/bash"
        yield f"# To submit these jobs, hand this text to bash, or run: {again} --submit"
        yield from (f"# {note}" for note in self.notes)
        yield "set -eu"
        yield f"mkdir -p {quoted(self.logs)}"
        for job in self.jobs:
            after = (
                ["--dependency=" + ",".join(f"{how}:{_number(name)}" for how, name in job.after)] if job.after else []
            )
            end = "FOREBAY"
            while end in job.script.splitlines():
                end += "_"
            options = " ".join(map(quoted, job.options))
            yield f"{job.name}=$(sbatch --parsable {' '.join([options, *after])} <<'{end}'"
            yield from job.script.splitlines()
            yield end
            yield ")"
        yield 'echo "submitted: ' + ", ".join(f"{job.name} ${{{job.name}%%;*}}" for job in self.jobs) + '"'


def _number(name: str) -> str:
    """The number of a job in the shell; the answer of sbatch may end with the name of a cluster."""
    return name if name[:1].isdigit() else f"${{{name}%%;*}}"


def planned(config: Config, asked: Asked) -> Submission:
    """Returns the jobs that make what is missing of a config's build; submits nothing.

    Raises ConfigError for an array of more parts than there are shards, and for what a cluster cannot do.
    """
    _require_shared(config, asked)
    _require_foreign(config)
    fetch_models(config)
    recipe = recipe_of(config)
    seen = seen_of(config, recipe)
    path = os.path.abspath(asked.config)
    if seen.sealed is not None and not quick_problems(seen.sealed.folder):
        return Submission(config=path, named=config.named, key=seen.sealed.key, sealed=seen.sealed.place)
    is_prepared = seen.prepared is not None and seen.prepared.moved is None
    num_parts, notes = _num_parts(config, asked, seen if is_prepared else None, seen)
    # What stands for a root in a store is of one node; the folder that jobs are submitted from is of all, as a rule.
    home = Path("forebay-logs") if config.remote_root is not None else config.cache_root / BUILDING / "logs"
    logs = os.path.abspath(asked.logs or home)
    _require_plain(logs)
    texts = _Texts(config=config, asked=asked, path=path, logs=logs, num_parts=num_parts, recipe=recipe)
    key = seen.prepared.key[:SHORT] if seen.prepared is not None and is_prepared else None
    wanted, busy = list(range(num_parts)), {}
    if is_prepared and asked.stage is None:  # of a stage each part knows by a listing what is there
        missing = seen.missing_parts(num_parts)
        busy = _running(seen, num_parts)
        wanted = [part for part in missing if part not in busy]
        notes += [f"part {part} runs already, as job {job}" for part, job in busy.items() if part in missing]
    if seen.submission is not None:
        notes.append(
            f"submitted before: {', '.join(f'{name} {job}' for name, job in seen.submission['jobs'].items())}; what of "
            "them still waits is to be ended first (scancel)"
        )
    jobs = [] if is_prepared else [texts.prepare()]
    jobs += [texts.parts(wanted, key)] if wanted else []
    jobs.append(texts.seal(key, [job.name for job in jobs], sorted(set(busy.values()))))
    return Submission(
        config=path,
        named=config.named,
        key=key,
        num_parts=num_parts,
        parts=compressed(wanted),
        logs=logs,
        notes=tuple(notes),
        jobs=tuple(jobs),
    )


def submit(config: Config, asked: Asked) -> Submission:
    """Submits the jobs that make what is missing of a config's build, and returns them with their numbers.

    Raises BuildError where there is no sbatch, or where that refuses a job.
    """
    found = planned(config, asked)
    if found.sealed is not None:
        return found
    require_writable(config.cache_root, setting="run.cache_root")
    os.makedirs(found.logs, exist_ok=True)
    ids: dict[str, str] = {}
    for job in found.jobs:
        ids[job.name] = _submitted(job, ids, found)
    document = {"num_parts": found.num_parts, "jobs": ids, "logs": found.logs, "label": config.name}
    file = submission_file(config, recipe_of(config))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, json_text({**document, "submitted": time.time()}).encode("ascii"))
    return replace(found, ids=ids)


def _submitted(job: Job, ids: dict[str, str], found: Submission) -> str:
    after = ",".join(f"{how}:{ids.get(name, name)}" for how, name in job.after)
    command = ["sbatch", "--parsable", *job.options, *([f"--dependency={after}"] if after else [])]
    config = from_here(found.config)
    left = f"; submitted already: {', '.join(f'{name} {job}' for name, job in ids.items())}" if ids else ""
    try:
        answer = subprocess.run(command, input=os.fsencode(job.script), capture_output=True, check=False)
    except FileNotFoundError as err:
        raise BuildError(
            "--submit: there is no sbatch on this machine; submit from a login node of the cluster, or print the jobs "
            f"and hand them to bash there: forebay preprocess {found.named} --runner slurm --print",
            code="FB308",
        ) from err
    said = os.fsdecode(answer.stderr).strip() or os.fsdecode(answer.stdout).strip()
    number = os.fsdecode(answer.stdout).strip().partition(";")[0]
    if answer.returncode != 0 or not number.isdigit():
        raise BuildError(
            f"sbatch refused the job {job.name} (exit status {answer.returncode}): {said or 'it said nothing'}{left}; "
            f"its options are those of run.sbatch in {config}; to see the jobs: forebay preprocess {found.named} "
            "--runner slurm --print",
            code="FB308",
        )
    return number


def _num_parts(config: Config, asked: Asked, prepared: SeenParts | None, seen: SeenParts) -> tuple[int, list[str]]:
    """Returns how many parts there are, and what is to be said of that."""
    if asked.num_parts is not None:
        if prepared is not None:
            require_parts(config, asked.num_parts, prepared.num_shards)
        return asked.num_parts, []
    last = None if seen.submission is None else int(seen.submission["num_parts"])
    wanted, why = (DEFAULT_PARTS, "the default") if last is None else (last, "as before")
    if prepared is not None and wanted > prepared.num_shards:
        wanted, why = max(1, prepared.num_shards), "as many as there are shards"
    return wanted, [f"{wanted} parts, {why}; another number: --array N"]


def _running(seen: SeenParts, num_parts: int) -> dict[int, str]:
    """Returns the jobs of the parts that work just now, by their numbers."""
    return {
        record.part[0]: record.job
        for record in seen.parts
        if record.state == "running" and record.job and record.part is not None and record.part[1] == num_parts
    }


def _require_shared(config: Config, asked: Asked) -> None:
    if asked.stage is not None:
        check_stage(config, asked.stage)
    elif config.remote_root is not None:
        raise ConfigError(
            f"--runner slurm: the cache root is {config.remote_root}, and the parts of other nodes are not seen from "
            f"here; put their shards into the bucket: --stage URL, or build below a folder that all nodes share, then "
            f"push the cache: forebay preprocess {config.named} --cache-root DIR --runner slurm, forebay cache push "
            "DIR/NAME URL"
        )


def _require_foreign(config: Config) -> None:
    for option in config.run.sbatch:
        if (name := option[2:].partition("=")[0]) in _OURS:
            raise ConfigError(
                f"run.sbatch of {config.path} has {option!r}, and --{name} is set by forebay: leave it out (the folder "
                "of the log files is --logs DIR, the size of the array --array N)"
            )


def _require_plain(logs: str) -> None:
    if "\\" in logs or "\n" in logs:
        raise ConfigError(
            f"the folder of the log files is {logs!r}, and sbatch writes to none with a backslash or a line end: name "
            "another one: --logs DIR"
        )


@dataclass(frozen=True, kw_only=True)
class _Texts:
    """Writes the jobs of one build."""

    config: Config
    asked: Asked
    path: str
    logs: str
    num_parts: int
    recipe: Recipe

    @property
    def _gres(self) -> tuple[str, ...]:
        """The option of the jobs that run models."""
        return (f"--gres={self.config.run.gres}",) if self.config.run.gres else ()

    def prepare(self) -> Job:
        """The job that lists and hashes; it leaves the key where the others find it."""
        command = self._forebay(f"--prepare --array {self.num_parts} --json")
        script = self._script("set -o pipefail", f"{command} | tee {quoted(self._key_file)}")
        return Job(name="prepare", options=(*self._options("prepare", "%j"), *self._gres), after=(), script=script)

    def parts(self, wanted: Sequence[int], key: str | None) -> Job:
        """The array, of which each task makes its part."""
        limit = f"%{self.asked.limit}" if self.asked.limit else ""
        array = f"--array={compressed(wanted)}{limit}"
        command = self._forebay(f'--shards "$SLURM_ARRAY_TASK_ID::{self.num_parts}" --key "$key"')
        # A part must not wait for ever for what will never be prepared.
        options = (*self._options("part", "%A_%a"), array, "--kill-on-invalid-dep=yes", *self._gres)
        after = () if key else (("afterok", "prepare"),)
        return Job(name="parts", options=options, after=after, script=self._script(*self._key(key), f"exec {command}"))

    def seal(self, key: str | None, jobs: Sequence[str], running: Sequence[str]) -> Job:
        """The job that seals.

        After the array however that ended: then the message of `--seal` says which shards are missing, where a job that
        waits for ever, or vanishes, says nothing. Without a prepared build there is nothing to say, and it would hash
        the raw data.
        """
        after = [("afterok", "prepare")] if "prepare" in jobs else []
        after += [("afterany", job) for job in ([name for name in jobs if name == "parts"] + list(running))]
        options = (*self._options("seal", "%j"), "--kill-on-invalid-dep=yes")
        command = self._forebay('--seal --key "$key"')
        script = self._script(*self._key(key), f"exec {command}")
        return Job(name="seal", options=options, after=tuple(after), script=script)

    @property
    def _key_file(self) -> str:
        return os.path.join(self.logs, f"{folder_of(self.config, self.recipe).name}.json")

    def _key(self, key: str | None) -> list[str]:
        """Lines that know the key: from the prepare job, where it was not known when the jobs were written."""
        if key is not None:
            return [f"key={key}"]
        return [
            f"""key=$(sed -n 's/^ "key": "\\([0-9a-f]*\\)".*/\\1/p' {quoted(self._key_file)})""",
            """test -n "$key" || { echo "the job 'prepare' has left no key" >&2; exit 1; }""",
        ]

    def _options(self, name: str, number: str) -> tuple[str, ...]:
        pattern = f"{self.logs.replace('%', '%%')}/{name}-{number}.log"
        options = [f"--job-name=forebay-{self.config.name}-{name}", f"--output={pattern}"]
        if not any(option.startswith("--cpus-per-task") for option in self.config.run.sbatch):
            options.append(f"--cpus-per-task={self.asked.workers or self.config.run.num_workers or 1}")
        return (*options, *self.config.run.sbatch)

    def _forebay(self, what: str) -> str:
        given = " ".join(map(quoted, self.asked.options))
        return (
            f"{quoted(sys.executable)} -m forebay preprocess {quoted(self.path)} {what} "
            f'--workers "${{SLURM_CPUS_PER_TASK:-1}}" --no-progress {given}'
        ).rstrip()

    def _script(self, *lines: str) -> str:
        package = str(Path(__file__).parents[3])
        exports = [f"export {name}={value}" for name, value in PINNED.items()]
        # The forebay that submits is the one that runs, installed or not.
        exports.append(f'export PYTHONPATH={quoted(package)}"${{PYTHONPATH:+:$PYTHONPATH}}"')
        return "\n".join(["#!/bin/bash", "set -eu", *exports, *lines, ""])


_pool: Pool | None = None


def answer(payload: bytes) -> bytes:
    """Returns what came of `function(task)`, given as `pickle.dumps((function, task))`, as the pickle of three parts.

    The name of this machine; what came: done, raised, died; and the result, the exception, or (row, status) of the
    second death.
    """
    global _pool
    if _pool is None:
        _pool = Pool(1)
    try:
        return _pool.map(_answer_of, [payload])[0]
    except WorkerDied as err:
        _pool = None
        return pickle.dumps((socket.gethostname(), "died", (err.position, err.status)))


def _answer_of(payload: bytes) -> bytes:
    host = socket.gethostname()
    try:
        function, task = pickle.loads(payload)  # noqa: S301  of our own driver
        return pickle.dumps((host, "done", function(task)))
    except Exception as err:  # noqa: BLE001  it is raised in the driver
        return pickle.dumps((host, "raised", _as_sent(err)))


def _as_sent(err: Exception) -> Any:
    """Returns an exception as the driver will see it; one that does not survive the way becomes a BuildError."""
    try:
        pickle.loads(pickle.dumps(err))  # noqa: S301
    except Exception:  # noqa: BLE001  of any library
        return BuildError(f"{type(err).__name__}: {err}; finished shards are kept; run the command again")
    return err
