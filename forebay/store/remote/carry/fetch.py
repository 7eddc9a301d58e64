"""`forebay fetch`: objects of a store, or the files of a manifest, become files of a folder, each whole or not at all.

Files are downloaded aside, several at a time, and are compared with what the manifest or the store says before they get
their names. What goes wrong with one file is told at the end, and the others come.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from forebay.config.remote import RemoteConfig
from forebay.config.url import Url
from forebay.errors import ConfigError, RemoteError
from forebay.store.files import sweep
from forebay.store.remote.carry.download import Downloads, Examine
from forebay.store.remote.carry.fetch_folder import TargetFolder
from forebay.store.remote.carry.fetch_list import (
    FetchListing,
    FetchOptions,
    alike,
    limits,
    list_files,
    problems,
    some,
)
from forebay.store.remote.carry.proof import Expected
from forebay.store.remote.carry.tally import FetchReport, Tally
from forebay.visible import human_bytes


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
