"""A build before its first shard is made: what is listed and hashed, and where shards begin and end.

It is written once, under the cache root, and read by every part of the build: parts hash nothing. The rows are mapped,
so many parts of one node share their memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from forebay.config.tree import Config
from forebay.errors import BuildError, ConfigError
from forebay.preprocess.group import Cut
from forebay.preprocess.groups import Groups, Listing
from forebay.preprocess.listing_folder import (
    DOCUMENT,
    FORMAT,
    files_now,
    folder_of,
    manifest_in,
    prepared_document,
    save_listing,
    submission_file,
    table_of,
)
from forebay.preprocess.probes import require_promise
from forebay.steps.recipe import Recipe
from forebay.store.files import put_away
from forebay.store.key import SHORT
from forebay.store.layout import Constants, Group
from forebay.store.lookup import Sealed
from forebay.store.shared_disk import lock_for_work
from forebay.terminal import CommandReport
from forebay.visible import from_here

logger = logging.getLogger(__name__)

_CUTS_SCHEMA = pa.schema(
    {"group": pa.string(), "index": pa.int64(), "start": pa.int64(), "stop": pa.int64(), "key": pa.string()}
)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The same for all parts of a build.

    constants: what collating needs, see `Groups.constants`. host: where the probe was measured.
    """

    listing: Listing
    cuts: Sequence[Cut]
    probe: Mapping[Group, str]
    constants: Constants
    host: str

    @property
    def num_shards(self) -> int:
        """Shards of the group that has most."""
        return max(Counter(cut.group for cut in self.cuts).values(), default=0)


@dataclass(frozen=True, kw_only=True)
class PrepareReport(CommandReport):
    """The result of `forebay preprocess --prepare`; its fields are those of its JSON document."""

    key: str
    folder: str
    num_samples: int
    num_files: int
    num_shards: int
    already_prepared: bool
    seconds: float
    sealed: str | None = None
    """The cache, where that is sealed already: then nothing is prepared."""

    @classmethod
    def of_standing(cls, standing: Sealed, *, seconds: float) -> PrepareReport:
        """Returns the report of a cache that was sealed already."""
        return cls(
            key=standing.key,
            folder="",
            num_samples=standing.metadata["num_samples"],
            num_files=len(standing.sources()),
            num_shards=max(shape["num_shards"] for shape in standing.metadata["groups"].values()),
            already_prepared=False,
            seconds=seconds,
            sealed=standing.place,
        )

    def lines(self) -> Iterator[str]:
        """Yields what the command prints."""
        if self.sealed is not None:
            yield f"already sealed: {from_here(self.sealed)} ({self.num_samples} samples); nothing is to be prepared"
            return
        state = "already prepared" if self.already_prepared else "prepared"
        yield f"{state}: {self.num_samples} samples of {self.num_files} files in {self.num_shards} shards"
        yield f"key {self.key[:SHORT]}, {self.seconds:.1f} s: {from_here(self.folder)}"


def prepared(config: Config, recipe: Recipe, make: Callable[[], Prepared]) -> tuple[Prepared, bool]:
    """Returns the prepared build of a config that is on disk, or makes it; says whether this call made it.

    make: hashes the sources, which takes long.
    Of several processes that ask at once one makes it and the others wait, where the file system has locks; where it
    has none, each makes it, and all make the same.
    """
    folder = folder_of(config, recipe)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if (found := load(config, recipe)) is not None:
            return found, False
        made = make()
        save(folder, made)
        return made, True


def load(config: Config, recipe: Recipe) -> Prepared | None:
    """Returns the prepared build of a config; None where there is none, or its sources are not what they were."""
    folder = folder_of(config, recipe)
    if (document := prepared_document(folder)) is None:
        return None
    files, moved = files_now(config, folder, document)
    if moved is not None:
        logger.warning("%s is not what it was when the build was prepared: it is listed again", moved)
        return None
    manifest = manifest_in(folder, document, files)
    constants = Constants(document["constants"])
    groups = Groups.of(config, recipe).keeping(manifest.rows).measured(constants)
    listing = Listing(groups=groups, manifest=manifest, key=document["key"])
    return Prepared(
        listing=listing,
        cuts=[Cut(**row) for row in table_of(folder, "cuts").to_pylist()],
        probe=document["probe"],
        constants=constants,
        host=document["host"],
    )


def remove(config: Config, recipe: Recipe) -> None:
    """Removes the prepared build of a config, whose cache is sealed now."""
    folder = folder_of(config, recipe)
    with contextlib.suppress(OSError):
        if folder.is_dir():
            put_away(folder)
    with contextlib.suppress(OSError):
        folder.with_suffix(".lock").unlink()
    with contextlib.suppress(OSError):
        submission_file(config, recipe).unlink()


def require_parts(config: Config, num_parts: int, num_shards: int) -> None:
    """Raises ConfigError for an array of more parts than there are shards."""
    if num_parts > num_shards:
        raise ConfigError(
            f"--array {num_parts}: {config.path} has {num_shards} shards, and more parts than shards leave some "
            f"without work; run: forebay preprocess {config.named} --runner slurm --array {max(1, num_shards)}"
        )


def require_key(config: Config, key: str, wanted: str | None) -> None:
    """Raises ConfigError where the build of a config is not the one that its parts were started for.

    wanted: the first digits of the key that `--key` names; None: any.
    """
    if wanted is not None and not key.startswith(wanted):
        raise ConfigError(
            f"--key {wanted}: {config.path} gives key {key[:SHORT]} now, so its settings or its raw data are not those "
            f"that the other parts were started with; put them back, or start all parts again: forebay preprocess "
            f"{config.named} --prepare (forebay key {config.named} --explain names what differs)",
            code="FB311",
        )


def require_numerics(config: Config, made: Prepared, here: Mapping[Group, str], constants: Constants) -> None:
    """Raises BuildError where the steps give other values on this machine than on the one that prepared the build."""
    for group, value in here.items():
        if value != made.probe[group]:
            raise BuildError(
                f"the {group} steps give other values on {socket.gethostname()} (probe {value}) than on {made.host} "
                f"(probe {made.probe[group]}), where {config.path} was prepared: another CPU family, or other "
                "libraries; run all parts on machines of one kind, with the same packages; what was finished is kept",
                code="FB305",
            )
    require_promise(config.named, made.constants.groups, constants.groups, where=f"on {made.host}")


def save(folder: Path, made: Prepared) -> None:
    """Makes a folder hold a prepared build."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "key": made.listing.key,
        "host": made.host,
        "listed_at_ns": time.time_ns(),  # all files that are there are hashed
        "probe": dict(made.probe),
        "constants": made.constants.to_json(),
    }
    columns = {name: [getattr(cut, name) for cut in made.cuts] for name in _CUTS_SCHEMA.names}
    tables = {"cuts": pa.table(columns, schema=_CUTS_SCHEMA)}
    save_listing(folder, DOCUMENT, made.listing.manifest, tables=tables, document=document)


@contextlib.contextmanager
def locked(path: Path, *, patience_s: float | None = None) -> Iterator[None]:
    """Lets one process after the other into the block; where a file system has no locks, all do the same work.

    patience_s: see `lock_for_work`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        lock_for_work(descriptor, path, patience_s=patience_s)
        yield
    finally:
        os.close(descriptor)
