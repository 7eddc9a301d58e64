"""Measures features beside transformers' extractors: `python -m benchmarks.features [--tiny] [--json] [--rounds N]`.

The input is the demo recordings as decoded float32, on one thread. transformers gets one clip a call, either without
padding (`per clip`) or padded to 30 s as it does by default (`30 s`). forebay gets all clips in one call; in the row
`one a call` it gets one clip a call too. Results are compared before anything counts. Every round times all contestants
in turn. Figures are medians of the rounds, and ratios are medians of the ratios within a round. us/frame is
microseconds of CPU per stored frame of 10 ms.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import pyarrow.parquet as pq
import soundfile as sf
import torch
from transformers import SeamlessM4TFeatureExtractor, WhisperFeatureExtractor
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from forebay.steps.audio.log_mel import LogMel, Qwen3Asr
from forebay.steps.audio.w2v_bert import W2vBert
from forebay.steps.batch import collate, fresh
from forebay.steps.step import AudioStep, Stored
from forebay.store.layout import Constants

MANIFEST = Path(__file__).parents[1] / "demo" / "speech" / "train.parquet"

Array = np.ndarray[Any, Any]
Extract = Callable[[Array], Array]


@dataclass(frozen=True, kw_only=True)
class Duel:
    """One feature against one way to call its reference. finish: stored fields to what the reference returns."""

    name: str
    reference: str
    step: AudioStep
    extract: Extract
    oracle: Extract
    p999: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """Figures of a duel; cpu is process time, ratios are reference over ours."""

    name: str
    reference: str
    frames: int
    ours_us_per_frame: float
    ours_one_a_call_us_per_frame: float
    reference_us_per_frame: float
    ratio: float
    ratio_one_a_call: float
    ratio_wall: float


def recordings() -> list[Array]:
    clips = []
    for row in pq.read_table(MANIFEST).to_pylist():
        with tarfile.open(MANIFEST.parent / row["tar_path"]) as tar:
            member = tar.extractfile(row["tar_member_name"])
            assert member is not None
            clips.append(sf.read(io.BytesIO(member.read()), dtype="float32")[0])
    return clips


def finished(step: AudioStep, fields: dict[str, Array]) -> Array:
    """Returns what a batch of this clip alone has of its features."""
    form = step.batch(Stored(step.name, Constants({}), {spec.name: spec for spec in step.fields()}))
    batch = collate(form, [form.items(fields)], dtype=torch.float32, allocate=fresh, are_rows=True)
    return batch["input_features"][0].numpy()


def duels() -> list[Duel]:
    def call(extractor: Any, **options: Any) -> Extract:
        return lambda clip: extractor(clip, sampling_rate=16_000, return_tensors="np", **options)["input_features"][0]

    found = []
    for n_mels in (80, 128):
        extractor = WhisperFeatureExtractor(feature_size=n_mels)
        for reference, options in (("per clip", {"padding": "longest"}), ("30 s", {})):
            found.append(
                Duel(
                    name=f"log_mel {n_mels}",
                    reference=reference,
                    step=LogMel(n_mels=n_mels, dtype="float32"),
                    extract=call(extractor, **options),
                    oracle=call(extractor),
                    p999=1e-6,
                )
            )
    qwen3_asr = call(Qwen3ASRFeatureExtractor(), padding=True, return_attention_mask=True)
    seamless = call(SeamlessM4TFeatureExtractor())
    return [
        *found,
        Duel(
            name="qwen3_asr",
            reference="per clip",
            step=Qwen3Asr(dtype="float32"),
            extract=qwen3_asr,
            oracle=qwen3_asr,
            p999=1e-6,
        ),
        Duel(
            name="w2v_bert",
            reference="per clip",
            step=W2vBert(),
            extract=seamless,
            oracle=seamless,
            p999=5e-5,
        ),
    ]


def verify(duel: Duel, clips: Sequence[Array]) -> None:
    """Stops the benchmark unless the stored fields, finished, are what the reference returns."""
    differences = []
    for clip, fields in zip(clips, duel.step.compute(clips), strict=True):
        ours, theirs = finished(duel.step, fields), duel.oracle(clip)
        if ours.shape != theirs.shape:
            raise SystemExit(f"{duel.name}: shape {ours.shape} is not the reference's {theirs.shape}")
        differences.append(np.abs(ours - theirs).ravel())
    p999 = float(np.quantile(np.concatenate(differences), 0.999))
    if p999 > duel.p999:
        raise SystemExit(f"{duel.name}: p99.9 of the difference is {p999:.2e}, wanted {duel.p999:.0e} or less")


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Returns the CPU and the wall time of a call, in seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def measure(duel: Duel, clips: Sequence[Array], *, rounds: int) -> Result:
    verify(duel, clips)
    ours, alone, theirs = [], [], []
    for _ in range(rounds):
        ours.append(timed(lambda: duel.step.compute(clips)))
        alone.append(timed(lambda: [duel.step.compute([clip]) for clip in clips]))
        theirs.append(timed(lambda: [duel.extract(clip) for clip in clips]))
    frames = int(duel.step.num_frames(np.array([clip.size for clip in clips])).sum())

    def us_per_frame(times: list[tuple[float, float]]) -> float:
        return statistics.median(cpu for cpu, _ in times) / frames * 1e6

    def ratio(mine: list[tuple[float, float]], *, clock: int = 0) -> float:
        return statistics.median(t[clock] / m[clock] for m, t in zip(mine, theirs, strict=True))

    return Result(
        name=duel.name,
        reference=duel.reference,
        frames=frames,
        ours_us_per_frame=us_per_frame(ours),
        ours_one_a_call_us_per_frame=us_per_frame(alone),
        reference_us_per_frame=us_per_frame(theirs),
        ratio=ratio(ours),
        ratio_one_a_call=ratio(alone),
        ratio_wall=ratio(ours, clock=1),
    )


def table(results: Sequence[Result]) -> str:
    head = f"{'feature':<12}{'reference':<11}{'us/frame':>9}{'one a call':>12}"
    head += f"{'reference':>11}{'ratio':>8}{'one a call':>12}{'wall':>8}"
    rows = [
        f"{r.name:<12}{r.reference:<11}{r.ours_us_per_frame:9.2f}{r.ours_one_a_call_us_per_frame:12.2f}"
        f"{r.reference_us_per_frame:11.2f}{r.ratio:7.1f}x{r.ratio_one_a_call:11.1f}x{r.ratio_wall:7.1f}x"
        for r in results
    ]
    return "\n".join([head, *rows])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a dozen clips and one round: does it run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    clips = recordings()[:: 4 if options.tiny else 1]
    results = [measure(duel, clips, rounds=1 if options.tiny else options.rounds) for duel in duels()]
    print(json.dumps([asdict(r) for r in results], indent=1) if options.json else table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
