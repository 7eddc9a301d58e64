"""`forebay doctor`: the arms one after the other, within a budget of seconds, then what they say.

A child is asked for the arms, and none takes longer than it may. Importing this module imports all that arms need,
before any clock runs. `--apply` edits the text of the user's TOML, so that comments stay.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pkgutil
import re
import shutil
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from forebay.config.plan import PackConfig
from forebay.config.remote import is_url
from forebay.config.tree import Config
from forebay.errors import ConfigError, ForebayError
from forebay.init.candidate import value_of
from forebay.measure.cache_arms import codecs, find, listing, made, plans, reads
from forebay.measure.child_process import Child
from forebay.measure.diagnosis import MeasuredArms
from forebay.measure.doctor_bench import Bench, DoctorTask
from forebay.measure.doctor_report import Advice, DoctorReport, advice
from forebay.measure.loader_arms import cached, pieces, uncached, workers
from forebay.measure.predict import Skip, StepTime, StepTimes
from forebay.steps.recipe import load_config, plan_example
from forebay.store.files import temporary_name
from forebay.terminal import Progress

_GRACE_S = 24.0
"""Beside `--seconds`, for imports, listing, models, and arms that hang; the rest of 30 s is the caller's own start."""
_FEW_ROWS = 256
"""Rows that are listed where listing all of them takes too long."""
_SET_UP_S = 6.0
"""What an arm may take beside the seconds that it measures for: lists and plans are made in it."""


@dataclass(frozen=True, slots=True)
class DoctorArm:
    """One arm. field: of `MeasuredArms`. share: of the seconds, which it may measure in. work: of a bench and those."""

    field: str
    share: float
    work: Callable[[Bench, float], Any]
    needs: Literal["nothing", "raw data", "a cache"] = "nothing"
    more_s: float = 0.0
    """What it may take beside `_SET_UP_S`."""


def _step(bench: Bench, seconds: float) -> Any:
    # transformers and accelerate take seconds to import, and a step that is given needs neither.
    return pkgutil.resolve_name("forebay.measure.step_runner:step")(bench, seconds)


ARMS: dict[str, DoctorArm] = {
    "find": DoctorArm("opened", 0.03, find),
    "listing": DoctorArm("listed", 0.1, listing),
    "raw read": DoctorArm("raw_read", 0.05, reads, "raw data"),
    "steps of a build": DoctorArm("made", 0.15, made, "raw data"),
    "cache": DoctorArm("pieces", 0.07, pieces, "a cache"),
    "plan": DoctorArm("plan", 0.05, plans, "a cache"),
    "cached loader": DoctorArm("cached", 0.17, cached, "a cache"),
    "uncached loader": DoctorArm("uncached", 0.18, uncached, "raw data"),
    "step": DoctorArm("steps", 0.15, _step, "a cache", more_s=12.0),  # transformers is imported, the model loaded
    "uncached DataLoader": DoctorArm("workers", 0.1, workers, "raw data"),
    "codecs": DoctorArm("codecs", 0.05, codecs, "raw data"),
}
"""The arms by their names, in the order in which they are asked for."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of an arm: its figures, or why there are none."""

    value: Any = None
    why: str = "it gave nothing"


def work(task: DoctorTask, parent: Connection) -> None:
    """Measures the arms that the parent names, each in the seconds that the parent gives it."""
    if task.prepare is not None:
        pkgutil.resolve_name(task.prepare)()
    bench = Bench(task)
    while True:
        name, seconds, bench.pace_s = parent.recv()
        try:
            answer = Answer(value=ARMS[name].work(bench, seconds))
        except (Skip, ForebayError) as err:
            answer = Answer(why=str(err))
        except OSError as err:
            answer = Answer(why=f"{err.strerror or err}{f': {err.filename}' if err.filename else ''}")
        parent.send(answer)


class DoctorSession:
    """A child that measures, and another one whenever the last was killed. A context, whose end ends the child."""

    def __init__(self, task: DoctorTask, *, deadline_s: float) -> None:
        """Starts the child. deadline_s: on the clock of `time.monotonic`; nothing is waited for behind it."""
        self.task, self._deadline_s = task, deadline_s
        self.pace_s = 0.0
        """Seconds of a step for each of its samples, once they are known."""
        self.start_s = 0.0
        """What the child took to start and to import what steps need, once it has answered; a build's processes do."""
        self._child: Child | None = None
        self._is_ready, self._count = False, 0
        self._start()

    def __enter__(self) -> DoctorSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def ask(self, name: str, seconds: float) -> Answer:
        """Returns what an arm came to in about so many seconds; the child is killed where it does not end."""
        left_s = self._deadline_s - time.monotonic()
        if left_s < 1:
            return Answer(why="no time was left for it")
        limit_s = min(2 * seconds + _SET_UP_S + ARMS[name].more_s, left_s)
        try:
            child = self._ready(left_s)
            child.send((name, min(seconds, left_s / 2), self.pace_s))
            answer: Answer = child.receive(limit_s)
        except TimeoutError:
            answer = Answer(why=f"it did not end in {limit_s:.0f} s and was stopped")
            self._kill()
        except ForebayError as err:
            answer = Answer(why=str(err))
            self._kill()
        return answer

    def limit(self, rows: int) -> None:
        """Makes the next child list no more rows than this."""
        self._kill()
        self.task = dataclasses.replace(self.task, limit=rows)

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _start(self) -> Child:
        self._count, self._began_s, self._is_ready = self._count + 1, time.monotonic(), False
        log = Path(self.task.root) / f"log-{self._count}"
        self._child = Child("the arm doctor", f"{__name__}:work", log=log, advice="the other arms are measured")
        return self._child

    def _ready(self, left_s: float) -> Child:
        child = self._child or self._start()
        if not self._is_ready:
            child.receive(left_s)  # its imports are done
            self.start_s = time.monotonic() - self._began_s
            child.send(self.task)
            self._is_ready = True
        return child


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """The request of `forebay doctor`."""

    seconds: float = 30.0
    step_s: float | None = None
    """What a step takes; None: that of the config's model is measured."""
    apply: Path | None = None
    with_rebuild: bool = False
    """`apply` also has the settings that need a new build."""
    progress: bool = True
    passed_s: float = 0.0
    """Seconds that the command has taken already: they count."""
    prepare: str | None = None
    """`module:function` that the measuring process calls first: for benchmarks, which plant a bottleneck there."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds >= 1):
            raise ConfigError(f"--seconds is {self.seconds:g}, wanted 1 or more")
        if self.step_s is not None and not (math.isfinite(self.step_s) and self.step_s > 0):
            raise ConfigError(f"--step-s is {self.step_s:g}, wanted the seconds of a step, more than 0")


def doctor(config: Config, options: DoctorOptions | None = None) -> DoctorReport:
    """Returns what is slow about a config's data on this machine, and what to change.

    It ends within `seconds` and half a minute, whatever the data does: what hangs is killed and named. It writes into a
    temporary folder alone, and `apply`. Raises ConfigError for a config that cannot be measured.
    """
    options = options or DoctorOptions()
    if config.plan is None:
        raise ConfigError(
            f"{config.path}: no [plan] section, so there are no batches to measure; add one, for example: "
            f"{plan_example(config)}",
            code="FB104",
        )
    if options.apply is not None:
        check_target(config, options.apply)
    began = time.monotonic() - options.passed_s
    root = tempfile.mkdtemp(prefix="forebay-doctor-")
    cores = len(os.sched_getaffinity(0))
    task = DoctorTask(config=config, root=root, cores=cores, prepare=options.prepare)
    try:
        with DoctorSession(task, deadline_s=began + options.seconds + _GRACE_S) as session:
            found = _measured(session, config, options, cores=cores)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    all_advice, applied = advice(found, config), None
    if options.apply is not None:
        settings = settings_of(all_advice, with_rebuild=options.with_rebuild)
        if settings:
            apply(config, options.apply, settings)
            applied = str(options.apply)
    return DoctorReport(
        config=config.path,
        seconds=time.monotonic() - began,
        found=found,
        advice=all_advice,
        applied=applied,
        wants_file=options.apply is not None,
    )


def _measured(session: DoctorSession, config: Config, options: DoctorOptions, *, cores: int) -> MeasuredArms:
    missing: dict[str, str] = {}
    given: dict[str, Any] = {"bucket": 0, "samples": 1, "room": 1, "seconds": options.step_s, "cpu_s": 0.0, "steps": 0}
    found = MeasuredArms(
        cores=cores,
        prefetch=config.loader.prefetch,
        num_threads=config.loader.num_threads,
        num_workers=config.run.num_workers or 0,
        # A step that takes what the user says, whatever its batch, needs none of this machine's cores.
        steps=None if options.step_s is None else StepTimes(device="given", times=(StepTime(**given),)),
        not_measured=missing,
    )
    needless = {"step": options.step_s is not None, "codecs": not isinstance(config.plan, PackConfig)}
    wanted = [name for name in ARMS if not needless.get(name)]
    progress = Progress(len(wanted), desc="doctor", unit="arm", is_shown=options.progress)
    for name in progress.over(wanted):
        progress.say(name)
        if (why := _pointless(name, found)) is not None:
            missing[name] = why
            continue
        session.pace_s = 0.0 if found.step is None else found.step.ms / 1e3
        seconds = ARMS[name].share * options.seconds
        answer = session.ask(name, seconds)
        if name == "listing" and "did not end" in answer.why:
            session.limit(_FEW_ROWS)
            answer = session.ask(name, seconds)
        if answer.value is None:
            missing[name] = answer.why
        else:
            found = dataclasses.replace(found, **{ARMS[name].field: answer.value})
        if name == "listing":
            _require_data(found, config)
    for name in ("cached loader", "uncached loader", "uncached DataLoader"):
        if (rates := getattr(found, ARMS[name].field)) is not None:
            missing |= {f"{name} with {number}": why for number, why in rates.skipped.items()}
    return dataclasses.replace(found, start_s=session.start_s)


def _pointless(name: str, found: MeasuredArms) -> str | None:
    """Returns why an arm is not even tried."""
    needs = ARMS[name].needs
    if needs == "raw data" and "listing" in found.not_measured:
        return "there is no listing of the raw data"
    if needs == "raw data" and "did not end" in found.not_measured.get("raw read", ""):
        return "reading raw data hangs"
    if needs == "a cache" and not found.is_sealed and found.made is None:
        return "there is no cache, and no sample of one could be made"
    if name == "uncached DataLoader" and found.uncached is None:
        return "the loader without a cache could not be measured"
    return None


def _require_data(found: MeasuredArms, config: Config) -> None:
    """Raises ConfigError where there is neither a cache nor raw data that this machine has."""
    missing = found.not_measured
    if found.is_sealed or "listing" not in missing:
        return
    if any(map(is_url, config.source.manifests)):
        raise ConfigError(
            f"{config.path}: source.manifest is a URL and no cache of it is sealed, so all that could be measured is "
            f"the download; build the cache first: forebay preprocess {config.named}, or fetch the data: "
            "forebay fetch"
        )
    if config.mixture.source:
        raise ConfigError(f"{config.path}: {missing.get('find', missing['listing'])}")


_HEADER = re.compile(r"""\s*\[\s*(?P<name>[^\[\]#]+?)\s*\]\s*(?:#.*)?$""")
_KEY = re.compile(r"""\s*(?P<quote>["']?)(?P<key>[A-Za-z0-9_-]+)(?P=quote)\s*=""")
_MARK = "# forebay doctor"


def check_target(config: Config, target: Path) -> None:
    """Raises ConfigError where the new file cannot be: it never takes the place of another one."""
    if os.path.lexists(target):
        raise ConfigError(f"--apply {target}: it is there already, and nothing is overwritten; name a new file")
    if target.absolute().parent.resolve() != Path(config.path).absolute().parent.resolve():
        raise ConfigError(
            f"--apply {target}: paths in {config.path} are relative to its folder, so the new file has to lie there "
            f"too; for example: --apply {Path(config.path).parent / target.name}"
        )


def settings_of(all_advice: Sequence[Advice], *, with_rebuild: bool) -> dict[str, Any]:
    """Returns the settings to write, by dotted name; None takes one out.

    Those that need a new build come with `with_rebuild` alone. Of two values of one setting the first counts.
    """
    found: dict[str, Any] = {}
    for each in all_advice:
        if each.needs == "nothing" or with_rebuild:
            found |= {name: value for name, value in each.settings.items() if name not in found}
    return found


def apply(config: Config, target: Path, settings: Mapping[str, Any]) -> None:
    """Makes `target` the config's file with other settings; each changed line has its old value beside it.

    Raises ConfigError where the file is there, ForebayError where the text cannot be edited to say just that.
    """
    check_target(config, target)
    text = Path(config.path).read_text(encoding="utf-8")
    aside = temporary_name(target).with_suffix(".toml")
    try:
        aside.write_text(edited(text, settings), encoding="utf-8")
        _require_tuning(config, aside, settings)
        os.link(aside, target)
    except FileExistsError as err:
        raise ConfigError(
            f"--apply {target}: it is there already, and nothing is overwritten; name a new file"
        ) from err
    finally:
        aside.unlink(missing_ok=True)


def _require_tuning(config: Config, file: Path, settings: Mapping[str, Any]) -> None:
    """Raises ForebayError unless a file says what the config's own file says, but for the settings."""
    try:
        made = _flat(load_config(str(file)))
    except ConfigError as err:
        raise ForebayError(f"{_by_hand(config, settings)}: {err}") from err
    wanted = {**_flat(load_config(config.path)), **{name: repr(value) for name, value in settings.items()}}
    taken_out = [name for name, value in settings.items() if value is None]
    wrong = sorted(name for name, value in wanted.items() if made.get(name) != value and name not in taken_out)
    if wrong:
        raise ForebayError(f"{_by_hand(config, settings)}: {', '.join(wrong)} would not be what is wanted")


def _by_hand(config: Config, settings: Mapping[str, Any]) -> str:
    lines = ", ".join(f"{name} = {value_of(value)}" for name, value in settings.items() if value is not None)
    return f"{config.path} cannot be edited here; set {lines} by hand"


def _flat(config: Config) -> dict[str, str]:
    return {
        f"{section}.{key}": repr(value)
        for section, values in dataclasses.asdict(dataclasses.replace(config, path="", given=())).items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    }


def edited(text: str, settings: Mapping[str, Any]) -> str:
    """Returns a TOML text with settings, by dotted name, set or (None) taken out; all other lines stay as they are."""
    lines = text.removesuffix("\n").split("\n")  # a text in TOML may hold what else ends lines elsewhere
    for name, value in settings.items():
        section, _, key = name.partition(".")
        lines = _with_setting(lines, section, key, value)
    return "\n".join(lines) + "\n"


def _with_setting(lines: list[str], section: str, key: str, value: Any) -> list[str]:
    heads = ((number, _HEADER.match(line)) for number, line in enumerate(lines))
    start = next((number for number, head in heads if head and head["name"].strip("\"'") == section), None)
    own = None if value is None else f"{key} = {value_of(value)}"
    if start is None:
        return lines if own is None else [*lines, "", f"[{section}]", f"{own}  {_MARK}"]
    end = next((n for n in range(start + 1, len(lines)) if lines[n].lstrip().startswith("[")), len(lines))
    for place in range(start + 1, end):
        found = _KEY.match(lines[place])
        if found is None or found["key"] != key:
            continue
        # A value may be an array over several lines.
        last = next((n for n in range(place, len(lines)) if _parses("\n".join(lines[place : n + 1]))), place)
        was, comment = _split("\n".join(lines[place : last + 1]))
        old = [f"{_MARK}: was {' '.join(was.split())}"]
        new = [] if own is None else [f"{own}{f'  {comment}' if comment else ''}"]
        return [*lines[:place], *old, *new, *lines[last + 1 :]]
    return lines if own is None else [*lines[: start + 1], f"{own}  {_MARK}", *lines[start + 1 :]]


def _split(text: str) -> tuple[str, str]:
    """Returns a setting and the comment behind it."""
    for place, character in enumerate(text):
        if character == "#" and _parses(text[:place]):
            return text[:place].rstrip(), text[place:].strip()
    return text.rstrip(), ""


def _parses(text: str) -> bool:
    try:
        return bool(tomllib.loads(text))
    except ValueError:
        return False
