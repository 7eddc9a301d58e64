"""Measures whether `forebay doctor` is right: `python -m benchmarks.doctor [--tiny] [--json] [--rounds N]`.

`plants`: a bottleneck is planted in the code path (a slow decoder, reader, collate, step) and the doctor is run in its
own processes, as a user runs it; `first` counts the runs that name what was planted as the bottleneck. `idle`: the
idle share that the doctor predicts of a loop whose step sleeps, beside that of the real loader under such a loop, both
in processes of their own, in turns; `points` is how far the medians lie apart. `seconds` are of whole runs, of which
`beyond` is the most that one took beyond its `--seconds`; a reader that hangs is among them.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import json

from benchmarks.report import arguments, machine, median, show
from forebay.config.tree import Config
from forebay.measure.doctor import DoctorOptions, doctor
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import build
from forebay.steps.recipe import load_config

CONFIG = Path(__file__).parents[1] / "configs/demo_speech.toml"
PLANTED_S = 0.03
"""Of each clip; the decoder, the slowest stage here, takes 2 ms."""
STEP_S = 0.02
SLOW_STEP_S = 1.0


def _slowed(owner: Any, name: str, seconds: Callable[..., float]) -> None:
    """Makes a function of the product sleep each time before it works."""
    function = getattr(owner, name)

    def slow(*args: Any, **named: Any) -> Any:
        time.sleep(seconds(*args, **named))
        return function(*args, **named)

    setattr(owner, name, slow)


def plant_decode() -> None:
    """A slow decoder."""
    from forebay.preprocess import audio_group

    _slowed(audio_group, "decode_audio", lambda *_, **__: PLANTED_S)


def plant_read() -> None:
    """A slow disk under the raw data."""
    from forebay.rows import media_reader as media

    _slowed(media, "read_fully", lambda *_: PLANTED_S)


def plant_collate() -> None:
    """A slow collator."""
    from forebay.train.collate.collator import Collator

    _slowed(Collator, "collate", lambda _, samples, **__: PLANTED_S * len(samples))


def plant_step() -> None:
    """A slow step."""
    from forebay.train.loop.learner import Learner

    _slowed(Learner, "update", lambda *_, **__: SLOW_STEP_S)


def plant_hang() -> None:
    """A disk that does not answer."""
    from forebay.rows import media_reader as media

    _slowed(media, "read_fully", lambda *_: 3600.0)


PLANTS = {"raw read": "plant_read", "decode": "plant_decode", "collate": "plant_collate", "step": "plant_step"}
"""What the doctor is to name, and what plants it."""


def config_under(root: str, *, is_built: bool, settings: Sequence[str] = ()) -> Config:
    """Returns the demo's config with a cache root of its own, and its cache there or not."""
    config = load_config(str(CONFIG), overrides=[f'run.cache_root="{root}"', *settings])
    if is_built:
        build(config, Options(progress=False))
    return config


def asked(config: Config, **options: Any) -> tuple[dict[str, Any], float]:
    """Returns the doctor's document, and the seconds that it took beyond `seconds`."""
    wanted = DoctorOptions(progress=False, **options)
    began = time.perf_counter()
    document = doctor(config, wanted).to_json()
    return document, time.perf_counter() - began - wanted.seconds


def named_first(plant: str, *, seconds: float) -> dict[str, Any]:
    """Returns what the doctor names of a run with a plant."""
    with tempfile.TemporaryDirectory() as root:
        config = config_under(root, is_built=plant == "collate", settings=["plan.batch_seconds=10"])
        step = {} if plant == "step" else {"step_s": STEP_S}
        prepare = f"benchmarks.doctor:{PLANTS[plant]}"
        document, beyond_s = asked(config, seconds=seconds, prepare=prepare, **step)
    return {"planted": plant, "named": str(document["bottleneck"]), "beyond_s": beyond_s}


def hanging(*, seconds: float) -> dict[str, Any]:
    """Returns what the doctor says of a reader that hangs."""
    with tempfile.TemporaryDirectory() as root:
        config = config_under(root, is_built=False)
        document, beyond_s = asked(config, seconds=seconds, prepare="benchmarks.doctor:plant_hang", step_s=STEP_S)
    return {"planted": "hang", "named": document["measured"]["not_measured"]["raw read"], "beyond_s": beyond_s}


def real_idle(config: Config, *, step_s: float, seconds: float, prepare: str | None) -> float:
    """Returns the share in which a loop of sleeping steps waits for its loader, in a process of its own."""
    task = {"root": str(config.run.cache_root), "plan": PLAN, "step_s": step_s, "seconds": seconds, "prepare": prepare}
    path = os.pathsep.join([str(CONFIG.parents[1]), os.environ.get("PYTHONPATH", "")])
    made = subprocess.run(
        [sys.executable, "-m", "benchmarks.doctor", "--loop", json.dumps({**task, "cache": config.loader.cache})],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return float(made.stdout)


PLAN = "plan.batch_seconds=20"


def loop(task: dict[str, Any]) -> float:
    """Returns the waiting share of whole epochs, behind a first one that loads libraries."""
    import pkgutil

    if task["prepare"] is not None:
        pkgutil.resolve_name(task["prepare"])()
    from forebay.train.select import make_loader

    settings = [f'loader.cache="{task["cache"]}"', task["plan"]]
    loader = make_loader(config_under(task["root"], is_built=False, settings=settings))
    for _ in loader:
        pass
    waited, began = loader.report()["wait_s"], time.perf_counter()
    while time.perf_counter() - began < task["seconds"]:
        for _ in loader:
            time.sleep(task["step_s"])
    total = time.perf_counter() - began
    return float((loader.report()["wait_s"] - waited) / total)


def idle_row(
    name: str, *, step_s: float, is_cached: bool, plant: str | None, rounds: int, seconds: float
) -> dict[str, Any]:
    """Returns predicted and real idle shares of a loop with a step, medians of some rounds."""
    prepare = None if plant is None else f"benchmarks.doctor:{plant}"
    predicted, real = [], []
    with tempfile.TemporaryDirectory() as root:
        config = config_under(root, is_built=is_cached, settings=[PLAN])
        config = dataclasses.replace(
            config, loader=dataclasses.replace(config.loader, cache="require" if is_cached else "off")
        )
        for _ in range(rounds):
            document, _ = asked(config, seconds=seconds, step_s=step_s, prepare=prepare)
            way = "cached, loader" if is_cached else "uncached, loader"
            number = config.loader.num_threads
            predicted += [
                each["idle"]
                for each in document["predictions"]
                if each["name"].startswith(way) and each["workers"] == number
            ]
            real.append(real_idle(config, step_s=step_s, seconds=seconds / 3, prepare=prepare))
    return {
        "run": name,
        "step_ms": 1e3 * step_s,
        "predicted_percent": 100 * median(predicted),
        "real_percent": 100 * median(real),
        "points": 100 * (median(predicted) - median(real)),
    }


def idle_rows(*, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yields the rows of both ways to read, each with a step that is slower and one that is faster than the data."""
    for name, step_s, is_cached, plant in (
        ("uncached", 0.02, False, None),
        ("uncached", 0.1, False, None),
        ("uncached, slow decoder", 0.2, False, "plant_decode"),
        ("cached", 0.001, True, None),
        ("cached", 0.02, True, None),
        ("cached, slow collate", 0.06, True, "plant_collate"),
    ):
        yield idle_row(name, step_s=step_s, is_cached=is_cached, plant=plant, rounds=rounds, seconds=seconds)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the words of builds and loaders to itself."""
    import logging

    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["--loop"]:
        with quiet():
            print(loop(json.loads(given[1])))
        return 0
    options = arguments(__doc__, argv)
    with quiet():
        if options.tiny:
            plants, idle = [named_first("decode", seconds=2)], []
        else:
            rounds = options.rounds or 5
            plants = [named_first(plant, seconds=6) for _ in range(rounds) for plant in PLANTS]
            plants.append(hanging(seconds=6))
            idle = list(idle_rows(rounds=min(rounds, 3), seconds=30))
    document = {
        "machine": machine("torch", "numpy"),
        "plants": [{**each, "is_first": str(each["named"] == each["planted"])} for each in plants],
        "first": sum(each["named"] == each["planted"] for each in plants),
        "of": sum(each["planted"] != "hang" for each in plants),
        "beyond_s_most": max(each["beyond_s"] for each in plants),
        **({"idle": idle, "points_most": max(abs(each["points"]) for each in idle)} if idle else {}),
    }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
