"""What `inspect` writes: the row table as parquet, a waveform as WAV. Each file is there whole or not at all."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import ConfigError
from forebay.store.cache import Cache
from forebay.store.files import write_aside, write_bytes

Array = np.ndarray[Any, Any]


def check_target(path: Path, option: str, *, cache_folder: Path) -> None:
    """Raises ConfigError where a file cannot be written there: no such folder, or inside the cache, which is sealed."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {folder}; make it, or name another file")
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name a file")
    if folder.resolve().is_relative_to(cache_folder.resolve()):
        raise ConfigError(
            f"{option} {path} lies inside the cache {cache_folder}, which is sealed; name a file elsewhere"
        )


def write_table(cache: Cache, path: Path) -> None:
    """Makes `path` a parquet file of `cache.samples`, one row a sample."""
    import pyarrow.parquet as pq

    table = cache.samples
    with write_aside(path) as file:
        # Buffered: pyarrow ignores how much of its bytes a `write` took, and a nearly full disk takes a part.
        buffered = io.BufferedWriter(file)
        pq.write_table(table, buffered)
        buffered.flush()
        buffered.detach()


def write_wav(cache: Cache, tensors: Mapping[str, Array], path: Path) -> None:
    """Makes `path` a mono WAV of a sample's `waveform`: 16-bit from int16, bit for bit, 32-bit float from float32.

    Raises ConfigError where the cache keeps no waveforms.
    """
    import soundfile

    if cache.constants["features"] in ("none", "patches"):
        raise ConfigError(f"--wav: {cache.folder} has no audio (its fields: {', '.join(tensors)}); leave --wav out")
    if "waveform" not in tensors:
        raise ConfigError(
            f"--wav: {cache.folder} keeps no waveforms (its fields: {', '.join(tensors)}); set audio.keep_waveform = true "
            "in the config and run: forebay preprocess CONFIG"
        )
    waveform = tensors["waveform"]
    subtype = "PCM_16" if waveform.dtype == np.int16 else "FLOAT"
    buffer = io.BytesIO()
    soundfile.write(buffer, waveform, cache.constants["sample_rate_hz"], format="WAV", subtype=subtype)
    write_bytes(path, buffer.getbuffer())
