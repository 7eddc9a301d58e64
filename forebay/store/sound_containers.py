"""A look at containers: whether encoded bytes are one whole stream, which decoders would shorten without a word.

MP3 from its frame headers: how many frames there are, and whether they are one stream (ISO 11172-3, 13818-3). Ogg from
its page headers: whether a stream is all there, and whether it is one (RFC 3533, sections 4 and 6). The plainest WAV
files, 16-bit PCM behind a header of 44 bytes, are read here without libsndfile: opening a file there takes longer than
the features of a short clip. soundfile, sox and the `wave` module write this form; any other file, also every damaged
one, is left to libsndfile, whose answer is the same for these.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_KBPS_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)

_KBPS_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)

_RATES_HZ = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
"""Rates by the header's version: 3 is MPEG-1, 2 MPEG-2, 0 MPEG-2.5."""

_MPEG_1, _LAYER_3, _MONO = 3, 1, 3

_SIDE_BYTES = {(True, True): 17, (True, False): 32, (False, True): 9, (False, False): 17}
"""The size of a frame's side information, by whether the frame is MPEG-1 and mono."""

_MARKS = (b"Xing", b"Info")

_SPARE_FRAMES = 1
"""Some encoders count the frame of the tag itself, others do not."""

_MAX_JUNK_BYTES = 1 << 16
"""What may lie between two frames; mpg123 looks as far for the next one."""

_CHAINED = ("chained_audio", "it holds several MP3 files one behind the other; split it, or join them anew")


_UNREAD = (
    (4, b"ftyp", "M4A or MP4"),
    (0, b"\x1a\x45\xdf\xa3", "WebM or Matroska"),
    (0, b"\x30\x26\xb2\x75", "WMA"),
    (0, b"#!AMR", "AMR"),
    (0, b"\xff\xf1", "AAC"),
    (0, b"\xff\xf9", "AAC"),
)
"""Forms of sound that are told and not read: where their marks stand, what they are called."""


class _Tag(NamedTuple):
    """A Xing or Info tag. frames: behind its own; end: of the bytes that it counts. None where it does not say."""

    frames: int | None
    end: int | None


def measured(data: bytes) -> tuple[bytes, tuple[str, str] | None]:
    """Returns MP3 bytes with a tag that counts their frames, and reason and description if files are glued together.

    Without a tag libsndfile takes the first frame's bitrate for that of all, and gives no more samples than that makes:
    of a recording whose bitrate varies often less than half. A tag takes the decoder's own delay away, 529 samples
    before the first. Bytes that have one, or are no MP3, come back as they are. `chained_audio`: behind the first frame
    stands the tag of another file (Xing, Info, ID3v2) with frames behind it, or there are more frames than the first
    tag counts: a decoder stops there. Frames alone behind frames alone are one stream.
    """
    start = _first_frame(data)
    if start < 0:
        return data, None
    tag = _tag(data, start)
    if tag is None or tag.frames is None:
        head = data[start : start + 4]
        start += 0 if tag is None else _size(data, start)
        frames, is_chained = _walk(data, start)
        tagged = _tagged_frame(head, frames) + data[start:] if frames else data
        return tagged, _CHAINED if is_chained else None
    if tag.end is not None and start < tag.end <= len(data) and _next_frame(data, tag.end) < 0:
        return data, None  # the usual file, which costs no walk: nothing stands behind what its tag counts
    frames, is_chained = _walk(data, start)
    is_chained |= frames - 1 > tag.frames + _SPARE_FRAMES
    return data, _CHAINED if is_chained else None


def has_length(data: bytes) -> bool:
    """Whether MP3 bytes say how many frames they hold; without that their length is an estimate."""
    start = _first_frame(data)
    tag = _tag(data, start) if start >= 0 else None
    return tag is not None and tag.frames is not None


def id3_bytes(head: bytes) -> int:
    """Returns the length of an ID3v2 tag, 0 without one; its size has seven bits a byte (ID3v2.4, section 3.1)."""
    if head[:3] != b"ID3" or len(head) < 10:
        return 0
    return 10 + sum((byte & 0x7F) << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=True))


def _frame_sizes() -> list[int]:
    """Bytes of a frame by the second and third byte of its header; 0 where they are of no frame of layer III."""
    sizes = [0] * 65_536
    for second in range(0xE0, 0x100):
        version = second >> 3 & 3
        if version not in _RATES_HZ or second >> 1 & 3 != _LAYER_3:
            continue
        scale, kbps = (144_000, _KBPS_1) if version == _MPEG_1 else (72_000, _KBPS_2)
        for third in range(256):
            rate = third >> 2 & 3
            if rate < 3 and kbps[third >> 4]:
                sizes[second << 8 | third] = scale * kbps[third >> 4] // _RATES_HZ[version][rate] + (third >> 1 & 1)
    return sizes


_SIZES = _frame_sizes()


def _size(data: Sequence[int], start: int) -> int:
    """Returns the bytes of the frame that begins here, 0 where none does."""
    if start + 4 > len(data) or data[start] != 0xFF:
        return 0
    return _SIZES[data[start + 1] << 8 | data[start + 2]]


def _first_frame(data: bytes) -> int:
    """Returns where the first frame begins, -1 where the bytes are no MP3."""
    if data[:1] != b"\xff" and data[:3] != b"ID3":
        return -1
    return _next_frame(data, 0)


def _next_frame(data: bytes, start: int) -> int:
    """Returns where the next frame begins behind ID3v2 tags and what else is none, -1 where none does within 64 KiB.

    A frame is one where two more follow it, as far as there are bytes: its header is no more than eleven ones.
    """
    while skipped := id3_bytes(data[start : start + 10]):
        start += skipped
    stop = start + _MAX_JUNK_BYTES
    found = data.find(b"\xff", start, stop)
    while found >= 0 and not _is_followed(data, found):
        found = data.find(b"\xff", found + 1, stop)
    return found


def _is_followed(data: bytes, start: int) -> bool:
    for _ in range(3):
        size = _size(data, start)
        if not size:
            return False
        start += size
        if start + 4 > len(data):
            return True
    return True


def _walk(data: bytes, start: int) -> tuple[int, bool]:
    """Returns the whole frames from `start` on, and whether the tag of another file stands among them."""
    sizes, end = _SIZES, len(data) - 4
    mark = _mark_offset(data, start) if start <= end else 0
    frames = 0
    is_chained = False
    while 0 <= start <= end:
        size = sizes[data[start + 1] << 8 | data[start + 2]] if data[start] == 0xFF else 0
        if size:
            if start + size > len(data):
                break
            is_chained |= frames > 0 and data.startswith(_MARKS, start + mark)
            frames += 1
            start += size
        else:
            is_tag = data.startswith(b"ID3", start)
            start = _next_frame(data, start)
            is_chained |= is_tag and start >= 0
    return frames, is_chained


def _mark_offset(data: Sequence[int], start: int) -> int:
    """Returns how far behind the beginning of a frame its tag begins: header, checksum if any, side information."""
    side = _SIDE_BYTES[data[start + 1] >> 3 & 3 == _MPEG_1, data[start + 3] >> 6 == _MONO]
    return side + (4 if data[start + 1] & 1 else 6)


def _tag(data: bytes, start: int) -> _Tag | None:
    """Returns the tag in a frame, None where it has none: its flags say which numbers follow them.

    0 frames stand where an encoder did not come back to write how many there are.
    """
    at = start + _mark_offset(data, start)
    if not data.startswith(_MARKS, at) or len(data) < at + 16:
        return None
    flags, *numbers = struct.unpack(">III", data[at + 4 : at + 16])
    frames = numbers.pop(0) if flags & 1 else 0
    return _Tag(frames or None, start + numbers.pop(0) if flags & 2 else None)


def _tagged_frame(head: bytes, frames: int) -> bytes:
    """Returns a frame without sound, of the kind of another, whose tag counts `frames`: the smallest that has room."""
    kinds = [bytes((0xFF, head[1] | 1, kbps << 4 | head[2] & 0x0C, head[3])) for kbps in range(1, 15)]
    mark = _mark_offset(kinds[0], 0)
    kind = next(kind for kind in kinds if _size(kind, 0) >= mark + 12)
    tag = struct.pack(">4sII", b"Xing", 1, frames)
    return (kind.ljust(mark, b"\0") + tag).ljust(_size(kind, 0), b"\0")


_MAGIC = b"OggS"

_HEAD_BYTES = 27
"""A page up to its segment table: flags at 5, serial at 14, length of the table at 26."""

_FIRST, _LAST = 0x02, 0x04

_CODECS = (b"\x01vorbis", b"OpusHead", b"\x7fFLAC", b"Speex   ")
"""What the first packet of a stream of sound begins with."""

_CHAINED_OGG = ("chained_audio", "it holds several streams one behind the other; split it, or join them anew")

_TRUNCATED = ("truncated_audio", "its end is missing: there is no end-of-stream page; write it again")


def ogg_problem(data: bytes) -> tuple[str, str] | None:
    """Returns reason and description of Ogg bytes that do not hold one whole stream of sound, None for all others.

    `chained_audio`: a stream begins behind pages of an earlier one; a decoder takes the first alone. Streams side by
    side begin together and are no chain. `truncated_audio`: the first stream of sound has no page that says that it
    ends, or the file ends inside its first page. What is no Ogg, or holds no sound, is for the decoder to refuse.
    Checksums are not compared: a decoder leaves a damaged page out, and then finds fewer samples than the last page
    claims.
    """
    start = 0 if data.startswith(_MAGIC) else -1
    size = len(data)
    serial: bytes | None = None
    is_begun = is_whole = False
    while start >= 0:
        flags = data[start + 5] if start + 5 < size else 0
        if flags & _FIRST and is_begun:
            return _CHAINED_OGG
        table = start + _HEAD_BYTES
        body = table + data[table - 1] if table <= size else size + 1
        end = body + sum(data[table:body])
        if end > size:  # what is left of a page behind the end of the stream is waste
            return None if is_whole or (serial is None and is_begun) else _TRUNCATED
        if not flags & _FIRST:
            is_begun = True
        elif serial is None and data.startswith(_CODECS, body):
            serial = data[start + 14 : start + 18]
        if flags & _LAST and data[start + 14 : start + 18] == serial:
            is_whole = True
        start = end if data.startswith(_MAGIC, end) else data.find(_MAGIC, end)
    return None if is_whole or serial is None else _TRUNCATED


_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")

_PCM, _BITS = 1, 16

_MAX_CHANNELS = 8


class PcmAudio(NamedTuple):
    """The audio of a file: int16 [num_samples, channels], a read-only view of its bytes."""

    sample_rate_hz: int
    samples: npt.NDArray[np.int16]


def plain_pcm(data: bytes) -> PcmAudio | None:
    """Returns the audio of a WAV file of one header, one `fmt ` chunk and one full `data` chunk; None for any other."""
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


def unread(data: bytes) -> tuple[str, str] | None:
    """Returns reason and description where bytes are sound of a form that is not read, by how they begin."""
    found = next((name for at, magic, name in _UNREAD if data.startswith(magic, at)), None)
    if found is None:
        return None
    return "format", f"it is {found}, which is not read; convert it: ffmpeg -i IN -vn OUT.flac"


def one_stream(data: bytes) -> tuple[bytes, tuple[str, str] | None]:
    """Returns the bytes to decode, and reason and description where they are not one whole stream, else None.

    Reasons: `format` (see `unread`), `truncated_audio` (Ogg without its end), `chained_audio` (Ogg or MP3 behind Ogg or
    MP3 of its kind). The bytes are those that were given; of an MP3 that does not say how long it is they begin with a
    frame that does.
    """
    problem = unread(data) or ogg_problem(data)
    return (data, problem) if problem is not None else measured(data)
