"""The last line of a run that waited for its data: why, and the command that helps."""

from __future__ import annotations

from forebay.config.tree import Config
from forebay.train.loader import FillTimes, Loader
from forebay.train.loop.micro_batches import BatchLoader
from forebay.visible import from_here

WORTH_A_LINE = 0.05
"""The share of a run's time in which it waited for data, above which the run says why."""


def waiting_line(config: Config, loader: BatchLoader, *, share: float, is_uncached: bool) -> str | None:
    """Returns why a run waited so large a share of its time for data, and the command; None where it hardly did."""
    if not share > WORTH_A_LINE:
        return None
    head, path = f"waited {100 * share:.0f} % of the time for data", from_here(config.path)
    if is_uncached:
        return f"{head}: samples are made on the fly; run: forebay preprocess {path}"
    ask = f"run: forebay doctor {path}"
    if not isinstance(loader, Loader):
        return f"{head}; {ask}"
    if not loader.settings.num_threads:
        return f"{head}: loader.num_threads = 0 fills batches in the step's own thread; {ask}"
    return f"{head}: {_why(loader.fill_times, threads=loader.settings.num_threads)}; {ask}"


def _why(times: FillTimes, *, threads: int) -> str:
    filled_s = times.read_s + times.collate_s
    if not filled_s:
        return "no batch was filled"
    if times.collate_s >= times.read_s:
        return f"collating took {100 * times.collate_s / filled_s:.0f} % of the work of {threads} threads"
    share = f"reading the cache took {100 * times.read_s / filled_s:.0f} % of the work of {threads} threads"
    # A read that needs no CPU waits for something: for a page of the disk, or for a download.
    is_cold = times.read_cpu_s < times.read_s / 2
    return f"{share}, most of it waiting for a cold disk, a download or busy cores" if is_cold else share
