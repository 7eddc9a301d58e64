"""Pictures that claim more than they hold or hold more than they claim, each with the reason to leave it out for.

All of them are a few MB at most. What `tests.store.image.variants` has for the reader alone comes here before a
whole build.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

from tests.preprocess.vision.corpus import photo
from tests.store.image.variants import bombs, chunk, png, refused

MAX_PIXELS = 4_000_000
MAX_BYTES = 2 << 20
_WHOLE = slice(8, 33)
"""Of a PNG: its IHDR."""

GOOD: Mapping[str, bytes] = {
    "a photo": photo(1),
    "as large as is allowed, in 4 kB": png(2000, 2000, bits=1, colour=0, pixels=bytes(2000 * 251)),
}


def pictures() -> dict[str, tuple[bytes, str]]:
    """Returns name to bytes and reason; no reason where the picture is taken for what it shows."""
    return {
        **{name: (data, "") for name, data in GOOD.items()},
        **{f"bomb {name}": (data, "too_many_pixels") for name, data in bombs().items()},
        **{name: case for name, case in refused().items() if case[1] in ("animated_image", "format")},
        **_ends(),
        **_frames(),
        **_texts(),
        **_directories(),
    }


def _ends() -> dict[str, tuple[bytes, str]]:
    jpeg = photo(2, width=400, height=300)
    return {
        "0 bytes": (b"", "empty_file"),
        "zeros": (bytes(1 << 20), "unreadable_image"),
        "half a JPEG": (jpeg[: len(jpeg) // 2], "unreadable_image"),
        "PNG of 1,000 lines that holds one": (png(1000, 1000, bits=8, colour=2, pixels=bytes(3001)), ""),
        "more bytes than allowed": (photo(3) + bytes(MAX_BYTES), "too_large"),
    }


def _frames() -> dict[str, tuple[bytes, str]]:
    """A frame larger than its canvas, and very many of them."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 10, 10, 0, 0, 0)
    large = b",\0\0\0\0" + struct.pack("<HHB", 9000, 9000, 0x80) + bytes(6) + b"\x02\x02\x4c\x01\0"
    small = b",\0\0\0\0" + struct.pack("<HHB", 10, 10, 0x80) + bytes(6) + b"\x02\x02\x4c\x01\0"
    control = chunk(b"acTL", struct.pack(">II", 0x7FFFFFFF, 0))
    return {
        "GIF frame of 9,000 x 9,000": (screen + large + b";", "too_many_pixels"),
        "GIF of 50,000 frames": (screen + small * 50_000 + b";", "animated_image"),
        "APNG of 2^31 frames": (_with_chunks(control), "animated_image"),
    }


def _texts() -> dict[str, tuple[bytes, str]]:
    """Text, profiles and EXIF that grow, or that are nonsense."""
    part, words = zlib.compress(bytes(1 << 20), 9), zlib.compress(bytes(100 << 20), 9)
    exif = b"Exif\0\0" + _directory([(number, 7, 60_000, 8) for number in range(300, 4000)])
    return {
        "zTXt of 100 MB": (_with_chunks(chunk(b"zTXt", b"a\0\0" + words)), "unreadable_image"),
        "iTXt of 100 MB": (_with_chunks(chunk(b"iTXt", b"a\0\1\0\0\0" + words)), "unreadable_image"),
        "iCCP of 100 MB": (_with_chunks(chunk(b"iCCP", b"a\0\0" + words)), "unreadable_image"),
        "200 x zTXt of 1 MB": (_with_chunks(chunk(b"zTXt", b"a\0\0" + part) * 200), "unreadable_image"),
        "EXIF of 3,700 overlapping tags": (_with_exif(exif), ""),
        "EXIF of noise": (_with_exif(b"Exif\0\0II*\0" + bytes(range(256)) * 20), ""),
        "EXIF that ends": (_with_exif(b"Exif\0\0MM\0*\0\0\0\x08\0\x30\x01\x12"), ""),
    }


def _directories() -> dict[str, tuple[bytes, str]]:
    """TIFFs: pieces far larger than the picture or the file, and directories without end."""
    sizes = [(256, 4, 1, 64), (257, 4, 1, 64), (258, 3, 1, 8), (262, 3, 1, 1)]
    strip = [(273, 4, 1, 8), (278, 4, 1, 0xFFFFFFFF), (279, 4, 1, 0xFFFFFFF0)]
    tile = [(322, 4, 1, 60_000), (323, 4, 1, 60_000), (324, 4, 1, 8), (325, 4, 1, 100)]
    many = _directory(sizes + [(number, 7, 400_000, 8) for number in range(60_000, 65_000)], last=400_000)
    return {
        "TIFF strip of 4 GB": (_directory([*sizes, (259, 3, 1, 1), *strip]), "unreadable_image"),
        "TIFF strip of 4 GB, deflated": (_directory([*sizes, (259, 3, 1, 8), *strip]), "unreadable_image"),
        "TIFF tile of 60,000 x 60,000": (_directory([*sizes, (259, 3, 1, 1), *tile]), "unreadable_image"),
        "TIFF tile of 60,000 x 60,000, deflated": (_directory([*sizes, (259, 3, 1, 8), *tile]), "unreadable_image"),
        "TIFF of 5,000 tags of the whole file": (many, "unreadable_image"),
        "TIFF that is its own next page": (
            _directory([*sizes, (259, 3, 1, 1), *strip], following=8),
            "unreadable_image",
        ),
        "BMP of 2^31 colours": (
            b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, 64, 64, 1, 8, 0, 0, 0, 0, 1 << 31, 0),
            "unreadable_image",
        ),
    }


def _with_chunks(chunks: bytes) -> bytes:
    whole = png(64, 64, bits=8, colour=2, pixels=bytes(64 * 193))
    return whole[: _WHOLE.stop] + chunks + whole[_WHOLE.stop :]


def _with_exif(data: bytes) -> bytes:
    """A JPEG whose first segment is this APP1."""
    jpeg = photo(4)
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(data[:65_000]) + 2) + data[:65_000] + jpeg[2:]


def _directory(entries: list[tuple[int, int, int, int]], *, following: int = 0, last: int = 0) -> bytes:
    """A TIFF of one directory of (tag, type, count, value), and zeros up to `last`."""
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    data = b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + struct.pack("<I", following)
    return data.ljust(max(last, len(data) + 100), b"\0")
