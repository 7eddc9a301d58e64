"""Measures writing a shard beside a tar: `python -m benchmarks.writer [--tiny] [--json] [--rounds N]`.

The work is 512 samples of float16 frames of the usual durations, with one float32, an id and a length each, from memory
to a file. The file and its folder are fsynced. forebay hashes every sample and the whole file on the way and writes
CRC-32s; a tar has none.

webdataset gets its own encoding (`npy` and `json`). In the row `raw bytes` it gets members that were encoded before the
clock starts. If webdataset is not installed (benchmarks/requirements-peers.txt), tarfile writes the same members. The
limit is one `write` of all frames, concatenated before the clock starts.

Every file is read back and compared once. Every round takes all contestants in turn. MB are MB of frames, figures are
medians of the rounds, and ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import BENCH_DATA
from benchmarks.plan import FRAME_SAMPLES, usual_durations
from benchmarks.report import Cost, arguments, machine, median, ratio, show, timed
from forebay.store.files import fsync_folder
from forebay.store.layout import FieldSpec
from forebay.store.shard import Shard, ShardEntry, shard_fields, write_shard

N_MELS = 80
FIELDS = shard_fields(
    (
        FieldSpec(name="input_features", dtype="float16", shape=(N_MELS,)),
        FieldSpec(name="pad_value", dtype="float32"),
        FieldSpec(name="sample_id", dtype="str", role="table"),
        FieldSpec(name="num_audio_samples", dtype="int64", role="table"),
    ),
    "",
)

Row = Mapping[str, Any]
Member = Mapping[str, Any]
"""A sample as webdataset takes it: `__key__` and a value by extension."""
Write = Callable[[Path], Any]


def samples(count: int) -> list[Row]:
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for index, num_samples in enumerate(usual_durations(count).tolist()):
        frames = rng.standard_normal((num_samples // FRAME_SAMPLES, N_MELS), dtype=np.float32).astype(np.float16)
        pad_value = np.array([-0.5], np.float32)
        rows.append(
            {
                "input_features": frames,
                "pad_value": pad_value,
                "sample_id": f"clip-{index:06d}",
                "num_audio_samples": np.int64(num_samples),
            }
        )
    return rows


def member(row: Row) -> Member:
    """Returns the sample as arrays and a mapping, to be encoded by the writer."""
    about = {"pad_value": float(row["pad_value"][0]), "num_audio_samples": int(row["num_audio_samples"])}
    return {"__key__": row["sample_id"], "npy": row["input_features"], "json": about}


def encoded(row: Row) -> Member:
    """Returns the sample as bytes: an `.npy` and a `.json`."""
    plain = member(row)
    return {
        "__key__": plain["__key__"],
        "npy": npy_bytes(plain["npy"]),
        "json": json.dumps(plain["json"]).encode("utf-8"),
    }


def npy_bytes(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array)
    return buffer.getvalue()


def write_webdataset(path: Path, members: Sequence[Member], *, encode: bool) -> None:
    webdataset = importlib.import_module("webdataset")  # absent from the tested environment
    with open(path, "wb") as file:
        with webdataset.TarWriter(file, encoder=encode) as writer:
            for sample in members:
                writer.write(sample)
        finish(file, path)


def write_tarfile(path: Path, members: Sequence[Member]) -> None:
    """Writes members that are bytes, as a stream, like webdataset."""
    with open(path, "wb") as file:
        with tarfile.open(fileobj=file, mode="w|", format=tarfile.USTAR_FORMAT) as tar:
            for sample in members:
                for extension in ("json", "npy"):
                    info = tarfile.TarInfo(f"{sample['__key__']}.{extension}")
                    info.size = len(sample[extension])
                    tar.addfile(info, io.BytesIO(sample[extension]))
        finish(file, path)


def write_once(path: Path, data: memoryview) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(data)
        finish(file, path)


def finish(file: Any, path: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    fsync_folder(path.parent)


def contestants(rows: Sequence[Row]) -> dict[str, Write]:
    """Returns what is measured, by name; ours first, the limit last."""
    members, as_bytes = [member(row) for row in rows], [encoded(row) for row in rows]
    found: dict[str, Write] = {"forebay, write_shard": lambda path: write_shard(path, FIELDS, rows, key="bench")}
    if importlib.util.find_spec("webdataset"):
        found["webdataset.TarWriter"] = lambda path: write_webdataset(path, members, encode=True)
        found["webdataset.TarWriter, raw bytes"] = lambda path: write_webdataset(path, as_bytes, encode=False)
    else:
        found["tarfile, npy"] = lambda path: write_tarfile(path, [encoded(row) for row in rows])
        found["tarfile, raw bytes"] = lambda path: write_tarfile(path, as_bytes)
    frames = np.concatenate([row["input_features"] for row in rows]).reshape(-1).view(np.uint8).data
    found["limit: one write"] = lambda path: write_once(path, frames)
    return found


def check(name: str, path: Path, written: Any, rows: Sequence[Row]) -> None:
    """Stops the benchmark unless a file holds the samples that were to be written."""
    if isinstance(written, ShardEntry):
        shard = Shard(path, written, FIELDS)
        found = [shard.row(index)["input_features"] for index in range(len(rows))]
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as tar:
            files = [tar.extractfile(info) for info in tar if info.name.endswith(".npy")]
            found = [np.load(io.BytesIO(file.read()), allow_pickle=False) for file in files if file is not None]
    else:
        found = [np.fromfile(path, np.float16).reshape(-1, N_MELS)]
        rows = [{"input_features": np.concatenate([row["input_features"] for row in rows])}]
    same = [np.array_equal(a, row["input_features"]) for a, row in zip(found, rows, strict=True)]
    if not all(same):
        raise SystemExit(f"{name}: sample {same.index(False)} of {len(same)} is not what was written")


def measure(rows: Sequence[Row], *, rounds: int) -> list[dict[str, Any]]:
    size_mb = sum(row["input_features"].nbytes for row in rows) / 1e6
    writers = contestants(rows)
    costs: dict[str, list[Cost]] = {name: [] for name in writers}
    BENCH_DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder:
        path = Path(folder) / "shard"
        for name, write in writers.items():  # also the round that loads libraries and touches buffers
            check(name, path, write(path), rows)
            path.unlink()
        for _ in range(rounds):
            for name, write in writers.items():
                costs[name].append(timed(functools.partial(write, path)))
                path.unlink()
    ours = costs["forebay, write_shard"]
    return [
        {
            "writer": name,
            "mb_per_s": size_mb / median(cost.wall_s for cost in found),
            "cpu_ms": 1e3 * median(cost.cpu_s for cost in found),
            "wall_times_ours": ratio((cost.wall_s for cost in found), (cost.wall_s for cost in ours)),
            "cpu_times_ours": ratio((cost.cpu_s for cost in found), (cost.cpu_s for cost in ours)),
        }
        for name, found in costs.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    rounds = 1 if options.tiny else options.rounds or 15
    has_peer = importlib.util.find_spec("webdataset") is not None
    if not has_peer:
        print(
            "webdataset is not installed: measured against tarfile instead; for its rows run: "
            "pip install -c constraints.txt -r benchmarks/requirements-peers.txt",
            file=sys.stderr,
        )
    rows = samples(64 if options.tiny else 512)
    document = {
        "machine": machine("numpy", "xxhash", *(["webdataset"] if has_peer else [])),
        "samples": len(rows),
        "rounds": rounds,
        "writers": measure(rows, rounds=rounds),
    }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
