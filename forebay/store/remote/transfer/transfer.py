"""Sealed caches to a store and back. metadata.json comes last, so a cache is there whole or not at all.

A push sends the files beside the shards first, one after the other, each only where no object has its name. They hold
the hash of every shard. So two caches never mix below one URL: the second of two pushes meets a file of the first, and
ends before it has sent a shard.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import xxhash

from forebay.config.remote import RemoteConfig
from forebay.config.url import Url
from forebay.errors import (
    CacheCorruptError,
    CacheError,
    CacheMismatchError,
    ConfigError,
    RemoteError,
    RemoteExistsError,
    RemoteMissingError,
)
from forebay.store.cache import Cache, open_cache
from forebay.store.files import link_or_copy, write_all, write_aside, write_bytes
from forebay.store.held import HeldFile
from forebay.store.key import SHORT
from forebay.store.locks import must_lock
from forebay.store.lookup import sealed_caches
from forebay.store.metadata import FILE_NAME, check_file, read_regular
from forebay.store.remote.bucket.bucket import MAX_COPY, Bucket, ObjectInfo
from forebay.store.remote.node.node import WantedFile
from forebay.store.remote.transfer.proof import (
    NOTHING_STAGED,
    Journal,
    Proof,
    StagedObjects,
    download_staged,
    hash_object,
    pieces_of,
    proof_of,
)
from forebay.store.remote.transfer.sent_columns import NAME as COLUMNS
from forebay.store.remote.transfer.tally import Kind, Tally, TransferReport, for_each
from forebay.store.seal import publish, quick_problems

_MAX_NAMES = 5
"""Objects that a message names."""


def push(
    folder: Path,
    url: Url,
    settings: RemoteConfig,
    *,
    staged: Mapping[str, StagedObjects] = NOTHING_STAGED,
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
    files = _files(cache)
    with Tally([wanted.size_bytes for _, wanted in files], label="push", progress=progress) as tally:
        already_there = _Push(cache, files, Bucket(url, settings), tally, staged=staged, verify=verify).run()
        target, source = str(url), str(folder)
        return tally.report("push", source=source, target=target, key=cache.key, already_there=already_there)


def _files(cache: Cache) -> list[tuple[HeldFile, WantedFile]]:
    """Every file of a cache but metadata.json."""
    return [
        (file, WantedFile(name=file.place, size_bytes=entry["size_bytes"], xxh3_128=entry["xxh3_128"]))
        for file, entry in cache.files()
    ]


class _Push:
    """One push: what its steps share."""

    def __init__(
        self,
        cache: Cache,
        files: Sequence[tuple[HeldFile, WantedFile]],
        bucket: Bucket,
        tally: Tally,
        *,
        staged: Mapping[str, StagedObjects],
        verify: bool,
    ) -> None:
        self.cache, self.files, self.bucket, self.tally, self.verify = cache, files, bucket, tally, verify
        self.staged = staged
        self.metadata = (files[0][0].folder / FILE_NAME).read_bytes()
        settings = bucket.settings
        place = xxhash.xxh3_64_hexdigest(f"{settings.endpoint or ''} {bucket.url}".encode())
        self.journal = Journal(settings.folder / "pushes" / f"{bucket.url.name}-{place}.jsonl")
        self.there: dict[str, ObjectInfo] = {}
        self.etags: dict[str, str] = {}

    def run(self) -> bool:
        """Returns whether all was there already."""
        is_sealed = self._is_sealed_there()
        self.there = self._listed()
        if is_sealed and not self.verify and all(self._has_size(wanted) for _, wanted in self.files):
            for _, wanted in self.files:
                self.tally.add("kept", wanted.size_bytes)
            return True
        shards = [pair for pair in self.files if "/" in pair[1].name]
        for file, wanted in sorted(set(self.files) - set(shards), key=lambda pair: pair[1].name):
            self._place(file, wanted, is_new=not is_sealed)
        for_each(lambda pair: self._place(*pair, is_new=False), shards, num_threads=self.bucket.settings.max_concurrent)
        self._compare()
        if not is_sealed or COLUMNS not in self.there:
            self.bucket.put(COLUMNS, self.cache.told())
        made = not is_sealed and self._seal()
        self.journal.remove()
        return not made and not self.tally.files["moved"]

    def _is_sealed_there(self) -> bool:
        """Whether this very cache is sealed there. Raises RemoteExistsError where another one is."""
        try:
            data = self.bucket.read(FILE_NAME)
        except RemoteMissingError:
            return False
        if data != self.metadata:
            raise self._other_cache(data)
        return True

    def _other_cache(self, data: bytes) -> RemoteExistsError:
        try:
            key = str(json.loads(data)["key"])
        except (ValueError, LookupError, TypeError):
            key = ""
        there, here = xxhash.xxh3_128_hexdigest(data), xxhash.xxh3_128_hexdigest(self.metadata)
        which = f"the cache of key {key[:SHORT]}, this one has key {self.cache.key[:SHORT]}"
        if key == self.cache.key:
            which = f"a cache of the same key {key[:SHORT]}, which was sealed by another build"
        return RemoteExistsError(
            f"{self.bucket.url / FILE_NAME} is {which} (xxh3-128 {there} there, {here} here); use what is there, or "
            "push to another URL"
        )

    def _listed(self) -> dict[str, ObjectInfo]:
        """What lies below the URL, by name. Raises RemoteExistsError where some of it is of no file of this cache."""
        known = {wanted.name for _, wanted in self.files} | {FILE_NAME, COLUMNS}
        found: dict[str, ObjectInfo] = {}
        foreign: list[str] = []
        for info in self.bucket.objects():
            found[info.name] = info
            foreign += [] if info.name in known else [info.name]
            if len(foreign) > _MAX_NAMES:  # a folder of other things may hold millions
                break
        if foreign:
            names = ", ".join(foreign[:_MAX_NAMES]) + (", and more" if len(foreign) > _MAX_NAMES else "")
            raise RemoteExistsError(
                f"{self.bucket.url} holds objects that are not of {self.cache.folder}: {names}; push to another URL "
                f"(one that ends with a slash: {self.bucket.url}/ is a folder of caches), or remove them"
            )
        return found

    def _has_size(self, wanted: WantedFile) -> bool:
        found = self.there.get(wanted.name)
        return found is not None and found.size_bytes == wanted.size_bytes

    def _place(self, file: HeldFile, wanted: WantedFile, *, is_new: bool) -> None:
        """Makes a file an object, unless it is one. is_new: an object of its name with other bytes is an error."""
        there = self.there.get(wanted.name)
        if there is not None and not self.verify and self.journal.knows(wanted, there.etag):
            return self._done(wanted, there.etag, "kept")
        if (staged := self.staged.get(wanted.name)) is not None:
            return self._copy(file, staged, wanted)
        proof = proof_of(file, wanted)
        if there is None and is_new:
            try:
                return self._send(file, wanted, proof, is_new=True)
            except RemoteExistsError:  # of another push, or of this one, whose answer was lost
                there = self.bucket.info(wanted.name)
        if there is not None and there.size_bytes == wanted.size_bytes and self._is_sent(wanted, there.etag, proof):
            return self._done(wanted, there.etag, "kept")
        if there is not None and is_new:
            raise RemoteExistsError(
                f"{self.bucket.url / wanted.name} is there with {there.size_bytes} bytes and etag {there.etag}, which "
                f"are not the {wanted.size_bytes} bytes of xxh3-128 {wanted.xxh3_128} of {file}: another cache, or "
                f"the beginning of one, lies there; push to another URL, or remove what is below {self.bucket.url}"
            )
        return self._send(file, wanted, proof, is_new=False)

    def _send(self, file: HeldFile, wanted: WantedFile, proof: Proof, *, is_new: bool) -> None:
        etag = self.bucket.put(wanted.name, file.path, create=is_new)
        if not self._is_sent(wanted, etag, proof):
            raise RemoteError(
                f"{self.bucket.url / wanted.name} was sent and is not the {wanted.size_bytes} bytes of xxh3-128 "
                f"{wanted.xxh3_128} of {file}; run the command again"
            )
        self._done(wanted, etag, "moved")

    def _copy(self, file: HeldFile, staged: StagedObjects, wanted: WantedFile) -> None:
        """Makes an object by a copy inside of the store, unless it is one."""
        there = self.there.get(wanted.name)
        if there is not None and there.size_bytes == wanted.size_bytes and self._is_copied(staged, there.etag, wanted):
            return self._done(wanted, there.etag, "kept")
        if wanted.size_bytes > MAX_COPY:
            download_staged(staged, wanted, file.path, self.bucket.settings)
            return self._send(file, wanted, proof_of(file.path, wanted), is_new=False)
        made = self.bucket.copy(staged.url, wanted.name, size_bytes=wanted.size_bytes)
        if made.size_bytes != wanted.size_bytes or not self._is_copied(staged, made.etag, wanted):
            raise RemoteError(
                f"{self.bucket.url / wanted.name} was copied from {staged.url} and is not the {wanted.size_bytes} "
                f"bytes of xxh3-128 {wanted.xxh3_128}; run the command again"
            )
        return self._done(wanted, made.etag, "linked")

    def _is_copied(self, staged: StagedObjects, etag: str, wanted: WantedFile) -> bool:
        if not self.verify and staged.is_copied(etag) is not False:
            return True
        self.tally.add_read_back(wanted.size_bytes)
        return hash_object(self.bucket, wanted.name) == wanted.xxh3_128

    def _is_sent(self, wanted: WantedFile, etag: str, proof: Proof) -> bool:
        if not self.verify and proof.holds(etag):
            return True
        self.tally.add_read_back(wanted.size_bytes)
        return hash_object(self.bucket, wanted.name) == wanted.xxh3_128

    def _done(self, wanted: WantedFile, etag: str, kind: Kind) -> None:
        self.etags[wanted.name] = etag
        self.journal.add(wanted, etag)
        self.tally.add(kind, wanted.size_bytes)

    def _compare(self) -> None:
        """Raises RemoteError where something below the URL is no longer what this push has found or sent."""
        self.there = self._listed()
        for _, wanted in self.files:
            found, sent = self.there.get(wanted.name), self.etags[wanted.name]
            if found is None or found.size_bytes != wanted.size_bytes or (sent and found.etag != sent):
                now = "gone" if found is None else f"{found.size_bytes} bytes of etag {found.etag}"
                raise RemoteError(
                    f"{self.bucket.url / wanted.name} was {wanted.size_bytes} bytes of etag {sent} and is {now}: "
                    "somebody else writes there; run the command again when they are done, or push to another URL"
                )

    def _seal(self) -> bool:
        """Puts metadata.json; says whether this push did, and not another one of the same cache."""
        try:
            self.bucket.put(FILE_NAME, self.metadata, create=True)
        except RemoteExistsError:
            self._is_sealed_there()
            return False
        if not self._is_sealed_there():
            raise RemoteError(f"{self.bucket.url / FILE_NAME} was sent and is not there; run the command again")
        return True


def pull(url: Url, folder: Path, settings: RemoteConfig, *, progress: bool = False) -> TransferReport:
    """Makes `folder` the sealed cache of a URL, whole, and returns what that took. An interrupted pull goes on.

    Every file is hashed before it has its name. Until all are there they lie beside `folder` under a name that is never
    read. What this node's cache or another cache beside `folder` has is linked. A damaged or incomplete copy of the
    same cache is mended. Raises CacheNotFoundError where no sealed cache lies at the URL, RemoteError where an object
    is not what its cache says, CacheMismatchError where something else stands at `folder`.
    """
    folder = folder.absolute()
    cache = open_cache(str(url), verify="never", remote=settings)
    files = _files(cache)
    metadata = (files[0][0].folder / FILE_NAME).read_bytes()
    is_whole, is_there = standing(folder, metadata, cache.key)
    with Tally([wanted.size_bytes for _, wanted in files], label="pull", progress=progress) as tally:
        if is_whole:
            for _, wanted in files:
                tally.add("kept", wanted.size_bytes)
        else:
            with occupied(folder.with_name(f".{folder.name}.pulling"), url) as aside:
                work = FolderPull(_download(Bucket(url, settings)), aside, tally, copies_beside(folder, cache))
                work.run([wanted for _, wanted in files], metadata, num_threads=settings.max_concurrent)
                publish(aside, folder, replace=is_there)
        return tally.report("pull", source=str(url), target=str(folder), key=cache.key, already_there=is_whole)


def _download(bucket: Bucket) -> Callable[[Path, WantedFile], None]:
    """Returns what makes a file of an object of its name, complete and of the hash that is wanted, or absent."""

    def make(path: Path, wanted: WantedFile) -> None:
        with write_aside(path) as file:
            for piece in pieces_of(bucket, wanted):
                write_all(file, piece)

    return make


def standing(folder: Path, metadata: bytes, key: str) -> tuple[bool, bool]:
    """Returns whether a folder is this very cache with all its files, and whether it is, perhaps without some.

    Raises CacheMismatchError where something else stands there.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return False, False
    try:
        stored = read_regular(folder / FILE_NAME)
    except (OSError, CacheError):
        stored = b""
    if stored == metadata:
        return not quick_problems(folder), True
    try:
        found = f"the cache of key {str(json.loads(stored)['key'])[:SHORT]}"
    except (ValueError, LookupError, TypeError):
        found = "no cache"
    raise CacheMismatchError(
        f"{folder} is not empty, and is {found}, wanted the cache of key {key[:SHORT]}; name another folder"
    )


@contextlib.contextmanager
def occupied(folder: Path, source: Url | Path) -> Iterator[Path]:
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


def copies_beside(folder: Path, *caches: Cache) -> dict[tuple[int, str], list[Path]]:
    """Returns files of this machine by size and xxh3-128, as their caches say: of these caches and beside `folder`."""
    found: dict[tuple[int, str], list[Path]] = {}
    for donor in [*caches, *_caches(folder.parent)]:
        for file, wanted in _files(donor):
            if file.path.is_file():
                found.setdefault((wanted.size_bytes, wanted.xxh3_128), []).append(file.path)
    return found


def _caches(root: Path) -> Iterator[Cache]:
    for sealed in sealed_caches(root):
        with contextlib.suppress(CacheError):  # a damaged one
            yield open_cache(sealed.folder, verify="never")


class FolderPull:
    """One pull into a folder of its own: what its steps share.

    make: makes a file at a path, complete and of the hash that is wanted, or absent.
    """

    def __init__(
        self,
        make: Callable[[Path, WantedFile], None],
        folder: Path,
        tally: Tally,
        copies: dict[tuple[int, str], list[Path]],
    ) -> None:
        self.make, self.folder, self.tally, self.copies = make, folder, tally, copies

    def run(self, files: Sequence[WantedFile], metadata: bytes, *, num_threads: int) -> None:
        """Makes all files in the folder, and removes what else an interrupted pull of another state left there."""
        names = {wanted.name for wanted in files}
        for path in self.folder.rglob("*"):
            if not path.is_dir() and str(path.relative_to(self.folder)) not in names:
                path.unlink()
        for parent in {(self.folder / name).parent for name in names}:
            parent.mkdir(exist_ok=True)
        for_each(self._place, files, num_threads=num_threads)
        write_bytes(self.folder / FILE_NAME, metadata)

    def _place(self, wanted: WantedFile) -> None:
        path = self.folder / wanted.name
        kind: Kind = "kept"
        if not _is_whole(path, wanted):
            kind = "linked" if self._linked(path, wanted) else "moved"
        if kind == "moved":
            self.make(path, wanted)
        self.tally.add(kind, wanted.size_bytes)

    def _linked(self, path: Path, wanted: WantedFile) -> bool:
        for copy in self.copies.get((wanted.size_bytes, wanted.xxh3_128), []):
            with contextlib.suppress(OSError):  # the node's cache may have let go of it
                if _is_whole(copy, wanted):
                    link_or_copy(copy, path)
                    return True
        return False


def _is_whole(path: Path, wanted: WantedFile) -> bool:
    try:
        check_file(path, {"size_bytes": wanted.size_bytes, "xxh3_128": wanted.xxh3_128}, verify=True)
    except CacheCorruptError:
        return False
    return True


def place_below(place: str, name: str) -> str:
    """Returns the place that a text names; where it ends with a slash, that of `name` below it."""
    return place + name if place.endswith("/") else place
