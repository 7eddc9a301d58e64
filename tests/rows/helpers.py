"""Small recordings, tars and manifests for the tests of sources."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile as sf

from forebay.config import SourceConfig
from forebay.rows import list_rows as listing
from forebay.rows.manifest import Manifest, Meaning, meaning_named

RATE_HZ = 16_000
SPEECH = Path(__file__).parents[2] / "demo" / "speech"


def audio(num_samples: int = 1600, *, kind: str = "FLAC", seed: int = 0) -> bytes:
    """Returns `num_samples` of noise at 16 kHz, encoded."""
    waveform = np.random.default_rng(seed).integers(-3000, 3000, num_samples).astype(np.int16)
    file = io.BytesIO()
    sf.write(file, waveform, RATE_HZ, format=kind)
    return file.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes] | Sequence[tuple[str, bytes]]) -> Path:
    """Writes a tar of members, in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pairs = members.items() if isinstance(members, Mapping) else members
    with tarfile.open(path, "w") as tar:
        for name, data in pairs:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_manifest(path: Path, rows: Sequence[Mapping[str, Any]], **types: pa.DataType) -> Path:
    """Writes a parquet manifest; columns that a row leaves out get a default."""
    defaults: dict[str, Any] = {"tar_path": "a.tar", "transcript": "hello", "language": "en", "duration_s": 1.0}
    table = pa.Table.from_pylist([{**defaults, **row} for row in rows])
    for name, kind in types.items():
        table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def described(**fields: Any) -> bytes:
    """Returns a JSON document."""
    return json.dumps(fields).encode()


def heard(source: SourceConfig) -> Meaning:
    """Returns what the rows of a source without images mean."""
    return meaning_named("texts" if source.kind == "text" else "recordings")


def read_rows(source: SourceConfig, **options: Any) -> Manifest:
    """Returns the rows of a source of recordings or texts."""
    return listing.list_rows(source, heard(source), **options)


def read_manifest(source: SourceConfig) -> Manifest:
    """Returns the rows that the manifests of such a source name."""
    return listing.read_manifest(source, heard(source))


def read(kind: Any, *manifests: Path | str, root: Path, **settings: Any) -> Manifest:
    """Returns the rows of a source; indexes of tars go under `root`."""
    source = SourceConfig(kind=kind, manifest=tuple(map(str, manifests)), **settings)
    return read_rows(source, cache_root=root / "cache_root")


def rejected(manifest: Manifest) -> list[tuple[str, str, str]]:
    """Returns (sample id, kind, reason) of what was left out, in the order of the listing."""
    return [(r["sample_id"], r["kind"], r["reason"]) for r in manifest.rejected.to_pylist()]


def ids(manifest: Manifest) -> list[str]:
    """Returns the sample ids that are left."""
    return list(manifest.rows["sample_id"].to_pylist())
