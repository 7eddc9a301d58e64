"""Headers tell what decoding tells, from one small read."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from forebay.store.sound_containers import AudioInfo, header_info, parsed_header
from tests.preprocess.audio_files import LOSSLESS, chunk, demo_clips, encoded, fmt, voice, wave, with_flac_length

DATA = voice(100).tobytes()


def info(data: bytes) -> AudioInfo | None:
    return header_info(lambda offset, size: data[offset : offset + size], len(data))


def by_decoding(data: bytes) -> tuple[int, int, int]:
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        return file.samplerate, len(file.read()), file.channels


@given(
    kind=st.sampled_from([*LOSSLESS, "OGG", "MP3"]),
    num_samples=st.integers(1, 3_000),
    channels=st.integers(1, 2),
    rate_hz=st.sampled_from([8_000, 16_000, 44_100, 48_000]),
)
def test_a_header_says_what_decoding_gives(kind: str, num_samples: int, channels: int, rate_hz: int) -> None:
    data = encoded(voice(num_samples, channels=channels), rate_hz, kind=kind)
    found = info(data)
    assert found is not None
    assert found[:3] == by_decoding(data)
    assert found.duration_s == found.num_samples / rate_hz


@pytest.mark.parametrize(
    "subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW", "IMA_ADPCM"]
)
@pytest.mark.parametrize("kind", ["WAV", "WAVEX", "RF64"])
def test_every_encoding_of_wave(subtype: str, kind: str) -> None:
    if not soundfile.check_format(kind, subtype):
        assert (kind, subtype) in {("WAVEX", "IMA_ADPCM"), ("RF64", "IMA_ADPCM")}
        return
    data = encoded(voice(1_000, channels=2), 22_050, kind=kind, subtype=subtype)
    found = info(data)
    assert found is not None
    assert found[:3] == by_decoding(data)


@pytest.mark.parametrize("subtype", ["PCM_S8", "PCM_16", "PCM_24"])
def test_every_width_of_flac(subtype: str) -> None:
    assert info(encoded(voice(999), 96_000, subtype=subtype)) == (96_000, 999, 1, "flac")


@pytest.mark.parametrize("subtype", ["PCM_S8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW"])
def test_every_encoding_of_aiff(subtype: str) -> None:
    data = encoded(voice(1_000, channels=2), 22_050, kind="AIFF", subtype=subtype)
    found = info(data)
    assert found is not None
    assert found[:3] == by_decoding(data)
    # What it claims, not what is left of it; of what is packed in another way libsndfile says what is left.
    assert info(data[:-300]) == (found if subtype != "ULAW" else (22_050, 850, 2, "aiff"))


def test_flac_wave_and_aiff_cost_one_small_read() -> None:
    for kind in ("FLAC", "WAV", "AIFF"):
        data = encoded(voice(50_000), 16_000, kind=kind)
        reads: list[tuple[int, int]] = []

        def read(offset: int, size: int, data: bytes = data, reads: list[tuple[int, int]] = reads) -> bytes:
            reads.append((offset, size))
            return data[offset : offset + size]

        found = header_info(read, len(data))
        assert found is not None
        assert found.num_samples == 50_000
        assert reads == [(0, 4096)]


def test_every_real_recording() -> None:
    count = 0
    for name, data, duration_s in demo_clips():
        found = info(data)
        assert found is not None, name
        assert found[:3] == by_decoding(data), name
        assert found.duration_s == pytest.approx(duration_s, abs=0.01), name
        count += 1
    assert count >= 40


@given(
    chunks=st.lists(st.tuples(st.sampled_from([b"LIST", b"junk", b"bext"]), st.binary(max_size=3_000)), max_size=6),
    split=st.integers(0, 6),
    order=st.sampled_from("<>"),
)
def test_chunks_may_stand_in_any_order(chunks: list[tuple[bytes, bytes]], split: int, order: str) -> None:
    others = [chunk(name, body, order=order) for name, body in chunks]
    parts = [fmt(order=order), *others[split:], chunk(b"data", DATA, order=order)]
    data = wave(*others[:split], *parts, magic=b"RIFX" if order == ">" else b"RIFF", order=order)
    assert info(data) == (16_000, 100, 1, "wav")
    assert info(data)[:3] == by_decoding(data)  # type: ignore[index]
    backwards = wave(*reversed(parts), magic=b"RIFX" if order == ">" else b"RIFF", order=order)
    assert info(backwards) == (16_000, 100, 1, "wav")


@pytest.mark.parametrize("magic", [b"RF64", b"BW64"])
def test_sixty_four_bit_sizes(magic: bytes) -> None:
    ds64 = chunk(b"ds64", struct.pack("<QQQI", 0, 200, 100, 0))
    data = wave(ds64, fmt(), chunk(b"data", DATA, size=0xFFFFFFFF), magic=magic)
    assert info(data) == (16_000, 100, 1, "wav")
    hours = chunk(b"ds64", struct.pack("<QQQI", 0, 2**40, 2**39, 0))
    assert info(wave(hours, fmt(), chunk(b"data", DATA, size=0xFFFFFFFF), magic=magic)) == (16_000, 2**39, 1, "wav")


@pytest.mark.parametrize("size", [0x7FFFF000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_the_size_of_a_stream_is_what_is_there(size: int) -> None:
    data = wave(fmt(), chunk(b"data", DATA, size=size))
    assert info(data) == (16_000, 100, 1, "wav")
    assert by_decoding(data)[1] == 100


def test_a_claim_is_reported_as_it_stands() -> None:
    assert info(wave(fmt(), chunk(b"data", DATA, size=7_200 * 32_000))) == (16_000, 7_200 * 16_000, 1, "wav")
    assert info(with_flac_length(encoded(voice(50), 16_000), 2**36 - 1)) == (16_000, 2**36 - 1, 1, "flac")


def test_an_id3_tag_before_flac_is_stepped_over() -> None:
    tag = b"ID3\x04\x00\x00" + bytes([0, 0, 39, 8]) + bytes(39 * 128 + 8)
    data = tag + encoded(voice(70), 16_000)
    assert parsed_header(lambda offset, size: data[offset : offset + size], len(data)) == (16_000, 70, 1, "flac")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"fLaC",
        b"RIFF",
        b"hello world, this is no audio at all",
        wave(),
        wave(fmt()),
        wave(chunk(b"data", DATA)),
        wave(chunk(b"fmt ", b"short"), chunk(b"data", DATA)),
        wave(fmt(channels=0), chunk(b"data", DATA)),
        wave(fmt(rate_hz=0), chunk(b"data", DATA)),
        wave(fmt(bits=0), chunk(b"data", DATA)),
        wave(fmt(), chunk(b"data", b"")),
        with_flac_length(encoded(voice(50), 16_000), 0),
        b"OggS" + bytes(100),
    ],
)
def test_what_cannot_be_told_is_none(data: bytes) -> None:
    assert info(data) is None


def test_files_above_the_bound_are_not_read_whole() -> None:
    data = encoded(voice(5_000), 16_000, kind="OGG")
    assert header_info(lambda offset, size: data[offset : offset + size], len(data), max_bytes=len(data) - 1) is None


def test_a_file_of_empty_chunks_ends() -> None:
    data = wave(b"junk\0\0\0\0" * 50_000)
    reads = 0

    def read(offset: int, size: int) -> bytes:
        nonlocal reads
        reads += 1
        return data[offset : offset + size]

    assert parsed_header(read, len(data)) is None
    assert reads < 5_000


def test_read_errors_come_through() -> None:
    def read(offset: int, size: int) -> bytes:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        header_info(read, 1_000)


@given(
    start=st.sampled_from(
        [b"", b"fLaC", b"fLaC\0\0\0\x22", b"RIFF\0\0\0\0WAVE", b"RF64\0\0\0\0WAVEds64", b"ID3\4\0\0", wave(fmt())]
    ),
    rest=st.binary(max_size=200),
)
def test_any_bytes_give_an_answer(start: bytes, rest: bytes) -> None:
    data = start + rest
    found = parsed_header(lambda offset, size: data[offset : offset + size], len(data))
    assert found is None or (found.num_samples >= 0 and found.channels > 0)
    answer = info(data)
    assert answer is None or np.isfinite(answer.duration_s)
