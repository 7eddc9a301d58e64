"""Changes of batches equal plain loops over clips, keep what they may not touch, and depend on the sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.train.augment.changes import Change, Clips, Gain, Masks, Noise, Reverb, model_policy
from forebay.train.augment.draws import EpochDraws
from tests.flat_constants import flat
from tests.train.fake_source import FakeSource

Array = np.ndarray[Any, Any]


def waves(lengths: Sequence[int], seed: int = 0) -> tuple[torch.Tensor, list[Array]]:
    rng = np.random.default_rng(seed)
    clips = [rng.normal(0, 0.1, length).astype(np.float32) for length in lengths]
    batch = np.zeros((len(clips), max(lengths) + 3), np.float32)
    for row, clip in zip(batch, clips, strict=True):
        row[: len(clip)] = clip
    return torch.from_numpy(batch), clips


def changed(
    change: Change, values: torch.Tensor, lengths: Sequence[int], *, epoch: int = 0, first: int = 0
) -> tuple[torch.Tensor, dict[str, Array]]:
    ids = [f"clip{first + i}" for i in range(len(lengths))]
    drawn = change.draw(EpochDraws(1, epoch).of(ids, 0), lengths)
    tensors = {name: torch.from_numpy(array) for name, array in drawn.items()}
    return change.apply(values.clone(), torch.tensor(lengths), tensors), drawn


def noises(lengths: Sequence[int], *, dtype: str = "int16") -> FakeSource:
    source = FakeSource(lengths, features="waveform", prompt=None, dtype=dtype, seed=5)
    source.constants = flat(features="waveform", sample_rate_hz=16_000)
    return source


def clips_of(source: FakeSource) -> Clips:
    return Clips(source, setting="augment.0.cache", rate_hz=16_000)


def masked_by_hand(clip: Array, drawn: dict[str, Array], row: int) -> Array:
    found = clip.copy()
    for start, stop in drawn["time"][row].tolist():
        found[start:stop] = 0
    for start, stop in drawn["bins"][row].tolist():
        found[:, start:stop] = 0
    return found


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    time=st.tuples(st.floats(0, 1), st.integers(1, 40), st.integers(0, 3)),
    bins=st.tuples(st.floats(0, 1), st.integers(1, 8), st.integers(0, 2)),
    probability=st.sampled_from([0.5, 1.0]),
)
def test_masks_are_those_of_a_plain_loop(
    lengths: list[int], time: tuple[float, int, int], bins: tuple[float, int, int], probability: float
) -> None:
    rng = np.random.default_rng(0)
    clips = [rng.normal(5, 1, (length, 20)).astype(np.float32) for length in lengths]
    values = torch.ones((len(lengths), max(lengths), 20))
    for row, clip in zip(values, clips, strict=True):
        row[: len(clip)] = torch.from_numpy(clip)
    masks = Masks(probability=probability, time=time, bins=bins, num_bins=20)
    found, drawn = changed(masks, values, lengths)
    for row, clip in enumerate(clips):
        assert np.array_equal(found[row, : len(clip)].numpy(), masked_by_hand(clip, drawn, row))
        spans = [span for span in drawn["time"][row].tolist() if span != [0, 0]]
        assert all(stop - start == time[1] and start >= 0 and stop <= len(clip) for start, stop in spans)
        wanted = time[0] * len(clip) / time[1]
        fits = len(clip) // time[1]
        is_changed = len(spans) or any(span != [0, 0] for span in drawn["bins"][row].tolist())
        if is_changed:
            assert min(max(int(wanted), time[2]), fits) <= len(spans) <= min(max(int(wanted) + 1, time[2]), fits)
        alone, _ = changed(masks, values[row : row + 1], lengths[row : row + 1], first=row)
        assert torch.equal(alone[0], found[row])


def test_as_many_frames_are_masked_as_the_share_says() -> None:
    masks = Masks(probability=1, time=(0.05, 10, 2), bins=(0.0, 10, 0), num_bins=80)
    lengths = [3000] * 200
    drawn = masks.draw(EpochDraws(0, 0).of([str(i) for i in range(200)], 0), lengths)
    counts = (drawn["time"][:, :, 1] > 0).sum(1)
    assert counts.tolist() == [15] * 200  # 0.05 * 3000 / 10, and what is drawn rounds nothing up
    starts = drawn["time"][:, :, 0].ravel()
    assert np.abs(np.histogram(starts, 10, (0, 2991))[0] / 300 - 1).max() < 0.25
    assert drawn["bins"].shape == (200, 0, 2)


def test_the_numbers_of_masks_are_the_models_or_whispers() -> None:
    assert model_policy({}, "time") == (0.05, 10, 2)
    assert model_policy({}, "feature") == (0.0, 10, 0)
    tuned = {"mask_time_prob": 0.1, "mask_time_length": 5, "mask_time_min_masks": 1, "mask_feature_prob": 0.2}
    assert model_policy(tuned, "time") == (0.1, 5, 1)
    assert model_policy(tuned, "feature") == (0.2, 10, 0)


@given(probability=st.sampled_from([0.4, 1.0]), db=st.tuples(st.floats(-20, 0), st.floats(0, 20)))
def test_a_gain_is_in_its_range_and_of_its_share(probability: float, db: tuple[float, float]) -> None:
    lengths = [50] * 300
    values, clips = waves(lengths)
    found, drawn = changed(Gain(probability=probability, db=db), values, lengths)
    factors = drawn["factor"]
    assert ((factors >= 10 ** (db[0] / 20) - 1e-6) & (factors <= 10 ** (db[1] / 20) + 1e-6)).all()
    if probability == 1.0:
        assert np.allclose(found[:, :50].numpy(), np.stack(clips) * factors[:, None], rtol=1e-6)
    elif db[0] < -1e-3 and db[1] > 1e-3:
        assert 80 < (factors != 1).sum() < 160


@pytest.mark.parametrize("dtype", ["int16", "float32"])
def test_noise_is_mixed_at_exactly_the_ratio_that_was_drawn(dtype: str) -> None:
    lengths = [4000, 9000, 300, 16_000]
    values, clips = waves(lengths)
    noise = Noise(probability=1, clips=clips_of(noises([5000, 700], dtype=dtype)), snr_db=(5, 20))
    found, drawn = changed(noise, values, lengths)
    for row, clip in enumerate(clips):
        added = found[row, : len(clip)].numpy().astype(np.float64) - clip
        ratio = np.square(clip, dtype=np.float64).mean() / np.square(added).mean()
        assert 10 * np.log10(ratio) == pytest.approx(10 * np.log10(drawn["snr"][row]), abs=1e-3)
        assert 5 <= 10 * np.log10(ratio) <= 20.001
        assert not found[row, len(clip) :].any()
        scaled = drawn["noise"][row, : len(clip)]
        assert np.corrcoef(added, scaled)[0, 1] > 0.999_999  # that very stretch, and nothing else


def test_stretches_of_noise_lie_inside_a_clip_and_short_ones_are_repeated() -> None:
    source = noises([5000], dtype="float32")
    kept = source.samples[0]["waveform"]
    noise = Noise(probability=1, clips=clips_of(source), snr_db=(10, 10))
    drawn = noise.draw(EpochDraws(0, 0).of([str(i) for i in range(40)], 0), [1000] * 20 + [12_000] * 20)
    windows = np.lib.stride_tricks.sliding_window_view(kept, 1000)
    starts = {int(np.flatnonzero((windows == row[:1000]).all(1))[0]) for row in drawn["noise"][:20]}
    assert len(starts) > 15
    for row in drawn["noise"][20:]:
        assert np.array_equal(row[:5000], row[5000:10_000])


def test_silence_gets_no_noise_and_no_noise_gives_silence() -> None:
    silent = noises([400], dtype="float32")
    silent.samples[0]["waveform"] = np.zeros(400, np.float32)
    values, _ = waves([300, 200])
    still, _ = changed(Noise(probability=1, clips=clips_of(silent), snr_db=(5, 5)), values, [300, 200])
    assert torch.equal(still, values)
    nothing = torch.zeros_like(values)
    found, _ = changed(Noise(probability=1, clips=clips_of(noises([400])), snr_db=(5, 5)), nothing, [300, 200])
    assert torch.equal(found, nothing)


def test_reverberation_is_a_convolution_that_moves_nothing() -> None:
    lengths = [4000, 900, 2500]
    values, clips = waves(lengths)
    source = noises([1200], dtype="float32")
    impulse = (np.exp(-np.arange(1200) / 200) * np.random.default_rng(2).normal(size=1200)).astype(np.float32)
    impulse[37] = 9  # the direct sound
    source.samples[0]["waveform"] = impulse
    found, drawn = changed(Reverb(probability=1, clips=clips_of(source)), values, lengths)
    response = drawn["response"][0].astype(np.float64)
    assert np.argmax(np.abs(response)) == 0
    assert np.square(response).sum() == pytest.approx(1, abs=1e-6)
    for row, clip in enumerate(clips):
        wanted = np.convolve(clip.astype(np.float64), response)[: len(clip)]
        assert np.abs(found[row, : len(clip)].numpy() - wanted).max() < 1e-6
        assert not found[row, len(clip) :].any()


def test_recordings_that_are_not_drawn_stay_as_they_were_bit_for_bit() -> None:
    lengths = [500 + i for i in range(60)]
    values, _ = waves(lengths)
    for change in (
        Reverb(probability=0.5, clips=clips_of(noises([300]))),
        Noise(probability=0.5, clips=clips_of(noises([300])), snr_db=(0, 0)),
        Gain(probability=0.5, db=(3, 3)),
    ):
        found, _ = changed(change, values, lengths)
        same = [torch.equal(one, other) for one, other in zip(found, values, strict=True)]
        assert 15 < sum(same) < 45
        again, _ = changed(change, values, lengths)
        assert torch.equal(found, again)
        other, _ = changed(change, values, lengths, epoch=1)
        assert not torch.equal(found, other)


def test_caches_that_hold_no_noise_are_refused() -> None:
    for source, message in (
        (FakeSource([100]), "augment.0.cache: .* holds 'log_mel' at None Hz, wanted waveforms at 16000 Hz"),
        (noises([]), "has no samples"),
    ):
        with pytest.raises(ConfigError, match=message):
            clips_of(source)
    other = noises([100])
    other.constants = flat(features="waveform", sample_rate_hz=8_000)
    with pytest.raises(ConfigError, match="holds 'waveform' at 8000 Hz, wanted waveforms at 16000 Hz"):
        clips_of(other)
