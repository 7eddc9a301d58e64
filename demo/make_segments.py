"""Makes demo/segments/ from demo/speech/: 40 recordings one behind the other in one file, and a table of their places.

python demo/make_segments.py

Between two of them lie 0.25 s of silence. The lowest four of 16 bits are zero, as in demo/ljspeech/.
"""

from __future__ import annotations

import csv
import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import soundfile as sf
from make_speech import HERE, SAMPLE_RATE_HZ, encode_flac

SILENCE = np.zeros(SAMPLE_RATE_HZ // 4, np.int16)
NUM_CLIPS = 40
"""The shortest ones."""


def clips(folder: Path) -> dict[str, np.ndarray]:
    """Returns the samples of every recording of the demo, by its id."""
    found = {}
    for path in sorted(folder.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            for member in (each for each in tar if each.name.endswith(".flac")):
                file = tar.extractfile(member)
                assert file is not None
                found[member.name.removesuffix(".flac")] = sf.read(io.BytesIO(file.read()), dtype="int16")[0]
    return found


def make(folder: Path) -> str:
    """Writes the recording and its table, and returns what they hold."""
    rows = pq.read_table(HERE / "speech" / "train.parquet").to_pylist()
    rows = sorted(sorted(rows, key=lambda row: row["duration_s"])[:NUM_CLIPS], key=lambda row: row["sample_id"])
    sounds, parts, at = clips(HERE / "speech"), [], 0
    folder.mkdir(exist_ok=True)
    with (folder / "segments.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["audio", "start", "end", "language", "text", "id"])
        for row in rows:
            sound = sounds[row["sample_id"]] & np.int16(-16)
            bounds = (at / SAMPLE_RATE_HZ, (at + len(sound)) / SAMPLE_RATE_HZ)
            writer.writerow(["long.flac", *bounds, row["language"], row["transcript"], row["sample_id"]])
            parts += [sound, SILENCE]
            at += len(sound) + len(SILENCE)
    (folder / "long.flac").write_bytes(encode_flac(np.concatenate(parts)))
    return f"{len(rows)} segments, {at / SAMPLE_RATE_HZ:.1f} s in {folder}"


if __name__ == "__main__":
    print(make(HERE / "segments"))
