"""A build before its first shard is made: what is listed and hashed, and where shards begin and end.

It is written once, under the cache root, and read by every part of the build: parts hash nothing. The rows are mapped,
so many parts of one node share their memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.config.url import is_url, parse_url
from forebay.errors import BuildError, ConfigError
from forebay.preprocess.cut import Cut
from forebay.preprocess.modality import Listing, modality_of
from forebay.preprocess.sources.rows import Manifest
from forebay.steps.recipe import AnyRecipe
from forebay.store.files import hash_file, write_aside, write_bytes
from forebay.store.key import SHORT, digest
from forebay.store.layout import GROUPS, Array, Group
from forebay.store.lookup import Sealed
from forebay.store.memo import SIZE, Stat, is_same, stat_now
from forebay.store.remote.raw.elsewhere import mirrors_in, rebased
from forebay.store.remote.raw.sources import localized, look_up
from forebay.store.shared_disk import lock_for_work, move, seen
from forebay.store.source_files import SourceFile, listed_files
from forebay.store.temporary import remove_aside, temporary_name
from forebay.visible import from_here

logger = logging.getLogger(__name__)

_FORMAT = 1
DOCUMENT = "prepared.json"
COPY_OF = "copy_of"
"""In the document of a build that another node has prepared: the digest of that node's document."""
_FILES_SCHEMA = pa.schema(
    [
        pa.field("name", pa.large_binary()),
        pa.field("path", pa.large_binary()),
        pa.field("entry", pa.int32()),
        pa.field("listed", pa.bool_()),
        pa.field("stat", pa.list_(pa.int64())),
        pa.field("xxh3_128", pa.string()),
    ]
)
_CUTS_SCHEMA = pa.schema(
    [pa.field("start", pa.int64()), pa.field("stop", pa.int64()), pa.field("num_media", pa.int64())]
    + [pa.field(group, pa.string()) for group in GROUPS]
)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The same for all parts of a build.

    constants: what collating needs, see `Modality.constants`. host: where the probe was measured.
    """

    listing: Listing
    cuts: Sequence[Cut]
    probe: Mapping[Group, str]
    constants: Mapping[str, Any]
    host: str


@dataclass(frozen=True, kw_only=True)
class PrepareReport:
    """What `forebay preprocess --prepare` found; its fields are those of its JSON document."""

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
            num_shards=standing.metadata["num_shards"],
            already_prepared=False,
            seconds=seconds,
            sealed=standing.place,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON document."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yields what the command prints."""
        if self.sealed is not None:
            yield f"already sealed: {from_here(self.sealed)} ({self.num_samples} samples); nothing is to be prepared"
            return
        state = "already prepared" if self.already_prepared else "prepared"
        yield f"{state}: {self.num_samples} samples of {self.num_files} files in {self.num_shards} shards"
        yield f"key {self.key[:SHORT]}, {self.seconds:.1f} s: {from_here(self.folder)}"


def prepared(config: Config, recipe: AnyRecipe, make: Callable[[], Prepared]) -> tuple[Prepared, bool]:
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


def load(config: Config, recipe: AnyRecipe) -> Prepared | None:
    """Returns the prepared build of a config; None where there is none, or its sources are not what they were."""
    folder = folder_of(config, recipe)
    if (document := read_document(folder)) is None:
        return None
    files, moved = _files_now(config, folder, document)
    if moved is not None:
        logger.warning("%s is not what it was when the build was prepared: it is listed again", moved)
        return None
    manifest = Manifest(
        files=files,
        rows=_table(folder, "rows"),
        rejected=_table(folder, "rejected"),
        absent=tuple(document["absent"]),
        images=_table(folder, "images") if "images.arrow" in document["files"] else None,
        unused=document["unused"],
    )
    hashes = [file.xxh3_128 for file in files]
    modality = modality_of(config, recipe)
    listing = Listing(recipe=recipe, modality=modality, manifest=manifest, hashes=hashes, key=document["key"])
    return Prepared(
        listing=listing,
        cuts=_cuts(_table(folder, "cuts")),
        probe=document["probe"],
        constants=document["constants"],
        host=document["host"],
    )


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A prepared build without its rows. moved: a source file that is not what it was then; None: none."""

    key: str
    host: str
    num_samples: int
    cuts: pa.Table
    moved: str | None

    def num_rows(self, group: Group) -> Array:
        """Returns the rows of every shard of a group."""
        if group == "media":
            return self._numbers("num_media")
        rows: Array = self._numbers("stop") - self._numbers("start")
        return rows

    def _numbers(self, name: str) -> Array:
        # Arrow's own conversion loads pandas.
        column = self.cuts[name].combine_chunks()
        return np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)


def outline(config: Config, recipe: AnyRecipe) -> Outline | None:
    """Returns the outline of a config's prepared build, also where its sources have changed; None if there is none."""
    folder = folder_of(config, recipe)
    if (document := read_document(folder)) is None:
        return None
    return Outline(
        key=document["key"],
        host=document["host"],
        num_samples=len(_table(folder, "rows")),
        cuts=_table(folder, "cuts"),
        moved=_files_now(config, folder, document)[1],
    )


def remove(config: Config, recipe: AnyRecipe) -> None:
    """Removes the prepared build of a config, whose cache is sealed now."""
    folder = folder_of(config, recipe)
    with contextlib.suppress(OSError):
        if folder.is_dir():
            _put_away(folder)
    with contextlib.suppress(OSError):
        folder.with_suffix(".lock").unlink()
    with contextlib.suppress(OSError):
        submission_file(config, recipe).unlink()


def folder_of(config: Config, recipe: AnyRecipe) -> Path:
    """Returns where the prepared build of a config is, or would be: named by all but the sources' content."""
    manifests = [name if is_url(name) else os.path.abspath(name) for name in config.source.manifests]
    named = {
        "format": _FORMAT,
        "recipe": recipe.key,
        "manifests": manifests,
        "confined": config.source.confined,
        "remote_identity": config.source.remote_identity,
        "rows_per_shard": config.layout.rows_per_shard,
        "codec": config.codec,
    }
    return config.cache_root / ".building" / f"prepared-{digest(named)[:SHORT]}"


def submission_file(config: Config, recipe: AnyRecipe) -> Path:
    """Returns the file that says which jobs of a cluster were last started for a config's build."""
    return folder_of(config, recipe).with_suffix(".submitted.json")


def require_parts(config: Config, num_parts: int, num_shards: int) -> None:
    """Raises ConfigError for an array of more parts than there are shards."""
    if num_parts > num_shards:
        raise ConfigError(
            f"--array {num_parts}: {config.path} has {num_shards} shards, and more parts than shards leave some "
            f"without work; run: forebay preprocess {config.path} --runner slurm --array {max(1, num_shards)}"
        )


def require_key(config: Config, key: str, wanted: str | None) -> None:
    """Raises ConfigError where the build of a config is not the one that its parts were started for.

    wanted: the first digits of the key that `--key` names; None: any.
    """
    if wanted is not None and not key.startswith(wanted):
        raise ConfigError(
            f"--key {wanted}: {config.path} gives key {key[:SHORT]} now, so its settings or its raw data are not those "
            f"that the other parts were started with; put them back, or start all parts again: forebay preprocess "
            f"{config.path} --prepare (forebay key {config.path} --explain names what differs)"
        )


def require_numerics(config: Config, made: Prepared, here: Mapping[Group, str]) -> None:
    """Raises BuildError where the steps give other values on this machine than on the one that prepared the build."""
    for group, value in here.items():
        if value != made.probe[group]:
            raise BuildError(
                f"the {group} steps give other values on {socket.gethostname()} (probe {value}) than on {made.host} "
                f"(probe {made.probe[group]}), where {config.path} was prepared: another CPU family, or other "
                "libraries; run all parts on machines of one kind, with the same packages; what was finished is kept"
            )


def read_document(folder: Path) -> dict[str, Any] | None:
    """Returns what a prepared build says of itself; None where it is not whole."""
    try:
        document: dict[str, Any] = json.loads((folder / DOCUMENT).read_bytes())
        for name, entry in document["files"].items():
            if (folder / name).stat().st_size != entry["size_bytes"]:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return document if document.get("format") == _FORMAT else None


def save(folder: Path, made: Prepared) -> None:
    """Makes a folder hold a prepared build."""
    manifest = made.listing.manifest
    tables = {"rows": manifest.rows, "rejected": manifest.rejected, "files": _files_table(manifest.files)}
    tables["cuts"] = _cuts_table(made.cuts)
    if manifest.images is not None:
        tables["images"] = manifest.images
    aside = temporary_name(folder)
    aside.mkdir(exist_ok=True)  # nobody else has its name: what is there is ours
    for name, table in tables.items():
        _write_table(aside / f"{name}.arrow", table)
    document: dict[str, Any] = {
        "format": _FORMAT,
        "key": made.listing.key,
        "host": made.host,
        "prepared_at": time.time(),
        "absent": list(manifest.absent),
        "unused": dict(manifest.unused),
        "probe": dict(made.probe),
        "constants": dict(made.constants),
        "mirrors": [[folder, str(url)] for folder, url in mirrors_in(manifest.files)],
        "files": {path.name: _sums(path) for path in aside.iterdir()},
    }
    write_bytes(aside / DOCUMENT, json.dumps(document).encode("ascii"))
    _publish(aside, folder, document["files"])


def _publish(aside: Path, folder: Path, files: Mapping[str, Any]) -> None:
    """Puts a prepared build in its place; an equal one of another process, which others may have mapped, stays."""
    while True:
        try:
            move(aside, folder)
            return
        except OSError as err:
            if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        seen(folder.is_dir, folder.parent, what=f"{folder.name} of another machine")
        standing = read_document(folder)
        if standing is not None and standing["files"] == files:
            shutil.rmtree(aside, ignore_errors=True)
            return
        with contextlib.suppress(FileNotFoundError):  # another process has put it away
            _put_away(folder)


def _put_away(folder: Path) -> None:
    gone = temporary_name(folder)
    move(folder, gone)
    remove_aside(gone)


def _sums(path: Path) -> dict[str, Any]:
    return {"size_bytes": path.stat().st_size, "xxh3_128": hash_file(path)}


def _write_table(path: Path, table: pa.Table) -> None:
    with write_aside(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table.combine_chunks())


def _table(folder: Path, name: str) -> pa.Table:
    with pa.memory_map(str(folder / f"{name}.arrow")) as mapped:
        return pa.ipc.open_file(mapped).read_all()


def _files_table(files: Sequence[SourceFile]) -> pa.Table:
    columns = {
        "name": [os.fsencode(file.name) for file in files],
        "path": [os.fsencode(file.path) for file in files],
        "entry": [file.entry for file in files],
        "listed": [file.listed for file in files],
        "stat": [None if file.stat is None else list(file.stat) for file in files],
        "xxh3_128": [file.xxh3_128 for file in files],
    }
    return pa.table(columns, schema=_FILES_SCHEMA)


def _files(table: pa.Table) -> tuple[SourceFile, ...]:
    return tuple(
        SourceFile(
            os.fsdecode(row["name"]),
            Path(os.fsdecode(row["path"])),
            entry=row["entry"],
            listed=row["listed"],
            stat=None if row["stat"] is None else tuple(row["stat"]),
            xxh3_128=row["xxh3_128"],
        )
        for row in table.to_pylist()
    )


def _cuts_table(cuts: Sequence[Cut]) -> pa.Table:
    columns: dict[str, Any] = {name: [getattr(cut, name) for cut in cuts] for name in ("start", "stop", "num_media")}
    columns |= {group: [cut.keys.get(group) for cut in cuts] for group in GROUPS}
    return pa.table(columns, schema=_CUTS_SCHEMA)


def _cuts(table: pa.Table) -> list[Cut]:
    return [
        Cut(
            index=index,
            start=row["start"],
            stop=row["stop"],
            num_media=row["num_media"],
            keys={group: row[group] for group in GROUPS if row[group] is not None},
        )
        for index, row in enumerate(table.to_pylist())
    ]


def _files_now(config: Config, folder: Path, document: Mapping[str, Any]) -> tuple[tuple[SourceFile, ...], str | None]:
    """Returns the files of a prepared build by their paths on this node, and one that is not what it was then."""
    files = _files(_table(folder, "files"))
    is_elsewhere = COPY_OF in document
    if is_elsewhere:
        mirrors = tuple((str(at), parse_url(url)) for at, url in document.get("mirrors", ()))
        files = rebased(files, mirrors, config.remote)
    return files, _moved(config, files, is_elsewhere=is_elsewhere)


def _moved(config: Config, files: Sequence[SourceFile], *, is_elsewhere: bool) -> str | None:
    """Returns a file that is not what it was: a stat each, and no reading.

    is_elsewhere: another node has listed them. A copy of a file has other times there and the same size; whoever reads
    the file compares its content.
    """
    found = [(file.entry, file.name) for file in listed_files(localized(config).source)]
    known = [(file.entry, file.name) for file in files if file.listed]
    if found != known:
        return next(iter(sorted(name for _, name in set(found) ^ set(known))), config.source.manifests[0])
    look_up([file.path for file in files])
    is_known = _is_as_large if is_elsewhere else is_same
    return next((str(file.path) for file in files if not is_known(stat_now(file.path), file.stat)), None)


def _is_as_large(now: Stat | None, known: Stat | None) -> bool:
    if now is None or known is None or now[0] < 0:  # the version of an object is the same for all nodes
        return is_same(now, known)
    return now[SIZE] == known[SIZE]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lets one process of this machine after the other into the block, where the file system has locks."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        lock_for_work(descriptor, path)  # a file system without locks: each makes the same
        yield
    finally:
        os.close(descriptor)
