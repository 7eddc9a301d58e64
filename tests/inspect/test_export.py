from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile

from forebay.errors import ConfigError
from forebay.inspect.bucket_manifests import write_table, write_wav
from forebay.store.cache import open_cache
from tests.store_factory import RATE_HZ, make_cache


def test_the_row_table_comes_back_from_parquet(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, num_samples=9, failed_rows=[3]))
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"older")
    write_table(cache, path)
    assert pq.read_table(path).equals(cache.samples)


def test_a_disk_that_is_full_after_a_part_leaves_no_table_and_no_rest_of_one(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path / "caches"))
    (tmp_path / "rows.parquet").write_bytes(b"older")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert cache.samples.num_rows == 6
    for limit_bytes in (100, 1_000):
        # The kernel takes what fits of a `write` and refuses the next one, as it does on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                write_table(cache, tmp_path / "rows.parquet")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["caches", "rows.parquet"]
        assert (tmp_path / "rows.parquet").read_bytes() == b"older"


def test_a_waveform_comes_back_bit_for_bit(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, features="waveform"))
    for index in range(len(cache)):
        write_wav(cache, cache.read(index), tmp_path / "a.wav")
        found, rate = soundfile.read(tmp_path / "a.wav", dtype="int16")
        assert rate == RATE_HZ
        assert np.array_equal(found, cache.read(index)["waveform"])
    info = soundfile.info(tmp_path / "a.wav")
    assert (info.format, info.subtype, info.channels) == ("WAV", "PCM_16", 1)


def test_a_float_waveform_stays_one(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, features="waveform"))
    waveform = np.array([0.1, -1.5, 1e-9], np.float32)
    write_wav(cache, {"waveform": waveform}, tmp_path / "a.wav")
    assert np.array_equal(soundfile.read(tmp_path / "a.wav", dtype="float32")[0], waveform)
    assert soundfile.info(tmp_path / "a.wav").subtype == "FLOAT"


def test_a_cache_without_waveforms_says_how_to_keep_them(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path))
    with pytest.raises(
        ConfigError, match=r"keeps no waveforms .* name the config .* audio\.keep_waveform = true .* forebay preprocess"
    ):
        write_wav(cache, cache.read(0), tmp_path / "a.wav")
    assert not (tmp_path / "a.wav").exists()
