"""Where the finished shards of a build stand until the cache is sealed: what a run asks of a folder, and of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from forebay.preprocess.stage import Stage
from forebay.preprocess.workspace import Donors, Named, Receipt
from forebay.store.layout import Group
from forebay.store.remote.carry.tally import TransferReport
from forebay.store.seal import Contents
from forebay.store.shard import ShardEntry
from forebay.task_map import Map


class ShardPlace(Protocol):
    """Where the finished shards of a build stand until the cache is sealed: a folder, or a stage in a store."""

    receipts: dict[str, Receipt]
    """Of the shards that are known to be there, by key."""

    @property
    def folder(self) -> Path:
        """A folder of this machine for what is being made."""
        ...

    @property
    def name(self) -> str:
        """The name of the place, for messages."""
        ...

    @property
    def stage(self) -> Stage | None:
        """Where workers put shards, if that is not `folder`."""
        ...

    def absent(self, wanted: Sequence[Named]) -> list[Named]:
        """Returns those of these shards that are not there; no byte of a shard is read."""
        ...

    def load(self, wanted: Sequence[Named], map_: Map = map) -> list[Receipt | None]:
        """Returns the receipt of every shard that is there and whole, else None. map_: for what takes long."""
        ...

    def has_all(self, wanted: Sequence[Named], map_: Map = map) -> bool:
        """Whether all of these shards are there now; their receipts are known then."""
        ...

    def adopt(self, group: Group, key: str, donors: Donors) -> bool:
        """Makes a shard of one that another cache or build has; says whether it did."""
        ...

    def find_donors(self, root: Path, wanted: set[str], *, recipe_key: str) -> Donors:
        """Returns where shards of these keys stand in other places."""
        ...

    def occupied(self) -> AbstractContextManager[None]:
        """Keeps others from removing the place as left over, as long as the block lasts."""
        ...

    def finished(self, wanted: Mapping[Group, Sequence[str]]) -> Mapping[Group, Sequence[tuple[Path, ShardEntry]]]:
        """Returns files of this machine from which the table fields of these shards, by key, can be read."""
        ...

    def seal(self, target: Path, contents: Contents, *, replace: bool) -> tuple[str, TransferReport | None]:
        """Makes the sealed cache; returns what to call it, and how it got there if it is in a store."""
        ...

    def remove(self) -> None:
        """Removes the place, whose cache is sealed now."""
        ...

    def remove_superseded(self) -> None:
        """Removes what earlier builds of the same manifests left, which stopped for sources that changed since."""
        ...
