"""A cache root, held open: by its resolved path, and never a folder that a person keeps other things in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forebay.config.remote import RemoteConfig
from forebay.config.tree import stand_in
from forebay.errors import CacheNotFoundError, ConfigError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True)
class Root:
    """An opened cache root. folder: its resolved path; descriptor: of that very folder, whatever its path becomes."""

    folder: Path
    descriptor: int
    device: int


@contextmanager
def opened_root(place: str | Path, settings: RemoteConfig | None = None) -> Iterator[Root]:
    """Yields a cache root; of a URL what stands for that URL on this node.

    Raises CacheNotFoundError where it is no folder, ConfigError for `/`, a home folder, or a folder that holds one.
    """
    folder = stand_in(str(place), settings or RemoteConfig())
    resolved = Path(os.path.realpath(folder))
    require_a_root(resolved)
    try:
        descriptor = os.open(resolved, FOLDER)
    except (FileNotFoundError, NotADirectoryError) as err:
        raise CacheNotFoundError(
            f"{place} is no folder, so no cache is there; name a cache root, as run.cache_root of a config does: "
            "forebay cache ls DIR"
        ) from err
    try:
        yield Root(folder=resolved, descriptor=descriptor, device=os.fstat(descriptor).st_dev)
    finally:
        os.close(descriptor)


def require_a_root(folder: Path) -> None:
    """Raises ConfigError for a resolved folder in which nothing may be cleaned up."""
    home = Path(os.path.realpath(Path.home()))
    if folder == home or folder in home.parents:
        what = "the root of the file system" if folder == Path("/") else "a home folder, or holds it"
        raise ConfigError(f"{folder} is {what}, and no cache root; name the folder of the caches: forebay cache ls DIR")
