"""A cache root, held open: by its resolved path, and never a folder that a person keeps other things in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forebay.config.remote import RemoteConfig
from forebay.config.url import is_url, parse_url
from forebay.errors import CacheNotFoundError, ConfigError
from forebay.store.remote.root import RemoteRoot

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True)
class Root:
    """An opened cache root. folder: its resolved path; descriptor: of that very folder, whatever its path becomes.

    remote: the URL that the folder stands for on this node, where it does.
    """

    folder: Path
    descriptor: int
    device: int
    remote: RemoteRoot | None = None

    @property
    def place(self) -> str:
        """What to call it: its folder or URL."""
        return str(self.remote.url if self.remote else self.folder)


@contextmanager
def opened_root(place: str | Path, settings: RemoteConfig | None = None) -> Iterator[Root]:
    """Yields a cache root; of a URL what stands for that URL on this node.

    Raises CacheNotFoundError where it is no folder, ConfigError for `/`, a home folder, or a folder that holds one.
    """
    remote = RemoteRoot.at(parse_url(str(place)), settings or RemoteConfig()) if is_url(str(place)) else None
    if remote is not None:
        remote.prepare()
    resolved = Path(os.path.realpath(remote.folder if remote else place))
    require_a_root(resolved)
    try:
        descriptor = os.open(resolved, FOLDER)
    except (FileNotFoundError, NotADirectoryError) as err:
        raise CacheNotFoundError(
            f"{place} is no folder, so no cache is there; name a cache root, as run.cache_root of a config does: "
            "forebay cache ls DIR"
        ) from err
    try:
        yield Root(folder=resolved, descriptor=descriptor, device=os.fstat(descriptor).st_dev, remote=remote)
    finally:
        os.close(descriptor)


def require_a_root(folder: Path) -> None:
    """Raises ConfigError for a resolved folder in which nothing may be cleaned up."""
    home = Path(os.path.realpath(Path.home()))
    if folder == home or folder in home.parents:
        what = "the root of the file system" if folder == Path("/") else "a home folder, or holds it"
        raise ConfigError(f"{folder} is {what}, and no cache root; name the folder of the caches: forebay cache ls DIR")
