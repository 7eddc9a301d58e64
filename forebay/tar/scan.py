"""Tar file to `TarIndex`: headers are read with `pread`, data is stepped over, every checksum is verified.

A walk takes the sizes in a run of headers on trust, then the checksums of the run are verified together (numpy needs
0.1 us a header where the interpreter needs 2), and only what stands before the first bad one counts.
"""

from __future__ import annotations

import os
import stat

import numpy as np
import numpy.typing as npt

from forebay.errors import TarError
from forebay.store.remote.raw.raw_sources import open_source, place_of
from forebay.tar import header
from forebay.tar.header import BLOCK, CURRENT_DIRECTORY, Extension, FileStamp, RefusedHeader, TarIndex
from forebay.tar.walk import HeaderRun, walk

_SEARCH_BYTES = 1024 * 1024
_PAX = ord("x")
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
        names, kinds = _names(table[:good], run.blocks), table[:good, header.TYPE].tobytes()
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
        return self._next_header(run.starts[row] + BLOCK), _lost_extension(block)

    def _behind_bad_size(self, run: HeaderRun) -> tuple[int, Extension | None]:
        """Returns where to go on behind a header that gives no size, and with what; its member was refused before."""
        start, block = run.starts[-1], run.blocks[-1]
        if block[header.TYPE] in header.EXTENDED:
            self._refuse(header.header_name(block), "bad_size", start)
        return self._next_header(start + BLOCK), _lost_extension(block)

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


def _lost_extension(block: bytes) -> Extension | None:
    """Returns what to hold against the member behind a bad block: its name or size may have stood in that block.

    Type flag or usual name is enough to take the block for an extended header: one of them may be what is broken.
    """
    name = block[:100]
    if block[header.TYPE] in header.EXTENDED or b"@LongLink" in name or b"PaxHeader" in name:
        return Extension(problem="bad_extended_header")
    return None


def _names(table: npt.NDArray[np.uint8], blocks: list[bytes]) -> list[bytes]:
    """Returns the names that the headers themselves give, without a leading `./`."""
    names: list[bytes] = np.ascontiguousarray(table[:, :100]).view("S100").ravel().tolist()
    for row in np.flatnonzero(table[:, 345]):
        names[row] = header.header_name(blocks[row])
    flat = b"\n".join(names)
    if b"\0" in flat or b"./" in flat:  # rare, and twice as dear as all the rest
        names = [name.partition(b"\0")[0].removeprefix(CURRENT_DIRECTORY) for name in names]
    return names
