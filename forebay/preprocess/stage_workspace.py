"""Where the shards of a build stand, and the driver's side of a stage: what a seal reads, and what the store copies.

That is a folder, or a stage, which must be one of the cache root's bucket. No shard passes here whole. A seal downloads
what it reads of each (see `skeleton`); the store copies the shards.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forebay.config.remote import Url, is_url, parse_url
from forebay.config.tree import Config
from forebay.errors import ConfigError, RemoteError, RemoteExistsError, RemoteMissingError
from forebay.preprocess.build_report import Options
from forebay.preprocess.groups import Groups, Listing
from forebay.preprocess.listing_folder import folder_of
from forebay.preprocess.prepared import remove
from forebay.preprocess.stage import ORIGIN, Stage, StagedShard, receipt_of, remove_staged, shard_object
from forebay.preprocess.workspace import Donors, Named, Receipt, Workspace, first_whole
from forebay.steps.recipe import Recipe
from forebay.store.files import temporary_name
from forebay.store.key import digest
from forebay.store.layout import Group
from forebay.store.memo import FILE_NAME as MEMO
from forebay.store.remote.bucket.bucket import Bucket, ObjectInfo
from forebay.store.remote.carry.tally import TransferReport, for_each
from forebay.store.remote.carry.transfer import StagedObjects, push
from forebay.store.remote.mirror import Mirror, key_there
from forebay.store.remote.small_files import fetch_skeleton, skeleton_ranges
from forebay.store.seal import Contents, assemble_folder
from forebay.store.shard import ShardEntry, shard_fields, shard_name
from forebay.task_map import Map
from forebay.visible import human_bytes

logger = logging.getLogger(__name__)
_MADE_WITH = "made_with"


@dataclass
class StagedWorkspace:
    """The shards of one build in a stage, used as a `Workspace`.

    local: a folder of this node for what the driver makes. root: where the cache is sealed. prepared: where
    the prepared build is. verify, progress: of the push.
    """

    stage: Stage
    local: Workspace
    root: Url
    prepared: Url
    groups: Groups
    verify: bool = False
    progress: bool = False
    shards: dict[str, StagedShard] = field(default_factory=dict)
    receipts: dict[str, Receipt] = field(default_factory=dict)
    _listed: dict[str, ObjectInfo] = field(default_factory=dict)
    _is_occupied: bool = False

    @property
    def folder(self) -> Path:
        """A folder of this node for what is being made."""
        return self.local.folder

    @property
    def name(self) -> str:
        """Its URL."""
        return str(self.stage.url)

    def absent(self, wanted: Sequence[Named]) -> list[Named]:
        """Returns those of these shards that are not staged now, by a listing.

        Raises RemoteMissingError where the stage has been removed since it was occupied.
        """
        self._listed = self.stage.listed()
        if self._is_occupied and ORIGIN not in self._listed:
            raise RemoteMissingError(
                f"{self.name} is gone: another builder has sealed its shards, or somebody has removed them; run the "
                "command again"
            )
        for group, key in wanted:
            if key in self.shards and not self.shards[key].is_at(self._listed.get(shard_object(group, key))):
                del self.shards[key]
        return [named for named in wanted if not self._is_listed(named)]

    def load(self, wanted: Sequence[Named], map_: Map = map) -> list[Receipt | None]:  # noqa: ARG002
        """Returns the receipt of every shard that is staged and whole, else None: a listing, and a request a shard."""
        absent = set(self.absent(wanted))
        unknown = [named for named in dict.fromkeys(wanted) if named not in absent and named[1] not in self.shards]
        for_each(self._load, unknown, num_threads=self.stage.settings.max_concurrent)
        return [self.shards[key].receipt if key in self.shards else None for _, key in wanted]

    def has_all(self, wanted: Sequence[Named], map_: Map = map) -> bool:  # noqa: ARG002
        """Whether all of these shards are staged now. Raises RemoteMissingError as `absent` does."""
        return not self.absent(wanted) and None not in self.load(wanted)

    def _is_listed(self, named: Named) -> bool:
        name = shard_object(*named)
        return name in self._listed and receipt_of(name) in self._listed

    def _load(self, named: Named) -> None:
        name, key = shard_object(*named), named[1]
        with contextlib.suppress(RemoteMissingError):
            found = StagedShard.parse(self.stage.bucket.read(receipt_of(name)), key)
            if found is not None and found.is_at(self._listed[name]):
                self.shards[key], self.receipts[key] = found, found.receipt

    def adopt(self, group: Group, key: str, donors: Donors) -> bool:
        """Stages a shard that another cache has: the store copies one of its own, one of this node is put."""
        copies = donors.get(key, [])
        for path, entry in copies:
            mirror = Mirror.of(path.parents[1])
            if mirror is None or not self._is_of_store(mirror):
                continue
            source = mirror.url / path.relative_to(mirror.folder).as_posix()
            with contextlib.suppress(RemoteMissingError):
                if self._add(self.stage.copy(group, source, Receipt(entry=entry, failures=()))):
                    return True
        donor = first_whole([copy for copy in copies if copy[0].is_file()])
        return donor is not None and self._add(self.stage.put(group, donor[0], Receipt(entry=donor[1], failures=())))

    def _is_of_store(self, mirror: Mirror) -> bool:
        here, there = self.stage, mirror
        return (there.url.scheme, there.url.bucket, there.settings.endpoint) == (
            here.url.scheme,
            here.url.bucket,
            here.settings.endpoint,
        )

    def _add(self, shard: StagedShard | None) -> bool:
        if shard is None:
            return False
        key = shard.receipt.entry.key
        self.shards[key], self.receipts[key] = shard, shard.receipt
        return True

    def find_donors(
        self, root: Path, wanted: set[str], *, recipe_key: str, here: Mapping[Group, Mapping[str, Any]]
    ) -> Donors:
        """Returns where shards of these keys stand, as a folder's workspace finds them."""
        return self.local.find_donors(root, wanted, recipe_key=recipe_key, here=here)

    @contextlib.contextmanager
    def occupied(self) -> Iterator[None]:
        """Puts what tells others whose stage it is. The folder of this node is there until the block ends."""
        try:
            with self.local.occupied():
                self.stage.bucket.put(ORIGIN, self.local.origin.encode("ascii"))
                self._is_occupied = True
                yield
        finally:
            self._is_occupied = False
            self.local.remove()

    def finished(self, wanted: Mapping[Group, Sequence[str]]) -> dict[Group, list[tuple[Path, ShardEntry]]]:
        """Downloads of these shards, by key, all but large values, and returns the files and what they are."""
        scratch = temporary_name(self.folder / "seal")
        for group in wanted:
            (scratch / group).mkdir(parents=True)
        sizes: list[int] = []
        units = sorted({(group, key) for group, keys in wanted.items() for key in keys})
        most = self.stage.settings.max_concurrent
        for_each(lambda named: sizes.append(self._fetch(*named, scratch)), units, num_threads=most)
        whole = sum(self.receipts[key].entry.size_bytes for _, key in units)
        logger.info("read %s of %d shards of %s for the seal", human_bytes(sum(sizes)), len(units), human_bytes(whole))
        return {
            group: [(scratch / shard_object(group, key), self.receipts[key].entry) for key in keys]
            for group, keys in wanted.items()
        }

    def _fetch(self, group: Group, key: str, scratch: Path) -> int:
        name, shard = shard_object(group, key), self.shards[key]
        fields = shard_fields(self.groups.fields(), group)
        ranges = skeleton_ranges(shard.receipt.entry, fields, kept=self.groups.read_values)
        return fetch_skeleton(self.stage.bucket, name, scratch / name, ranges, etag=self._listed[name].etag)

    def seal(self, target: Path, contents: Contents, *, replace: bool) -> tuple[str, TransferReport | None]:  # noqa: ARG002
        """Makes the sealed cache below the root, under the name of `target`: its shards are copied by the store.

        A push does it, with the claims of a push, so of two drivers one wins and both have the same cache. A cache that
        stands there is never replaced.
        """
        url = self.root / target.name
        folder = temporary_name(self.folder / target.name)
        assemble_folder(folder, self._decided(contents))
        staged = {
            shard_name(group, index): self._staged(group, entry.key)
            for group, shards in contents.shards.items()
            for index, (_, entry) in enumerate(shards)
        }
        settings = self.stage.settings
        try:
            transfer = push(folder, url, settings, staged=staged, verify=self.verify, progress=self.progress)
        except RemoteExistsError:
            if key_there(url, settings) != contents.document["key"]:
                raise
            logger.warning("another builder has sealed %s meanwhile: that one is used", url)
            return str(url), None
        logger.info("sealed %s", url)
        return str(url), transfer

    def _staged(self, group: Group, key: str) -> StagedObjects:
        shard = self.shards[key]
        return StagedObjects(url=self.stage.url / shard_object(group, key), proof=shard.proof, etag=shard.etag)

    def _decided(self, contents: Contents) -> Contents:
        """Returns the contents with what the first driver that came to seal them has said where nodes differ.

        Stats of files and versions of libraries are those of one node. Decided once, an interrupted seal goes on from
        any node, and two drivers seal the same bytes.
        """
        keys = {group: [entry.key for _, entry in shards] for group, shards in contents.shards.items()}
        name = f"seal-{digest(keys)[:16]}.json"
        own = {MEMO: base64.b64encode(contents.files[MEMO]).decode("ascii"), _MADE_WITH: contents.document[_MADE_WITH]}
        data = json.dumps(own, sort_keys=True).encode("ascii")
        try:
            self.stage.bucket.put(name, data, create=True)
        except RemoteExistsError:
            data = self.stage.bucket.read(name)
        found: dict[str, Any] = json.loads(data)
        return replace(
            contents,
            files={**contents.files, MEMO: base64.b64decode(found[MEMO])},
            document={**contents.document, _MADE_WITH: found[_MADE_WITH]},
        )

    def remove(self) -> None:
        """Removes the build's objects, and the folder of this node."""
        self.stage.remove()
        remove_staged(self.prepared, self.stage.settings)
        self.local.remove()

    def remove_superseded(self) -> None:
        """Removes the stages of the same origin, whose builds stopped for sources that have changed since."""
        self.local.remove_superseded()
        parent = Bucket(self.stage.url.parent, self.stage.settings)
        try:
            names = [name for name in parent.level()[1] if name != self.stage.url.name]
            for name in names:
                with contextlib.suppress(RemoteMissingError):
                    if parent.read(f"{name}/{ORIGIN}") == self.local.origin.encode("ascii"):
                        replace(self.stage, url=parent.url / name).remove()
        except RemoteError as err:
            logger.warning("%s: earlier stages are left there: %s", parent.url, err)


_SUFFIX = "-stage"
"""Ends the name of a driver's own folder: shards of a build without a stage stand in the one without it."""


def check_stage(config: Config, text: str) -> None:
    """Raises ConfigError for a stage that is no folder of the bucket that the cache root lies in."""
    command = f"forebay preprocess {config.named}"
    if not is_url(text):
        raise ConfigError(
            f"--stage {text} is a folder of this machine; where all nodes share it, no stage is needed: "
            f"{command} --cache-root {text}; else name one of the bucket: --stage s3://bucket/stage"
        )
    stage = parse_url(text)
    if stage.is_web:
        raise ConfigError(f"--stage {stage}: nothing is put to a web server; name a folder of s3://, gs:// or az://")
    if config.remote_root is None:
        raise ConfigError(
            f"--stage {stage}: the cache root is {config.run.cache_root}, a folder of this machine, and the cache is "
            f"sealed in the bucket of its stage; run: {command} --stage {stage} --cache-root "
            f"{stage.scheme}://{stage.bucket}/caches, then forebay cache pull"
        )
    root = parse_url(config.remote_root)
    if (stage.scheme, stage.bucket) != (root.scheme, root.bucket):
        raise ConfigError(
            f"--stage {stage} is in another bucket than the cache root {root}, and a store copies within one; run: "
            f"{command} --stage {root.scheme}://{root.bucket}/stage"
        )
    if _is_inside(stage, root) or _is_inside(root, stage):
        raise ConfigError(
            f"--stage {stage} and the cache root {root} lie one in the other, and what is below a root are caches; "
            f"run: {command} --stage {root.scheme}://{root.bucket}/"
            + ("stage" if root.key.partition("/")[0] != "stage" else "staged")
        )


def _is_inside(one: Url, other: Url) -> bool:
    return not other.key or f"{one.key}/".startswith(f"{other.key}/")


ShardPlace = Workspace | StagedWorkspace
"""Where the finished shards of a build stand until the cache is sealed: a folder, or a stage in a store."""


def shard_place(config: Config, options: Options, listing: Listing, *, folder: Path, origin: str) -> ShardPlace:
    """Returns where the shards of a build stand.

    folder: of this machine, whose name a stage has too. origin: names what the build is of, whatever its content.
    """
    if options.stage is None:
        return Workspace(folder, origin)
    url = parse_url(options.stage)
    return StagedWorkspace(
        stage=Stage(url=url / folder.name, settings=config.remote).knowing(listing.files.paths),
        local=Workspace(folder.with_name(f"{folder.name}{_SUFFIX}"), origin),
        root=parse_url(str(config.remote_root)),
        prepared=url / folder_of(config, listing.recipe).name,
        groups=listing.groups,
        verify=options.verify,
        progress=options.progress,
    )


def remove_stage(config: Config, options: Options, recipe: Recipe, name: str) -> None:
    """Removes what a driver left in the stage that was killed after it had sealed. name: of the build's folder."""
    if options.stage is not None:
        url = parse_url(options.stage)
        Stage(url=url / name, settings=config.remote).remove()
        remove_staged(url / folder_of(config, recipe).name, config.remote)
        remove(config, recipe)
