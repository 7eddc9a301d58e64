"""Samples as the bytes of a WAV file."""

from __future__ import annotations

import struct

from forebay.store.layout import Array

_MAX_BYTES = (1 << 32) - 1 - 36
"""What the 32-bit sizes of a WAV can say."""


def pcm16_wav(samples: Array, sample_rate_hz: int) -> bytes:
    """Returns a mono 16-bit PCM WAV, a header of 44 bytes and the samples: the same bytes for the same samples.

    samples: int16 [num_samples]. Raises OverflowError for 4 GiB or more, about 37 hours at 16 kHz.
    """
    data = samples.astype("<i2", copy=False).tobytes()
    if len(data) > _MAX_BYTES:
        raise OverflowError(f"{len(data)} bytes of samples do not fit a WAV, which holds {_MAX_BYTES}")
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate_hz, 2 * sample_rate_hz, 2, 16)
    riff = struct.pack("<4sI4s", b"RIFF", 36 + len(data), b"WAVE")
    return riff + form + struct.pack("<4sI", b"data", len(data)) + data
