"""Decoding is exact where it can be, deterministic everywhere, and gives a reason where it fails."""

from __future__ import annotations

import io
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DecodeError
from forebay.preprocess.decode import decode_audio
from forebay.steps.audio.waveform import Decode
from tests.preprocess.audio_files import (
    LOSSLESS,
    chunk,
    demo_clips,
    encoded,
    fmt,
    mp3,
    voice,
    wave,
    with_flac_length,
    with_flac_rate,
)

STEP = Decode()


def decode(data: bytes, step: Decode = STEP, **kwargs: Any) -> np.ndarray[Any, Any]:
    return decode_audio(data, step, sample_id="s-1", **kwargs)


def reason_of(data: bytes, step: Decode = STEP, *, match: str = "sample s-1: ") -> str:
    with pytest.raises(DecodeError, match=match) as caught:
        decode(data, step)
    return caught.value.reason


@given(
    kind=st.sampled_from(LOSSLESS),
    num_samples=st.integers(1, 5_000),
    channels=st.integers(1, 9),
    seed=st.integers(0, 9),
)
def test_lossless_sources_come_back_exactly(kind: str, num_samples: int, channels: int, seed: int) -> None:
    samples = voice(num_samples, channels=min(channels, 8) if kind == "FLAC" else channels, seed=seed)
    waveform = decode(encoded(samples, 16_000, kind=kind, subtype="PCM_16"))
    assert waveform.dtype == np.float32
    assert waveform.shape == (num_samples,)
    exact = samples.astype(np.float64).mean(axis=1) / 32768
    np.testing.assert_allclose(waveform, exact, rtol=0, atol=0 if samples.shape[1] in (1, 2, 4) else 1e-7)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_sixteen_bit_mono_stays_int16_when_asked(kind: str) -> None:
    samples = voice(3_000)
    data = encoded(samples, 16_000, kind=kind, subtype="PCM_16")
    waveform = decode(data, want="int16")
    assert waveform.dtype == np.int16
    np.testing.assert_array_equal(waveform, samples[:, 0])
    np.testing.assert_array_equal(waveform / np.float32(32768), decode(data))
    np.testing.assert_array_equal(decode(data, Decode(clip_s=0.1), want="int16"), samples[:1_600, 0])


@pytest.mark.parametrize(
    ("rate_hz", "channels", "subtype"), [(8_000, 1, "PCM_16"), (16_000, 2, "PCM_16"), (16_000, 1, "PCM_24")]
)
def test_what_is_not_lossless_in_int16_stays_float32(rate_hz: int, channels: int, subtype: str) -> None:
    data = encoded(voice(3_000, channels=channels), rate_hz, subtype=subtype)
    waveform = decode(data, want="int16")
    assert waveform.dtype == np.float32
    np.testing.assert_array_equal(waveform, decode(data))


@pytest.mark.parametrize("kind", ["FLAC", "WAV", "OGG", "MP3"])
@pytest.mark.parametrize("channels", [1, 2])
def test_other_rates_are_what_soundfile_and_soxr_give(kind: str, channels: int) -> None:
    data = encoded(voice(30_000, channels=channels), 44_100, kind=kind)
    plain, rate_hz = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    wanted = soxr.resample(plain.mean(axis=1), rate_hz, 16_000, quality="HQ")
    waveform = decode(data)
    assert waveform.dtype == np.float32
    np.testing.assert_allclose(waveform, wanted, rtol=0, atol=1e-7)


def test_every_real_recording() -> None:
    count = 0
    for name, data, _ in demo_clips():
        plain, rate_hz = soundfile.read(io.BytesIO(data), dtype="int16")
        assert rate_hz == 16_000
        np.testing.assert_array_equal(decode(data, want="int16"), plain, err_msg=name)
        np.testing.assert_array_equal(decode(data), plain / np.float32(32768), err_msg=name)
        count += 1
    assert count >= 40


@given(
    rate_hz=st.sampled_from([8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 1_000]),
    clip_s=st.floats(0.05, 2.5),
    kind=st.sampled_from(["FLAC", "WAV", "OGG"]),
)
def test_a_clip_is_the_beginning_of_the_whole(rate_hz: int, clip_s: float, kind: str) -> None:
    if kind == "OGG" and rate_hz < 8_000:
        kind = "WAV"
    data = encoded(voice(2 * rate_hz), rate_hz, kind=kind)
    clip, whole = decode(data, Decode(clip_s=clip_s)), decode(data)
    assert len(clip) == min(len(whole), round(clip_s * 16_000))
    np.testing.assert_array_equal(clip, whole[: len(clip)])


@pytest.mark.parametrize("kind", ["FLAC", "WAV", "OGG", "MP3"])
def test_decoding_is_deterministic(kind: str) -> None:
    data = encoded(voice(40_000, channels=2), 22_050, kind=kind)
    first = decode(data)
    assert all(np.array_equal(first, decode(data)) for _ in range(3))


@pytest.mark.parametrize("num_samples", [1, 4_096, 50_000, 1 << 18, (1 << 18) + 1, 600_000])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.few
def test_a_flac_stream_without_its_length_is_read_to_its_end(num_samples: int, channels: int) -> None:
    samples = voice(num_samples, channels=channels)
    data = encoded(samples, 16_000)
    stream = with_flac_length(data, 0)
    np.testing.assert_array_equal(decode(stream), decode(data))
    np.testing.assert_array_equal(decode(stream, want="int16"), decode(data, want="int16"))
    np.testing.assert_array_equal(decode(stream, Decode(clip_s=2.0)), decode(data, Decode(clip_s=2.0)))


def test_a_24_bit_stream_without_its_length_is_exact() -> None:
    data = encoded(voice(20_000).astype(np.float32) / 40_000, 16_000, subtype="PCM_24")
    np.testing.assert_array_equal(decode(with_flac_length(data, 0)), decode(data))


FLAC = encoded(voice(20_000), 16_000)
WAV = encoded(voice(20_000), 16_000, kind="WAV")
AIFF = encoded(voice(20_000), 16_000, kind="AIFF")
OGG = encoded(voice(20_000), 16_000, kind="OGG")
MP3 = mp3(voice(20_000))
NAN = np.where(np.arange(1_000) == 7, np.nan, 0.5).astype(np.float32)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty_file"),
        (b"hello world" * 100, "unknown_format"),
        (bytes(5_000), "unknown_format"),
        (b"fLaC", "corrupt_audio"),
        (FLAC[: len(FLAC) // 2], "corrupt_audio"),
        (FLAC[:5_000] + bytes(500) + FLAC[5_500:], "corrupt_audio"),
        (FLAC[:43], "header_mismatch"),
        (with_flac_length(FLAC, 20_001), "header_mismatch"),
        (with_flac_length(FLAC, 3_600 * 16_000), "header_mismatch"),
        (WAV[:-2], "header_mismatch"),
        (WAV[: len(WAV) // 2], "header_mismatch"),
        (AIFF[: len(AIFF) // 2], "header_mismatch"),
        (AIFF[:-2], "header_mismatch"),
        (MP3[: len(MP3) // 2], "header_mismatch"),
        (OGG[: len(OGG) // 2], "truncated_audio"),
        (OGG[:-1], "truncated_audio"),
        (OGG + OGG, "chained_audio"),
        (MP3 + MP3, "chained_audio"),
        (wave(fmt(), chunk(b"data", bytes(200), size=3_600 * 32_000)), "header_mismatch"),
        (WAV[:30], "corrupt_audio"),
        (with_flac_length(FLAC, 2**36 - 1), "too_large"),
        (wave(fmt(), chunk(b"data", bytes(200), size=0x7FFFEFFE)), "too_large"),
        (wave(fmt(rate_hz=0), chunk(b"data", bytes(200))), "bad_sample_rate"),
        (wave(fmt(rate_hz=999), chunk(b"data", bytes(200))), "bad_sample_rate"),
        (wave(fmt(rate_hz=384_001), chunk(b"data", bytes(200))), "bad_sample_rate"),
        (with_flac_rate(FLAC, 0), "bad_sample_rate"),
        (wave(fmt(), chunk(b"data", b"")), "empty_audio"),
        (encoded(voice(0), 16_000, kind="AIFF"), "empty_audio"),
        (encoded(NAN, 16_000, kind="WAV", subtype="FLOAT"), "not_finite"),
        (encoded(np.full(100, np.inf), 8_000, kind="WAV", subtype="DOUBLE"), "not_finite"),
    ],
)
def test_every_failure_has_its_reason_and_names_the_sample(data: bytes, reason: str) -> None:
    assert reason_of(data) == reason


def test_sizes_are_refused_before_anything_is_allocated() -> None:
    small = Decode(max_sample_bytes=100_000)
    tracemalloc.start()
    assert (
        reason_of(FLAC + bytes(100_000), small, match=r"the file takes \d+ bytes, allowed are 100000;") == "too_large"
    )
    assert (
        reason_of(with_flac_length(FLAC, 2**36 - 1), match="274877906940 bytes, allowed are 268435456") == "too_large"
    )
    assert reason_of(encoded(voice(20_000), 1_000), small, match="the audio at 16000 Hz takes") == "too_large"
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2 * 1024**2
    assert len(decode(FLAC, small)) == 20_000
    stream = with_flac_length(encoded(np.zeros((400_000, 1), np.int16), 16_000), 0)
    assert reason_of(stream, Decode(max_sample_bytes=1_000_000), match="the audio takes") == "too_large"


def test_a_clip_of_a_long_recording_needs_no_room_for_all_of_it() -> None:
    step = Decode(clip_s=0.5, max_sample_bytes=64_000)
    np.testing.assert_array_equal(decode(FLAC, step), decode(FLAC)[:8_000])


def test_what_libsndfile_has_no_memory_for_is_not_the_samples_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise soundfile.LibsndfileError(17)

    monkeypatch.setattr(soundfile, "SoundFile", fail)
    with pytest.raises(MemoryError, match="no memory for sample s-1"):
        decode(FLAC)


@given(
    kind=st.sampled_from(["FLAC", "WAV", "OGG"]),
    flips=st.lists(st.tuples(st.integers(0, 60_000), st.integers(1, 255)), min_size=1, max_size=5),
    cut=st.one_of(st.none(), st.integers(0, 20_000)),
)
def test_damage_gives_a_reason_or_a_finite_waveform(kind: str, flips: list[tuple[int, int]], cut: int | None) -> None:
    data = bytearray(encoded(voice(6_000), 16_000, kind=kind))
    for position, flip in flips:
        data[position % len(data)] ^= flip
    try:
        waveform = decode(bytes(data[:cut]), Decode(max_sample_bytes=4 * 1024**2))
    except DecodeError as err:
        assert err.reason  # noqa: PT017
        return
    assert waveform.dtype == np.float32
    assert np.isfinite(waveform).all()
    assert 0 < waveform.nbytes <= 4 * 1024**2


@given(position=st.integers(42, 60_000), flip=st.integers(1, 255))
def test_damage_in_flac_audio_is_never_heard(position: int, flip: int) -> None:
    data = bytearray(FLAC)
    position = 42 + (position - 42) % (len(data) - 42)
    data[position] ^= flip
    try:
        waveform = decode(bytes(data))
    except DecodeError as err:
        assert err.reason in {"corrupt_audio", "header_mismatch", "unknown_format"}  # noqa: PT017
        return
    np.testing.assert_array_equal(waveform, decode(FLAC))


def test_beside_another_thread_the_same_bytes_give_the_same_waveform() -> None:
    alone = decode(FLAC)
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        beside = decode(FLAC)
    finally:
        stop.set()
        other.join()
    np.testing.assert_array_equal(alone, beside)
