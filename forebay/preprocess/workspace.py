"""The folder of a build until the cache is sealed: finished shards by key, each with its receipt beside it.

A shard that an earlier run finished is kept, and an equal one of any cache or unfinished build under the root is
linked. A shard counts only after it was hashed again, whoever wrote it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forebay.config.remote import is_url
from forebay.config.tree import Config
from forebay.errors import CacheError, RemoteError
from forebay.preprocess.probes import is_promised, numbers_of
from forebay.store.cache import open_cache
from forebay.store.files import link_or_copy, remove_aside, remove_tree, temporary_name, write_bytes
from forebay.store.key import SHORT, digest
from forebay.store.layout import BUILDING, TEXT, Group, is_group_name
from forebay.store.lookup import sealed_caches
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.node.node import WantedFile
from forebay.store.remote.small_files import RemoteRoot
from forebay.store.seal import Contents, is_whole, seal
from forebay.store.shard import ShardEntry, entry_from_json, entry_to_json
from forebay.store.shared_disk import alone_in, is_gone, move, wait_shared
from forebay.task_map import Map

Donors = dict[str, list[tuple[Path, ShardEntry]]]
"""Where the shards of these keys stand, in sealed caches and in folders of builds."""
logger = logging.getLogger(__name__)
ORIGIN = "origin"
"""File in the folder of a build that says what it is of, see `origin_of`."""
_LOCK = "lock"
"""File in it that builders hold a shared lock on."""
_PAUSE_S = 0.01
_MUCH = 64 * 1024 * 1024
"""Bytes from which on hashing by workers, which first have to start, is quicker."""


Named = tuple[Group, str]
"""Group and key of a shard."""


@dataclass
class Workspace:
    """Shards of one build by key. What is loaded once was whole then and is remembered.

    origin: names what the build is of, whatever its content: recipe and manifests.
    """

    folder: Path
    origin: str = ""
    receipts: dict[str, Receipt] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of it, for messages."""
        return str(self.folder)

    @property
    def stage(self) -> None:
        """Shards are made in `folder` itself."""
        return None

    def path(self, group: Group, key: str) -> Path:
        """Where a shard stands."""
        return self.folder / group / f"{key}.tdz"

    def load(self, wanted: Sequence[Named], map_: Map = map) -> list[Receipt | None]:
        """Returns the receipt of every shard that is here and whole, else None; large ones are hashed by `map_`."""
        waiting = {key: group for group, key in wanted if key not in self.receipts}
        found = {key: self._read(group, key) for key, group in waiting.items()}
        here = {key: receipt for key, receipt in found.items() if receipt is not None}
        files = [(self.path(waiting[key], key), receipt.entry) for key, receipt in here.items()]
        is_much = sum(entry.size_bytes for _, entry in files) >= _MUCH
        whole = list((map_ if is_much else map)(_is_whole, files))
        self.receipts |= {key: here[key] for key, is_here in zip(here, whole, strict=True) if is_here}
        return [self.receipts.get(key) for _, key in wanted]

    def has_all(self, wanted: Sequence[Named], map_: Map = map) -> bool:
        """Whether all of these shards are here and whole. Nothing is hashed where one is not here at all."""
        return not self.absent(wanted) and None not in self.load(wanted, map_)

    def absent(self, wanted: Sequence[Named]) -> list[Named]:
        """Returns those of these shards that are not here, by one listing of each folder; others may be damaged."""
        here = {group: finished_keys(self.folder / group) for group in {group for group, _ in wanted}}
        return [(group, key) for group, key in wanted if key not in self.receipts and key not in here[group]]

    def _read(self, group: Group, key: str) -> Receipt | None:
        """Returns the receipt of a shard that is here and of the right size."""
        path = self.path(group, key)
        receipt = read_receipt(path, key)
        with contextlib.suppress(OSError):
            if receipt is not None and path.stat().st_size == receipt.entry.size_bytes:
                return receipt
        return None

    def finished(self, wanted: Mapping[Group, Sequence[str]]) -> dict[Group, list[tuple[Path, ShardEntry]]]:
        """Returns where these shards, by key, stand, and what they are."""
        return {
            group: [(self.path(group, key), self.receipts[key].entry) for key in keys] for group, keys in wanted.items()
        }

    def seal(self, target: Path, contents: Contents, *, replace: bool) -> tuple[str, None]:
        """Makes `target` the sealed cache, whose shards are linked from here."""
        sealed_here = seal(target, contents, scratch=self.folder, replace=replace)
        logger.info("%s %s", "sealed" if sealed_here else "another builder sealed", target)
        return str(target), None

    def adopt(self, group: Group, key: str, donors: Donors) -> bool:
        """Links a shard that another cache has, after re-hashing it; says whether it did."""
        copies = donors.get(key, [])
        donor = first_whole([copy for copy in copies if _mirror(copy[0]) is None]) or _fetched(copies)
        if donor is None:
            return False
        path, entry = donor
        self.path(group, key).parent.mkdir(exist_ok=True)
        try:
            link_or_copy(path, self.path(group, key))
        except FileNotFoundError:  # its cache was removed since: the shard is made instead
            logger.info("%s is gone: its shard is made again", path)
            return False
        self.receipts[key] = Receipt(entry=entry, failures=())
        save_receipt(self.path(group, key), self.receipts[key])
        return True

    def find_donors(
        self, root: Path, wanted: set[str], *, recipe_key: str, here: Mapping[Group, Mapping[str, Any]]
    ) -> Donors:
        """Returns where shards of these keys stand: in sealed caches under a root, and in the folders of other builds.

        here: constants by group; whose models gave other numbers, beyond what they promise, is passed over.
        They are not re-hashed here. Of caches in a store those of one recipe are opened: each costs a few downloads.
        """
        donors = _of_other_builds(self.folder, wanted, here)
        remote = RemoteRoot.of(root)
        for sealed in sealed_caches(root):
            if sealed.url is not None and sealed.metadata["recipe_key"] != recipe_key:
                continue
            # A damaged cache still gives the shards that are whole; one that cannot be opened gives none.
            with contextlib.suppress(CacheError, RemoteError):
                cache = open_cache(sealed.place, verify="never", remote=None if remote is None else remote.settings)
                for group in cache.groups:
                    found = [each for each in cache.shard_entries(group) if each[1].key in wanted]
                    stored = cache.constants.of(group)
                    if found and is_promised(group, stored, here.get(group, {}), where=Path(sealed.place)):
                        for path, entry in found:
                            donors.setdefault(entry.key, []).append((path, entry))
        return donors

    @contextlib.contextmanager
    def occupied(self) -> Iterator[None]:
        """Makes the folder and holds a shared lock in it, so that no other builder removes it as left over."""
        while True:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                # Of a file: NFS keeps locks of folders to itself.
                descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as err:  # the last builder removed it in between
                if not is_gone(err):
                    raise
                time.sleep(_PAUSE_S)
                continue
            wait_shared(descriptor)  # on a file system without locks two builders do the same work
            if self._is(descriptor):
                break
            os.close(descriptor)
        try:
            write_bytes(self.folder / ORIGIN, self.origin.encode("ascii"))
            yield
        finally:
            os.close(descriptor)

    def remove_superseded(self) -> None:
        """Removes what earlier builds of the same origin left, which stopped for sources that have changed since."""
        for folder in _listed(self.folder.parent):
            with contextlib.suppress(OSError):
                if (folder / ORIGIN).read_text() == self.origin:
                    Workspace(folder).remove(is_sealed=False)

    def remove(self, *, is_sealed: bool = True) -> None:
        """Removes the folder unless another builder is in it; the last one out removes it.

        is_sealed: all that is in it is in a cache. Where no lock tells who is in it, it goes only then: the other
        builder takes that cache.
        """
        with contextlib.suppress(OSError):
            descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if (state := alone_in(descriptor, self.folder)) == "taken":  # another builder is in it
                    return
                is_alone = state == "had"
                if is_alone or is_sealed:
                    gone = temporary_name(self.folder)
                    move(self.folder, gone)
                    if is_alone:
                        remove_tree(gone)  # what is open stays for a later sweep
                    else:  # whoever has a shard of it mapped would be killed
                        remove_aside(gone)
            finally:
                os.close(descriptor)
        with contextlib.suppress(OSError):  # not empty: of another build
            self.folder.parent.rmdir()

    def _is(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.folder / _LOCK))
        except OSError:
            return False


def _listed(folder: Path) -> list[Path]:
    """Returns what is in a folder, sorted; nothing where it is gone."""
    with contextlib.suppress(OSError):
        return sorted(Path(entry.path) for entry in os.scandir(folder))
    return []


def workspace_folder(config: Config, key: str, suffix: str = "") -> Path:
    """Returns the folder in which a build's finished shards stand until the cache is sealed."""
    return config.cache_root / BUILDING / f"{key[:SHORT]}{suffix}"


def origin_of(config: Config, recipe_key: str) -> str:
    """Returns what names the builds of a config, whatever the content of its sources."""
    manifests = [name if is_url(name) else os.path.abspath(name) for name in config.source.manifests]
    return digest({"recipe": recipe_key, "manifests": manifests})


def finished_keys(folder: Path) -> set[str]:
    """Returns the keys of the shards in a group's folder that have their receipts, by the folder's listing alone."""
    try:
        names = os.listdir(folder)
    except OSError:
        return set()
    receipts = {name[:-5] for name in names if name.endswith(".json")}
    return receipts.intersection([name[:-4] for name in names if name.endswith(".tdz")])


def folders_of(folder: Path) -> list[Group]:
    """Returns the groups of which a build has shards, text last, by the listing of its folder alone."""
    names = [path.name for path in _listed(folder) if path.is_dir() and is_group_name(path.name) and path.name != PARTS]
    return sorted(names, key=lambda name: (name == TEXT, name))


PARTS = "parts"
"""The folder of a build in which its runs note what they do; no group has this name."""


def workspaces_of(config: Config, recipe_key: str) -> list[Path]:
    """Returns the folders of unfinished builds of a config, of whatever content its sources had, newest first."""
    origin, found = origin_of(config, recipe_key), []
    for path in (folder / ORIGIN for folder in _listed(config.cache_root / BUILDING)):
        with contextlib.suppress(OSError):
            if path.read_text() == origin:
                found.append((path.stat().st_mtime_ns, path.parent))
    return [folder for _, folder in sorted(found, reverse=True)]


def _is_whole(shard: tuple[Path, ShardEntry]) -> bool:
    return is_whole(*shard)


def _of_other_builds(own: Path, wanted: set[str], here: Mapping[Group, Mapping[str, Any]]) -> Donors:
    """Returns the shards of these keys that other builds left unfinished, before their sources changed."""
    donors: Donors = {}
    builds = [build for build in _listed(own.parent) if build != own]
    for folder in [group for build in builds for group in _listed(build) if is_group_name(group.name)]:
        paths = [path for path in _listed(folder) if path.suffix == ".tdz" and path.stem in wanted]
        stored = numbers_of(folder.parent).get(folder.name, {})
        if paths and is_promised(folder.name, stored, here.get(folder.name, {}), where=folder.parent):
            for path in paths:
                if (receipt := read_receipt(path, path.stem)) is not None:
                    donors.setdefault(path.stem, []).append((path, receipt.entry))
    return donors


def first_whole(copies: Sequence[tuple[Path, ShardEntry]]) -> tuple[Path, ShardEntry] | None:
    """Returns a copy that is whole. All are checked, links to the same bytes once, and every damaged one is named."""
    seen: dict[tuple[int, int] | None, bool] = {}
    whole = []
    for path, entry in copies:
        inode = _inode(path)
        if inode not in seen:
            seen[inode] = is_whole(path, entry)
        if seen[inode]:
            whole.append((path, entry))
        else:
            logger.warning("%s is damaged; to mend it: forebay preprocess --verify with the config of that cache", path)
    return whole[-1] if whole else None


def _mirror(shard: Path) -> Mirror | None:
    """Returns the mirror that a shard is to be in and is not in yet, else None."""
    return None if os.path.isfile(shard) else Mirror.of(shard.parents[1])


def _fetched(copies: list[tuple[Path, ShardEntry]]) -> tuple[Path, ShardEntry] | None:
    """Returns the first copy that a store gives; it is compared with its hash while it is downloaded."""
    for path, entry in copies:
        if (mirror := _mirror(path)) is not None:
            name = path.relative_to(mirror.folder).as_posix()
            with contextlib.suppress(RemoteError):
                mirror.require(WantedFile(name=name, size_bytes=entry.size_bytes, xxh3_128=entry.xxh3_128))
                return path, entry
    return None


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A sample that a step refused: counted by reason, listed, never the end of a build."""

    sample_id: str
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """The facts of a finished shard, kept as `<key>.json` beside it."""

    entry: ShardEntry
    failures: tuple[Failure, ...]


def load_receipt(path: Path, key: str) -> Receipt | None:
    """Returns the receipt of a shard that is on disk and whole, else None: a name proves nothing after a crash."""
    receipt = read_receipt(path, key)
    return receipt if receipt is not None and is_whole(path, receipt.entry) else None


def read_receipt(path: Path, key: str) -> Receipt | None:
    """Returns the receipt beside a shard of this key, None where there is none; the shard is not looked at."""
    try:
        document = json.loads(path.with_suffix(".json").read_bytes())
    except (OSError, ValueError):
        return None
    return receipt_from_json(document, key)


def receipt_from_json(document: Any, key: str) -> Receipt | None:
    """Returns the receipt of a document; None where that is of no shard of this key."""
    try:
        entry = entry_from_json(document["entry"])
        failures = tuple(Failure(**failure) for failure in document["failures"])
    except (ValueError, KeyError, TypeError):
        return None
    return Receipt(entry=entry, failures=failures) if entry.key == key else None


def save_receipt(path: Path, receipt: Receipt) -> None:
    """Keeps the receipt beside its shard."""
    write_bytes(path.with_suffix(".json"), json.dumps(receipt_to_json(receipt)).encode("ascii"))


def receipt_to_json(receipt: Receipt) -> dict[str, Any]:
    """Returns the document of a receipt."""
    return {"entry": entry_to_json(receipt.entry), "failures": [asdict(failure) for failure in receipt.failures]}
