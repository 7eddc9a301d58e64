"""Measures a build of segments of long recordings: `python -m benchmarks.segments [--tiny] [--json] [--rounds N]`.

One recording of ten hours a format, 5,000 segments that cover it, log-mels of 80 bins. Beside it stands what nobody can
leave out: the recording decoded once in blocks by libsndfile, and the same features of the same stretches, nothing
stored. Both run in this process in turn; seconds are of the CPU. MB are what the peak of the resident memory of a
process that reads all segments is above that of its start, by a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import soundfile

from benchmarks.data import BENCH_DATA, ROOT
from benchmarks.report import Cost, arguments, machine, median, ratio, show, timed
from forebay.preprocess.decode import decode_audio
from forebay.rows.media_reader import MediaReader
from forebay.rows.segments import Bounds
from forebay.steps.audio.log_mel import LogMel
from forebay.steps.audio.waveform import Decode
from forebay.store.source_files import SourceFile

RATE_HZ = 16_000
SEGMENT_S = 7.2
FORMATS = ("flac", "mp3", "ogg", "wav")
_TOGETHER = 32


class Forward(soundfile.SoundFile):  # it has no types
    """A file that is read without the seeks of soundfile, as a decoder in a loop of its own would."""

    def seekable(self) -> bool:
        return False


def write(path: Path, hours: float) -> None:
    rng = np.random.default_rng(0)
    with soundfile.SoundFile(path, "w", RATE_HZ, 1, format="MP3" if path.suffix == ".mp3" else None) as file:
        for _ in range(max(int(hours * 60), 1)):
            walk = np.cumsum(rng.standard_normal(RATE_HZ * 60, dtype=np.float32))
            file.write(walk / np.abs(walk).max() * np.float32(0.5))


def features(clips: Iterator[Any]) -> None:
    """Makes the features of clips, some at a time, and drops them."""
    step, held = LogMel(), []
    for clip in clips:
        held.append(clip)
        if len(held) == _TOGETHER:
            step.compute(held)
            held = []
    step.compute(held)


def bare(path: Path, count: int) -> Iterator[Any]:
    """Yields stretches of a recording that is decoded once, forward."""
    with Forward(path) as file:
        for _ in range(count):
            yield file.read(int(SEGMENT_S * RATE_HZ), dtype="float32")


def segments(path: Path, count: int) -> Iterator[Any]:
    """Yields the same stretches as a build reads and decodes its rows."""
    source, decode = SourceFile(entry=0, name=path.name, path=path, listed=False), Decode()
    with MediaReader([source], max_open=1) as read:
        for number in range(count):
            start_s = number * SEGMENT_S
            data = read(0, 0, -1, Bounds(start_s, start_s + SEGMENT_S))
            yield decode_audio(data, decode, sample_id=str(number))


_MEMORY = """
import resource, sys
from pathlib import Path
from benchmarks.segments import features, segments
features(segments(Path(sys.argv[1]), 1))  # what it imports
resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
features(segments(Path(sys.argv[1]), int(sys.argv[2])))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - resident / 2**20)
"""


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    hours, rounds = (0.05, 1) if options.tiny else (10.0, options.rounds or 3)
    rows = []
    BENCH_DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder:
        for form in FORMATS:
            path = Path(folder) / f"long.{form}"
            write(path, hours)
            count = int(hours * 3600 / SEGMENT_S)
            ours: list[Cost] = []
            theirs: list[Cost] = []
            for _ in range(rounds):
                theirs.append(timed(lambda path=path, count=count: features(bare(path, count))))
                ours.append(timed(lambda path=path, count=count: features(segments(path, count))))
            said = subprocess.run(
                [sys.executable, "-c", _MEMORY, str(path), str(count)],
                check=True,
                capture_output=True,
                text=True,
                cwd=ROOT,
            )
            rows.append(
                {
                    "format": form,
                    "segments": count,
                    "decode once + features, s": median(cost.cpu_s for cost in theirs),
                    "segments, s": median(cost.cpu_s for cost in ours),
                    "ratio": ratio([cost.cpu_s for cost in ours], [cost.cpu_s for cost in theirs]),
                    "MB": float(said.stdout),
                }
            )
            path.unlink()
    show({"machine": machine("numpy", "soundfile"), "segments": rows}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
