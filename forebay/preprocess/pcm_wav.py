"""The plainest WAV files, 16-bit PCM behind a header of 44 bytes, read without libsndfile.

Opening a file there takes longer than a short clip's features. What soundfile, sox and the `wave` module write is of this
form; anything else, every damaged file among them, is left to libsndfile, whose answer is the same for these.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
_PCM, _BITS = 1, 16
_MAX_CHANNELS = 8


class PcmAudio(NamedTuple):
    """The audio of a file: int16 [num_samples, channels], a read-only view of its bytes."""

    sample_rate_hz: int
    samples: npt.NDArray[np.int16]


def plain_pcm(data: bytes) -> PcmAudio | None:
    """Returns the audio of a WAV file that is one header, one `fmt ` chunk and one full `data` chunk; None for any other."""
    if len(data) <= _HEADER.size:
        return None
    riff, riff_size, wave, fmt, fmt_size, kind, channels, rate_hz, byte_rate, block, bits, name, size = (
        _HEADER.unpack_from(data)
    )
    names = (riff, wave, fmt, name)
    if names != (b"RIFF", b"WAVE", b"fmt ", b"data") or (fmt_size, kind, bits) != (16, _PCM, _BITS):
        return None
    if not 1 <= channels <= _MAX_CHANNELS or block != 2 * channels or byte_rate != rate_hz * block:
        return None
    if riff_size != len(data) - 8 or size != len(data) - _HEADER.size or size % block:
        return None
    return PcmAudio(rate_hz, np.frombuffer(data, "<i2", offset=_HEADER.size).reshape(-1, channels))
