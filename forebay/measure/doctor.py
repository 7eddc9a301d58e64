"""`forebay doctor`: the arms one after the other, within a budget of seconds, then what they say.

`--apply`: the user's TOML with other settings, as an edit of its text, so that comments stay.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config.plan import PackConfig
from forebay.config.tree import Config
from forebay.config.url import is_url
from forebay.errors import ConfigError, ForebayError
from forebay.measure.advice import Advice, advice
from forebay.measure.diagnosis import MeasuredArms
from forebay.measure.doctor_bench import DoctorTask
from forebay.measure.doctor_child import Answer, Session, session
from forebay.measure.doctor_report import DoctorReport
from forebay.measure.predict import StepTime, StepTimes
from forebay.progress import Progress
from forebay.steps.recipe import load_config, plan_example
from forebay.store.files import temporary_name
from forebay.visible import from_here

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
    own = load_config(config.path)
    changes = {name: _value(own, name) if value is None else value for name, value in settings.items()}
    try:
        made = load_config(str(file))
    except ConfigError as err:
        raise ForebayError(f"{_by_hand(config, settings)}: {err}") from err
    unlike = [name for name, value in changes.items() if settings[name] is not None and _value(made, name) != value]
    kept = _flat(dataclasses.replace(own, path="")).items() - _flat(dataclasses.replace(made, path="")).items()
    moved = sorted({name for name, _ in kept} - settings.keys())
    if unlike or moved:
        raise ForebayError(f"{_by_hand(config, settings)}: {', '.join([*unlike, *moved])} would not be what is wanted")


def _by_hand(config: Config, settings: Mapping[str, Any]) -> str:
    lines = ", ".join(f"{name} = {toml(value)}" for name, value in settings.items() if value is not None)
    return f"{config.path} cannot be edited here; set {lines} by hand"


def _value(config: Config, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def _flat(config: Config) -> dict[str, str]:
    return {
        f"{section}.{key}": repr(value)
        for section, values in dataclasses.asdict(config).items()
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
    start = next((n for n, line in enumerate(lines) if _header(line) == section), None)
    own = None if value is None else f"{key} = {toml(value)}"
    if start is None:
        return lines if own is None else [*lines, "", f"[{section}]", f"{own}  {_MARK}"]
    end = next((n for n in range(start + 1, len(lines)) if lines[n].lstrip().startswith("[")), len(lines))
    for place in range(start + 1, end):
        found = _KEY.match(lines[place])
        if found is None or found["key"] != key:
            continue
        last = _last_line(lines, place)
        was, comment = _split("\n".join(lines[place : last + 1]))
        old = [f"{_MARK}: was {' '.join(was.split())}"]
        new = [] if own is None else [f"{own}{f'  {comment}' if comment else ''}"]
        return [*lines[:place], *old, *new, *lines[last + 1 :]]
    return lines if own is None else [*lines[: start + 1], f"{own}  {_MARK}", *lines[start + 1 :]]


def _header(line: str) -> str | None:
    found = _HEADER.match(line)
    return None if found is None else found["name"].strip("\"'")


def _last_line(lines: Sequence[str], first: int) -> int:
    """Returns the last line of a value that may be an array over several."""
    for last in range(first, len(lines)):
        if _parses("\n".join(lines[first : last + 1])):
            return last
    return first


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


def toml(value: Any) -> str:
    """Returns a value of a setting as TOML writes it."""
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


GRACE_S = 24.0
"""Beside `--seconds`, for imports, listing, models, and arms that hang; the rest of 30 s is the caller's own start."""
_FEW_ROWS = 256
"""Rows that are listed where listing all of them takes too long."""

_SHARES = {
    "find": 0.03,
    "listing": 0.1,
    "raw read": 0.05,
    "steps of a build": 0.15,
    "cache": 0.07,
    "plan": 0.05,
    "cached loader": 0.17,
    "uncached loader": 0.18,
    "step": 0.15,
    "uncached DataLoader": 0.1,
    "codecs": 0.05,
}
"""What each arm may measure, as a share of the seconds."""
_FIELDS = {
    "find": "opened",
    "listing": "listed",
    "raw read": "raw_read",
    "steps of a build": "made",
    "cache": "pieces",
    "plan": "plan",
    "cached loader": "cached",
    "uncached loader": "uncached",
    "uncached DataLoader": "workers",
    "codecs": "codecs",
    "step": "steps",
}
_OF_RAW = ("raw read", "steps of a build", "codecs", "uncached loader", "uncached DataLoader")
_OF_CACHE = ("cache", "plan", "cached loader", "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """What `forebay doctor` was asked for."""

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
    check(config, options)
    began = time.monotonic() - options.passed_s
    root = tempfile.mkdtemp(prefix="forebay-doctor-")
    cores = len(os.sched_getaffinity(0))
    task = DoctorTask(config=config, root=root, parent=os.getpid(), cores=cores, prepare=options.prepare)
    try:
        with session(task, deadline_s=began + options.seconds + GRACE_S) as bench:
            found = _measured(bench, config, options, cores=cores)
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


def check(config: Config, options: DoctorOptions) -> None:
    """Raises ConfigError for what cannot be measured, or written."""
    if config.plan is None:
        raise ConfigError(
            f"{config.path}: no [plan] section, so there are no batches to measure; add one, for example: "
            f"{plan_example(config)}",
            code="FB104",
        )
    if options.apply is not None:
        check_target(config, options.apply)


def _measured(bench: Session, config: Config, options: DoctorOptions, *, cores: int) -> MeasuredArms:
    found: dict[str, Any] = {} if options.step_s is None else {"steps": given_step(options.step_s)}
    missing: dict[str, str] = {}
    for arm in _arms(options):
        if arm == "step" and options.step_s is not None:
            continue
        if arm == "codecs" and not isinstance(config.plan, PackConfig):
            continue
        if (why := _pointless(arm, found, missing)) is not None:
            missing[arm] = why
            continue
        bench.pace_s = _pace_s(found, config, cores=cores)
        answer = bench.ask(arm, _SHARES[arm] * options.seconds)
        if arm == "listing" and answer.failed is not None:
            answer = _fewer(bench, answer, options)
        if answer.value is None:
            missing[arm] = answer.skipped or answer.failed or "it gave nothing"
        else:
            found[_FIELDS[arm]] = answer.value
        if arm == "listing":
            _require(found, missing, config)
    for arm in ("cached", "uncached", "workers"):
        if arm in found:
            names = {field: name for name, field in _FIELDS.items()}
            missing |= {f"{names[arm]} with {number}": why for number, why in found[arm].skipped.items()}
    return dataclasses.replace(_of(found, config, cores=cores, not_measured=missing), start_s=bench.start_s)


def _of(
    found: Mapping[str, Any], config: Config, *, cores: int, not_measured: Mapping[str, str] | None = None
) -> MeasuredArms:
    return MeasuredArms(
        cores=cores,
        prefetch=config.loader.prefetch,
        num_threads=config.loader.num_threads,
        num_workers=config.run.num_workers or 0,
        not_measured=not_measured or {},
        **found,
    )


def _pace_s(found: Mapping[str, Any], config: Config, *, cores: int) -> float:
    """Returns the seconds of a step for each of its samples; 0 where nobody knows them yet."""
    step = _of(found, config, cores=cores).step
    return 0.0 if step is None else step.ms / 1e3


def _arms(options: DoctorOptions) -> Iterator[str]:
    with Progress(len(_SHARES), desc="doctor", unit="arm", is_shown=options.progress) as progress:
        for arm in _SHARES:
            progress.say(arm)
            yield arm
            progress.update()


def _fewer(bench: Session, answer: Answer, options: DoctorOptions) -> Answer:
    """Returns the listing of the first rows, where that of all rows took too long; else why there is none."""
    if "did not end" not in (answer.failed or ""):
        return answer
    bench.limit(_FEW_ROWS)
    return bench.ask("listing", _SHARES["listing"] * options.seconds)


def _pointless(arm: str, found: dict[str, Any], missing: dict[str, str]) -> str | None:
    """Returns why an arm is not even tried."""
    if arm in _OF_RAW and "listing" in missing:
        return "there is no listing of the raw data"
    if arm in _OF_RAW and "raw read" in missing and "did not end" in missing["raw read"]:
        return "reading raw data hangs"
    is_sealed = "opened" in found and found["opened"].place is not None
    if arm in _OF_CACHE and not is_sealed and "made" not in found:
        return "there is no cache, and no sample of one could be made"
    if arm == "uncached DataLoader" and "uncached" not in found:
        return "the loader without a cache could not be measured"
    return None


def _require(found: Mapping[str, Any], missing: Mapping[str, str], config: Config) -> None:
    """Raises ConfigError where there is neither a cache nor raw data that this machine has."""
    is_sealed = "opened" in found and found["opened"].place is not None
    if is_sealed or "listing" not in missing:
        return
    if any(map(is_url, config.source.manifests)):
        raise ConfigError(
            f"{config.path}: source.manifest is a URL and no cache of it is sealed, so all that could be measured is "
            f"the download; build the cache first: forebay preprocess {from_here(config.path)}, or fetch the data: "
            "forebay fetch"
        )
    if config.mixture.source:
        raise ConfigError(f"{config.path}: {missing.get('find', missing['listing'])}")


def given_step(step_s: float) -> StepTimes:
    """Returns steps that take what the user says, whatever their batch; they need none of this machine's cores."""
    return StepTimes(device="given", times=(StepTime(bucket=0, samples=1, room=1, seconds=step_s, cpu_s=0.0, steps=0),))
