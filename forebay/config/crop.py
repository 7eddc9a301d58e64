"""What `loader.crop_s` asks for, checked against what is stored."""

from __future__ import annotations

import math
from fractions import Fraction

from forebay.errors import ConfigError

_W2V_BERT_SAMPLES = 560
"""Two frames: the variance of one is not defined."""


def crop_samples(crop_s: float, *, features: str, sample_rate_hz: int, has_waveform: bool) -> int:
    """Returns the audio samples of a crop of `crop_s` seconds, taken as the decimal that the config shows.

    A crop of 0.1 s at 16 kHz has 1600 samples.

    features: as in `audio.features`. has_waveform: whether samples hold the field `waveform`.
    Raises ConfigError for features that a crop cannot be cut from, a missing waveform, a part of a sample, or too short
    a crop.
    """
    if features not in ("w2v_bert", "waveform"):
        raise ConfigError(
            f'loader.crop_s is {crop_s} and audio.features is "{features}", whose frames depend on the whole clip; '
            'crops need "w2v_bert" or "waveform"'
        )
    if not has_waveform:
        raise ConfigError(
            f"loader.crop_s is {crop_s}, and batches of crops hold the waveform, which is not kept; "
            "set audio.keep_waveform = true and run: forebay preprocess CONFIG"
        )
    samples = Fraction(repr(float(crop_s))) * sample_rate_hz if math.isfinite(crop_s) else Fraction(0)
    shortest = _W2V_BERT_SAMPLES if features == "w2v_bert" else 1
    if samples.denominator != 1 or samples < shortest:
        raise ConfigError(
            f"loader.crop_s is {crop_s}, {float(samples)} samples at {sample_rate_hz} Hz; "
            f"wanted a whole number of samples, {shortest} or more"
        )
    return int(samples)
