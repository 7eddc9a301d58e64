"""Sound and pictures of samples: what a file holds of them, and that it never holds too much."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image
import pytest
import soundfile

from forebay.inspect.page.cards import clips, features_of, grid_paths, hop_s, picture_of, png, wav_head, webp, webps
from forebay.inspect.page.words import url_size
from forebay.store.layout import Array

RATE_HZ = 16_000


def tone(seconds: float, *, dtype: type = np.int16) -> Array:
    values = 0.4 * np.sin(np.arange(int(seconds * RATE_HZ)) * 0.2)
    return np.asarray(values * (32767 if dtype is np.int16 else 1), dtype)


def test_a_clip_that_fits_is_whole_and_without_loss() -> None:
    waveform = tone(1.5)
    clip, nothing = clips([waveform, None], RATE_HZ, budget=1_000_000)
    assert nothing is None
    assert clip is not None
    assert (clip.media_type, clip.note) == ("audio/flac", "")
    values, rate = soundfile.read(io.BytesIO(clip.data), dtype="int16")
    assert rate == RATE_HZ
    assert np.array_equal(values, waveform)


def test_a_long_clip_is_cut_and_says_so() -> None:
    (clip,) = clips([tone(31.0)], RATE_HZ, budget=2_000_000)
    assert clip is not None
    assert clip.note == "the first 30 of 31.0 s"
    assert soundfile.info(io.BytesIO(clip.data)).frames == 30 * RATE_HZ


def test_a_small_budget_gives_mp3_then_shorter_clips_then_none() -> None:
    rng = np.random.default_rng(0)
    noise = [(rng.normal(size=12 * RATE_HZ) * 8000).astype(np.int16) for _ in range(3)]
    notes = []
    for budget in (2_000_000, 400_000, 60_000, 1_000):
        found = clips(noise, RATE_HZ, budget=budget)
        assert sum(url_size(clip.data) for clip in found if clip is not None) <= budget
        notes.append({None if clip is None else clip.note for clip in found})
    assert notes[0] == {""}
    assert notes[1] == {"as MP3, to keep this file small"}
    assert len(notes[2]) == 1
    assert "of 12.0 s" in str(notes[2])
    assert notes[3] == {None}


def test_float_waveforms_are_heard_in_16_bits_and_served_as_they_are() -> None:
    waveform = tone(0.2, dtype=np.float32) * 4
    (clip,) = clips([waveform], RATE_HZ, budget=100_000)
    assert clip is not None
    assert clip.note == "in 16 bits"
    values, _ = soundfile.read(io.BytesIO(wav_head(waveform, RATE_HZ) + waveform.tobytes()), dtype="float32")
    assert np.array_equal(values, waveform)


def test_a_rate_that_no_format_knows_gives_no_clip() -> None:
    assert clips([tone(0.1)], 123_456_789, budget=100_000) == [None]


def test_a_served_waveform_is_the_stored_one() -> None:
    waveform = tone(0.3)
    values, rate = soundfile.read(io.BytesIO(wav_head(waveform, RATE_HZ) + waveform.tobytes()), dtype="int16")
    assert rate == RATE_HZ
    assert np.array_equal(values, waveform)


def test_features_are_drawn_with_high_bins_on_top() -> None:
    values = np.zeros((10, 80), np.float16)
    values[2, 79] = 5
    made = picture_of({"input_features": values}, rate_hz=RATE_HZ, columns=100)
    assert made is not None
    data, about, seconds = made
    assert about == "input_features: 80 bins over 10 frames"
    assert seconds == pytest.approx(0.1)
    image = np.asarray(PIL.Image.open(io.BytesIO(data)).convert("L"))
    assert image.shape == (80, 10)
    assert np.argwhere(image < 100).tolist() == [[0, 2]]


def test_frames_of_mel_last_as_long_as_their_hop() -> None:
    between = hop_s({"features": "mel", "hop_length": 256, "sample_rate_hz": 22_050})
    made = picture_of({"mel": np.ones((100, 80), np.float32)}, rate_hz=22_050, columns=100, hop_s=between)
    assert made is not None
    assert made[1] == "mel: 80 bins over 100 frames"
    assert made[2] == pytest.approx(25_600 / 22_050)
    assert hop_s({"features": "log_mel", "sample_rate_hz": 16_000}) == 0.01


def test_a_picture_is_no_wider_than_asked() -> None:
    made = picture_of({"fbanks": np.ones((5001, 80), np.float32)}, rate_hz=RATE_HZ, columns=100)
    assert made is not None
    assert PIL.Image.open(io.BytesIO(made[0])).width <= 100


def test_a_waveform_alone_is_drawn_as_its_spectrum() -> None:
    made = picture_of({"waveform": tone(2.0)}, rate_hz=RATE_HZ, columns=150)
    assert made is not None
    image = np.asarray(PIL.Image.open(io.BytesIO(made[0])).convert("L"))
    assert image.shape[1] <= 150
    darkest = int(np.argmin(image.mean(axis=1)))
    # 0.2 rad a sample at 16 kHz: 509 Hz of 8 kHz, counted from the bottom.
    assert darkest == pytest.approx(image.shape[0] * (1 - 509 / 8000), abs=2)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"waveform": np.zeros(10, np.int16)},
        {"input_features": np.zeros((0, 80), np.float32)},
        {"input_ids": np.zeros(4, np.int32)},
    ],
)
def test_nothing_is_drawn_where_nothing_is(tensors: dict[str, np.ndarray]) -> None:
    assert picture_of(tensors, rate_hz=RATE_HZ, columns=100) is None


def test_features_that_are_no_numbers_are_drawn_all_the_same() -> None:
    values = np.full((50, 80), np.nan, np.float32)
    values[10] = np.inf
    assert picture_of({"own": values}, rate_hz=RATE_HZ, columns=100) is not None
    assert features_of({"own": values}) == "own"
    assert len(png(np.zeros((3, 8), np.float32))) > 0


def test_images_shrink_until_they_fit() -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (900, 700, 3), dtype=np.uint8) for _ in range(3)]
    files = webps(images, budget=40_000)
    assert files is not None
    assert sum(map(url_size, files)) <= 40_000
    assert max(PIL.Image.open(io.BytesIO(data)).size[1] for data in files) < 640
    assert webps(images, budget=100) is None
    assert PIL.Image.open(io.BytesIO(webp(images[0], side=640))).size == (498, 640)


def test_a_grid_has_a_line_between_patches_and_heavy_ones_between_tokens() -> None:
    paths = grid_paths(4, 6, 2)
    assert paths is not None
    fine, heavy = paths
    assert (fine + heavy).count("V4") == 5
    assert (fine + heavy).count("H6") == 3
    assert heavy == "M2 0V4 M4 0V4 M0 2H6"
    assert grid_paths(300, 200, 2) is None
