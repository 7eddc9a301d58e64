"""Tar file to `TarIndex`: headers are read with `pread`, data is stepped over, every checksum is verified.

A walk takes the sizes in a run of headers on trust, then the checksums of the run are verified together (numpy needs
0.1 us a header where the interpreter needs 2), and only what stands before the first bad one counts.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field, replace

import numpy as np

from forebay.errors import TarError
from forebay.store.remote.raw.raw_sources import open_source, place_of
from forebay.tar import header
from forebay.tar.header import (
    BLOCK,
    CURRENT_DIRECTORY,
    MAX_EXTENDED_BYTES,
    Extension,
    FileStamp,
    RefusedHeader,
    TarIndex,
)

_RUN_HEADERS = 1024
_NEAR_BYTES = 4 * 1024
_MAX_WINDOW_BYTES = 64 * 1024
_ZERO_BLOCK = bytes(BLOCK)
_TYPE = header.TYPE
_PLAIN_FILE, _PAX = b"0x"
_SIZE_DIGITS = slice(124, 135)
_IS_EXTENDED_HEADER, _IS_EXTENDED_BLOCK = 482, 504


@dataclass(slots=True)
class HeaderRun:
    """Headers that follow each other, one entry a header in each list.

    sizes: of the data, in bytes; -1 where the header gives none. extensions: the rows that are anything but a plain
    regular file within the file's end (or a PAX header of no consequence), in order, each with what extended headers
    said about it.
    stop: why the walk ended: `full`, `zeros`, `end`, `truncated`, `bad_size` or `globals`; next: where to go on.
    pending: extended headers whose member did not come. defaults: what a global header asks for, if `stop` says so.
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
    kind, start, size = block[header.TYPE], run.next, header.header_size(block)
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
    size = extension.size if extension and extension.size is not None else header.header_size(block)
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


_SEARCH_BYTES = 1024 * 1024
_NO_FILES = frozenset((header.DIRECTORY, header.VOLUME_LABEL)) | header.EXTENDED
_REASONS = {ord("1"): "hard_link", ord("2"): "symlink", header.SPARSE: "sparse"} | dict.fromkeys(b"346", "special_file")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}


def scan_tar(path: str | os.PathLike[str]) -> TarIndex:
    """Returns the index of a tar, read from its headers; about 2 us a member when the file is in memory.

    Directories and volume labels are left out; all else that is no regular, complete file stands in `refused`. After a
    bad checksum the scan goes on at the next valid header; archives behind an end-of-archive mark are read too.
    Raises TarError for a file that cannot be read, is empty, compressed or no tar, or changes under the scan.
    """
    path = os.fspath(path)
    try:
        descriptor, version = open_source(path)
        try:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                raise TarError(f"{path} is not a regular file; name a tar file")
            scan = _Scan(descriptor, path, before.st_size)
            scan.run()
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError as err:
        raise TarError(f"cannot read tar {path}: {err.strerror}; check the path and its permissions") from err
    except ValueError as err:  # a NUL in the path, or a surrogate that no file name holds
        raise TarError(f"cannot read tar {path!r}: {err}; check the path") from err
    # The node's copy of an object is of one version, whatever is done to its times.
    if place_of(path) is None and FileStamp.of(before) != FileStamp.of(after):
        raise TarError(f"{path} changed while it was indexed; run again when it is written completely")
    return scan.index(FileStamp.of_source(version))


class _Scan:
    def __init__(self, descriptor: int, path: str, end: int) -> None:
        self._descriptor = descriptor
        self._path = path
        self._end = end
        self._names: list[bytes] = []
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._refused: list[RefusedHeader] = []

    def index(self, stamp: FileStamp) -> TarIndex:
        offsets = np.array(self._starts, np.int64) + BLOCK
        return TarIndex.of(self._path, stamp, self._names, offsets, self._sizes, self._refused)

    def run(self) -> None:
        if not self._end:
            raise TarError(f"{self._path} is empty (0 bytes), so it is no tar; write it again")
        offset, is_tar, is_zeros = 0, False, True
        pending: Extension | None = None
        defaults: Extension | None = None
        while offset < self._end:
            run = walk(self._descriptor, offset, end=self._end, pending=pending, defaults=defaults)
            good = self._take_verified(run)
            is_tar = is_tar or good > 0
            is_zeros = is_zeros and run.stop == "zeros" and not run.starts
            if good < len(run.starts):
                if not is_tar:
                    self._refuse_compressed()
                offset, pending = self._behind_bad_block(run, good)
            elif run.stop == "bad_size":
                offset, pending = self._behind_bad_size(run)
            else:
                defaults, pending = run.defaults, run.pending if run.stop == "full" else None
                offset = self._behind(run)
        if pending is not None:
            self._refuse(pending.name or b"", "truncated", self._end)
        if not is_tar and not is_zeros:
            self._refuse_compressed()
            raise TarError(f"{self._path} is no tar: no valid header in its {self._end} bytes; check the path")

    def _take_verified(self, run: HeaderRun) -> int:
        """Takes what a run's headers say, up to the first bad checksum; returns how many headers are good."""
        if not run.starts:
            return 0
        table = np.frombuffer(b"".join(run.blocks), np.uint8).reshape(-1, BLOCK)
        valid = header.valid_headers(table)
        good = len(valid) if valid.all() else int(valid.argmin())
        names, kinds = header.header_names(table[:good], run.blocks), table[:good, header.TYPE].tobytes()
        done = 0
        for row, extension in run.extensions.items():
            if row >= good:
                break
            self._take_plain(run, names, kinds, done, row)
            self._take_special(names[row], kinds[row], run.starts[row], run.sizes[row], extension)
            done = row + 1
        self._take_plain(run, names, kinds, done, good)
        return good

    def _take_plain(self, run: HeaderRun, names: list[bytes], kinds: bytes, first: int, stop: int) -> None:
        if b"" in names[first:stop]:
            for row in range(first, stop):
                self._take_special(names[row], kinds[row], run.starts[row], run.sizes[row], None)
        elif kinds.find(b"x", first, stop) < 0:
            self._names += names[first:stop]
            self._starts += run.starts[first:stop]
            self._sizes += run.sizes[first:stop]
        else:
            rows = [row for row in range(first, stop) if kinds[row] != _PAX]
            self._names += [names[row] for row in rows]
            self._starts += [run.starts[row] for row in rows]
            self._sizes += [run.sizes[row] for row in rows]

    def _take_special(self, name: bytes, kind: int, start: int, size: int, extension: Extension | None) -> None:
        if extension and extension.name is not None:
            name = extension.name.removeprefix(CURRENT_DIRECTORY)
        # v7 had no type for directories: a slash at the end of the name made one.
        if kind in _NO_FILES or (kind == 0 and name.endswith(b"/")):
            return
        reason = self._reason(name, kind, start, size, extension)
        if reason is None:
            self._names.append(name)
            self._starts.append(start)
            self._sizes.append(size)
        else:
            self._refuse(name, reason, start)

    def _reason(self, name: bytes, kind: int, start: int, size: int, extension: Extension | None) -> str | None:
        if kind not in header.REGULAR:
            return _REASONS.get(kind, "unknown_type")
        if extension and (extension.problem or extension.sparse):
            return extension.problem or "sparse"
        if size < 0:
            return "bad_size"
        if start + BLOCK + size > self._end:
            return "truncated"
        return None if name else "no_name"

    def _refuse(self, name: bytes, reason: str, start: int) -> None:
        decoded = name.removeprefix(CURRENT_DIRECTORY).decode("utf-8", "surrogateescape")
        self._refused.append(RefusedHeader(decoded, reason, start))

    def _refuse_compressed(self) -> None:
        head = os.pread(self._descriptor, BLOCK, 0)
        for magic, name in _COMPRESSED.items():
            if head.startswith(magic):
                raise TarError(
                    f"{self._path} is compressed ({name}): members cannot be read by offset; decompress it: "
                    f"{name} -dk {self._path}",
                    code="FB211",
                )

    def _behind_bad_block(self, run: HeaderRun, row: int) -> tuple[int, Extension | None]:
        """Refuses the block of a run that carries no valid checksum; returns where to go on, and with what."""
        block, extension = run.blocks[row], run.extensions.get(row)
        name = extension.name if extension and extension.name else header.header_name(block)
        self._refuse(name, "bad_checksum", run.starts[row])
        return self._next_header(run.starts[row] + BLOCK), header.lost_extension(block)

    def _behind_bad_size(self, run: HeaderRun) -> tuple[int, Extension | None]:
        """Returns where to go on behind a header that gives no size, and with what; its member was refused before."""
        start, block = run.starts[-1], run.blocks[-1]
        if block[header.TYPE] in header.EXTENDED:
            self._refuse(header.header_name(block), "bad_size", start)
        return self._next_header(start + BLOCK), header.lost_extension(block)

    def _behind(self, run: HeaderRun) -> int:
        """Returns where the next header may stand behind a run that was taken whole; refuses what its end cut off."""
        if run.stop in ("full", "globals"):
            return run.next
        if run.pending is not None:
            self._refuse(run.pending.name or b"", "truncated", run.starts[-1] if run.starts else run.next)
        if run.stop == "zeros":
            return self._skip_zeros(run.next)
        if run.stop == "end":
            rest = os.pread(self._descriptor, BLOCK, run.next)
            if rest.strip(b"\0"):
                self._refuse(rest[:100].partition(b"\0")[0], "truncated", run.next)
        return self._end

    def _skip_zeros(self, offset: int) -> int:
        while chunk := os.pread(self._descriptor, _SEARCH_BYTES, offset):
            zeros = len(chunk) - len(chunk.lstrip(b"\0"))
            if zeros < len(chunk):
                return offset + zeros // BLOCK * BLOCK
            offset += len(chunk)
        return self._end

    def _next_header(self, offset: int) -> int:
        """Returns the offset of the first valid header at or behind an offset, or the end of the file."""
        while len(chunk := os.pread(self._descriptor, _SEARCH_BYTES, offset)) >= BLOCK:
            table = np.frombuffer(chunk, np.uint8, len(chunk) // BLOCK * BLOCK).reshape(-1, BLOCK)
            valid = header.valid_headers(table)
            if valid.any():
                return offset + int(valid.argmax()) * BLOCK
            offset += table.size
        return self._end
