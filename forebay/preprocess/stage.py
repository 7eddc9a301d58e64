"""The objects of a build's stage: what a worker on any node puts there, and what is known of it by few requests.

A shard is `<stage>/<key>/<group>/<shard key>.tdz`. Its receipt is put beside it when the shard is there, so a receipt
means a whole shard. The bytes of a shard are decided by its key: two workers that make one put the same. A prepared
build lies in `<stage>/prepared-<id>/`: one node lists and hashes the raw data, and the parts of all nodes read that.
Tables have their hash in their names, and `prepared.json` is put last, so of two nodes no mixture is read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from forebay.config.remote import RemoteConfig, Url
from forebay.config.tree import Config
from forebay.errors import ConfigError, RemoteError, RemoteExistsError, RemoteMissingError
from forebay.preprocess.listing_folder import COPY_OF, DOCUMENT, folder_of, prepared_document
from forebay.preprocess.prepared import Prepared, load, locked, save
from forebay.preprocess.workspace import Receipt, receipt_from_json, receipt_to_json
from forebay.steps.recipe import Recipe
from forebay.store.files import sweep, temporary_name, write_bytes
from forebay.store.layout import Group
from forebay.store.remote.bucket.bucket import Bucket, ObjectInfo, find, find_bytes
from forebay.store.remote.carry.proof import Proof, hash_object, proof_of, save_object
from forebay.store.remote.carry.tally import for_each
from forebay.store.remote.node.node import WantedFile
from forebay.store.remote.raw.arriving import Mirrors, mirrors_in, rebased
from forebay.store.source_files import SourceFile

logger = logging.getLogger(__name__)
ORIGIN = "origin"
"""Object of a stage that names what the build is of, whatever its content: recipe and manifests."""
_OURS = re.compile(rf"{ORIGIN}|seal-[0-9a-f]{{16}}\.json|[a-z][a-z0-9_]{{0,31}}/[0-9a-f]{{64}}\.(?:tdz|json)")
_SCRATCH = "stage"
"""Folder of a node below `remote.shard_dir` in which workers make shards before these are put."""
_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedShard:
    """A shard of a stage. etag: of the object, when its bytes were proven; proof: what S3 calls these bytes."""

    receipt: Receipt
    etag: str
    proof: Proof | None

    def is_at(self, info: ObjectInfo | None) -> bool:
        """Returns whether an object is this shard, as far as a store says without a read."""
        if info is None or info.size_bytes != self.receipt.entry.size_bytes:
            return False
        same = info.etag.strip('"') == self.etag.strip('"')
        return same or (self.proof is not None and self.proof.holds(info.etag))

    def dump(self) -> bytes:
        """Returns the object that tells of it."""
        proof = None if self.proof is None else [self.proof.whole, self.proof.in_parts]
        document = {**receipt_to_json(self.receipt), "etag": self.etag, "proof": proof}
        return json.dumps(document).encode("ascii")

    @classmethod
    def parse(cls, data: bytes, key: str) -> StagedShard | None:
        """Returns what an object tells of the shard of a key; None where it is no such object."""
        try:
            document = json.loads(data)
            receipt = receipt_from_json(document, key)
            proof = None if document["proof"] is None else Proof(*map(str, document["proof"]))
            return None if receipt is None else cls(receipt=receipt, etag=str(document["etag"]), proof=proof)
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The stage of one build, as a worker on any node needs it; it holds no credentials.

    url: `<stage>/<key>`. mirrors: the folders of the node that made the tasks in which paths of raw data lie, with
    the URL that each stands for; another node has them elsewhere.
    """

    url: Url
    settings: RemoteConfig
    mirrors: Mirrors = ()

    @property
    def bucket(self) -> Bucket:
        """Where its objects are."""
        return _bucket(self.url, self.settings, os.getpid())

    def knowing(self, paths: Iterable[str]) -> Stage:
        """Returns the stage for tasks that read these files of this node."""
        return replace(self, mirrors=mirrors_in(paths))

    def here(self, files: Sequence[SourceFile]) -> Sequence[SourceFile]:
        """Returns the files of a task with the paths that they have on this node."""
        return rebased(files, self.mirrors, self.settings)

    def made(self, group: Group, key: str, make: Callable[[Path], Receipt]) -> tuple[Receipt, bool]:
        """Returns the receipt of a shard, which is staged then, and whether this call made it.

        make: makes the shard below a folder of this node, as `<group>/<key>.tdz`. Raises RemoteError or ConfigError,
        with the name of this machine, where the stage cannot be read or written.
        """
        with self._naming_host():
            found = self.staged(group, key)
        if found is not None:
            return found.receipt, False
        with self._scratch(group) as folder:
            receipt = make(folder)
            with self._naming_host():
                self.put(group, folder / shard_object(group, key), receipt)
        return receipt, True

    def staged(self, group: Group, key: str) -> StagedShard | None:
        """Returns a shard that is staged and whole, by two requests. Raises RemoteError."""
        name = shard_object(group, key)
        told = find_bytes(self.bucket, receipt_of(name))
        found = None if told is None else StagedShard.parse(told, key)
        return found if found is not None and found.is_at(find(self.bucket, name)) else None

    def put(self, group: Group, path: Path, receipt: Receipt) -> StagedShard:
        """Makes a file of this node a staged shard. Raises CacheCorruptError where it is not what its receipt says."""
        entry = receipt.entry
        name = shard_object(group, entry.key)
        wanted = WantedFile(name=name, size_bytes=entry.size_bytes, xxh3_128=entry.xxh3_128)
        proof = proof_of(path, wanted)
        etag = self.bucket.put(name, path)
        if not proof.holds(etag) and (found := hash_object(self.bucket, name)) != entry.xxh3_128:
            raise RemoteError(
                f"{self.url / name} was sent and has xxh3-128 {found}, wanted {entry.xxh3_128}; run the command again"
            )
        return self._tell(name, StagedShard(receipt=receipt, etag=etag, proof=proof))

    def copy(self, group: Group, source: Url, receipt: Receipt) -> StagedShard | None:
        """Makes a shard of a cache of the same bucket a staged one; None where it is not there as its cache says."""
        name = shard_object(group, receipt.entry.key)
        made = self.bucket.copy(source, name, size_bytes=receipt.entry.size_bytes)
        if made.size_bytes != receipt.entry.size_bytes:
            return None
        return self._tell(name, StagedShard(receipt=receipt, etag=made.etag, proof=None))

    def listed(self) -> dict[str, ObjectInfo]:
        """Returns the objects of the build, by name; others below its URL are named in the log and left alone."""
        found: dict[str, ObjectInfo] = {}
        foreign: list[str] = []
        for info in self.bucket.objects():
            if _OURS.fullmatch(info.name):
                found[info.name] = info
            elif len(foreign) <= _NAMED:
                foreign.append(info.name)
        if foreign:
            named = ", ".join(foreign[:_NAMED]) + (", and more" if len(foreign) > _NAMED else "")
            logger.warning("%s holds objects that are not of a build and are left alone: %s", self.url, named)
        return found

    def remove(self) -> None:
        """Removes the build's objects, those that tell of a shard first. A store that refuses is named in the log."""
        names = sorted(self.listed(), key=lambda name: (name.endswith(".tdz"), name))
        try:
            self.bucket.remove(names)
        except RemoteError as err:
            logger.warning("%s is not needed any more and could not be removed: %s", self.url, err)

    def _tell(self, name: str, shard: StagedShard) -> StagedShard:
        self.bucket.put(receipt_of(name), shard.dump())
        return shard

    @contextlib.contextmanager
    def _scratch(self, group: Group) -> Iterator[Path]:
        """Yields a folder of this node that is removed at the end; one of a killed worker goes when another begins."""
        root = self.settings.folder / _SCRATCH
        root.mkdir(parents=True, exist_ok=True)
        sweep(root)
        folder = temporary_name(root / self.url.name)
        (folder / group).mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _naming_host(self) -> Iterator[None]:
        try:
            yield
        except (RemoteError, ConfigError) as err:
            err.args = (f"{socket.gethostname()} cannot use the stage: {err}",)
            raise


def shard_object(group: Group, key: str) -> str:
    """Returns the name of a shard below its stage."""
    return f"{group}/{key}.tdz"


def receipt_of(name: str) -> str:
    """Returns the name of the object that tells of a shard."""
    return f"{name.removesuffix('.tdz')}.json"


@functools.lru_cache(maxsize=16)
def _bucket(url: Url, settings: RemoteConfig, pid: int) -> Bucket:  # noqa: ARG001  a fork connects anew
    return Bucket(url, settings)


_BEGUN = "begun"
"""Object that says which node has prepared last, or does now."""
_OF_LISTING = re.compile(rf"{re.escape(DOCUMENT)}|{_BEGUN}|[a-z]+-[0-9a-f]{{32}}\.arrow")


def staged_prepared(config: Config, recipe: Recipe, stage: Url, make: Callable[[], Prepared]) -> tuple[Prepared, bool]:
    """Returns the prepared build of a config that is in a stage, or makes it and puts it there; says whether it did.

    stage: the URL below which builds are staged. make: hashes the sources, which takes long.
    """
    folder = folder_of(config, recipe)
    folder.parent.mkdir(parents=True, exist_ok=True)
    bucket = Bucket(stage / folder.name, config.remote)
    _remove_sealed(folder, stage, config.remote)
    with locked(folder.with_suffix(".lock")):
        is_there = _downloaded(bucket, folder)
        if (found := load(config, recipe)) is not None:
            if not is_there:
                _put(bucket, folder)
            return found, False
        # Before what takes long: whether anything can be put there.
        bucket.put(_BEGUN, socket.gethostname().encode("ascii", "replace"))
        made = make()
        save(folder, made)
        try:
            _put(bucket, folder, create=not is_there)
        except RemoteExistsError:  # another node was faster: all read the same
            if _downloaded(bucket, folder) and (found := load(config, recipe)) is not None:
                return found, False
            _put(bucket, folder)
        return made, True


def _remove_sealed(folder: Path, stage: Url, settings: RemoteConfig) -> None:
    """Removes this node's copies of other prepared builds that their stage has no more: their caches are sealed."""
    for other in folder.parent.glob("prepared-*"):
        document = None if other == folder else prepared_document(other)
        is_copy = document is not None and COPY_OF in document
        if is_copy and find(Bucket(stage / other.name, settings), DOCUMENT) is None:
            shutil.rmtree(other, ignore_errors=True)


def remove_staged(url: Url, settings: RemoteConfig) -> None:
    """Removes a prepared build from a stage. url: its own. A store that refuses is named in the log."""
    bucket = Bucket(url, settings)
    try:
        names = [info.name for info in bucket.objects() if _OF_LISTING.fullmatch(info.name)]
        bucket.remove(sorted(names, key=lambda name: name != DOCUMENT))
    except RemoteError as err:
        logger.warning("%s is not needed any more and could not be removed: %s", bucket.url, err)


def _downloaded(bucket: Bucket, folder: Path) -> bool:
    """Makes a folder the prepared build of a stage, if there is one; whether there is. Raises RemoteError."""
    if (data := find_bytes(bucket, DOCUMENT)) is None:
        return False
    digest = xxhash.xxh3_128_hexdigest(data)
    with contextlib.suppress(OSError):
        if (folder / DOCUMENT).read_bytes() == data:
            return True  # this node has put it
    if (here := prepared_document(folder)) is not None and here.get(COPY_OF) == digest:
        return True
    aside = temporary_name(folder)
    aside.mkdir()
    try:
        document = json.loads(data)
        files: Mapping[str, Any] = document["files"]

        def fetch(name: str) -> None:
            save_object(bucket, WantedFile.of(_object(name, files[name]), files[name]), aside / name)

        for_each(fetch, files, num_threads=bucket.settings.max_concurrent)
        write_bytes(aside / DOCUMENT, json.dumps({**document, COPY_OF: digest}).encode("ascii"))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(aside, folder)
    except (ValueError, KeyError, TypeError, AttributeError, RemoteMissingError) as err:
        logger.warning("%s is not whole (%s): the raw data is listed again", bucket.url, err)
        return False
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return True


def _put(bucket: Bucket, folder: Path, *, create: bool = False) -> None:
    """Puts a prepared build. create: raises RemoteExistsError where one is there by now."""
    document = prepared_document(folder)
    if document is None:
        return
    files: Mapping[str, Any] = document["files"]
    most = bucket.settings.max_concurrent
    for_each(lambda name: bucket.put(_object(name, files[name]), folder / name), files, num_threads=most)
    bucket.put(DOCUMENT, (folder / DOCUMENT).read_bytes(), create=create)


def _object(name: str, entry: Mapping[str, Any]) -> str:
    """Returns what a table is called in a stage. Raises ValueError for a name that is of no table."""
    found = f"{name.removesuffix('.arrow')}-{entry['xxh3_128']}.arrow"
    if not _OF_LISTING.fullmatch(found):
        raise ValueError(f"{name!r} is no table of a prepared build")
    return found
