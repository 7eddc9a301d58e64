"""Extended headers: GNU long names and PAX records, and what they change about the member that follows."""

from __future__ import annotations

from dataclasses import dataclass

MAX_EXTENDED_BYTES = 1024 * 1024
"""Larger extended headers are refused unread: a flipped bit in a size must not fill memory."""
MAX_NAME_BYTES = 64 * 1024


@dataclass(slots=True)
class Extension:
    """What extended headers say about the next member; the member is refused with `problem` where that is set."""

    name: bytes | None = None
    size: int | None = None
    sparse: bool = False
    problem: str | None = None

    def apply_long_name(self, payload: bytes) -> None:
        """Takes the name of a GNU `L` header."""
        self._set_name(payload.partition(b"\0")[0])

    def apply_pax(self, payload: bytes) -> None:
        """Takes `path`, `size` and the sparse marks of PAX records; an empty value leaves the header's own."""
        records = pax_records(payload)
        if records is None:
            self.problem = "bad_extended_header"
            return
        for keyword, value in records:
            if keyword == b"path":
                self._set_name(value or None)
            elif keyword == b"size":
                self._set_size(value)
            elif keyword.startswith(b"GNU.sparse."):
                self.sparse = True
        # The path of a sparse member is an invented one; its own name stands in GNU.sparse.name.
        for keyword, value in records if self.sparse else ():
            if keyword == b"GNU.sparse.name":
                self._set_name(value or None)

    def _set_name(self, name: bytes | None) -> None:
        if name is not None and len(name) > MAX_NAME_BYTES:
            self.problem = "extended_header_too_large"
        else:
            self.name = name

    def _set_size(self, value: bytes) -> None:
        if not value:
            self.size = None
        elif value.isdigit() and len(value) < 20:
            self.size = int(value)
        else:
            self.problem = "bad_extended_header"


def pax_records(payload: bytes) -> list[tuple[bytes, bytes]] | None:
    """Returns the (keyword, value) pairs of a PAX header, or None where its framing is broken.

    A record is `length keyword=value newline`; the length counts the whole record in bytes (POSIX.1-2001, pax).
    """
    records = []
    position, end = 0, len(payload)
    while position < end and payload[position]:
        space = payload.find(b" ", position, position + 20)
        digits = payload[position:space]
        if space < 0 or not digits.isdigit():
            return None
        stop = position + int(digits)
        keyword, equals, value = payload[space + 1 : stop - 1].partition(b"=")
        if stop > end or stop <= space + 1 or payload[stop - 1] != 0x0A or not equals:
            return None
        records.append((keyword, value))
        position = stop
    return records
