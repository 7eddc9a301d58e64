"""zarr: a whole cache as a zarr v3 hierarchy, which is also what `forebay cache push --form zarr` makes."""

from __future__ import annotations

from forebay.errors import ConfigError
from forebay.export.command import ExportOptions, require_outside
from forebay.store.cache import Cache
from forebay.store.cold.push import write_zarr
from forebay.store.remote.transfer.tally import TransferReport


def export_zarr(cache: Cache, options: ExportOptions) -> TransferReport:
    """Makes a folder the cold form of a cache, and returns what that took; interrupted, it goes on.

    `forebay cache pull` makes the very cache of it again, so it is always all of its samples. Raises ConfigError for
    options that choose some of them or the size of files, and what `write_zarr` raises.
    """
    given = {"--ids": options.ids, "--max-samples": options.max_samples, "--shard-size-mb": options.shard_size_mb}
    if named := [name for name, value in given.items() if value is not None]:
        raise ConfigError(
            f"{named[0]} does not go with --form zarr, which is of a whole cache; to export some of its samples: "
            f"forebay cache subset {cache.place} --ids FILE --out DIR, then export that"
        )
    require_outside(options.out, cache)
    return write_zarr(cache, options.out, progress=options.progress)
