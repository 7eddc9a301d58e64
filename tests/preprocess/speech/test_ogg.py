"""Ogg that is cut off or chained is found by its pages, wherever it was cut; what is whole passes."""

from __future__ import annotations

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.errors import DecodeError
from forebay.preprocess.decode import decode_audio
from forebay.steps.audio.waveform import Decode
from forebay.store.sound_containers import ogg_problem
from tests.preprocess.audio_files import encoded, ogg_flac, ogg_page, ogg_pages, voice

VOICE = voice(4_096 * 8)
KINDS = ("VORBIS", "OPUS", "FLAC")


@functools.cache
def ogg(kind: str) -> bytes:
    return ogg_flac(VOICE) if kind == "FLAC" else encoded(VOICE, 16_000, kind="OGG", subtype=kind)


def reason_of(data: bytes) -> str | None:
    """Why decoding refuses a file."""
    try:
        decode_audio(data, Decode(), sample_id="s-1")
    except DecodeError as err:
        assert str(err).startswith("sample s-1: ")  # noqa: PT017
        return err.reason
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_stream_passes(kind: str) -> None:
    assert ogg_problem(ogg(kind)) is None
    if kind == "FLAC":  # in Ogg libsndfile does not decode it; nothing of it is kept
        assert reason_of(ogg(kind)) == "corrupt_audio"
    else:
        assert len(decode_audio(ogg(kind), Decode(), sample_id="s-1")) == len(VOICE)


@given(kind=st.sampled_from(KINDS), cut=st.floats(0, 1, exclude_max=True), is_between_pages=st.booleans())
@example(kind="VORBIS", cut=0.0, is_between_pages=False)
@example(kind="OPUS", cut=0.3, is_between_pages=True)
def test_a_stream_cut_anywhere_is_truncated(kind: str, cut: float, *, is_between_pages: bool) -> None:
    data = ogg(kind)
    if is_between_pages:
        pages = ogg_pages(data)
        part = b"".join(pages[: max(1, int(cut * len(pages)))])
    else:
        part = data[: max(4, int(cut * len(data)))]
    assert reason_of(part) == "truncated_audio"


@given(first=st.sampled_from(KINDS), second=st.sampled_from(KINDS), cut=st.floats(0.1, 1))
@settings(max_examples=20, deadline=None)
def test_a_second_stream_is_a_chain_also_where_it_is_cut(first: str, second: str, cut: float) -> None:
    other = ogg(second)
    assert reason_of(ogg(first) + other[: int(cut * len(other))]) == "chained_audio"


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_cut_off_before_the_next_is_a_chain(kind: str) -> None:
    pages = ogg_pages(ogg(kind))
    assert reason_of(b"".join(pages[:-1] + pages)) == "chained_audio"


def test_streams_side_by_side_are_no_chain() -> None:
    first, *rest = ogg_pages(ogg("VORBIS"))
    skeleton = [ogg_page(b"fishead\0" + bytes(56), flags=2, serial=9), ogg_page(b"", flags=4, serial=9, sequence=1)]
    assert ogg_problem(b"".join([skeleton[0], first, skeleton[1], *rest])) is None
    assert ogg_problem(b"".join([first, skeleton[0], *rest[:-1], skeleton[1], rest[-1]])) is None
    # The end of the other stream is not the end of the sound.
    cut = b"".join([skeleton[0], first, *rest[:-1], skeleton[1]])
    assert ogg_problem(cut) == ("truncated_audio", "its end is missing: there is no end-of-stream page; write it again")


@pytest.mark.parametrize("tail", [b"TAG" + bytes(125), bytes(5_000), b"OggS", b"OggS\0\0" + bytes(30)])
def test_waste_behind_the_end_is_none_of_the_stream(tail: bytes) -> None:
    assert reason_of(ogg("VORBIS") + tail) is None


@pytest.mark.parametrize("kind", ["VORBIS", "OPUS"])
@pytest.mark.parametrize("is_flipped", [False, True])
@pytest.mark.few
def test_a_page_lost_in_the_middle_is_never_a_shorter_sample(kind: str, *, is_flipped: bool) -> None:
    pages = ogg_pages(ogg(kind))
    page = bytearray(pages[3])
    page[-1] ^= 1
    pages[3] = bytes(page) if is_flipped else b""
    assert reason_of(b"".join(pages)) == "header_mismatch"


@given(data=st.binary(max_size=300), start=st.sampled_from([b"", b"OggS", ogg_page(b"OpusHead", flags=2)]))
def test_any_bytes_get_an_answer(data: bytes, start: bytes) -> None:
    problem = ogg_problem(start + data)
    assert problem is None or problem[0] in {"truncated_audio", "chained_audio"}
    assert start or data.startswith(b"OggS") or problem is None
