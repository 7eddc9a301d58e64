"""A folder of a store as a folder of this node: small files are there when it is opened, large ones when asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from forebay.config.remote import RemoteConfig
from forebay.config.url import Url, is_url, parse_url
from forebay.errors import CacheNotFoundError, RemoteMissingError
from forebay.store.files import write_bytes
from forebay.store.layout import FORMAT_VERSION
from forebay.store.metadata import read_metadata
from forebay.store.remote.bucket import Bucket
from forebay.store.remote.node import NodeCache, Wanted

ORIGIN = "origin.json"
"""In the folder of a mirror: what it is a mirror of. It holds no secret."""


class Mirror:
    """What a node has of a folder of a store. It describes itself, so any process that has the path can go on."""

    def __init__(self, folder: Path, url: Url, settings: RemoteConfig) -> None:
        self.folder, self.url, self.settings = folder, url, settings
        self.node = NodeCache(settings.folder, bound_bytes=settings.cache_size_bytes)
        self.before_demand: list[Callable[[], None]] = []
        """Called before a file that is not here is asked for: what readers tell is to be true then."""

    @cached_property
    def bucket(self) -> Bucket:
        """Where its files come from."""
        return Bucket(self.url, self.settings)

    @classmethod
    def at(cls, url: Url, settings: RemoteConfig, *, state: str = "") -> Mirror:
        """Returns the mirror of a URL, whose folder is there then. state: of what the URL holds, where that changes."""
        identity = f"{settings.endpoint or ''} {url} {state}"
        folder = settings.folder / "mirrors" / f"{url.name}-{xxhash.xxh3_64_hexdigest(identity.encode())}"
        folder.mkdir(parents=True, exist_ok=True)
        document = {"url": str(url), "remote": dataclasses.asdict(settings)}
        data = json.dumps(document, indent=1).encode()
        if not (folder / ORIGIN).is_file() or (folder / ORIGIN).read_bytes() != data:
            write_bytes(folder / ORIGIN, data)
        return cls(folder, url, settings)

    @classmethod
    def of(cls, folder: Path) -> Mirror | None:
        """Returns the mirror whose folder this is, None where it is no mirror."""
        try:
            document = json.loads((folder / ORIGIN).read_bytes())
        except FileNotFoundError:
            return None
        return cls(folder, parse_url(document["url"]), RemoteConfig(**document["remote"]))

    def require(self, wanted: Wanted) -> Path:
        """Returns the path of a file, which is there then, whole. Raises RemoteError."""
        path = self.folder / wanted.name
        if not path.is_file():
            for tell in list(self.before_demand):
                tell()
            self.node.fetch(path, wanted, self.bucket)
        return path

    def fetch_ahead(self, wanted: Wanted, *, distance: int) -> bool:
        path = self.folder / wanted.name
        return path.is_file() or self.node.fetch(path, wanted, self.bucket, distance=distance) is not None


def cache_folder(place: str | Path, settings: RemoteConfig) -> Path:
    """Returns the folder of a cache on this node: that which is named, or the mirror of a URL.

    Of a URL all but the shards is there then. Raises CacheNotFoundError where no sealed cache lies there.
    """
    if not is_url(str(place)):
        return Path(place)
    url = parse_url(str(place))
    bucket = Bucket(url, settings)
    try:
        data = bucket.read("metadata.json")
    except RemoteMissingError as err:
        raise CacheNotFoundError(
            f"{url} holds no sealed cache: it has no metadata.json; name another URL, or run: "
            f"forebay preprocess CONFIG --cache-root {url.parent}"
        ) from err
    mirror = Mirror.at(url, settings, state=xxhash.xxh3_128_hexdigest(data))
    if not (mirror.folder / "metadata.json").is_file():
        write_bytes(mirror.folder / "metadata.json", data)
    files: dict[str, Any] = read_metadata(mirror.folder, format_version=FORMAT_VERSION)["files"]
    wanted = [
        Wanted(name=name, size_bytes=int(entry["size_bytes"]), xxh3_128=entry["xxh3_128"])
        for name, entry in files.items()
    ]
    with ThreadPoolExecutor(settings.max_concurrent) as threads:
        list(threads.map(mirror.require, wanted))
    return mirror.folder
