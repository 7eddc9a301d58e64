"""One 512-byte tar header: its numbers, its name, its checksum. POSIX.1-1988 (ustar), v7 and GNU forms."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK = 512
TYPE = 156
"""Position of the type flag; an `int`, since indexing bytes gives one."""
SIZE_FIELD = slice(124, 136)

REGULAR = frozenset(b"0\x007")
"""Regular files: '0', the NUL of v7, and '7' (contiguous, stored like a regular file)."""
WITHOUT_DATA = frozenset(b"123456")
"""Links, devices, directories and pipes: no data follows, whatever their size field says."""
LONG_NAME, LONG_LINK, SPARSE = b"LKS"
PAX_NEXT = frozenset(b"xX")
PAX_GLOBAL = ord("g")
DIRECTORY = ord("5")
VOLUME_LABEL = ord("V")
EXTENDED = frozenset(b"LKxXg")

_CHECKSUM_FIELD = slice(148, 156)
_DIGIT_WEIGHTS = 8 ** np.arange(5, -1, -1, dtype=np.int32)
_NUMBER_STARTS = np.zeros(256, bool)
_NUMBER_STARTS[np.frombuffer(b"01234567 \0\x80", np.uint8)] = True


def parse_number(field: bytes) -> int | None:
    """Returns the value of a numeric field: octal text, or base-256 where the first byte is 0x80 or 0xff; else None.

    0x80 is followed by a positive big-endian number, 0xff by a negative one in two's complement (GNU tar manual,
    "Basic Tar Format").
    """
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big", signed=field[0] == 0xFF)
    text = field.partition(b"\0")[0].strip(b" ")
    if not text:
        return 0
    return int(text, 8) if text.strip(b"01234567") == b"" else None


def header_name(block: bytes) -> bytes:
    """Returns the name in a header, with the ustar prefix in front of it where there is one.

    GNU headers (magic `ustar` and two spaces) keep times where ustar keeps the prefix, so theirs is left alone.
    """
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and block[345] and block[TYPE] not in b"LKS":
        return block[345:500].partition(b"\0")[0] + b"/" + name
    return name


def valid_headers(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Returns which of the blocks [n, 512] carry their own checksum; some old tars summed signed bytes, both are right.

    The sum runs over all 512 bytes with the checksum field taken as eight spaces. A block of zeros is not a header.
    """
    field = blocks[:, _CHECKSUM_FIELD]
    stored = _stored_checksums(field)
    computed = blocks.sum(axis=1, dtype=np.int32) - field.sum(axis=1, dtype=np.int32) + 8 * ord(" ")
    valid: npt.NDArray[np.bool_] = computed == stored
    for row in np.flatnonzero(~valid & (stored >= 0)):  # rare: the signed sum costs as much as all the rest
        high = (blocks[row] >= 128).sum() - (field[row] >= 128).sum()
        valid[row] = high > 0 and computed[row] - 256 * int(high) == stored[row]
    return valid


def _stored_checksums(field: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Returns the checksums in the fields [n, 8], -1 where there is no number."""
    digits = field[:, :6] - np.uint8(ord("0"))  # what is below '0' wraps around to above 7
    plain = (digits < 8).all(axis=1) & ((field[:, 6] == 0) | (field[:, 6] == ord(" ")))
    stored = (digits.astype(np.int32) @ _DIGIT_WEIGHTS).astype(np.int64)
    stored[~plain] = -1
    for row in np.flatnonzero(~plain & _NUMBER_STARTS[field[:, 0]]):
        value = parse_number(field[row].tobytes())
        if value is not None and value <= BLOCK * 255:
            stored[row] = value
    return stored
