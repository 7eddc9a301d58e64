"""`forebay export`: a sealed cache as files of another form, written once, whole or to be gone on with.

zarr: a whole cache as a zarr v3 hierarchy, which is also what `forebay cache push --form zarr` makes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from forebay.errors import CacheCorruptError, ConfigError
from forebay.inspect.export_forms import ExportedSamples, selected, write_parquet, write_webdataset
from forebay.progress import Progress
from forebay.store.cache import Cache
from forebay.store.cold.push import write_zarr
from forebay.store.files import write_aside
from forebay.store.filling import Entry, Filling, Summed, filling
from forebay.store.metadata import foreign_values
from forebay.store.remote.carry.tally import TransferReport
from forebay.tar.write import member_key
from forebay.visible import from_here, human_bytes

DOCUMENT = "_export.json"
"""The file that is written last and says that an export is whole. Readers of a folder of parquet pass over `_`."""

_FORMAT = 1
"""Moves when the same cache gives other bytes."""

_MB, _SIZE_MB = 1_000_000, 1000

_FORMS: Mapping[str, tuple[str, Callable[..., Generator[int]]]] = {
    "parquet": ("parquet", write_parquet),
    "webdataset": ("tar", write_webdataset),
}
"""Extension and writer by form. A writer yields the place behind the samples that it has written so far."""

FORMS = tuple(sorted(_FORMS))


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to export. shard_size_mb: about how large a file becomes, 1000 where it is left out. ids, max_samples: which
    samples, see `selected`."""

    form: str
    out: Path
    shard_size_mb: int | None = None
    ids: Path | None = None
    max_samples: int | None = None
    progress: bool = True

    @property
    def size_mb(self) -> int:
        """About how large a file becomes."""
        return _SIZE_MB if self.shard_size_mb is None else self.shard_size_mb


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export did; its fields are those of its JSON document. files_kept: whole ones of an earlier run."""

    form: str
    folder: str
    cache: str
    key: str
    num_samples: int
    num_files: int
    files_kept: int
    size_bytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON document."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yields what `forebay export` prints."""
        kept = f", {self.files_kept} of them were there" if self.files_kept else ""
        yield (
            f"{self.form}: {self.num_samples} samples in {self.num_files} files{kept}, {human_bytes(self.size_bytes)}, "
            f"{self.seconds:.1f} s: {from_here(self.folder)}"
        )


def export(cache: Cache, options: ExportOptions) -> ExportReport:
    """Makes a folder hold the samples of a cache as files, and returns what was done.

    A new file is begun where one has `shard_size_mb`. What is whole is kept: interrupted, the same call goes on.
    Raises ConfigError for samples that the cache does not have, and for a folder that holds anything else.
    """
    started_s = time.monotonic()
    _check(cache, options)
    samples = selected(cache, ids=options.ids, max_samples=options.max_samples)
    with filling(options.out, DOCUMENT, identity=_identity(samples, options), option="--out") as folder:
        whole = folder.document
        kept = list(folder.finished) if whole is None else whole["files"]
        if whole is None:
            with foreign_values(cache.folder):
                _fill(folder, samples, options)
                folder.seal({"about": samples.about(), "files": folder.finished})
    files = folder.finished if whole is None else kept
    return ExportReport(
        form=options.form,
        folder=str(options.out),
        cache=cache.place,
        key=cache.key,
        num_samples=len(samples),
        num_files=len(files),
        files_kept=len(kept),
        size_bytes=sum(entry["size_bytes"] for entry in files),
        seconds=time.monotonic() - started_s,
    )


def _check(cache: Cache, options: ExportOptions) -> None:
    if options.form not in _FORMS:
        raise ConfigError(f"--form {options.form}: wanted one of {', '.join(FORMS)}")
    if options.size_mb < 1:
        raise ConfigError(f"--shard-size-mb {options.size_mb}: wanted 1 or more")
    require_outside(options.out, cache)


def require_outside(out: Path, cache: Cache) -> None:
    """Raises ConfigError for a folder inside a cache."""
    if out.resolve().is_relative_to(cache.folder.resolve()):
        raise ConfigError(f"--out {out} lies inside the cache {cache.folder}, which is sealed; name a folder elsewhere")


def _identity(samples: ExportedSamples, options: ExportOptions) -> dict[str, Any]:
    chosen = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(samples.indices, "<i8").data)
    return {
        "format": _FORMAT,
        "form": options.form,
        "key": samples.cache.key,
        "num_samples": len(samples),
        "samples": chosen,
        "shard_size_mb": options.size_mb,
    }


def _fill(folder: Filling, samples: ExportedSamples, options: ExportOptions) -> None:
    """Writes every file that is not there; each begins where the one before it ended."""
    known = {entry["start"]: entry for entry in folder.finished}
    folder.finished.clear()
    start = 0
    with Progress(len(samples), unit="sample", desc="export", is_shown=options.progress) as bar:
        while start < len(samples):
            entry = known.get(start)
            if entry is None:
                entry = _written(folder, samples, options, start, bar)
                folder.add(entry)
            else:
                folder.finished.append(entry)
                bar.update(entry["stop"] - start)
            start = entry["stop"]


def _written(folder: Filling, samples: ExportedSamples, options: ExportOptions, start: int, bar: Progress) -> Entry:
    extension, write = _FORMS[options.form]
    metadata = samples.cache.metadata
    stem = "-".join(member_key(str(metadata[name])) for name in ("name", "split") if metadata.get(name))
    name = f"{stem}-{len(folder.finished):06d}.{extension}"
    stop = start
    with write_aside(folder.folder / name) as raw:
        file = Summed(raw)
        with closing(write(samples, start, file, max_bytes=options.size_mb * _MB)) as writing:
            for at in writing:
                bar.update(at - stop)
                stop = at
    if stop == start:
        raise CacheCorruptError(f"{samples.cache.place}: nothing could be written from sample {start} on")
    return {"name": name, "start": start, "stop": stop, **file.sums()}


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
