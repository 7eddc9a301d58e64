"""Ogg from its page headers: whether a stream is all there, and whether it is one (RFC 3533, sections 4 and 6)."""

from __future__ import annotations

_MAGIC = b"OggS"
_HEAD_BYTES = 27
"""Of a page, up to its segment table: flags at 5, serial at 14, length of the table at 26."""
_FIRST, _LAST = 0x02, 0x04
_CODECS = (b"\x01vorbis", b"OpusHead", b"\x7fFLAC", b"Speex   ")
"""What the first packet of a stream of sound begins with."""

_CHAINED = ("chained_audio", "it holds several streams one behind the other; split it, or join them anew")
_TRUNCATED = ("truncated_audio", "its end is missing: there is no end-of-stream page; write it again")


def ogg_problem(data: bytes) -> tuple[str, str] | None:
    """Returns reason and description of Ogg bytes that do not hold one whole stream of sound, None for all others.

    `chained_audio`: a stream begins behind pages of an earlier one; a decoder takes the first alone. Streams side by side
    begin together and are no chain. `truncated_audio`: the first stream of sound has no page that says that it ends, or the
    file ends inside its first page. What is no Ogg, or holds no sound, is for the decoder to refuse. Checksums are not
    compared: a decoder leaves a damaged page out, and then finds fewer samples than the last page claims.
    """
    start = 0 if data.startswith(_MAGIC) else -1
    size = len(data)
    serial: bytes | None = None
    is_begun = is_whole = False
    while start >= 0:
        flags = data[start + 5] if start + 5 < size else 0
        if flags & _FIRST and is_begun:
            return _CHAINED
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
