"""`forebay calibrate --mode verify-all` under torchrun: a few steps of every bucket on all ranks, compared."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.config.plan import BucketConfig, PackConfig
from forebay.config.tree import Config
from forebay.errors import ConfigError, ForebayError
from forebay.measure.batch_search import PACK_UNIT, Case
from forebay.measure.calibrate import Tell, cases_of, checked, chosen
from forebay.measure.calibrate_bench import FILE_NAME, CalibrateOptions, Entries, is_out_of_memory
from forebay.measure.machine import peak_resident_bytes, reset_peak_resident
from forebay.measure.step_runner import StepRunner, for_trials, opened
from forebay.plan.bucket.bucket_plan import BucketPlan
from forebay.plan.make import make_plan, samples_of
from forebay.store.source import SampleSource
from forebay.train.collate.patches import fields_of
from forebay.train.device import Batch
from forebay.train.loop.launch import process_state
from forebay.train.models.families import ModelFacts
from forebay.visible import human_bytes

PEAK_TOLERANCE = 0.05
"""How far the peaks of ranks on CUDA may lie apart, as a share of the largest. Peaks of hosts are not compared."""
_HEAD = f"{'bucket':<12}{'rank':>5}{'size':>8}{'steps':>7}{'peak':>10}{'s a step':>10}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one rank did with one bucket."""

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
class RanksReport:
    """What `forebay calibrate --mode verify-all --json` prints; its fields are an interface."""

    world_size: int
    rows: list[Row]
    problems: list[str]
    """How ranks differ; empty where they do not."""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """Returns what is printed at the end; the rows were printed before."""
        return self.problems or [f"all buckets train on {self.world_size} ranks, and the ranks agree"]


def verify(config: Config, options: CalibrateOptions, *, tell: Tell) -> RanksReport | None:
    """Returns what `--steps` steps on the longest shapes of every bucket took on each rank; None on ranks but 0.

    Batches are as large as `--out` says, or `calibrated_bs.json` beside the config; where there is no such file, as
    the plan of the config says. tell: called with the lines of a table. Raises as `calibrate`, and ForebayError on a
    rank that runs out of memory: torchrun then ends the others.
    """
    facts, config = checked(config), for_trials(config)
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
) -> tuple[list[Row], bool]:
    """Returns the rows of all buckets and ranks, and whether the device is a CUDA device."""
    source = opened(config)
    cases, sizes = cases_of(config, source), _sizes(config, source, options)
    loop = StepRunner(config, facts, source, accumulates=config.train.grad_acc > 1)
    rows: list[Row] = []
    if state.is_main_process:
        tell(_HEAD)
    for name in chosen(options.buckets, list(cases)):
        if (case := cases[name]) is None:
            continue
        own = _row(case, case.batch(config, source, sizes[name]), loop, options.steps, rank=state.process_index)
        of_all = _gathered(own, state.num_processes)
        rows += of_all
        if state.is_main_process:
            tell("\n".join(row.line() for row in of_all))
    return rows, _on_cuda(loop)


def differences(rows: Sequence[Row], *, on_cuda: bool) -> list[str]:
    """Returns a line for each way in which ranks differ: batch, shapes, steps, and on CUDA peaks far apart."""
    found = []
    for bucket in dict.fromkeys(row.bucket for row in rows):
        own = [row for row in rows if row.bucket == bucket]
        for name in ("size", "shapes", "steps"):
            for row in own[1:]:
                if (value := getattr(row, name)) != (first := getattr(own[0], name)):
                    found.append(f"{bucket}: {name} is {first} on rank {own[0].rank} and {value} on rank {row.rank}")
        low, high = (pick(own, key=lambda row: row.peak_bytes) for pick in (min, max))
        if on_cuda and high.peak_bytes - low.peak_bytes > PEAK_TOLERANCE * high.peak_bytes:
            found.append(
                f"{bucket}: the peak is {human_bytes(low.peak_bytes)} on rank {low.rank} and "
                f"{human_bytes(high.peak_bytes)} on rank {high.rank}, more than {100 * PEAK_TOLERANCE:.0f} % apart"
            )
    return found


def _sizes(config: Config, source: SampleSource, options: CalibrateOptions) -> dict[str, int]:
    """Returns the size of each bucket's batches, or of the packs."""
    settings = config.plan
    if isinstance(settings, PackConfig):
        return {"pack": max(settings.seq_len // PACK_UNIT, 1)}
    file = options.out or Path(config.path).parent / FILE_NAME
    if options.buckets and file.is_file():  # whose other buckets need not be calibrated yet
        entries = Entries.of(file).entries
        names = chosen(options.buckets, list(cases_of(config, source)))
        if missing := [name for name in names if not isinstance(entries.get(name, {}).get("batch_size"), int)]:
            raise ConfigError(
                f"--bucket {missing[0]}: {file} has no batch_size of it; run: forebay calibrate {config.path} "
                f"--bucket {missing[0]}"
            )
        return {name: entries[name]["batch_size"] for name in names}
    if isinstance(settings, BucketConfig) and file.is_file():
        settings = dataclasses.replace(
            settings, calibration=str(file), batch_size=None, batch_seconds=None, batch_tokens=None
        )
    plan = make_plan(samples_of(source), settings) if settings is not None else None
    if not isinstance(plan, BucketPlan):
        raise TypeError("only buckets and packs are verified")
    return dict(zip(cases_of(config, source), plan.batch_sizes.tolist(), strict=True))


def _row(case: Case, batch: Batch, loop: StepRunner, steps: int, *, rank: int) -> Row:
    fields = fields_of(batch)
    shapes = {name: list(value.shape) for name, value in fields.items() if isinstance(value, torch.Tensor)}
    if _on_cuda(loop):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(loop.device)
    else:
        reset_peak_resident()
    try:
        times_s = [loop.step(batch) for _ in range(steps)]
    except RuntimeError as err:
        if not is_out_of_memory(err):
            raise
        raise ForebayError(
            f"rank {rank}: {case.name} does not fit: {shapes}; calibrate it again: {err}", code="FB706"
        ) from err
    on_cuda = _on_cuda(loop)
    peak = torch.cuda.max_memory_reserved(loop.device) if on_cuda else peak_resident_bytes()
    size = fields["labels"].numel() if case.name == "pack" else len(fields["labels"])
    step_s = round(statistics.median(times_s[1:]), 4)
    return Row(
        bucket=case.name, rank=rank, size=size, shapes=shapes, steps=len(times_s), peak_bytes=peak, step_s=step_s
    )


def _gathered(row: Row, num_ranks: int) -> list[Row]:
    if num_ranks == 1:
        return [row]
    found: list[Any] = [None] * num_ranks
    torch.distributed.all_gather_object(found, row)
    return found


def _on_cuda(loop: StepRunner) -> bool:
    return loop.device.type == "cuda"
