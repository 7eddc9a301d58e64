"""Sealed caches to a store and back. metadata.json comes last, so a cache is there whole or not at all.

A push sends the files beside the shards first, one after the other, each only where no object has its name. They hold
the hash of every shard. So two caches never mix below one URL: the second of two pushes meets a file of the first, and
ends before it has sent a shard.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import xxhash

from forebay.config.remote import RemoteConfig, Url
from forebay.errors import CacheError, CacheMismatchError, ConfigError, RemoteError, RemoteExistsError
from forebay.store.cache import Cache, open_cache
from forebay.store.files import link_or_copy, write_bytes
from forebay.store.held import HeldFile
from forebay.store.key import SHORT
from forebay.store.lookup import sealed_caches
from forebay.store.metadata import FILE_NAME, read_regular
from forebay.store.remote.bucket.bucket import MAX_COPY, Bucket, ObjectInfo, find_bytes
from forebay.store.remote.carry.proof import Proof, hash_object, proof_of, save_object
from forebay.store.remote.carry.tally import Kind, Tally, TransferReport, for_each
from forebay.store.remote.carry.upload import MadeObject, PushedItem, Upload
from forebay.store.remote.node.node import WantedFile
from forebay.store.remote.small_files import NAME as COLUMNS
from forebay.store.seal import is_whole, publish, quick_problems
from forebay.store.shared_disk import must_lock
from forebay.visible import human_bytes

logger = logging.getLogger(__name__)


def push(
    folder: Path,
    url: Url,
    settings: RemoteConfig,
    *,
    staged: Mapping[str, StagedObjects] | None = None,
    verify: bool = False,
    progress: bool = False,
) -> TransferReport:
    """Makes `url` the sealed cache of a folder, and returns what that took. An interrupted push goes on.

    Every byte is checked: of the folder's files while they are read; of the objects by their etags, and where an etag
    says nothing of the bytes by reading the object back. staged: files, by name, that the store copies from another of
    its objects; the folder's own need not have all of their bytes. verify: every object is read back, and what is
    damaged in a sealed cache is sent again. Raises CacheCorruptError for a damaged file, which is not sent;
    RemoteExistsError where another cache, or anything else, lies below the URL; RemoteError where the store does not
    keep what was sent.
    """
    cache = open_cache(folder)
    if cache.mirror is not None:
        raise ConfigError(
            f"{folder} is what this node has of {cache.mirror.url}; run: forebay cache pull, and push that"
        )
    with Tally([wanted.size_bytes for _, wanted in _files(cache)], label="push", progress=progress) as tally:
        already_there = _CacheUpload(cache, Bucket(url, settings), tally, staged or {}, verify=verify).run()
        return tally.report("push", source=folder, target=url, key=cache.key, already_there=already_there)


def metadata_bytes(cache: Cache) -> bytes:
    """Returns the metadata.json of a cache."""
    return (next(cache.files())[0].folder / FILE_NAME).read_bytes()


def _files(cache: Cache) -> list[tuple[HeldFile, WantedFile]]:
    """Every file of a cache but metadata.json."""
    return [(file, WantedFile.of(file.place, entry)) for file, entry in cache.files()]


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedObjects:
    """An object of a pushed file's bytes. proof: of these; etag: at that time. None, empty: its size alone is known."""

    url: Url
    proof: Proof | None
    etag: str

    def is_copied(self, etag: str) -> bool | None:
        """Returns whether an object of this etag, and of the same size, is a copy; None where etags do not say so."""
        if self.proof is None or not self.proof.holds(self.etag):
            return None
        return self.proof.holds(etag)


def _made(bucket: Bucket, file: HeldFile, wanted: WantedFile) -> MadeObject:
    """Returns what is sent of a file, which is read. Raises CacheCorruptError where the file is not as wanted."""

    def read_back() -> tuple[bool, int]:
        return hash_object(bucket, wanted.name) == wanted.xxh3_128, wanted.size_bytes

    return MadeObject(
        data=file.path,
        size_bytes=wanted.size_bytes,
        words=f"{wanted.size_bytes} bytes of xxh3-128 {wanted.xxh3_128} of {file}",
        proves=proof_of(file, wanted).holds,
        read_back=read_back,
    )


class _CacheUpload(Upload):
    """One push of a cache in its own form. metadata.json is sealed last."""

    elsewhere = "another URL"

    def __init__(
        self, cache: Cache, bucket: Bucket, tally: Tally, staged: Mapping[str, StagedObjects], *, verify: bool
    ) -> None:
        files = [PushedItem(wanted, partial(_made, bucket, file, wanted)) for file, wanted in _files(cache)]
        self.small = sorted((one for one in files if "/" not in one.wanted.name), key=lambda one: one.wanted.name)
        self.shards = [one for one in files if "/" in one.wanted.name]
        known = {one.wanted.name for one in files} | {FILE_NAME, COLUMNS}
        super().__init__(bucket, tally, known, verify=verify, journal_ending=".jsonl")
        self.cache, self.bucket, self.staged = cache, bucket, staged
        self.metadata = metadata_bytes(cache)
        self.is_sealed = False

    def run(self) -> bool:
        """Returns whether all was there already."""
        self.is_sealed = self.is_this(FILE_NAME)
        self.list_there()
        if self.is_sealed and not self.verify and all(map(self._has_size, (*self.small, *self.shards))):
            self.tally.keep_all()
            return True
        for one in self.small:
            self.keep(one)
        for_each(self.keep, self.shards, num_threads=self.bucket.settings.max_concurrent)
        self.compare()
        if not self.is_sealed or COLUMNS not in self.there:
            self.bucket.put(COLUMNS, self.cache.told())
        made = not self.is_sealed and self.create(FILE_NAME, self.metadata)
        self.journal.remove()
        return not made and not self.tally.files["moved"]

    def is_this(self, name: str) -> bool:
        data = find_bytes(self.bucket, name)
        if data is None or data == self.metadata:
            return data is not None
        key = key_in(data)
        there, here = xxhash.xxh3_128_hexdigest(data), xxhash.xxh3_128_hexdigest(self.metadata)
        which = f"the cache of key {key[:SHORT]}, this one has key {self.cache.key[:SHORT]}"
        if key == self.cache.key:
            which = f"a cache of the same key {key[:SHORT]}, which was sealed by another build"
        raise RemoteExistsError(
            f"{self.bucket.url / FILE_NAME} is {which} (xxh3-128 {there} there, {here} here); use what is there, or "
            "push to another URL"
        )

    def foreign(self, shown: str) -> str:
        return (
            f"{self.bucket.url} holds objects that are not of {self.cache.folder}: {shown}; push to another URL "
            f"(one that ends with a slash: {self.bucket.url}/ is a folder of caches), or remove them"
        )

    def _has_size(self, item: PushedItem) -> bool:
        found = self.there.get(item.wanted.name)
        return found is not None and found.size_bytes == item.wanted.size_bytes

    def bring(self, item: PushedItem, there: ObjectInfo | None) -> None:
        """Sends a file, unless it is there or the store copies it.

        An object beside the shards, with other bytes, is of another cache: an error, unless this one is sealed here.
        """
        wanted = item.wanted
        if (staged := self.staged.get(wanted.name)) is not None:
            return self._copy(item, staged, there)
        made, is_new = item.make(), not self.is_sealed and "/" not in wanted.name
        if there is None and is_new:
            try:
                return self.send(item, made, create=True)
            except RemoteExistsError:  # of another push, or of this one, whose answer was lost
                there = self.bucket.info(wanted.name)
        if self.is_kept(item, made, there):
            return None
        if there is not None and is_new:
            raise RemoteExistsError(
                f"{self.bucket.url / wanted.name} is there with {there.size_bytes} bytes and etag {there.etag}, which "
                f"are not the {made.words}: another cache, or the beginning of one, lies there; push to another URL, "
                f"or remove what is below {self.bucket.url}"
            )
        return self.send(item, made)

    def _copy(self, item: PushedItem, staged: StagedObjects, there: ObjectInfo | None) -> None:
        """Makes an object by a copy inside of the store, unless it is one."""
        wanted = item.wanted
        if there is not None and self._is_copied(staged, there, wanted):
            return self.done(item, there.size_bytes, there.etag, "kept")
        if wanted.size_bytes > MAX_COPY:
            logger.warning(
                "%s has %s, and stores copy no more than %s at once: it goes through this machine; a smaller "
                "layout.rows_per_shard makes smaller shards",
                staged.url,
                human_bytes(wanted.size_bytes),
                human_bytes(MAX_COPY),
            )
            path = self.cache.folder / wanted.name
            save_object(Bucket(staged.url.parent, self.bucket.settings), replace(wanted, name=staged.url.name), path)
            return self.send(item, item.make())
        made = self.bucket.copy(staged.url, wanted.name, size_bytes=wanted.size_bytes)
        if not self._is_copied(staged, made, wanted):
            raise RemoteError(
                f"{self.bucket.url / wanted.name} was copied from {staged.url} and is not the {wanted.size_bytes} "
                f"bytes of xxh3-128 {wanted.xxh3_128}; run the command again"
            )
        return self.done(item, made.size_bytes, made.etag, "linked")

    def _is_copied(self, staged: StagedObjects, found: ObjectInfo, wanted: WantedFile) -> bool:
        if found.size_bytes != wanted.size_bytes:
            return False
        if not self.verify and staged.is_copied(found.etag) is not False:
            return True
        self.tally.add_read_back(wanted.size_bytes)
        return hash_object(self.bucket, wanted.name) == wanted.xxh3_128


def key_in(data: bytes) -> str:
    """Returns the key that a metadata.json holds, empty where the text is none."""
    try:
        return str(json.loads(data)["key"])
    except (ValueError, LookupError, TypeError):
        return ""


def pull(url: Url, folder: Path, settings: RemoteConfig, *, progress: bool = False) -> TransferReport:
    """Makes `folder` the sealed cache of a URL, whole, and returns what that took. An interrupted pull goes on.

    Every file is hashed before it has its name. Until all are there they lie beside `folder` under a name that is never
    read. What this node's cache or another cache beside `folder` has is linked. A damaged or incomplete copy of the
    same cache is mended. Raises CacheNotFoundError where no sealed cache lies at the URL, RemoteError where an object
    is not what its cache says, CacheMismatchError where something else stands at `folder`.
    """
    cache = open_cache(str(url), verify="never", remote=settings)
    files = [wanted for _, wanted in _files(cache)]
    bucket = Bucket(url, settings)
    work = FolderPull(lambda path, wanted: save_object(bucket, wanted, path), files, metadata_bytes(cache), cache.key)
    return work.run(url, folder, settings, donors=[cache], progress=progress)


class FolderPull:
    """A pull of a sealed cache into a folder: what its steps share.

    make: makes a file at a path, complete and of the hash that is wanted, or absent. metadata: bytes of metadata.json.
    """

    def __init__(
        self, make: Callable[[Path, WantedFile], None], files: Sequence[WantedFile], metadata: bytes, key: str
    ) -> None:
        self.make, self.files, self.metadata, self.key = make, files, metadata, key
        self._copies: dict[tuple[int, str], list[Path]] = {}

    def run(
        self, source: Url | Path, folder: Path, settings: RemoteConfig, *, donors: Sequence[Cache], progress: bool
    ) -> TransferReport:
        """Makes the folder the cache. donors: their files are linked too. CacheMismatchError: it is something else."""
        folder = folder.absolute()
        is_whole, is_there = self._standing(folder)
        with Tally([wanted.size_bytes for wanted in self.files], label="pull", progress=progress) as tally:
            if is_whole:
                tally.keep_all()
            else:
                with _occupied(folder.with_name(f".{folder.name}.pulling"), source) as aside:
                    self._copies = _copies_beside(folder, donors)
                    self._fill(aside, tally, num_threads=settings.max_concurrent)
                    publish(aside, folder, replace=is_there)
            return tally.report("pull", source=source, target=folder, key=self.key, already_there=is_whole)

    def _standing(self, folder: Path) -> tuple[bool, bool]:
        """Returns whether a folder is this very cache with all its files, and whether it is, perhaps without some."""
        if not folder.is_dir() or not any(folder.iterdir()):
            return False, False
        try:
            stored = read_regular(folder / FILE_NAME)
        except (OSError, CacheError):
            stored = b""
        if stored == self.metadata:
            return not quick_problems(folder), True
        key = key_in(stored)
        found = f"the cache of key {key[:SHORT]}" if key else "no cache"
        raise CacheMismatchError(
            f"{folder} is not empty, and is {found}, wanted the cache of key {self.key[:SHORT]}; name another folder"
        )

    def _fill(self, aside: Path, tally: Tally, *, num_threads: int) -> None:
        """Makes all files in the folder, and removes what else an interrupted pull of another state left there."""
        names = {wanted.name for wanted in self.files}
        for path in aside.rglob("*"):
            if not path.is_dir() and str(path.relative_to(aside)) not in names:
                path.unlink()
        for parent in {(aside / name).parent for name in names}:
            parent.mkdir(exist_ok=True)

        def place(wanted: WantedFile) -> None:
            path = aside / wanted.name
            kind: Kind = "kept" if is_whole(path, wanted) else "linked" if self._linked(path, wanted) else "moved"
            if kind == "moved":
                self.make(path, wanted)
            tally.add(kind, wanted.size_bytes)

        for_each(place, self.files, num_threads=num_threads)
        write_bytes(aside / FILE_NAME, self.metadata)

    def _linked(self, path: Path, wanted: WantedFile) -> bool:
        for copy in self._copies.get((wanted.size_bytes, wanted.xxh3_128), []):
            with contextlib.suppress(OSError):  # the node's cache may have let go of it
                if is_whole(copy, wanted):
                    link_or_copy(copy, path)
                    return True
        return False


@contextlib.contextmanager
def _occupied(folder: Path, source: Url | Path) -> Iterator[Path]:
    """Yields a folder that no other process pulls into meanwhile, with what an interrupted pull left there."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not must_lock(descriptor):
                raise CacheError(f"another process pulls {source} into {folder}; run the command when it is done")
            # Another process may have pulled all of it, and made this folder the cache, before it was locked.
            if folder.is_dir() and os.path.samestat(os.fstat(descriptor), folder.stat()):
                yield folder
                return
        finally:
            os.close(descriptor)


def _copies_beside(folder: Path, donors: Sequence[Cache]) -> dict[tuple[int, str], list[Path]]:
    """Returns files of this machine by size and xxh3-128, as their caches say: of donors and beside the folder."""
    caches = list(donors)
    for sealed in sealed_caches(folder.parent):
        with contextlib.suppress(CacheError):  # a damaged one
            caches.append(open_cache(sealed.folder, verify="never"))
    found: dict[tuple[int, str], list[Path]] = {}
    for cache in caches:
        for file, wanted in _files(cache):
            if file.path.is_file():
                found.setdefault((wanted.size_bytes, wanted.xxh3_128), []).append(file.path)
    return found


def place_below(place: str, name: str) -> str:
    """Returns the place that a text names; where it ends with a slash, that of `name` below it."""
    return place + name if place.endswith("/") else place
