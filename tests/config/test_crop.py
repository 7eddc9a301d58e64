from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import Config
from forebay.errors import ConfigError
from forebay.steps.audio.audio_section import crop_samples
from forebay.steps.recipe import load_config


def config_with(crop_s: Any, **audio: Any) -> Config:
    document = {
        "name": "a",
        "source": {"kind": "tar", "manifest": "a.parquet"},
        "audio": audio,
        "loader": {"crop_s": crop_s},
    }
    return load_config(document)


@given(samples=st.integers(560, 10**9), rate=st.sampled_from([8_000, 16_000, 22_050, 44_100, 48_000]))
def test_seconds_that_are_whole_samples_are_taken_as_they_are_written(samples: int, rate: int) -> None:
    crop_s = samples / 1000
    wanted = samples * rate
    if wanted % 1000:
        with pytest.raises(ConfigError, match="wanted a whole number of samples"):
            crop_samples(crop_s, features="waveform", sample_rate_hz=rate, has_waveform=True)
    else:
        assert crop_samples(crop_s, features="waveform", sample_rate_hz=rate, has_waveform=True) == wanted // 1000


def test_an_integer_and_a_decimal_are_the_same() -> None:
    kept = {"features": "w2v_bert", "sample_rate_hz": 16_000, "has_waveform": True}
    assert crop_samples(6, **kept) == crop_samples(6.0, **kept) == 96_000  # type: ignore[arg-type]
    assert crop_samples(0.1, **kept) == 1600  # type: ignore[arg-type]


@pytest.mark.parametrize("crop_s", [6, 6.0, 0.035])
def test_configs_that_can_be_cropped(crop_s: float) -> None:
    assert config_with(crop_s, features="w2v_bert", keep_waveform=True).loader.crop_s == crop_s
    assert config_with(crop_s, features="waveform", sample_rate_hz=48_000).loader.crop_s == crop_s


@pytest.mark.parametrize("features", ["log_mel", "qwen3_asr"])
def test_features_of_the_whole_clip_are_refused(features: str) -> None:
    with pytest.raises(ConfigError, match=rf'loader.crop_s is 6.0 and audio.features is "{features}"'):
        config_with(6.0, features=features, keep_waveform=True)


def test_filter_banks_without_their_waveform_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"set audio\.keep_waveform = true and run: forebay preprocess"):
        config_with(6.0, features="w2v_bert")


@pytest.mark.parametrize(
    ("crop_s", "audio"),
    [
        (0.00001, {"features": "waveform"}),
        (0.0, {"features": "waveform"}),
        (-6.0, {"features": "waveform"}),
        (1.00001, {"features": "waveform"}),
        (0.0349375, {"features": "w2v_bert", "keep_waveform": True}),
    ],
)
def test_lengths_that_are_no_crop_are_refused(crop_s: float, audio: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"loader.crop_s is .* samples at 16000 Hz; wanted a whole number"):
        config_with(crop_s, **audio)


@pytest.mark.parametrize("crop_s", [float("inf"), float("nan")])
def test_what_is_no_length_is_refused(crop_s: float) -> None:
    with pytest.raises(ConfigError, match="wanted a whole number of samples"):
        crop_samples(crop_s, features="waveform", sample_rate_hz=16_000, has_waveform=True)
