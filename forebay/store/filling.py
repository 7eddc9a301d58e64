"""A folder that is filled file by file: interrupted at any instant, the same command goes on where it was.

Every file is written aside, fsynced and renamed. Then a line of the journal says that the file is whole. A document is
written last, and says that the folder is: the journal goes then.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from forebay.errors import ConfigError
from forebay.store.files import fsync_folder, sweep, write_all, write_bytes
from forebay.store.shared_disk import try_alone
from forebay.terminal import first_of

Entry = dict[str, Any]
"""What is said of a finished file: its `name` and `size_bytes`, and what the writer adds. A name of None: no file."""

_SHOWN = 40
"""Characters of a value that a message shows."""


@dataclass
class Filling:
    """A folder that this process fills. finished: the entries of whole files; document: that of a whole folder."""

    folder: Path
    document_name: str
    identity: Mapping[str, Any]
    finished: list[Entry] = field(default_factory=list)
    document: Mapping[str, Any] | None = None
    _journal: BinaryIO | None = None

    def add(self, entry: Entry) -> None:
        """Notes that a file is whole; it bears its name already."""
        self._append(entry)
        self.finished.append(entry)

    def seal(self, document: Mapping[str, Any]) -> None:
        """Makes the folder whole. document: JSON; the identity is added to it."""
        self.document = {"identity": dict(self.identity), **document}
        write_bytes(self.folder / self.document_name, json.dumps(self.document, indent=1).encode("ascii") + b"\n")
        journal_of(self.folder, self.document_name).unlink(missing_ok=True)
        fsync_folder(self.folder)

    def _append(self, line: Mapping[str, Any]) -> None:
        assert self._journal is not None
        write_all(self._journal, json.dumps(line).encode("ascii") + b"\n")
        os.fsync(self._journal.fileno())


@contextlib.contextmanager
def filling(folder: Path, document_name: str, *, identity: Mapping[str, Any], option: str) -> Iterator[Filling]:
    """Yields a folder to fill: an empty or new one, or one that the same command began, with what is whole there.

    identity: what decides the bytes of all files; plain JSON. option: what named the folder.
    Raises ConfigError where the folder holds anything else, or another process fills it.
    """
    _make_folder(folder, option)
    sweep(folder)
    filled = Filling(folder, document_name, identity)
    if (folder / document_name).exists():
        filled.document = _whole(folder, document_name, identity, option)
        yield filled
        return
    journal = journal_of(folder, document_name)
    if not journal.exists():
        _require_empty(folder, option)
    with open(journal, "ab+", buffering=0) as file:
        _lock(file, folder, option)
        filled._journal = file
        filled.finished = _begun(filled, file, option)
        yield filled


def journal_of(folder: Path, document_name: str) -> Path:
    """Returns where the files that are whole are noted, until the folder is."""
    return folder / f".{document_name}.unfinished"


class Summed(io.BufferedIOBase):
    """A file that counts and hashes what is written to it. It writes all that it is given, or raises."""

    def __init__(self, file: BinaryIO, *, with_sha256: bool = False) -> None:
        self._file = file
        self._xxh3, self._sha256 = xxhash.xxh3_128(), hashlib.sha256() if with_sha256 else None
        self.size_bytes = 0

    def writable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns how many bytes were written."""
        return self.size_bytes

    def write(self, data: Any, /) -> int:
        """Writes all bytes of a buffer and returns how many there are."""
        view = memoryview(data).cast("B")
        write_all(self._file, view)
        self._xxh3.update(view)
        if self._sha256 is not None:
            self._sha256.update(view)
        self.size_bytes += len(view)
        return len(view)

    def sums(self) -> Entry:
        """Returns `size_bytes`, `xxh3_128` and, where asked for, `sha256` of what was written."""
        sums: Entry = {"size_bytes": self.size_bytes, "xxh3_128": self._xxh3.hexdigest()}
        return sums if self._sha256 is None else {**sums, "sha256": self._sha256.hexdigest()}


def _make_folder(folder: Path, option: str) -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"{option} {folder} is a file; name a folder", code="FB115")
    folder.mkdir(parents=True, exist_ok=True)


def _require_empty(folder: Path, option: str) -> None:
    names = sorted(os.listdir(folder))
    if names:
        raise ConfigError(
            f"{option} {folder} is not empty: it holds {first_of(list(map(repr, names)), 1)}, which this command did "
            "not write; name a new or empty folder",
            code="FB115",
        )


def _lock(file: BinaryIO, folder: Path, option: str) -> None:
    """Raises ConfigError where another process holds the lock; without locks both write the same bytes."""
    if try_alone(file.fileno()) == "taken":
        raise ConfigError(f"{option} {folder}: another process is filling it; wait for its end", code="FB115")


def _begun(filled: Filling, file: BinaryIO, option: str) -> list[Entry]:
    """Returns the entries of the journal whose files are as they say; the journal is begun where it is empty."""
    file.seek(0)
    lines = file.read().split(b"\n")
    whole, torn = lines[:-1], lines[-1]
    if torn:  # the process ended in the middle of a line
        file.truncate(sum(len(line) + 1 for line in whole))
    if not whole:
        filled._append(filled.identity)
        return []
    try:
        # A file that was damaged and made again is named twice, by lines that are the same.
        identity, *entries = [json.loads(line) for line in dict.fromkeys(whole)]
        require_same(filled.folder, identity, filled.identity, option)
        return [entry for entry in entries if _problem(filled.folder, entry) is None]
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        if isinstance(err, ConfigError):
            raise
        journal = journal_of(filled.folder, filled.document_name)
        raise ConfigError(
            f"{journal} is none that forebay writes; name another folder, or remove that one", code="FB115"
        ) from err


def _whole(folder: Path, name: str, identity: Mapping[str, Any], option: str) -> Mapping[str, Any]:
    try:
        document = json.loads((folder / name).read_bytes())
        stored, entries = document["identity"], document["files"]
        require_same(folder, stored, identity, option)
        problems = [problem for entry in entries if (problem := _problem(folder, entry)) is not None]
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        if isinstance(err, ConfigError):
            raise
        raise ConfigError(
            f"{option} {folder}: its {name} is none that forebay writes; name a new folder", code="FB115"
        ) from err
    if problems:
        raise ConfigError(
            f"{option} {folder}: its {name} says that it is whole, and {problems[0]}; remove the folder", code="FB115"
        )
    found: Mapping[str, Any] = document
    return found


def require_same(folder: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any], option: str) -> None:
    """Raises ConfigError, with the first field and both values, where a folder holds what another command began."""
    for name in {**wanted, **stored}:
        if stored.get(name) != wanted.get(name):
            was, now = (str(each.get(name))[:_SHOWN] for each in (stored, wanted))
            raise ConfigError(
                f"{option} {folder} holds what another command wrote: {name} is {was} there, {now} is wanted; "
                "name another folder, or remove that one",
                code="FB115",
            )


def _problem(folder: Path, entry: Entry) -> str | None:
    if entry["name"] is None:
        return None
    try:
        size = os.stat(folder / entry["name"], follow_symlinks=False).st_size
    except FileNotFoundError:
        return f"{entry['name']} is not there"
    return None if size == entry["size_bytes"] else f"{entry['name']} has {size} bytes, not {entry['size_bytes']}"
