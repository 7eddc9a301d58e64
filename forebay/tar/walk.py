"""A walk from header to header: a run of headers whose sizes are taken on trust, to be verified together afterwards."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from forebay.tar import header
from forebay.tar.header import BLOCK, MAX_EXTENDED_BYTES, Extension

_RUN_HEADERS = 1024
_NEAR_BYTES = 4 * 1024
_MAX_WINDOW_BYTES = 64 * 1024
_ZERO_BLOCK = bytes(BLOCK)
_TYPE = header.TYPE
_PLAIN_FILE, _PAX = b"0x"
_SIZE_DIGITS = slice(124, 135)
_PLAIN_ENDS = frozenset(b"\0 ")
_IS_EXTENDED_HEADER, _IS_EXTENDED_BLOCK = 482, 504


@dataclass(slots=True)
class HeaderRun:
    """Headers that follow each other, one entry a header in each list.

    sizes: of the data, in bytes; -1 where the header gives none. extensions: the rows that are anything but a plain
    regular file within the file's end (or a PAX header of no consequence), in order, each with what extended headers
    said about it.
    stop: why the walk ended: `full`, `zeros`, `end`, `truncated`, `bad_size` or `globals`; next: where to go on.
    pending: extended headers whose member did not come yet. defaults: what a global header asks for, where `stop` says
    so.
    """

    starts: list[int] = field(default_factory=list)
    blocks: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    extensions: dict[int, Extension | None] = field(default_factory=dict)
    stop: str = "full"
    next: int = 0
    pending: Extension | None = None
    defaults: Extension | None = None


class _Window:
    """The part of the file that was read last: `data`, which begins at `base` in the file.

    It grows while headers follow each other closely. Where data is stepped over it falls back to one block, or to as
    much as the headers behind the last step took (a clip's and its transcript's, an extended header and its member's):
    in memory but not in the CPU's cache, a read of 512 bytes costs 1.2 us, of 4 KiB 4.6.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.data = b""
        self.base = 0
        self._width = self._step_width = BLOCK
        self._is_step = False

    def fill(self, offset: int, size: int, *, last_start: int) -> None:
        """Makes `data` at least `size` bytes from an offset, fewer at the end of the file; last_start: of a header."""
        if 0 <= offset - self.base - len(self.data) <= _NEAR_BYTES:
            if self._is_step:
                self._step_width = min(offset + size - self.base, _NEAR_BYTES)
            self._width = min(2 * self._width, _MAX_WINDOW_BYTES)
            self._is_step = False
        else:
            if self._is_step and last_start == self.base:
                self._step_width = BLOCK
            self._width = self._step_width
            self._is_step = True
        self.data = os.pread(self.descriptor, max(self._width, size), offset)
        self.base = offset

    @property
    def is_lone(self) -> bool:
        """Whether each of the last steps found one header alone; `fill` would change nothing but `data`."""
        return self._is_step and self._width == BLOCK

    def read(self, offset: int, size: int, *, last_start: int) -> bytes:
        """Returns any range, from what was read last where it is there; fewer bytes only at the end of the file."""
        position = offset - self.base
        if position >= 0 and position + size <= len(self.data):
            return self.data[position : position + size]
        if size > _MAX_WINDOW_BYTES:
            return os.pread(self.descriptor, size, offset)
        self.fill(offset, size, last_start=last_start)
        return self.data[:size]


def walk(
    descriptor: int, offset: int, *, end: int, pending: Extension | None = None, defaults: Extension | None = None
) -> HeaderRun:
    """Returns the run of headers at an offset, about 1024 at most.

    end: size of the file. pending: what earlier headers say about the first member. defaults: what global headers say
    about all members. Nothing is verified here; a run is to be believed up to its first bad checksum.
    """
    run = HeaderRun(next=offset, pending=pending, defaults=defaults)
    window = _Window(descriptor)
    while len(run.starts) < _RUN_HEADERS:
        if run.pending is None and run.defaults is None:
            _walk_plain(run, window, end)
        block = window.read(run.next, BLOCK, last_start=run.starts[-1] if run.starts else -1)
        if len(block) < BLOCK or block == _ZERO_BLOCK:
            run.stop = "end" if len(block) < BLOCK else "zeros"
            break
        if block[header.TYPE] in header.EXTENDED:
            _take_extended(run, window, block, end)
        else:
            _take_member(run, window, block, end)
        if run.stop != "full":
            break
    return run


def _walk_plain(run: HeaderRun, window: _Window, end: int) -> None:
    """Takes the headers of regular files with octal sizes, and PAX headers of no consequence, up to anything else.

    This is `_take_member` for the usual case, with everything in local variables: here the 2 us a member are decided.
    """
    data, base, offset, room = window.data, window.base, run.next, end - BLOCK
    last, is_lone, descriptor, pread = len(data) - BLOCK, window.is_lone, window.descriptor, os.pread
    starts, sizes, blocks = run.starts, run.sizes, run.blocks
    before = _PLAIN_FILE
    for _ in range(_RUN_HEADERS - len(starts)):
        position = offset - base
        if 0 <= position <= last:
            block = data[position : position + BLOCK]
        else:
            if is_lone and position > last + _NEAR_BYTES:
                data = pread(descriptor, BLOCK, offset)
            else:
                window.data, window.base = data, base
                window.fill(offset, BLOCK, last_start=starts[-1] if starts else -1)
                data, is_lone = window.data, window.is_lone
            base, position, last = offset, 0, len(data) - BLOCK
            if last < 0:
                break
            block = data[:BLOCK]
        kind = block[_TYPE]
        try:
            size = int(block[_SIZE_DIGITS], 8)
        except ValueError:  # padded in another way, base-256, or broken
            break
        if not 0 <= size <= room - offset or block[135] not in b"\0 ":
            break
        if kind != _PLAIN_FILE and (kind != _PAX or _matters(data, position + BLOCK, size)):
            break
        before = kind
        starts.append(offset)
        blocks.append(block)
        sizes.append(size)
        offset += (size + 2 * BLOCK - 1) & -BLOCK
    window.data, window.base, run.next = data, base, offset
    if before == _PAX:
        run.pending = Extension()


def _matters(data: bytes, position: int, size: int) -> bool:
    """Says whether PAX records may name the next member or its size; most give times only."""
    payload = data[position : position + size]
    return len(payload) < size or b"path" in payload or b"size" in payload or b"GNU.sparse." in payload


def _take_extended(run: HeaderRun, window: _Window, block: bytes, end: int) -> None:
    """Takes a header that speaks about the next member, or about all that follow."""
    kind, start, size = block[header.TYPE], run.next, _size(block)
    before = run.pending or run.defaults
    _add(run, block, size, None)
    if size < 0 or start + BLOCK + size > end:
        run.stop = "bad_size" if size < 0 else "truncated"
        run.pending = before or Extension()
        return
    run.next = start + BLOCK + _padded(size)
    payload = None
    if size <= MAX_EXTENDED_BYTES:  # one read fetches the header that follows, too
        payload = window.read(start + BLOCK, _padded(size) + BLOCK, last_start=start)[:size]
    if kind == header.PAX_GLOBAL and run.pending is None:
        run.defaults, run.stop = _extended(kind, payload, before), "globals"
    else:
        run.pending = _extended(kind, payload, before)


def _take_member(run: HeaderRun, window: _Window, block: bytes, end: int) -> None:
    """Takes the header of a member, with what extended headers said about it."""
    kind, start, extension = block[header.TYPE], run.next, run.pending or run.defaults
    size = extension.size if extension and extension.size is not None else _size(block)
    data = 0 if kind in header.WITHOUT_DATA else size
    _add(run, block, size, extension)
    run.pending = None
    if data < 0 or start + BLOCK + data > end:
        run.stop = "bad_size" if data < 0 else "truncated"
        return
    run.next = start + BLOCK + _padded(data)
    if kind == header.SPARSE:
        run.next += BLOCK * _sparse_blocks(window, block, start)


def _add(run: HeaderRun, block: bytes, size: int, extension: Extension | None) -> None:
    run.extensions[len(run.starts)] = extension
    run.starts.append(run.next)
    run.blocks.append(block)
    run.sizes.append(size)


def _padded(size: int) -> int:
    return (size + BLOCK - 1) & -BLOCK


def _size(block: bytes) -> int:
    """Returns the size field's value; -1 where it has none."""
    text = block[header.SIZE_FIELD]
    if text[11] in _PLAIN_ENDS:
        try:
            return max(-1, int(text[:11], 8))
        except ValueError:
            pass  # padded in another way, or base-256
    size = header.parse_number(text)
    return -1 if size is None else max(-1, size)


def _extended(kind: int, payload: bytes | None, before: Extension | None) -> Extension:
    """Returns what is known about the next member after one more extended header; a payload of None was too large."""
    extension = replace(before) if before else Extension()  # `before` may be every member's
    if payload is None:
        extension.problem = "extended_header_too_large"
    elif kind == header.LONG_NAME:
        extension.apply_long_name(payload)
    elif kind != header.LONG_LINK:
        extension.apply_pax(payload)
    return extension


def _sparse_blocks(window: _Window, block: bytes, start: int) -> int:
    """Returns how many blocks of an old GNU sparse map stand between header and data."""
    count, more = 0, block[_IS_EXTENDED_HEADER]
    while more:
        count += 1
        block = window.read(start + count * BLOCK, BLOCK, last_start=start)
        more = block[_IS_EXTENDED_BLOCK] if len(block) == BLOCK else 0
    return count
