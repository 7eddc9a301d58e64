"""Containers of sound: rate and length by their headers, and whether they are one stream, which decoders do not say.

MP3 from its frame headers: how many frames there are, and whether they are one stream (ISO 11172-3, 13818-3). Ogg from
its page headers: whether a stream is all there, and whether it is one (RFC 3533, sections 4 and 6). The plainest WAV
files, 16-bit PCM behind a header of 44 bytes, are read here: opening one in libsndfile takes longer than the features
of a short clip. soundfile, sox and the `wave` module write this form; any other file, also every damaged one, is left
to libsndfile, whose answer is the same for these.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
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
    ends, or the file ends inside its first page. What is no Ogg, or holds no sound, is for the decoder to refuse. Sums
    are not compared: a decoder leaves a damaged page out, and finds fewer samples than the last page claims.
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

    Reasons: `format` (see `unread`), `truncated_audio` (Ogg without its end), `chained_audio` (Ogg or MP3 behind its
    kind). The bytes are those given; of an MP3 that does not say how long it is they begin with a frame that does.
    """
    problem = unread(data) or ogg_problem(data)
    return (data, problem) if problem is not None else measured(data)


Read = Callable[[int, int], bytes]
"""(offset, size) -> bytes of the encoded sample; fewer only at its end."""
MAX_WHOLE_BYTES = 256 * 1024 * 1024
"""The largest file that is read as a whole, for a format whose length takes all of its bytes to tell."""
_PREFIX_BYTES = 4096
_MAX_CHUNKS = 4096
"""RIFF chunks before the audio; more is a damaged file, and a read each."""
_UNKNOWN_SIZES = frozenset((0x7FFFF000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF))
"""What sox, arecord and ffmpeg write as the size of a stream whose length they do not know yet."""
_WAVE_KINDS = frozenset((1, 3, 6, 7))
"""PCM, float, A-law, mu-law."""
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
    """Returns what a header claims, or None where nothing can be told without decoding. Errors of `read` come through.

    FLAC STREAMINFO, RIFF/RF64/BW64 WAVE and AIFF cost one read of 4 KiB as a rule. Other formats (Ogg: the last
    granule; MP3: its tag, else its frames are counted) need all their bytes, unless there are more than `max_bytes`.
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
    if kind == 0xFFFE and len(form) >= 26:  # extensible: the sub-format begins with the kind
        kind = struct.unpack(order + "H", form[24:26])[0]
    if kind not in _WAVE_KINDS or not channels or block != channels * ((bits + 7) // 8) or not block:
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
