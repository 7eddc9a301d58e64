"""The sound of films by PyAV (extra `video`), read as a WAV of what FFmpeg decodes, so that it is a clip as any other.

It begins with its first sample, whenever a film shows its first frame: so transformers takes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from forebay.errors import DecodeError
from forebay.steps.image.video_frames import open_film
from forebay.store.layout import Array
from forebay.store.sound_containers import AudioInfo

_MARKS = ((4, b"ftyp"), (4, b"moov"), (4, b"mdat"), (4, b"wide"), (4, b"free"), (0, b"\x1a\x45\xdf\xa3"), (8, b"AVI "))
_MARKS_OF_STREAMS = ((0, b"FLV"), (0, b"\x47"), (0, b"\x00\x00\x01\xba"), (0, b"\x30\x26\xb2\x75"))
"""Where the marks of films stand: of MP4 and its like, Matroska and AVI; of FLV, MPEG and ASF."""
_SLACK_S = 0.25
"""The seconds that a header may say too much."""


def is_film(data: bytes) -> bool:
    """Whether encoded bytes begin as a film does, whose sound `film_sound` reads."""
    return any(data.startswith(mark, at) for at, mark in (*_MARKS, *_MARKS_OF_STREAMS))


def film_info(data: bytes, *, max_s: float, name: str) -> AudioInfo:
    """Returns what the sound of a film is: all of it is decoded, for no header says how much there is.

    Raises DecodeError as `film_sound` does, `video_too_long` for more than `max_s` seconds.
    """
    num_samples, rate_hz, channels = 0, 1, 1
    for frame in _frames(data, max_s, name):
        num_samples, rate_hz, channels = num_samples + frame.samples, frame.sample_rate, frame.layout.nb_channels
    return AudioInfo(rate_hz, num_samples, channels, "film")


def film_sound(data: bytes, *, max_bytes: int, name: str) -> tuple[Array, int]:
    """Returns the sound of a film, float32 [num_samples, channels], and its rate in Hz: that of FFmpeg's best stream.

    Raises DecodeError: `no_sound`, `unreadable_video`, `truncated_sound`, `too_large`.
    """
    from av import AudioResampler

    as_floats, blocks, size = AudioResampler(format="fltp"), [], 0
    for frame in _frames(data, float("inf"), name):
        size += frame.samples * frame.layout.nb_channels * np.dtype(np.float32).itemsize
        if size > max_bytes:
            said = f"video {name}: its sound takes more than {max_bytes} bytes"
            raise DecodeError("too_large", f"{said}; cut it, or raise source.max_sample_bytes")
        rate_hz = frame.sample_rate
        blocks += [made.to_ndarray() for made in as_floats.resample(frame)]
    return np.ascontiguousarray(np.concatenate(blocks, axis=1).T), rate_hz


def _frames(data: bytes, max_s: float, name: str) -> Iterator[Any]:
    """Yields the frames of a film's sound, one or more, all of one rate and layout."""
    with open_film(data, name) as container:
        stream = container.streams.best("audio")
        if stream is None or stream.codec_context is None:
            raise DecodeError("no_sound", f"video {name}: it has no sound that can be decoded; leave it out")
        stream.codec_context.thread_count = 1
        stream.codec_context.options = {"err_detect": "explode"}
        told_s = 0.0 if stream.duration is None else float(stream.duration * stream.time_base)
        found_s, end_s, form = 0.0, 0.0, None
        start = stream.start_time or 0
        with _damage(name), contextlib.closing(container.decode(stream)) as frames:
            for frame in frames:
                found_s += frame.samples / frame.sample_rate
                if max(told_s, found_s) > max_s:
                    said = f"video {name}: {max(told_s, found_s):.1f} s of sound, source.max_video_s is {max_s:g}"
                    raise DecodeError("video_too_long", f"{said}; cut it, or raise that setting")
                own = (frame.sample_rate, frame.layout.name)
                if frame.is_corrupt or own != (form := form or own):
                    raise _truncated(name, f"is damaged, or changes its rate, at {found_s:.2f} s")
                if frame.pts is not None:  # of sound with gaps the end is later than what there is of it
                    end_s = float((frame.pts - start) * stream.time_base) + frame.samples / frame.sample_rate
                yield frame
        if form is None:
            raise DecodeError("no_sound", f"video {name}: its sound has no samples; leave it out")
        if max(found_s, end_s) < told_s - _SLACK_S:
            raise _truncated(name, f"has {told_s:.2f} s by its header, and ends at {max(found_s, end_s):.2f} s")


@contextlib.contextmanager
def _damage(name: str) -> Iterator[None]:
    import av

    try:
        yield
    except av.FFmpegError as err:
        raise _truncated(name, f"is cut off or damaged ({err.strerror})") from err


def _truncated(name: str, why: str) -> DecodeError:
    return DecodeError("truncated_sound", f"video {name}: its sound {why}; write the video again")
