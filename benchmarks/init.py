"""Measures `forebay init` on many files: `python -m benchmarks.init [--tiny] [--json] [--rounds N]`.

Each layout has 100,000 recordings of half a second (WAV, 1 kB): in one folder without texts; in a folder a speaker with
a text beside each (200,000 files); and named by the rows of a CSV. Each round is a new process, as a user starts it,
the names of the files in the kernel's cache. Beside it stands a process that starts Python and lists the same files
by `os.scandir`, which nothing that looks at them all can beat.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.data import ROOT
from benchmarks.report import arguments, machine, median, show
from forebay.store.by_hand import pcm16_wav

TARGET_S = 5.0
_RATE_HZ, _SAMPLES = 1_000, 500
_SPEAKERS = 200
_WALK = """
import os, sys
def count(folder):
    return sum(count(e.path) if e.is_dir(follow_symlinks=False) else 1 for e in os.scandir(folder))
print(count(sys.argv[1]))
"""

Row = dict[str, Any]


def flat(folder: Path, clip: bytes, count: int) -> Path:
    """Recordings in one folder."""
    for number in range(count):
        (folder / f"{number:06d}.wav").write_bytes(clip)
    return folder


def beside(folder: Path, clip: bytes, count: int) -> Path:
    """Recordings in a folder a speaker, with a text beside each."""
    for number in range(count):
        place = folder / f"speaker{number % _SPEAKERS:03d}"
        if number < _SPEAKERS:
            place.mkdir()
        (place / f"{number:06d}.wav").write_bytes(clip)
        (place / f"{number:06d}.txt").write_text(f"text number {number}")
    return folder


def table(folder: Path, clip: bytes, count: int) -> Path:
    """Recordings that the rows of a CSV name."""
    (folder / "clips").mkdir()
    with open(folder / "metadata.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "sentence", "locale", "speaker"))
        for number in range(count):
            (folder / "clips" / f"{number:06d}.wav").write_bytes(clip)
            locale = "hi" if number % 3 else "ta"
            writer.writerow((f"clips/{number:06d}.wav", f"text number {number}", locale, number % _SPEAKERS))
    return folder


LAYOUTS: dict[str, Callable[[Path, bytes, int], Path]] = {"one folder": flat, "texts beside": beside, "CSV": table}


def process_s(*command: str, folder: Path) -> float:
    """Returns the seconds of a process. It must end with 0."""
    start = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT)}
    subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def measure(name: str, *, count: int, rounds: int) -> Row:
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        data = work / "recordings"
        data.mkdir()
        clip = pcm16_wav(np.zeros(_SAMPLES, np.int16), _RATE_HZ)
        LAYOUTS[name](data, clip, count)
        ours, bare = [], []
        for _ in range(rounds):
            ours.append(process_s("-m", "forebay", "init", "recordings", "--out", "my.toml", "--force", folder=work))
            bare.append(process_s("-c", _WALK, "recordings", folder=work))
        files = int(subprocess.check_output([sys.executable, "-c", _WALK, os.fspath(data)]))
    return {
        "layout": name,
        "files": files,
        "init s": round(median(ours), 2),
        "slowest s": round(max(ours), 2),
        "scandir s": round(median(bare), 2),
        "target s": TARGET_S,
        "reached": "yes" if median(ours) <= TARGET_S else "no",
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    count, rounds = (300, 1) if options.tiny else (100_000, options.rounds or 3)
    rows = [measure(name, count=count, rounds=rounds) for name in LAYOUTS]
    show({"machine": machine("pyarrow"), "init": rows}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
