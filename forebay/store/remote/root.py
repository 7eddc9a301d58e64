"""A cache root in a store: what is sealed below its URL, known on this node by small files that stay."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from forebay.config.remote import RemoteConfig, Url, parse_url
from forebay.config.tree import Config, stand_in
from forebay.errors import RemoteDeniedError, RemoteError, RemoteMissingError
from forebay.store.files import TEMPORARY_MARK, require_writable, write_bytes
from forebay.store.held import ORIGIN
from forebay.store.metadata import FILE_NAME as METADATA
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.bucket.object_store import find_bytes

logger = logging.getLogger(__name__)

LISTED = ".listed"
"""Under the folder that stands for a root: metadata.json of each cache below the URL, by the names of their folders."""

_KEYED = re.compile(r"-([0-9a-f]{16})(?:\.\w+)?\Z")
"""The end of the name that forebay gives a cache: its key, and a codec."""


class RemoteRoot:
    """The caches below a URL. folder: what stands for the root on this node; it says so itself, see `of`."""

    def __init__(self, url: Url, settings: RemoteConfig, folder: Path) -> None:
        """Asks nothing yet."""
        self.url, self.settings, self.folder = url, settings, folder

    @classmethod
    def at(cls, url: Url, settings: RemoteConfig) -> RemoteRoot:
        """Returns the root of a URL, with its folder on this node."""
        return cls(url, settings, stand_in(str(url), settings))

    @classmethod
    def of_config(cls, config: Config) -> RemoteRoot | None:
        """Returns the root of a config, None where it is a folder of this machine."""
        return None if config.remote_root is None else cls.at(parse_url(config.remote_root), config.remote)

    @classmethod
    def of(cls, folder: Path) -> RemoteRoot | None:
        """Returns the root that a folder of this node stands for, None where it is a root itself."""
        try:
            document = json.loads((folder / ORIGIN).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(parse_url(document["url"]), RemoteConfig(**document["remote"]), folder)

    @cached_property
    def bucket(self) -> Bucket:
        """Where it lies."""
        return Bucket(self.url, self.settings)

    def prepare(self) -> None:
        """Makes the folder on this node, which then says what it stands for. Raises BuildError where it cannot."""
        require_writable(self.folder, setting="remote.shard_dir")
        data = json.dumps({"url": str(self.url), "remote": asdict(self.settings)}, indent=1).encode()
        path = self.folder / ORIGIN
        if not path.is_file() or path.read_bytes() != data:
            write_bytes(path, data)

    def caches(self) -> Iterator[tuple[Url, Path]]:
        """Yields the URL of each sealed cache, and a folder with its metadata.json, in the order of their names.

        What is known of a folder whose name carries the key is not asked for again: its recipe cannot be another one.
        So a root that is known costs one listing. A store that does not answer leaves what is known; RemoteError where
        nothing is.
        """
        self.prepare()
        names = self._names()
        with ThreadPoolExecutor(self.settings.max_concurrent) as threads:
            for name, folder in zip(names, threads.map(self._kept, names), strict=True):
                if folder is not None:
                    yield self.url / name, folder

    def _names(self) -> list[str]:
        try:
            return [name for name in self.bucket.level()[1] if _is_name(name)]
        except RemoteError as err:
            known = sorted(path.name for path in (self.folder / LISTED).glob("*") if _is_certain(path))
            if known and not isinstance(err, (RemoteMissingError, RemoteDeniedError)):
                logger.warning("%s; going on with what this node knows of %s", err, self.url)
                return known
            raise type(err)(
                f"the cache root {self.url} cannot be listed: {err}; check its name, the credentials of the "
                "environment or the profile, and remote.endpoint, or give a folder of this machine: --cache-root DIR",
                code=err.code,
            ) from err

    def _kept(self, name: str) -> Path | None:
        """Returns the folder with the metadata.json of a cache, which is asked for if need be; None: it is unsealed."""
        folder = self.folder / LISTED / name
        if not _is_certain(folder):
            if (data := find_bytes(self.bucket, f"{name}/{METADATA}")) is None:
                return None
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / METADATA, data)
        return folder


def _is_name(name: str) -> bool:
    return name.isprintable() and not name.startswith(".") and TEMPORARY_MARK not in name and "/" not in name


def _is_certain(folder: Path) -> bool:
    """Whether what is kept of a cache holds for good: the name of its folder carries the key that is kept."""
    named = _KEYED.search(folder.name)
    try:
        kept = json.loads((folder / METADATA).read_bytes())
        return named is not None and str(kept["key"]).startswith(named[1])
    except (OSError, ValueError, KeyError, TypeError):
        return False
