"""The sound of a cache that keeps no waveforms, from its sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from forebay import cli
from forebay.config.tree import Config
from forebay.inspect.page.cards import NO_SOURCE
from forebay.preprocess.decode import Heard
from forebay.steps.recipe import load_config
from forebay.store.cache import Cache, open_cache
from tests.preprocess.here_pool import build_here

_FORMS = {"16k.wav": 16_000, "16k.flac": 16_000, "8k.wav": 8_000, "44k.flac": 44_100, "stereo.wav": 16_000}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Clips of several rates and forms in a folder, a table of them, and a config of log-mel bins."""
    rng = np.random.default_rng(5)
    (tmp_path / "wavs").mkdir()
    for name, rate_hz in _FORMS.items():
        shape = (rate_hz, 2) if name == "stereo.wav" else (rate_hz,)
        soundfile.write(tmp_path / "wavs" / name, rng.uniform(-0.4, 0.4, shape), rate_hz, subtype="PCM_16")
    rows = "".join(f"wavs/{name},word,{name}\n" for name in _FORMS)
    (tmp_path / "train.csv").write_text(f"audio,text,id\n{rows}")
    (tmp_path / "config.toml").write_text(
        'name = "clips"\n[source]\nkind = "table"\nmanifest = "train.csv"\nmax_duration_s = 0.8\n'
        'overlong = "clip"\n[audio]\nfeatures = "log_mel"\n'
        '[plan]\nbatch_size = 2\nedges_s = [2]\n[run]\ncache_root = "caches"\nnum_workers = 1\n'
    )
    return load_config(tmp_path / "config.toml")


def built(config: Config, *overrides: str) -> Cache:
    return open_cache(build_here(load_config(config.path, overrides=overrides)).cache)


def rows(cache: Cache) -> list[dict[str, Any]]:
    return [dict(row) for row in cache.samples.to_pylist()]


def test_a_sound_from_its_source_is_the_one_that_would_have_been_kept(config: Config) -> None:
    kept, cache = built(config, "audio.keep_waveform=true"), built(config)
    heard = Heard(config, cache)
    ids = kept.samples["sample_id"].to_pylist()
    assert len(cache) == len(_FORMS)
    for row in rows(cache):
        found = heard(row)
        assert found is not None
        assert found.dtype == np.int16
        assert np.array_equal(found, kept.read(ids.index(row["sample_id"]))["waveform"])


def test_a_source_that_is_gone_or_changed_gives_no_sound(config: Config, tmp_path: Path) -> None:
    cache = built(config)
    (tmp_path / "wavs" / "8k.wav").unlink()
    changed = tmp_path / "wavs" / "16k.wav"
    changed.write_bytes(changed.read_bytes()[:-2] + b"\x01\x01")  # of the same size
    heard = Heard(config, cache)
    assert {row["sample_id"] for row in rows(cache) if heard(row) is None} == {"8k.wav", "16k.wav"}
    (tmp_path / "train.csv").unlink()
    assert [row for row in rows(cache) if Heard(config, cache)(row) is not None] == []


def test_the_page_and_wav_of_a_config_have_sound(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = built(config)
    page, wav = tmp_path / "x.html", tmp_path / "x.wav"
    (tmp_path / "wavs" / "44k.flac").unlink()
    assert cli.main(["inspect", config.path, "--html", str(page)]) == 0
    assert page.read_text().count("<audio") == len(_FORMS) - 1
    assert page.read_text().count(NO_SOURCE) == 1
    assert cli.main(["inspect", config.path, "--sample", "16k.wav", "--wav", str(wav)]) == 0
    sound = soundfile.read(tmp_path / "wavs" / "16k.wav", dtype="int16")[0]
    assert np.array_equal(soundfile.read(wav, dtype="int16")[0], sound[: int(0.8 * 16_000)])
    capsys.readouterr()
    assert cli.main(["inspect", config.path, "--sample", "44k.flac", "--wav", str(wav)]) == cli.BAD_CONFIG
    assert "name the config where its sources are on this machine" in capsys.readouterr().err
    assert cli.main(["inspect", str(cache.folder), "--html", str(page)]) == 0
    assert "<audio" not in page.read_text()
