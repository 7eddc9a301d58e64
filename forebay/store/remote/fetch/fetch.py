"""`forebay fetch`: objects of a store, or the files of a manifest, become files of a folder, each whole or not at all.

Files are downloaded aside, in segments that several threads share, and are compared with what the manifest or the store
says before they get their names. What goes wrong with one file is told at the end, and the others come.
"""

from __future__ import annotations

import time
from pathlib import Path

from forebay.config.remote import RemoteConfig
from forebay.config.url import Url
from forebay.errors import ConfigError, RemoteError
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.fetch.download import Downloads, Examine
from forebay.store.remote.fetch.fetch_content import Expected, judge
from forebay.store.remote.fetch.fetch_folder import InTheWayError, TargetFolder, read_pieces
from forebay.store.remote.fetch.fetch_list import (
    FetchListing,
    FetchOptions,
    alike,
    check_prefix,
    limits,
    list_files,
    problems,
    some,
)
from forebay.store.remote.fetch.fetch_report import FetchCount, FetchReport
from forebay.store.remote.transfer.tally import for_each
from forebay.visible import human_bytes


def fetch(url: Url, folder: Path, settings: RemoteConfig, options: FetchOptions, *, examine: Examine) -> FetchReport:
    """Makes the objects below a URL files of a folder, and returns what that took. An interrupted fetch goes on.

    Every file is compared with its size, and its hash where one is known, before it has its name. Raises RemoteError
    where the store does not give what was asked, or more than the bounds allow, or names that no file may have;
    ManifestError for a wrong manifest; ConfigError where something else stands in the folder. Nothing is downloaded
    then. A file that is not what it should be is refused, and the report names it.
    """
    check_prefix(options.prefix)
    listing = list_files(url, settings, prefix=options.prefix, bounds=options.bounds)
    wanted = list(listing.files.values())
    if options.dry_run and not folder.is_dir():
        _check_names(listing, folder=None)
        return _report(listing, url, folder, _counted(wanted, progress=False), dry_run=wanted)
    with TargetFolder(folder) as target, _counted(wanted, progress=options.progress) as count:
        _check_names(listing, folder=target)
        to_come = _Standing(target, listing.bucket, count, options).look(wanted)
        if not options.dry_run:
            _check_room(target, to_come)
            Downloads(listing, target, count, options, examine).run(to_come)
            target.sweep()
        return _report(listing, url, folder, count, dry_run=to_come if options.dry_run else None)


def _counted(wanted: list[Expected], *, progress: bool) -> FetchCount:
    return FetchCount(len(wanted), sum(one.size_bytes for one in wanted), progress=progress)


def _report(
    listing: FetchListing, url: Url, folder: Path, count: FetchCount, *, dry_run: list[Expected] | None
) -> FetchReport:
    return FetchReport(
        source=str(url),
        target=str(folder.absolute()),
        files=count.num_files,
        size_bytes=count.total_bytes,
        moved_files=count.files["moved"],
        moved_bytes=count.bytes["moved"],
        kept_files=count.files["kept"],
        kept_bytes=count.bytes["kept"],
        resumed_bytes=count.resumed_bytes,
        checked_by=dict(count.checked_by),
        refused=sorted(count.refused, key=lambda one: one["name"]),
        tars=len(listing.tars),
        names=[one.name for one in dry_run or ()],
        dry_run=dry_run is not None,
        seconds=time.monotonic() - count.started_s,
    )


def _check_names(listing: FetchListing, *, folder: TargetFolder | None) -> None:
    """Raises RemoteError for names that no file of the folder may have."""
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
    """Raises ConfigError where the disk has less room than is to come."""
    needed, free = sum(one.size_bytes for one in to_come), folder.free_bytes()
    if needed > free:
        raise ConfigError(
            f"{folder.path}: {human_bytes(needed)} ({needed:,} bytes) are to come and {human_bytes(free)} ({free:,} "
            "bytes) are free; free the disk, name another --output, or bring fewer by --prefix"
        )


class _Standing:
    """What stands in the folder before anything is downloaded."""

    def __init__(self, folder: TargetFolder, bucket: Bucket, count: FetchCount, options: FetchOptions) -> None:
        self.folder, self.count, self.options = folder, count, options
        self.etags_are_md5 = bucket.url.scheme == "s3" and options.etags
        self.in_the_way: list[str] = []
        self.to_come: list[Expected] = []

    def look(self, wanted: list[Expected]) -> list[Expected]:
        """Returns what is to be downloaded. Raises ConfigError where the folder holds something else."""
        for_each(self._look_at, wanted, num_threads=4)
        if self.in_the_way:
            raise ConfigError(
                f"{some(sorted(self.in_the_way))}; nothing was fetched; name another --output, or replace files by "
                "--overwrite (links, folders and devices are never replaced)",
                code="FB115",
            )
        places = {one.name: place for place, one in enumerate(wanted)}
        return sorted(self.to_come, key=lambda one: places[one.name])

    def _look_at(self, expected: Expected) -> None:
        try:
            problem = self._problem(expected)
        except InTheWayError as err:
            self.in_the_way.append(str(err))
            return
        if problem is None:
            self.to_come.append(expected)
        elif problem:
            self.in_the_way.append(f"{self.folder.path / expected.name} is there, and {problem}")

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
                pieces = read_pieces(descriptor, 0, found.st_size)
                verdict = judge(pieces, expected, etags_are_md5=self.etags_are_md5)
            problem = verdict.problem
            if verdict.by == "size" and found.st_mtime_ns < expected.modified_ns:
                problem = "is older than the object of the same size"
            if not problem:
                self.count.add("kept", expected.size_bytes, by=verdict.by)
        return None if problem and self.options.overwrite else problem
