"""MP3: how much of it is there is counted, not guessed from a bitrate; files glued together are found."""

from __future__ import annotations

import functools
import io

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DecodeError
from forebay.preprocess.decode import decode_audio
from forebay.steps.audio.waveform import Decode
from forebay.store.sound_containers import has_length, header_info, measured
from tests.preprocess.audio_files import encoded, id3, mp3, voice, without_tag

RATES_HZ = (8_000, 16_000, 24_000, 44_100)
DELAY = 529
"""Of mpg123's decoder, which a tag takes away."""


@functools.cache
def tagged(rate_hz: int = 16_000, channels: int = 1, mode: str = "VARIABLE") -> bytes:
    """A recording that pauses, so that its bitrate varies."""
    samples = voice(30_000, channels=channels)
    samples[8_000:24_000] = 0
    return mp3(samples, rate_hz, mode=mode)


def reason_of(data: bytes) -> str | None:
    try:
        decode_audio(data, Decode(), sample_id="s-1")
    except DecodeError as err:
        return err.reason
    return None


def read(data: bytes) -> np.ndarray:
    return np.asarray(soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)[0])


@pytest.mark.parametrize("mode", ["VARIABLE", "CONSTANT", "AVERAGE"])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate_hz", RATES_HZ)
@pytest.mark.few
def test_without_a_tag_everything_is_decoded_all_the_same(rate_hz: int, channels: int, mode: str) -> None:
    data = tagged(rate_hz, channels, mode)
    bare = without_tag(data)
    assert not has_length(bare)
    whole, counted = read(data), read(measured(bare)[0])
    offset = 576  # of the encoder, which only its own tag tells
    np.testing.assert_allclose(counted[offset : offset + len(whole)], whole, rtol=0, atol=1e-6)
    info = header_info(lambda start, size: bare[start : start + size], len(bare))
    assert info is not None
    assert (info.num_samples, info.sample_rate_hz, info.channels) == (len(counted), rate_hz, channels)


def test_a_wrong_estimate_of_the_length_loses_and_fails_nothing() -> None:
    low, high = without_tag(tagged()), without_tag(tagged(44_100, 2, "CONSTANT"))
    assert (
        len(read(low)) < 16_000 < len(decode_audio(low, Decode(), sample_id="s-1"))
    )  # 30,000 and what an encoder adds
    with soundfile.SoundFile(io.BytesIO(high)) as file:
        assert file.frames != len(file.read())
    assert reason_of(high) is None


@given(cut=st.floats(0.05, 1), rate_hz=st.sampled_from(RATES_HZ))
def test_cut_anywhere_a_tag_tells_and_without_one_every_whole_frame_is_there(cut: float, rate_hz: int) -> None:
    data = tagged(rate_hz)
    bare = without_tag(data)
    part = data[: int(cut * (len(data) - 1))]
    assert reason_of(part) in {"header_mismatch", "corrupt_audio"}
    frame = 1_152 if rate_hz >= 32_000 else 576
    rest = read(measured(bare[: max(3_200, int(cut * len(bare)))])[0])
    assert (len(rest) + DELAY) % frame == 0


ID3V1 = b"TAG" + bytes(125)


@pytest.mark.parametrize("rate_hz", RATES_HZ)
def test_files_glued_together_are_chained(rate_hz: int) -> None:
    data, other = tagged(rate_hz), mp3(voice(9_000, seed=3), rate_hz, mode="CONSTANT")
    bare = without_tag(data)
    for glued in (
        data + other,
        data + ID3V1 + other,
        data + id3() + other,
        data + bare,
        bare + other,
        bare + id3() + bare,
    ):
        assert reason_of(glued) == "chained_audio"
    for alone in (data, bare, id3() + data, id3() + id3() + bare, data + ID3V1, data + bytes(3_000), bare + ID3V1):
        assert reason_of(alone) is None
    # Frames alone behind frames alone are one stream, of which nothing is lost.
    assert len(read(measured(bare + bare)[0])) + DELAY == 2 * (len(read(measured(bare)[0])) + DELAY)


@pytest.mark.parametrize("is_zero", [False, True])
def test_a_tag_that_counts_no_frames_is_replaced(*, is_zero: bool) -> None:
    data = bytearray(tagged())
    at = data.index(b"Xing")
    if is_zero:
        data[at + 8 : at + 12] = bytes(4)
    else:
        data[at + 7] &= ~1  # its flags: the frames are not among what follows
    assert not has_length(bytes(data))
    made, problem = measured(bytes(data))
    assert problem is None
    assert len(read(made)) == len(read(measured(without_tag(tagged()))[0]))


@given(
    flips=st.lists(st.tuples(st.integers(0, 9_000), st.integers(1, 255)), min_size=1, max_size=20),
    is_tagged=st.booleans(),
    cut=st.integers(0, 9_000),
)
def test_damage_gives_a_reason_or_a_finite_waveform(flips: list[tuple[int, int]], *, is_tagged: bool, cut: int) -> None:
    data = bytearray(tagged() if is_tagged else without_tag(tagged()))
    for position, flip in flips:
        data[position % len(data)] ^= flip
    try:
        waveform = decode_audio(bytes(data[cut:]), Decode(max_sample_bytes=1 << 22), sample_id="s-1")
    except DecodeError as err:
        assert err.reason  # noqa: PT017
        return
    assert np.isfinite(waveform).all()


@given(st.binary(max_size=400), st.sampled_from([b"", b"\xff", b"\xff\xfb\x90\xc4", b"ID3\x04\0\0\0\0\0\x05"]))
def test_any_bytes_get_an_answer(data: bytes, start: bytes) -> None:
    made, problem = measured(start + data)
    assert made.endswith(data[-1:])
    assert problem is None or problem[0] == "chained_audio"


def test_other_formats_are_left_alone() -> None:
    for kind in ("FLAC", "WAV", "OGG", "AIFF"):
        data = encoded(voice(3_000), 16_000, kind=kind)
        assert measured(data) == (data, None)
