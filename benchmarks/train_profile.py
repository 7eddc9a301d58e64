"""Measures what is known of a step's time, and what knowing it costs: `python -m benchmarks.train_profile [--tiny]
[--json] [--rounds N]`.

The demo's Whisper learns the demo's clips, one a step, with and without a recorder, in turns. `unclaimed` is the share
of the recorded steps' wall time that no part claims, and `recorded_times_plain` the CPU of a recorded step beside a
plain one. `span_us` is what the name of a stretch costs while nobody listens; a step has `spans` of them.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import timeit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import json

from benchmarks.report import Cost, arguments, machine, median, ratio, show, timed
from forebay.config.tree import Config
from forebay.measure.profile import UNCLAIMED, Trace, read_trace, shares_of
from forebay.spans import span
from forebay.steps.recipe import load_config
from forebay.train.loop.recorder import WARM_UP, Recorder
from forebay.train.loop.run import run

CONFIG = Path(__file__).parents[1] / "configs/demo_speech.toml"


def demo(folder: str, *, steps: int) -> Config:
    """Returns the demo config with a clip a step and no files but under `folder`."""
    settings = ("plan.batch_seconds=1", f"train.output_dir={folder}/runs", "train.usage_every=0", "train.log_every=5")
    config = load_config(str(CONFIG), overrides=[*settings, f"run.cache_root={folder}/caches"])
    return dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=steps))


def recorded(folder: str, *, steps: int) -> tuple[Cost, Trace]:
    """Returns the cost of a run whose steps but the first are recorded, and the trace."""
    recorder = Recorder(num_steps=steps)
    # One step more than is done: a run writes its checkpoint after its last one.
    cost = timed(lambda: run(demo(folder, steps=steps + WARM_UP + 1), log=lambda _: None, recorder=recorder))
    path = Path(folder) / "trace.json"
    recorder.write(path)
    return cost, read_trace(json.loads(path.read_bytes())["traceEvents"])


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    steps, rounds = (2, 1) if options.tiny else (10, options.rounds or 10)
    with_s, without_s, unclaimed, spans = [], [], [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            cost, trace = recorded(folder, steps=steps)
            with_s.append(cost.cpu_s)
            without_s.append(timed(lambda: run(demo(folder, steps=steps + WARM_UP), log=lambda _: None)).cpu_s)
            shares = shares_of(trace)
            unclaimed.append(shares.main[UNCLAIMED] / shares.wall_s)
            spans = sum(map(len, trace.spans.values())) / trace.num_steps
    document: dict[str, Any] = {
        "machine": machine("torch", "accelerate"),
        "steps": steps,
        "rounds": rounds,
        "unclaimed_percent": 100 * median(unclaimed),
        "unclaimed_percent_most": 100 * max(unclaimed),
        "recorded_times_plain": ratio(with_s, without_s),
        "spans": spans,
        "span_us": 10 * min(timeit.repeat(_empty, number=100_000, repeat=5)),
    }
    show(document, as_json=options.json)
    return 0


def _empty() -> None:
    with span("nobody listens"):
        pass


if __name__ == "__main__":
    sys.exit(main())
