"""Plain WAV files read without libsndfile are, bit for bit, what libsndfile makes of them; so are their refusals."""

from __future__ import annotations

import io
import wave as wave_module
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DecodeError
from forebay.preprocess.decode import decode_audio
from forebay.steps.audio.waveform import Decode
from forebay.store.sound_containers import plain_pcm
from tests.preprocess.audio_files import chunk, encoded, fmt, voice, wave

Answer = tuple[str, bytes] | tuple[str, str]


def answer(data: bytes, step: Decode, want: Literal["float32", "int16"]) -> Answer:
    try:
        waveform = decode_audio(data, step, sample_id="s-1", want=want)
    except DecodeError as err:
        return err.reason, str(err)
    return waveform.dtype.name, waveform.tobytes()


def by_libsndfile(data: bytes, step: Decode, want: Literal["float32", "int16"]) -> Answer:
    with mock.patch("forebay.preprocess.decode.plain_pcm", return_value=None):
        return answer(data, step, want)


@given(
    samples=st.integers(1, 3000),
    channels=st.integers(1, 9),
    rate_hz=st.sampled_from((999, 1000, 8000, 16_000, 44_100, 384_000, 400_000)),
    clip_s=st.none() | st.sampled_from((0.01, 0.1)),
    max_bytes=st.none() | st.integers(100, 20_000),
    want=st.sampled_from(("float32", "int16")),
    extremes=st.booleans(),
)
def test_plain_files_are_what_libsndfile_gives(
    samples: int,
    channels: int,
    rate_hz: int,
    clip_s: float | None,
    max_bytes: int | None,
    want: Literal["float32", "int16"],
    *,
    extremes: bool,
) -> None:
    audio = voice(samples, channels=channels, seed=samples)
    if extremes:
        audio[::3], audio[1::3] = -32768, 32767
    data = encoded(audio, rate_hz, kind="WAV", subtype="PCM_16")
    assert (plain_pcm(data) is not None) == (channels <= 8)
    limits: dict[str, Any] = {} if max_bytes is None else {"max_sample_bytes": max_bytes}
    step = Decode(clip_s=clip_s, **limits)
    assert answer(data, step, want) == by_libsndfile(data, step, want)


@given(
    changes=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=3),
    cut=st.none() | st.integers(0, 300),
    tail=st.binary(max_size=9),
)
def test_damaged_files_get_the_answer_of_libsndfile(
    changes: list[tuple[int, int]], cut: int | None, tail: bytes
) -> None:
    data = bytearray(encoded(voice(120, channels=2), 16_000, kind="WAV", subtype="PCM_16"))
    for position, value in changes:
        data[position] = value
    made = bytes(data)[:cut] + tail
    assert answer(made, Decode(), "float32") == by_libsndfile(made, Decode(), "float32")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(wave(fmt(), chunk(b"data", bytes(20)), magic=b"RIFX", order=">"), id="big endian"),
        pytest.param(wave(fmt(bits=8), chunk(b"data", bytes(20))), id="8 bits"),
        pytest.param(wave(fmt(), chunk(b"LIST", bytes(8)), chunk(b"data", bytes(20))), id="a chunk between"),
        pytest.param(wave(fmt(), chunk(b"data", bytes(20), size=18)), id="more than data says"),
        pytest.param(wave(fmt(), chunk(b"data", bytes(20), size=22)), id="less than data says"),
        pytest.param(wave(fmt(channels=2), chunk(b"data", bytes(18))), id="half a sample"),
        pytest.param(wave(fmt(), chunk(b"data", b"")), id="no audio"),
        pytest.param(wave(fmt(extra=bytes(2)), chunk(b"data", bytes(20))), id="a longer fmt"),
        pytest.param(b"", id="empty"),
    ],
)
def test_any_other_form_is_left_to_libsndfile(data: bytes) -> None:
    assert plain_pcm(data) is None


def test_the_wave_module_writes_plain_files() -> None:
    sink = io.BytesIO()
    with wave_module.open(sink, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(np.arange(-5, 5, dtype="<i2").tobytes())
    found = plain_pcm(sink.getvalue())
    assert found is not None
    assert found.sample_rate_hz == 16_000
    assert found.samples[:, 0].tolist() == list(range(-5, 5))
