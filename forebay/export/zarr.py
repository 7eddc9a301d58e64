"""zarr: a whole cache as a zarr v3 hierarchy, which is also what `forebay cache push --form zarr` makes."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from forebay.errors import ConfigError
from forebay.export.command import ExportOptions, require_outside
from forebay.store.cache import Cache

if TYPE_CHECKING:
    from forebay.store.remote.transfer.tally import TransferReport

_WRITER = "forebay.store.cold.push:write_zarr"


def export_zarr(cache: Cache, options: ExportOptions) -> TransferReport:
    """Makes a folder the cold form of a cache, and returns what that took; interrupted, it goes on.

    `forebay cache pull` gives the cache back, so it is always all of its samples. Raises ConfigError for options that
    choose some of them or the size of files, and what the writer of the cold form raises.
    """
    chosen = {"--ids": options.ids, "--max-samples": options.max_samples, "--shard-size-mb": options.shard_size_mb}
    for name, value in chosen.items():
        if value is not None:
            raise ConfigError(
                f"{name} {value}: the zarr form holds the whole cache, in files of its own sizes, so that "
                f"forebay cache pull gives it back; leave {name} out"
            )
    require_outside(options.out, cache)
    write: Callable[..., TransferReport] = resolve_name(_WRITER)
    return write(cache, options.out, progress=options.progress)
