"""Rate, length and channels of encoded audio from its header: a small read for FLAC, RIFF, AIFF, else libsndfile."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import NamedTuple

from forebay.store.sound_containers import id3_bytes, measured

Read = Callable[[int, int], bytes]
"""(offset, size) -> bytes of the encoded sample; fewer only at its end."""

MAX_WHOLE_BYTES = 256 * 1024 * 1024
"""The largest file that is read as a whole, for a format whose length takes all of its bytes to tell."""

_PREFIX_BYTES = 4096

_MAX_CHUNKS = 4096
"""RIFF chunks before the audio; more is a damaged file, and a read each."""

_UNKNOWN_SIZES = frozenset((0x7FFFF000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF))
"""What sox, arecord and ffmpeg write as the size of a stream whose length they do not know yet."""

_PCM, _FLOAT, _ALAW, _MULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE

_AIFF_PLAIN = frozenset((b"", b"NONE", b"sowt", b"twos", b"in24", b"in32", b"fl32", b"FL32", b"fl64", b"FL64"))
"""Compressions under which a frame is a sample of each channel."""


class AudioInfo(NamedTuple):
    """The claims of a header; the data may hold less. num_samples: of one channel. format: `flac`, `wav`, `ogg`, ..."""

    sample_rate_hz: int
    num_samples: int
    channels: int
    format: str

    @property
    def duration_s(self) -> float:
        """The length in seconds."""
        return self.num_samples / self.sample_rate_hz


def header_info(read: Read, size_bytes: int, *, max_bytes: int = MAX_WHOLE_BYTES) -> AudioInfo | None:
    """Returns what the header of an encoded sample claims, or None where nothing can be told without decoding.

    FLAC STREAMINFO, RIFF/RF64/BW64 WAVE and AIFF cost one read of 4 KiB as a rule. Other formats (Ogg: the last
    granule; MP3: its tag, else its frames are counted) need all their bytes, unless there are more than `max_bytes`.
    Errors of `read` come through.
    """
    info = parsed_header(read, size_bytes)
    if info is not None and info.num_samples > 0:
        return info if info.sample_rate_hz > 0 else None
    if size_bytes > max_bytes:
        return None
    return _by_libsndfile(read(0, size_bytes))


def parsed_header(read: Read, size_bytes: int) -> AudioInfo | None:
    """Returns what a FLAC, RIFF WAVE or AIFF header says, unchecked, or None for anything else and for broken headers.

    num_samples is 0 where a FLAC stream was written without its length.
    """
    source = _Source(read, size_bytes)
    start = id3_bytes(source.get(0, 10))
    magic = source.get(start, 12)
    if magic[:4] == b"fLaC":
        return _flac(source, start + 4)
    if magic[:4] in (b"RIFF", b"RIFX", b"RF64", b"BW64") and magic[8:] == b"WAVE" and not start:
        return _wave(source, ">" if magic[:4] == b"RIFX" else "<")
    if magic[:4] == b"FORM" and magic[8:] in (b"AIFF", b"AIFC") and not start:
        return _aiff(source)
    return None


class _Source:
    def __init__(self, read: Read, size_bytes: int) -> None:
        self._read = read
        self._prefix = read(0, min(_PREFIX_BYTES, size_bytes))
        self.size_bytes = size_bytes

    def get(self, offset: int, size: int) -> bytes:
        if offset + size <= len(self._prefix) or offset >= self.size_bytes:
            return self._prefix[offset : offset + size]
        return self._read(offset, min(size, self.size_bytes - offset))


def _flac(source: _Source, offset: int) -> AudioInfo | None:
    """Reads STREAMINFO, which is the first metadata block (RFC 9639, section 8.2)."""
    block = source.get(offset, 4 + 34)
    if len(block) < 4 + 34 or block[0] & 0x7F:
        return None
    packed = int.from_bytes(block[14:22], "big")  # 20 bits rate, 3 channels - 1, 5 bits a sample - 1, 36 samples
    return AudioInfo(packed >> 44, packed & (1 << 36) - 1, (packed >> 41 & 7) + 1, "flac")


def _wave(source: _Source, order: str) -> AudioInfo | None:
    """Reads `fmt ` and finds `data`, in any order among other chunks; sizes of RF64 and BW64 stand in `ds64`."""
    form: bytes | None = None
    data: tuple[int, int] | None = None
    data_size64: int | None = None
    offset = 12
    for _ in range(_MAX_CHUNKS):
        head = source.get(offset, 8)
        if len(head) < 8:
            break
        size: int = struct.unpack(order + "I", head[4:])[0]
        if head[:4] == b"fmt ":
            form = source.get(offset + 8, min(size, 40))
        elif head[:4] == b"ds64":
            body = source.get(offset + 8, 16)
            data_size64 = struct.unpack("<Q", body[8:])[0] if len(body) == 16 else None
        elif head[:4] == b"data":
            if size == 0xFFFFFFFF and data_size64 is not None:
                size = data_size64
            data = (offset + 8, size)
        if form is not None and data is not None:
            return _wave_info(form, order, data, source.size_bytes)
        offset += 8 + size + (size & 1)
    return None


def _wave_info(form: bytes, order: str, data: tuple[int, int], size_bytes: int) -> AudioInfo | None:
    if len(form) < 16:
        return None
    kind, channels, rate, _, block, bits = struct.unpack(order + "HHIIHH", form[:16])
    if kind == _EXTENSIBLE and len(form) >= 26:  # the sub-format begins with the kind
        kind = struct.unpack(order + "H", form[24:26])[0]
    if kind not in (_PCM, _FLOAT, _ALAW, _MULAW) or not channels or block != channels * ((bits + 7) // 8) or not block:
        return None
    start, size = data
    if size in _UNKNOWN_SIZES:
        size = max(0, size_bytes - start)
    return AudioInfo(rate, size // block, channels, "wav")


def _aiff(source: _Source) -> AudioInfo | None:
    """Reads `COMM`: channels, frames, bits, the rate as an 80-bit float, and of AIFC the compression."""
    offset = 12
    for _ in range(_MAX_CHUNKS):
        head = source.get(offset, 8)
        if len(head) < 8:
            break
        size: int = struct.unpack(">I", head[4:])[0]
        if head[:4] == b"COMM":
            body = source.get(offset + 8, min(size, 22))
            if len(body) < 18 or body[18:] not in _AIFF_PLAIN:
                return None
            channels, frames, _, exponent, mantissa = struct.unpack(">HIHHQ", body[:18])
            rate = mantissa >> max(0, 16_383 + 63 - (exponent & 0x7FFF))
            return AudioInfo(rate, frames, channels, "aiff") if channels else None
        offset += 8 + size + (size & 1)
    return None


def _by_libsndfile(data: bytes) -> AudioInfo | None:
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(measured(data)[0])) as file:
            info = AudioInfo(file.samplerate, file.frames, file.channels, file.format.lower())
    except soundfile.LibsndfileError:
        return None
    return info if 0 < info.num_samples < 1 << 62 and info.sample_rate_hz > 0 else None
