"""`forebay fetch`: objects of a store, or the files of a manifest, become files of a folder, each whole or not at all.

A file that stands is kept, any other one is downloaded aside, several at a time, is compared with what the manifest or
the store says of it, and gets its name where it is right. What goes wrong with one file is told at the end, and the
others come. What stops a fetch as a whole (a store that is gone, a full disk) is raised.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.config.remote import RemoteConfig, Url
from forebay.errors import ConfigError, RemoteError, RemoteMissingError, RemoteReplacedError, TarError
from forebay.store.files import sweep
from forebay.store.remote.bucket.bucket import find
from forebay.store.remote.carry.fetch_folder import FilePart, InTheWayError, TargetFolder, read_pieces
from forebay.store.remote.carry.fetch_list import FetchListing, FetchOptions, alike, limits, list_files, problems, some
from forebay.store.remote.carry.proof import Expected, Verdict, judge
from forebay.store.remote.carry.tally import FetchReport, Tally, for_each
from forebay.visible import human_bytes

_ATTEMPTS = 3
_MOST_BY_ETAG = 3
"""Files that an etag alone may refuse before any was proven by one: more, and the store's etags are no MD5s."""
_NO_MD5 = (
    "the store does not give what was put there; or its bucket encrypts with a key of its own, and etags say nothing: "
    "then --ignore-etags"
)
_DAMAGED = "it is damaged, or was replaced: have it put there again"
_NO_RANGES = "Range request not supported"
Examine = Callable[[Path, str, Any], None]
"""Looks into a tar of an evaluation set, given its path, its name and what index.json says; raises TarError."""


def fetch(url: Url, folder: Path, settings: RemoteConfig, options: FetchOptions, *, examine: Examine) -> FetchReport:
    """Makes the objects below a URL files of a folder, and returns what that took. An interrupted fetch goes on.

    Every file is compared with its size, and its hash where one is known, before it has its name. Raises RemoteError
    where the store does not give what was asked, or more than the bounds allow, or names that no file may have;
    ManifestError for a wrong manifest; ConfigError where something else stands in the folder. Nothing is downloaded
    then. A file that is not what it should be is refused, and the report names it.
    """
    listing = list_files(url, settings, options)
    wanted = list(listing.files.values())
    sizes, is_there = [one.size_bytes for one in wanted], folder.is_dir() or not options.dry_run
    with (
        TargetFolder(folder) if is_there else contextlib.nullcontext() as target,  # a dry run makes no folder
        Tally(sizes, label="fetch", progress=options.progress and is_there, has_file_count=True) as count,
    ):
        _check_names(listing, folder=target)
        to_come = wanted
        if target is not None:
            downloads = Downloads(listing, target, count, options, examine)
            to_come = downloads.look(wanted)
            if not options.dry_run:
                _check_room(target, to_come)
                downloads.run(to_come)
                sweep(target.path)  # what dead fetches left of objects that nobody goes on with
        return FetchReport(
            source=str(url),
            target=str(folder.absolute()),
            resumed_bytes=count.resumed_bytes,
            checked_by=dict(count.checked_by),
            refused=sorted(count.refused, key=lambda one: one["name"]),
            tars=len(listing.tars),
            names=[one.name for one in to_come] if options.dry_run else [],
            dry_run=options.dry_run,
            **count.figures(),
        )


def _check_names(listing: FetchListing, *, folder: TargetFolder | None) -> None:
    longest_part, longest = limits(str(folder.path)) if folder is not None else (255, 4095)
    found = problems(listing.files, longest_part=longest_part, longest=longest)
    pairs = alike(listing.files)
    if pairs and folder is not None and not folder.tells_apart():
        found += [f"{one!r} and {other!r} are one name in this folder" for one, other in pairs]
    if found:
        raise RemoteError(
            f"{listing.bucket.url}: names that no file below {folder.path if folder else 'a folder'} may have: "
            f"{some(found)}; nothing was fetched; leave them out by --prefix, or have them renamed"
        )


def _check_room(folder: TargetFolder, to_come: list[Expected]) -> None:
    needed, free = sum(one.size_bytes for one in to_come), folder.free_bytes()
    if needed > free:
        raise ConfigError(
            f"{folder.path}: {human_bytes(needed)} ({needed:,} bytes) are to come and {human_bytes(free)} ({free:,} "
            "bytes) are free; free the disk, name another --output, or bring fewer by --prefix"
        )


class _RefusedError(Exception):
    """A file is not what it should be. is_etag: an etag alone says so."""

    def __init__(self, message: str, *, is_etag: bool = False) -> None:
        super().__init__(message)
        self.is_etag = is_etag


_GIVEN_UP = (_RefusedError, RemoteMissingError, RemoteReplacedError, InTheWayError, TarError)
"""Errors of one file: the others come."""


class Downloads:
    """The downloads: what their threads share."""

    def __init__(
        self, listing: FetchListing, folder: TargetFolder, count: Tally, options: FetchOptions, examine: Examine
    ) -> None:
        self.bucket, self.folder, self.count, self.options = listing.bucket, folder, count, options
        self.tars, self.examine = listing.tars, examine
        self._num_by_etag = itertools.count(1)
        self._is_stopped = threading.Event()

    def look(self, wanted: list[Expected]) -> list[Expected]:
        """Returns what is to be downloaded. Raises ConfigError where the folder holds something else."""
        to_come: set[str] = set()
        in_the_way: list[str] = []

        def look_at(expected: Expected) -> None:
            try:
                problem = self._problem(expected)
            except InTheWayError as err:
                in_the_way.append(str(err))
                return
            if problem is None:
                to_come.add(expected.name)
            elif problem:
                in_the_way.append(f"{self.folder.path / expected.name} is there, and {problem}")

        for_each(look_at, wanted, num_threads=4)
        if in_the_way:
            raise ConfigError(
                f"{some(sorted(in_the_way))}; nothing was fetched; name another --output, or replace files by "
                "--overwrite (links, folders and devices are never replaced)",
                code="FB115",
            )
        return [one for one in wanted if one.name in to_come]

    def _problem(self, expected: Expected) -> str | None:
        """Returns what is wrong with the file that is there; None where it is to come, empty where it is right."""
        found = self.folder.stat(expected.name)
        if found is None:
            return None
        if found.st_size != expected.size_bytes:
            problem = f"has {found.st_size} bytes, wanted {expected.size_bytes}"
        elif found.st_nlink > 1:
            problem = f"has {found.st_nlink} names (hard links), so that somebody else may write to it"
        else:
            with self.folder.open(expected.name) as descriptor:
                verdict = self._judge(read_pieces(descriptor, found.st_size), expected)
            problem = verdict.problem
            if verdict.by == "size" and found.st_mtime_ns < expected.modified_ns:
                problem = "is older than the object of the same size"
            if not problem:
                self.count.add("kept", expected.size_bytes, by=verdict.by)
        return None if problem and self.options.overwrite else problem

    def _judge(self, pieces: Any, expected: Expected) -> Verdict:
        return judge(pieces, expected, etags_are_md5=self.bucket.url.scheme == "s3" and self.options.etags)

    def run(self, to_come: list[Expected]) -> None:
        """Downloads all files. Raises what stops a fetch as a whole: RemoteError, OSError."""
        for_each(self._bring, to_come, num_threads=self.bucket.settings.max_concurrent, stopped=self._is_stopped)

    def _bring(self, expected: Expected) -> None:
        """Makes an object a file, if need be by several attempts, or refuses it."""
        wanted: Expected | None = expected
        for attempt in range(1, _ATTEMPTS + 1):
            if wanted is not None:
                wanted = self._attempt(wanted, attempt)

    def _attempt(self, expected: Expected, attempt: int) -> Expected | None:
        """Downloads a file once; returns what to download in its place, None where that is all."""
        try:
            if not (expected.modified_ns and expected.size_bytes):
                expected = self._known(expected)
        except (RemoteMissingError, _RefusedError) as err:
            # An object of no bytes that is not there is `folder/`, which a listing calls `folder`.
            if expected.size_bytes or expected.hashes or isinstance(err, _RefusedError):
                self._refuse(expected, err)
            return None
        with self.folder.part(expected, str(self.bucket.url)) as part:
            self.count.resumed(part.resumed_bytes)
            try:
                self._fill(part)
                verdict = self._checked(part)
                self._publish(part)
            except _GIVEN_UP as err:
                part.remove()
                self.count.resumed(-part.resumed_bytes)
                self.count.arrived(part.resumed_bytes - part.size_bytes)
                again = self._again(expected, err, attempt)
                if again is None:
                    self._refuse(expected, err)
                return again
        self.count.add("moved", expected.size_bytes, by=verdict.by)
        return None

    def _known(self, expected: Expected) -> Expected:
        """Returns a file with what the store says of it, of which only a manifest is known, or which has no bytes."""
        info = self.bucket.info(expected.name)
        if info.size_bytes != expected.size_bytes:
            raise _RefusedError(f"the store has {info.size_bytes} bytes, {expected.size_bytes} are wanted")
        return expected.of(info)

    def _fill(self, part: FilePart) -> None:
        try:
            self._stream(part)
        except RemoteError as err:
            if not (part.resumed_bytes and _NO_RANGES in str(err)):  # some web servers give all or nothing
                raise
            self.count.resumed(-part.resumed_bytes)
            part.begin_anew()
            self._stream(part)

    def _stream(self, part: FilePart) -> None:
        expected = part.expected
        if part.size_bytes < expected.size_bytes:
            stream = self.bucket.stream(expected.name, start=part.size_bytes, etag=expected.etag)
            with contextlib.closing(stream):  # type: ignore[type-var]
                for piece in stream:
                    if part.size_bytes + len(piece) > expected.size_bytes:
                        raise _RefusedError(f"it has more than the {expected.size_bytes} bytes that are wanted")
                    part.append(piece)
                    self.count.arrived(len(piece))
                    if self._is_stopped.is_set():
                        raise RemoteError(f"{self.bucket.url / expected.name}: another download has ended the fetch")
        if part.size_bytes != expected.size_bytes:
            raise _RefusedError(f"it has {part.size_bytes} bytes, {expected.size_bytes} are wanted")

    def _checked(self, part: FilePart) -> Verdict:
        verdict, name = self._judge(part.pieces(), part.expected), part.expected.name
        if verdict.problem:
            raise _RefusedError(verdict.problem, is_etag=verdict.by == "etag")
        if name in self.tars:
            try:
                self.examine(part.path, name, self.tars[name])
            except TarError as err:  # some name the file, and it has another name now
                raise TarError(f"{self.bucket.url}: {str(err).replace(str(part.path), name)}") from err
        return verdict

    def _publish(self, part: FilePart) -> None:
        """Gives a file its name, unless another file has had it meanwhile."""
        name, size = part.expected.name, part.expected.size_bytes
        found = self.folder.stat(name)
        if found is not None and not self.options.overwrite:
            with self.folder.open(name) as descriptor:
                pairs = itertools.zip_longest(read_pieces(descriptor, size), part.pieces())
                is_same = found.st_size == size and all(one == other for one, other in pairs)
            if not is_same:
                raise InTheWayError(f"{self.folder.path / name} has come meanwhile, with other bytes; try --overwrite")
        part.publish()

    def _again(self, expected: Expected, err: Exception, attempt: int) -> Expected | None:
        """Returns what to download in place of a file that is not right; None where that would not help."""
        if isinstance(err, _RefusedError):
            return expected if attempt == 1 else None
        if not isinstance(err, RemoteReplacedError) or attempt == _ATTEMPTS:
            return None
        if (info := find(self.bucket, expected.name)) is None:
            return None
        now, total = expected.of(info), self.count.total_bytes
        return now if total - expected.size_bytes + now.size_bytes <= self.options.max_bytes else None

    def _refuse(self, expected: Expected, err: Exception) -> None:
        """Counts a file that does not come. Raises RemoteError where the etags of the store seem to say nothing."""
        reason, is_etag = str(err), isinstance(err, _RefusedError) and err.is_etag
        if isinstance(err, _RefusedError):
            reason = f"{self.bucket.url / expected.name}: {err}; {_NO_MD5 if is_etag else _DAMAGED}"
        self.count.refuse(expected.name, reason)
        if is_etag and next(self._num_by_etag) >= _MOST_BY_ETAG and not self.count.checked_by["etag"]:
            raise RemoteError(reason)
