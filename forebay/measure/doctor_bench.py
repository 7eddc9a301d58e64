"""The child's side: what several arms need is made here once, when the first of them asks.

Bytes of a file taken out of the page cache, as far as the kernel does that.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from forebay.config.remote import is_url
from forebay.config.tree import Config
from forebay.errors import CacheNotFoundError
from forebay.measure.predict import Listed, Skip
from forebay.plan.make import Planned, plan_of
from forebay.plan.names import plan_folder
from forebay.preprocess.group import ItemGroup
from forebay.preprocess.groups import Groups
from forebay.preprocess.listing import listed
from forebay.rows.manifest import Manifest
from forebay.rows.media_reader import MediaReader
from forebay.steps.recipe import Recipe, recipe_of
from forebay.store.cache import open_cache
from forebay.store.remote.raw.raw_sources import naming_urls
from forebay.store.source import SampleSource
from forebay.train.select import select
from forebay.train.uncached.uncached_source import uncached_source

logger = logging.getLogger(__name__)
SAMPLE = "sample"
"""Folder of the temporary cache, below the temporary root."""
_UNCACHED_ROWS = 512
_MOST_ROWS = 4096
"""Rows that the arms draw from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorTask:
    """The task of a child. root: the only place where it writes. limit: list no more rows than this; None: all."""

    config: Config
    root: str
    cores: int
    limit: int | None = None
    prepare: str | None = None
    """`module:function`, called first."""


class Bench:
    """A config, its samples, and a place to write."""

    def __init__(self, task: DoctorTask) -> None:
        self.task, self.config, self.root = task, task.config, Path(task.root)
        # Whatever is written on the way from raw data (tar indexes, listings) goes to the temporary root.
        self.raw_config = dataclasses.replace(
            task.config,
            # Of a few rows the share of bad ones says little.
            run=dataclasses.replace(task.config.run, cache_root=str(self.root / "raw"), max_failed_share=1.0),
            loader=dataclasses.replace(task.config.loader, cache="off", cache_dir=None),
        )
        self.random = np.random.default_rng(0)
        self.pace_s = 0.0
        """Seconds of a step for each of its samples; 0: nobody knows it."""

    @cached_property
    def recipe(self) -> Recipe:
        """The steps of the config."""
        return recipe_of(self.config)

    @cached_property
    def groups(self) -> Groups:
        """The groups of a sample, with the facts of raw data that decide them."""
        return Groups.of(self.raw_config, self.recipe).keeping(self.manifest.rows)

    @cached_property
    def sealed(self) -> SampleSource | None:
        """The source that training reads, if its caches are sealed."""
        wanted = dataclasses.replace(self.config, loader=dataclasses.replace(self.config.loader, cache="require"))
        try:
            return select(wanted)
        except CacheNotFoundError as err:
            if self.config.mixture.source:
                raise
            logger.info("%s", err)
            return None

    @cached_property
    def manifest(self) -> Manifest:
        """The rows of the raw data. Raises Skip where there is none that can be measured here."""
        if self.config.mixture.source:
            raise Skip("a mixture of caches has no raw data of its own: ask the doctor about each of its configs")
        if any(map(is_url, self.config.source.manifests)):
            raise Skip("source.manifest is a URL: what would be measured is its download")
        _linked(self.config.cache_root / "tar_index", self.root / "raw/tar_index")
        with naming_urls():
            found = listed(self.limited(self.task.limit), Groups.of(self.raw_config, self.recipe))
        if not len(found.rows):
            raise Skip("no row of the raw data can be used")
        return found

    def limited(self, rows: int | None) -> Config:
        """Returns the config of the raw data with so many rows at most."""
        source, own = self.raw_config.source, self.raw_config.source.max_samples
        most = min((number for number in (rows, own) if number is not None), default=None)
        return dataclasses.replace(self.raw_config, source=dataclasses.replace(source, max_samples=most))

    @property
    def first_rows(self) -> Config:
        """The config of some rows, which are enough to see how fast they are made."""
        return self.limited(min(_UNCACHED_ROWS, self.task.limit or _UNCACHED_ROWS))

    @cached_property
    def on_the_fly(self) -> SampleSource:
        """The first rows of the raw data, made when they are asked for. Raises Skip where there is none."""
        self.manifest  # noqa: B018  raises Skip
        return uncached_source(self.first_rows)

    @cached_property
    def picked(self) -> Manifest:
        """Some rows of the manifest, drawn at random."""
        rows, count = self.manifest.rows, min(len(self.manifest.rows), _MOST_ROWS)
        places, index = self.random.permutation(len(rows))[:count], rows.column_names.index("group")
        if self.groups.text.listed:  # items that rows list are stored once a source file, and texts name it
            taken = rows.take(pa.array(places[np.argsort(rows["group"].to_numpy()[places], kind="stable")]))
        else:
            one = pa.array(np.zeros(count, np.int32))
            taken = rows.take(pa.array(places)).set_column(index, rows.schema.field(index), one)
        return dataclasses.replace(self.manifest, rows=taken)

    def listed(self, seconds: float) -> Listed:
        """Returns what is known of the raw data."""
        rows = self.manifest.rows
        hours = None
        if "duration_s" in rows.column_names:
            durations = rows["duration_s"].to_numpy()
            known = durations[np.isfinite(durations)]
            hours = float(known.mean()) * len(rows) / 3600 if len(known) else None
        is_whole = self.task.limit is None or len(rows) < self.task.limit
        return Listed(num_rows=len(rows), hours=hours, is_whole=is_whole, seconds=seconds)

    def reader(self, group: ItemGroup) -> MediaReader:
        """Returns what reads the encoded bytes of a group's items, as a build reads them."""
        return MediaReader(
            self.manifest.files,
            max_open=self.config.run.max_open_tars,
            max_bytes=group.max_sample_bytes,
            column=group.column,
        )

    @property
    def sample_folder(self) -> Path:
        """Where the temporary cache is, once it is made."""
        return self.root / SAMPLE / "cache"

    @cached_property
    def cached(self) -> SampleSource:
        """The cache that arms read: the sealed one, else the temporary one. Raises Skip if there is neither."""
        if self.sealed is not None:
            return self.sealed
        if not self.sample_folder.is_dir():
            raise Skip("no cache is sealed, and no sample of one could be made")
        cache = open_cache(str(self.sample_folder))
        if not len(cache):
            raise Skip("no cache is sealed, and no row of the sample could be used")
        return cache

    @cached_property
    def planned(self) -> Planned:
        """The plan of the config over what the arms of a cache read; nothing is written."""
        source = self.cached
        return plan_of(self.config, source, keep=self._has_plan(source))

    def _has_plan(self, source: SampleSource) -> bool:
        if source is not self.sealed or self.config.plan is None or self.config.mixture.is_given:
            return False
        where = {"dataset": self.config.name, "split": self.config.source.split, "cache_key": source.key}
        return plan_folder(self.config.cache_root, **where, settings=self.config.plan).is_dir()


def _linked(folder: Path, target: Path) -> None:
    """Makes the files of a folder stand in another one too, as far as that costs nothing."""
    if not folder.is_dir() or target.exists():
        return
    target.mkdir(parents=True)
    for file in folder.iterdir():
        try:
            os.symlink(file, target / file.name)
        except OSError as err:
            logger.info("%s is not used: %s", file, err)


_PAGE = 4096


def dropped(path: str, offset: int, size: int) -> str | None:
    """Returns None if these bytes of a file are on the disk alone now, else why they are not, or may not be.

    size: 0 is all from the offset on. Nothing is written, and no other process sees more of it than a slower read.
    """
    start = offset // _PAGE * _PAGE
    length = 0 if not size else -(-(offset + size - start) // _PAGE) * _PAGE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as err:
        return f"{err.strerror}: {path}"
    try:
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)
        return _still_there(descriptor, offset)
    except OSError as err:
        return f"this file system does not let go of what it has read ({err.strerror})"
    finally:
        os.close(descriptor)


def _still_there(descriptor: int, offset: int) -> str | None:
    """Returns why a byte is not known to be on the disk alone."""
    if not hasattr(os, "RWF_NOWAIT"):
        return "this system does not tell what is in memory"
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return None
    except OSError as err:
        if err.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return "this file system does not tell what is in memory"
        raise
    return "this file system keeps what it has read (tmpfs does, and files that another process has mapped)"
