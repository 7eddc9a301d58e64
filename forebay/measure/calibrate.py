"""`forebay calibrate`: an entry of `calibrated_bs.json` for every bucket, or for packs, written as each is found.

`--mode verify-all` under torchrun: a few steps of every bucket on all ranks, compared.
"""

from __future__ import annotations

import dataclasses
import difflib
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.config.plan import BucketConfig, PackConfig
from forebay.config.tree import Config
from forebay.errors import ConfigError, ForebayError
from forebay.measure.batch_search import PACK_UNIT, Case, bucket_cases, pack_case
from forebay.measure.calibrate_bench import FILE_NAME, CalibrateOptions, CalibrationBench, Entries, is_out_of_memory
from forebay.measure.child_process import Isolated
from forebay.measure.fake_tensors import ProbedStep
from forebay.measure.machine import reset_peaks
from forebay.measure.step_runner import StepRunner, checked_model, for_trials, opened
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.make import make_plan, samples_of
from forebay.steps.recipe import plan_example
from forebay.store.source import SampleSource, parts_of
from forebay.terminal import CommandReport
from forebay.train.collate.device_features import constants_seen
from forebay.train.collate.patches import fields_of
from forebay.train.device import Batch
from forebay.train.loop.launch import process_state
from forebay.train.models.families import FAMILIES, ModelFacts
from forebay.train.models.model_folder import check_constants
from forebay.visible import from_here, human_bytes

Tell = Callable[[str], None]
_PEAK_TOLERANCE = 0.05
"""How far the peaks of ranks on CUDA may lie apart, as a share of the largest. Peaks of hosts are not compared."""
_SIZES = ("batch_seconds", "batch_tokens", "batch_size", "calibration", "seq_len", "max_patches")


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationReport(CommandReport):
    """The document of `forebay calibrate --json`; its fields are an interface."""

    file: str
    """The calibration, for `plan.calibration`."""
    device: str
    limit_bytes: int
    """What a batch may take."""
    world_size: int
    measured: bool
    """Whether the device's own memory was measured; False: a line says what a batch takes."""
    buckets: dict[str, dict[str, Any]]
    """The entries of the file that were asked for, by bucket; of packs one, `pack`."""
    skipped: list[str]
    """Buckets without samples."""
    settings: list[str]
    """The lines for `[plan]`."""
    replaces: str = ""
    """The settings of `[plan]` that these lines replace: a plan takes one of them."""

    def lines(self) -> list[str]:
        """Returns what `forebay calibrate` prints at its end; a line for each bucket was printed before."""
        place = f", in the place of {self.replaces}" if self.replaces else ""
        return [f"written: {from_here(self.file)}; for [plan]{place}:", *(f"  {line}" for line in self.settings)]


def calibrate(config: Config, options: CalibrateOptions, *, tell: Tell) -> CalibrationReport | None:
    """Returns the report of a calibration, whose file then has an entry for each bucket; None on ranks other than 0.

    tell: called with a line for each bucket as it ends. Raises ConfigError for settings that cannot be calibrated,
    CacheNotFoundError where the cache is not there, and at the end ForebayError for buckets that do not fit.
    """
    facts = _checked(config)
    if int(os.environ.get("RANK", "0")):
        return None
    source = opened(config)
    for part in parts_of(source):
        check_constants(facts, constants_seen(config, part.constants))
    cases = _cases_of(config, source)
    asked = _chosen(options.buckets, list(cases))
    entries = Entries.of(options.out or Path(config.path).parent / FILE_NAME)
    with Isolated() as processes:
        bench = CalibrationBench(for_trials(config), facts, options, processes)
        failed = _run(bench, cases, asked=asked, entries=entries, tell=tell)
    if failed:
        raise ForebayError(_failure(bench, failed), code="FB706")
    return CalibrationReport(
        file=str(entries.path),
        device=bench.device.name,
        limit_bytes=bench.limit_bytes,
        world_size=bench.world_size,
        measured=bench.device.is_cuda,
        buckets={name: entries.entries[name] for name in asked if cases[name] is not None},
        skipped=[name for name in asked if cases[name] is None],
        settings=_settings(entries, cases),
        replaces=", ".join(name for name in _SIZES if getattr(config.plan, name, None) is not None),
    )


def _checked(config: Config) -> ModelFacts:
    """Returns the facts of the config's model. Raises ConfigError where there is nothing to calibrate."""
    if config.plan is None:
        raise ConfigError(
            f"{config.path}: no [plan] section; add one, for example: {plan_example(config)}", code="FB104"
        )
    if not isinstance(config.plan, (BucketConfig, PackConfig)):
        raise ConfigError(
            f'{config.path}: plan.kind is "{config.plan.kind}", whose batches have no range of length to calibrate a '
            'batch size for; set plan.kind = "bucket" with edges_s, and no window, then run: forebay calibrate '
            f"{config.named}"
        )
    if config.train.model is None:
        raise ConfigError(
            f"{config.path}: train.model is missing; name the folder of a model whose model_type is one of "
            f"{', '.join(FAMILIES)}, or of any other of transformers that returns a loss",
            code="FB108",
        )
    return checked_model(config)


def _cases_of(config: Config, source: SampleSource) -> dict[str, Case | None]:
    """Returns what is calibrated of a config's plan by its name; None for a bucket without samples."""
    if isinstance(config.plan, PackConfig):
        return {"pack": pack_case(source, config.plan)}
    assert isinstance(config.plan, BucketConfig)  # see `_checked`
    return dict(bucket_cases(source, config.plan))


def _chosen(asked: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the buckets of these names or indices, in the plan's order; all where none is asked for.

    Raises ConfigError for a bucket that is not there, with the nearest.
    """
    wanted = set()
    for name in asked:
        if name not in names and not (name.isascii() and name.isdecimal() and int(name) < len(names)):
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
            raise ConfigError(
                f"--bucket {name}: the plan has no such bucket; the nearest: {', '.join(near)}; it has "
                f"{', '.join(names)}, or 0 to {len(names) - 1}"
            )
        wanted.add(name if name in names else names[int(name)])
    return [name for name in names if name in wanted or not asked]


def _run(
    bench: CalibrationBench, cases: Mapping[str, Case | None], *, asked: Sequence[str], entries: Entries, tell: Tell
) -> list[tuple[Case, ProbedStep | None]]:
    """Returns the cases that do not fit; each of the others that were asked for has its entry, in the file and told."""
    digests = {name: bench.made_by(case) for name, case in cases.items() if case is not None}
    for name in entries.foreign(digests):
        if name not in asked:
            tell(f"{name}: its entry in {from_here(entries.path)} was made with other settings and stays as it is")
    kept = {name: entry for name in asked if (entry := entries.kept(name, digests.get(name)))}
    todo = [case for name in asked if (case := cases[name]) is not None and name not in kept]
    probed = dict(zip([case.name for case in todo], bench.probe(todo), strict=True))
    failed: list[tuple[Case, ProbedStep | None]] = []
    for name in asked:
        case = cases[name]
        if case is None:
            tell(f"{name}: no samples, skipped")
            continue
        entry = kept.get(name) or bench.entry(case, probed[name])
        if entry is None:
            failed.append((case, probed[name]))
            entries.drop(name)
            tell(f"{name}: does not fit at {case.amount(bench.least(case))}")
            continue
        entries.put(name, bench.with_grad_acc(entry), order=list(cases))
        tell(bench.line(case, entries.entries[name]) + (" (kept, of the same settings)" if name in kept else ""))
    _fill(entries, cases)
    return failed


def _fill(entries: Entries, cases: Mapping[str, Case | None]) -> None:
    """Makes buckets without samples have an entry, without which a plan would refuse the file.

    It is that of the next longer bucket, whose shapes are longer, of cells one with as many tokens at least; behind the
    last of them a batch of one sample.
    """
    names = list(cases)
    for number, name in enumerate(names):
        if cases[name] is None and name not in entries.entries:
            behind = (each for each in names[number + 1 :] if cases[each] is not None and each in entries.entries)
            longer = next((each for each in behind if _token_edge(each) >= _token_edge(name)), None)
            sizes = {"batch_size": 1, "grad_acc": 1} if longer is None else entries.entries[longer]
            of_none = {**{n: sizes[n] for n in ("batch_size", "grad_acc")}, "trials": 0, "measured": False}
            entries.put(name, of_none, order=names)


def _token_edge(name: str) -> int:
    """Returns the upper edge in tokens of a cell by its name; 0 of another bucket."""
    edge = name.rpartition("_t")[2]
    return int(edge) if edge != name else 0


def _failure(bench: CalibrationBench, failed: Sequence[tuple[Case, ProbedStep | None]]) -> str:
    train, found = bench.config.train, []
    for case, probed in failed:
        least = bench.least(case)
        takes = "more" if probed is None else f"about {human_bytes(probed.at(least))}"
        found.append(f"{case.name} at {case.amount(least)} (takes {takes})")
    advice = [
        *(["train.gradient_checkpointing = true"] if not train.gradient_checkpointing else []),
        *(['train.mixed_precision = "bf16"'] if train.mixed_precision == "no" else []),
        *(["[train.lora]"] if train.lora is None else []),
    ]
    shorter = "a lower --min-bs, or shorter clips (source.max_duration_s)"
    if isinstance(bench.config.plan, PackConfig):
        shorter = "a smaller plan.max_patches"
    return (
        f"does not fit into {human_bytes(bench.limit_bytes)}: {'; '.join(found)}; set {', '.join([*advice, shorter])}; "
        "the entries of what does fit are kept"
    )


def _settings(entries: Entries, cases: Mapping[str, Case | None]) -> list[str]:
    """Returns the lines for `[plan]`: which file sizes its batches, or how large its packs are."""
    if list(cases) == ["pack"]:
        entry = entries.entries["pack"]
        return [f"seq_len = {entry['seq_len']}", f"max_patches = {entry['max_patches']}"]
    lines = [f'calibration = "{entries.path.name}"']
    missing = [name for name in cases if name not in entries.entries]
    return lines if not missing else [*lines, f"# still missing, and wanted by a plan: {', '.join(missing)}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow:
    """The work of one rank with one bucket."""

    bucket: str
    rank: int
    size: int
    """Samples of the batch, or tokens of the pack."""
    shapes: Mapping[str, list[int]]
    """Shape of every tensor of the batch, by field."""
    steps: int
    peak_bytes: int
    """On CUDA what the allocator had reserved at most, else the peak of the process's resident memory."""
    step_s: float

    def line(self) -> str:
        """Returns the row for a terminal."""
        return (
            f"{self.bucket:<12}{self.rank:>5}{self.size:>8}{self.steps:>7}{human_bytes(self.peak_bytes):>10}"
            f"{self.step_s:>10.3g}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksReport(CommandReport):
    """The document of `forebay calibrate --mode verify-all --json`; its fields are an interface."""

    world_size: int
    rows: list[RankRow]
    problems: list[str]
    """How ranks differ; empty where they do not."""

    def lines(self) -> list[str]:
        """Returns what is printed at the end; the rows were printed before."""
        return self.problems or [f"all buckets train on {self.world_size} ranks, and the ranks agree"]


def verify(config: Config, options: CalibrateOptions, *, tell: Tell) -> RanksReport | None:
    """Returns what `--steps` steps on the longest shapes of every bucket took on each rank; None on ranks but 0.

    Batches are as large as `--out` says, or `calibrated_bs.json` beside the config; where there is no such file, as
    the plan of the config says. tell: called with the lines of a table. Raises as `calibrate`, and ForebayError on a
    rank that runs out of memory: torchrun then ends the others.
    """
    facts, config = _checked(config), for_trials(config)
    state = process_state()
    rows, on_cuda = _rows(config, facts, options, state=state, tell=tell)
    if torch.distributed.is_initialized():
        # DDP holds the process group: one that lives on until the interpreter ends can wait there for its threads.
        gc.collect()
        state.destroy_process_group()
    if not state.is_main_process:
        return None
    return RanksReport(world_size=state.num_processes, rows=rows, problems=differences(rows, on_cuda=on_cuda))


def _rows(
    config: Config, facts: ModelFacts, options: CalibrateOptions, *, state: Any, tell: Tell
) -> tuple[list[RankRow], bool]:
    """Returns the rows of all buckets and ranks, and whether the device is a CUDA device."""
    source = opened(config)
    cases = _cases_of(config, source)
    sizes = _sizes(config, source, options, names=list(cases))
    runner = StepRunner(config, facts, source, accumulates=config.train.grad_acc > 1)
    rows: list[RankRow] = []
    if state.is_main_process:
        tell(f"{'bucket':<12}{'rank':>5}{'size':>8}{'steps':>7}{'peak':>10}{'s a step':>10}")
    for name in _chosen(options.buckets, list(cases)):
        if (case := cases[name]) is None:
            continue
        own = _row(case, case.batch(config, source, sizes[name]), runner, options.steps, rank=state.process_index)
        of_all = [own] * state.num_processes
        if state.num_processes > 1:
            torch.distributed.all_gather_object(of_all, own)
        rows += of_all
        if state.is_main_process:
            tell("\n".join(row.line() for row in of_all))
    return rows, runner.device.type == "cuda"


def differences(rows: Sequence[RankRow], *, on_cuda: bool) -> list[str]:
    """Returns a line for each way in which ranks differ: batch, shapes, steps, and on CUDA peaks far apart."""
    found = []
    for bucket in dict.fromkeys(row.bucket for row in rows):
        own = [row for row in rows if row.bucket == bucket]
        for name in ("size", "shapes", "steps"):
            for row in own[1:]:
                if (value := getattr(row, name)) != (first := getattr(own[0], name)):
                    found.append(f"{bucket}: {name} is {first} on rank {own[0].rank} and {value} on rank {row.rank}")
        low, high = (pick(own, key=lambda row: row.peak_bytes) for pick in (min, max))
        if on_cuda and high.peak_bytes - low.peak_bytes > _PEAK_TOLERANCE * high.peak_bytes:
            found.append(
                f"{bucket}: the peak is {human_bytes(low.peak_bytes)} on rank {low.rank} and "
                f"{human_bytes(high.peak_bytes)} on rank {high.rank}, more than {100 * _PEAK_TOLERANCE:.0f} % apart"
            )
    return found


def _sizes(config: Config, source: SampleSource, options: CalibrateOptions, *, names: list[str]) -> dict[str, int]:
    """Returns the size of each bucket's batches, or of the packs."""
    settings = config.plan
    if isinstance(settings, PackConfig):
        return {"pack": max(settings.seq_len // PACK_UNIT, 1)}
    file = options.out or Path(config.path).parent / FILE_NAME
    if options.buckets and file.is_file():  # whose other buckets need not be calibrated yet
        entries = Entries.of(file).entries
        names = _chosen(options.buckets, names)
        if missing := [name for name in names if not isinstance(entries.get(name, {}).get("batch_size"), int)]:
            raise ConfigError(
                f"--bucket {missing[0]}: {file} has no batch_size of it; run: forebay calibrate {config.named} "
                f"--bucket {missing[0]}"
            )
        return {name: entries[name]["batch_size"] for name in names}
    if isinstance(settings, BucketConfig) and file.is_file():
        settings = dataclasses.replace(
            settings, calibration=str(file), batch_size=None, batch_seconds=None, batch_tokens=None
        )
    plan = make_plan(samples_of(source), settings) if settings is not None else None
    assert isinstance(plan, BucketPlan)  # see `_checked`
    return dict(zip(names, plan.batch_sizes.tolist(), strict=True))


def _row(case: Case, batch: Batch, runner: StepRunner, steps: int, *, rank: int) -> RankRow:
    fields = fields_of(batch)
    shapes = {name: list(value.shape) for name, value in fields.items() if isinstance(value, torch.Tensor)}
    reset_peaks()
    try:
        peak, _, step_s = runner.measured(batch, steps)
    except RuntimeError as err:
        if not is_out_of_memory(err):
            raise
        raise ForebayError(
            f"rank {rank}: {case.name} does not fit: {shapes}; calibrate it again: {err}", code="FB706"
        ) from err
    size = case.size_of(fields["labels"])
    return RankRow(bucket=case.name, rank=rank, size=size, shapes=shapes, steps=steps, peak_bytes=peak, step_s=step_s)
