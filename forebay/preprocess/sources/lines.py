"""The lines of a text manifest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from forebay.errors import ManifestError


def manifest_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, line without its end) of every line that is not blank; a byte order mark is taken off.

    Lines end with LF or CRLF. Raises ManifestError where the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                line = line.removesuffix(b"\n").removesuffix(b"\r")
                if line.strip():
                    yield number, line
    except OSError as err:
        raise ManifestError(f"cannot read manifest {path}: {err.strerror}; check the path and its permissions") from err


def decoded(line: bytes, path: Path, number: int) -> str:
    """Returns a line as text. Raises ManifestError where it is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as err:
        raise ManifestError(f"{path}, line {number}: is not UTF-8: {err}; correct the manifest") from err
