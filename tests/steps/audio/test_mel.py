from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay import load_config
from forebay.errors import ConfigError, DecodeError
from forebay.steps.audio.mel import PRESETS, Mel
from forebay.steps.audio.pitch import Energy
from forebay.steps.audio.spectrum import mel_filters
from forebay.steps.recipe import recipe_of
from forebay.steps.table import settings_of
from tests.steps.audio.clips import recordings
from tests.steps.audio.make_librosa import MEL_CLIP, MELS, recording

GOLDEN = Path(__file__).with_name("librosa.npz")


def reference(clip: np.ndarray, step: Mel) -> np.ndarray:
    """Returns what the settings say in words, in float64 and frame by frame; the mel values before the logarithm."""
    n_fft, win_length = step.n_fft, step.win_length
    assert win_length is not None
    padding = {True: n_fft // 2, False: 0, "hop": (n_fft - step.hop_length) // 2}[step.center]
    signal = np.pad(clip.astype(np.float64), padding, mode=step.pad_mode) if padding else clip.astype(np.float64)
    window = np.zeros(n_fft)
    first = (n_fft - win_length) // 2
    window[first : first + win_length] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(win_length) / win_length)
    starts = range(0, len(signal) - n_fft + 1, step.hop_length)
    power = np.array([np.abs(np.fft.rfft(signal[s : s + n_fft] * window)) ** 2 for s in starts]) + step.epsilon
    return np.asarray((power if step.power == 2 else np.sqrt(power)) @ filters(step).T)


def filters(step: Mel) -> np.ndarray:
    """Returns triangles [n_mels, bins] in float64, one after the other."""
    assert step.f_max is not None

    def to_mel(hz: float) -> float:
        if step.mel_scale == "htk":
            return 2595 * math.log10(1 + hz / 700)
        return 3 * hz / 200 if hz < 1000 else 15 + 27 * math.log(hz / 1000) / math.log(6.4)

    def to_hz(mel: float) -> float:
        if step.mel_scale == "htk":
            return 700 * (10 ** (mel / 2595) - 1)
        return 200 * mel / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)

    edges = [to_hz(mel) for mel in np.linspace(to_mel(step.f_min), to_mel(step.f_max), step.n_mels + 2)]
    bins = np.arange(step.n_fft // 2 + 1) * step.rate_hz / step.n_fft
    rows = []
    for low, middle, high in zip(edges, edges[1:], edges[2:], strict=False):
        triangle = np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)).clip(0)
        rows.append(triangle * 2 / (high - low) if step.norm == "slaney" else triangle)
    return np.array(rows)


def logarithm(mels: np.ndarray, step: Mel) -> np.ndarray:
    if step.log == "none":
        return mels
    floored = np.maximum(mels, step.floor)
    if step.log == "ln":
        return np.asarray(np.log(floored))
    return np.asarray(np.log10(floored) * (20 / step.power if step.log == "db" else 1))


def before_logarithm(mels: np.ndarray, step: Mel) -> np.ndarray:
    wide = mels.astype(np.float64)
    return np.asarray(np.exp(wide) if step.log == "ln" else 10 ** (wide * (step.power / 20 if step.log == "db" else 1)))


def one(step: Mel, clip: np.ndarray) -> np.ndarray:
    return step.compute([clip])[0]["mel"]


def of_librosa(name: str, **settings: Any) -> Mel:
    """Returns the step with the settings that librosa was called with."""
    theirs = MELS[name]
    names = {"hop_length", "win_length", "n_fft", "n_mels", "center", "pad_mode"}
    given = {key: value for key, value in theirs.items() if key in names}
    given |= {"f_min": theirs.get("fmin", 0.0), "f_max": theirs.get("fmax"), "power": int(theirs.get("power", 2))}
    given |= {"mel_scale": "htk" if theirs.get("htk") else "slaney", "norm": theirs.get("norm", "slaney") or "none"}
    return Mel(rate_hz=theirs["sr"], **{**given, **settings})


@pytest.mark.parametrize("name", MELS)
def test_spectrograms_are_librosas(name: str) -> None:
    logs: dict[str, dict[str, Any]] = {
        "htk_db": {"log": "db", "floor": 1e-10},
        "amplitude_db": {"log": "db", "floor": 1e-5},
    }
    step = of_librosa(name, **logs.get(name, {"log": "none"}))
    clip, want = recording(MEL_CLIP), np.load(GOLDEN)[f"mel_{name}"]
    made = one(step, clip)
    assert made.shape == want.shape
    if step.log == "none":
        assert np.abs(made - want).max() <= 2e-6 * want.max()
    else:
        np.testing.assert_allclose(made, want, atol=2e-3)  # dB; both are float32, and quiet bins carry its rounding
        assert np.median(np.abs(made - want)) < 1e-5


def hifigans(clip: np.ndarray) -> torch.Tensor:
    """`mel_spectrogram` of jik876/hifi-gan in the words of its config_v1.json, with torch's own operations."""
    padded = torch.nn.functional.pad(torch.from_numpy(clip)[None, None], (384, 384), mode="reflect")[0, 0]
    bins = torch.stft(padded, 1024, 256, 1024, torch.hann_window(1024), center=False, return_complex=True)
    return torch.sqrt(bins.real**2 + bins.imag**2 + 1e-9)


def tacotron2s(clip: np.ndarray) -> torch.Tensor:
    """The magnitudes of `TacotronSTFT`: a convolution with windowed sines and cosines of the mirrored clip."""
    n = np.arange(1024)
    angles = 2 * np.pi * np.outer(np.arange(513), n) / 1024
    window = 0.5 - 0.5 * np.cos(2 * np.pi * n / 1024)
    basis = torch.from_numpy(np.concatenate([np.cos(angles), -np.sin(angles)]) * window)[:, None]
    padded = torch.nn.functional.pad(torch.from_numpy(clip)[None, None].double(), (512, 512), mode="reflect")
    parts = torch.nn.functional.conv1d(padded, basis, stride=256)[0]
    return torch.sqrt(parts[:513] ** 2 + parts[513:] ** 2)


@pytest.mark.parametrize(("preset", "magnitudes"), [("hifigan", hifigans), ("tacotron2", tacotron2s)])
def test_presets_are_those_projects_own(preset: str, magnitudes: Any) -> None:
    step = Mel.of(preset=preset)
    matrix = torch.from_numpy(filters(step))
    for _, clip in recordings()[:12]:
        want = torch.log(torch.clamp(matrix @ magnitudes(clip).double(), min=1e-5)).T.numpy()
        made = one(step, clip)
        assert made.shape == want.shape
        worst = np.abs(np.maximum(np.exp(made), 1e-5) - np.exp(want)).max()
        assert worst <= 1e-6 * np.exp(want).max()
        assert np.abs(made - want).max() <= 5e-3
        assert np.median(np.abs(made - want)) <= 1e-5


def test_a_preset_is_what_it_fills_in_and_what_is_given_wins() -> None:
    filled = Mel(**PRESETS["hifigan"])
    assert Mel.of(preset="hifigan") == filled
    assert filled.preset == ""
    assert filled.identity()["center"] == "hop"
    other = Mel.of(preset="hifigan", center=True, n_mels=100, f_max=11_025.0)
    assert (other.center, other.n_mels, other.f_max, other.epsilon) == (True, 100, 11_025.0, 1e-9)
    with pytest.raises(ValueError, match=r"Mel\.of\(preset=\.\.\.\) fills them in"):
        Mel(preset="hifigan")


@st.composite
def steps(draw: st.DrawFn) -> Mel:
    n_fft = 2 * draw(st.integers(8, 300))
    rate_hz = draw(st.sampled_from([8000, 16_000, 22_050, 24_000]))
    return Mel(
        rate_hz=rate_hz,
        n_fft=n_fft,
        hop_length=draw(st.integers(8, n_fft)),
        win_length=draw(st.integers(4, n_fft)),
        n_mels=draw(st.integers(1, min(40, n_fft))),
        f_min=draw(st.sampled_from([0.0, 55.0])),
        f_max=draw(st.sampled_from([None, 3800.0])),
        power=draw(st.sampled_from([1, 2])),
        epsilon=draw(st.sampled_from([0.0, 1e-9])),
        center=draw(st.sampled_from([True, False, "hop"])),
        pad_mode=draw(st.sampled_from(["reflect", "constant"])),
        mel_scale=draw(st.sampled_from(["slaney", "htk"])),
        norm=draw(st.sampled_from(["slaney", "none"])),
        log=draw(st.sampled_from(["ln", "log10", "db", "none"])),
    )


@st.composite
def noises(draw: st.DrawFn, *, least: int) -> list[np.ndarray]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(st.lists(st.one_of(st.just(least), st.integers(least, 4000)), min_size=1, max_size=4))
    return [(rng.standard_normal(n) * draw(st.sampled_from([0.0, 1e-3, 0.3]))).astype(np.float32) for n in sizes]


@given(data=st.data())
def test_any_settings_are_the_reference_and_no_clip_depends_on_its_neighbours(data: st.DataObject) -> None:
    step = data.draw(steps())
    clips = data.draw(noises(least=step.framing.least_samples))
    together = [fields["mel"] for fields in step.compute(clips)]
    for clip, made in zip(clips, together, strict=True):
        np.testing.assert_array_equal(made, one(step, clip))
        want = reference(clip, step)
        assert len(made) == len(want) == step.num_frames(np.array([len(clip)]))[0] >= 1
        scale = max(float(want.max(initial=0)), 1e-6)
        if step.log == "none":
            assert np.abs(made - want).max() <= 3e-6 * scale
        else:
            back = before_logarithm(made, step)
            assert np.abs(back - np.maximum(want, step.floor)).max() <= 1e-5 * scale
            assert made.min() >= logarithm(np.array(step.floor), step) - 1e-4


@given(samples=st.integers(0, 3000), n_fft=st.sampled_from([16, 250, 1024]), hop_length=st.integers(1, 16))
def test_a_clip_has_as_many_frames_as_its_length_says(samples: int, n_fft: int, hop_length: int) -> None:
    for center in (True, False, "hop"):
        step = Mel(n_fft=n_fft, hop_length=hop_length, n_mels=8, center=center)
        count = int(step.num_frames(np.array([samples]))[0])
        assert (count > 0) == (samples >= step.framing.least_samples)
        if count and center is True:
            assert count == 1 + samples // hop_length
        if count and center == "hop" and (n_fft - hop_length) % 2 == 0:
            assert count == samples // hop_length


def test_a_clip_that_is_too_short_to_be_mirrored_is_refused() -> None:
    step = Mel.of(preset="tacotron2")
    assert one(step, np.zeros(513, np.float32)).shape == (3, 80)
    with pytest.raises(DecodeError, match=r"512 samples, mel needs 513 with n_fft = 1024 and center = true") as caught:
        one(step, np.zeros(512, np.float32))
    assert caught.value.reason == "too_short"
    with pytest.raises(DecodeError, match=r'center = "hop"'):
        one(Mel.of(preset="hifigan"), np.zeros(384, np.float32))
    assert one(Mel(pad_mode="constant"), np.zeros(1, np.float32)).shape == (1, 80)


def test_float16_is_float32_rounded() -> None:
    clip = recordings()[3][1]
    np.testing.assert_array_equal(one(Mel(dtype="float16"), clip), one(Mel(), clip).astype(np.float16))


def test_a_filter_between_two_bins_is_named(caplog: pytest.LogCaptureFixture) -> None:
    step = Mel(n_fft=256, hop_length=64, n_mels=128)
    made = one(step, recordings()[0][1][:2000])
    assert np.isfinite(made).all()
    assert "filters lie between two bins of n_fft = 256" in caplog.text


def test_filters_are_made_once() -> None:
    made = functools.partial(mel_filters, rate_hz=22_050, n_fft=1024, n_mels=80, f_min=0.0, f_max=8000.0)
    assert made(mel_scale="slaney", norm="slaney") is made(mel_scale="slaney", norm="slaney")


def test_energy_is_the_norm_of_each_frames_magnitudes() -> None:
    step = Mel.of(preset="tacotron2")
    framing = step.framing
    energy = Energy(
        n_fft=framing.n_fft,
        hop_length=framing.hop_length,
        win_length=framing.win_length,
        center=framing.center,
        pad_mode=framing.pad_mode,
    )
    for _, clip in recordings()[:6]:
        want = torch.linalg.norm(tacotron2s(clip), dim=0).numpy()
        made = energy.compute([clip, clip[:2000]])[0]["energy"]
        assert made.dtype == np.float32
        np.testing.assert_allclose(made, want, rtol=1e-5, atol=1e-5)


def config(**audio: Any) -> dict[str, Any]:
    return {
        "name": "t",
        "source": {"kind": "tar", "manifest": "nowhere.parquet"},
        "audio": {"features": "mel", "sample_rate_hz": 22_050, **audio},
    }


OTHERS: dict[str, Any] = {
    "n_fft": 2048,
    "hop_length": 300,
    "win_length": 800,
    "n_mels": 100,
    "f_min": 20.0,
    "f_max": 7000.0,
    "power": 2,
    "epsilon": 1e-9,
    "center": False,
    "pad_mode": "constant",
    "mel_scale": "htk",
    "norm": "none",
    "log": "db",
    "floor": 1e-6,
    "dtype": "float16",
    "preset": "hifigan",
    "energy": True,
    "pitch": {},
    "sample_rate_hz": 24_000,
}


def test_every_setting_is_in_the_key() -> None:
    variants = [{}, *({name: value} for name, value in OTHERS.items())]
    variants += [{"pitch": {name: value}} for name, value in {"min_hz": 80.0, "max_hz": 400, "threshold": 0.1}.items()]
    keys = [recipe_of(load_config(config(**settings))).key for settings in variants]
    assert len(set(keys)) == len(keys)
    assert set(settings_of("audio", "mel")) <= set(OTHERS)


def test_settings_that_mean_the_same_have_one_key() -> None:
    def key(**settings: Any) -> str:
        return recipe_of(load_config(config(**settings))).key

    assert key() == key(win_length=1024, f_max=11_025) == key(n_fft=1024, f_max=11025.0)
    assert key(log="none") == key(log="none", floor=0.5)
    assert key(preset="tacotron2") == key(f_max=8000.0, floor=1e-5)


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        (
            {"preset": "hifigan", "sample_rate_hz": 16_000},
            r'preset = "hifigan" is defined at 22050 Hz; sample_rate_hz is',
        ),
        ({"f_max": 12_000}, r"f_max is 12000\.0, and sound of 22050 Hz ends at 11025\.0"),
        ({"f_min": 9000.0, "f_max": 8000.0}, r"f_min is 9000\.0 and f_max 8000\.0"),
        ({"n_fft": 1023}, r"n_fft is 1023, wanted an even number"),
        ({"hop_length": 2000}, r"hop_length is 2000, wanted 1 to n_fft \(1024\)"),
        ({"win_length": 1025}, r"win_length is 1025"),
        ({"n_mels": 0}, r"n_mels is 0"),
        ({"floor": 0.0}, r"a floor above 0 before a logarithm"),
        ({"center": "middle"}, r'audio\.center: features = "mel" wants true or false or "hop", got'),
        ({"preset": "waveglow"}, r'audio\.preset: .*wants "" or "hifigan" or "tacotron2"'),
        ({"pitch": {"min_hz": 700.0}}, r"min_hz is 700\.0 and max_hz 600\.0"),
        ({"pitch": {"threshold": 1.5}}, r"threshold is 1\.5"),
        (
            {"features": "waveform", "energy": True},
            r'energy are by the frames of features = "mel", and features is "wav',
        ),
    ],
)
def test_settings_that_cannot_be_are_config_errors(audio: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(config(**audio))


def test_a_kept_column_cannot_have_a_fields_name() -> None:
    wanted = config(energy=True)
    wanted["source"]["keep_columns"] = ["energy"]
    with pytest.raises(ConfigError, match=r"'energy' is the name of a field of the audio; rename the column"):
        load_config(wanted)


def test_crops_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'"mel", whose frames depend on the whole clip'):
        load_config({**config(), "loader": {"crop_s": 1.0}})
