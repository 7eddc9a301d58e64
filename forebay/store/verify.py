"""Whether a cache, on disk or in a store, is byte for byte what was sealed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.errors import CacheCorruptError, CacheError
from forebay.progress import Progress
from forebay.store.cache import Cache, open_cache
from forebay.store.held import AnyFile
from forebay.store.metadata import check_file
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.transfer.check import check_bytes, check_sizes
from forebay.store.shared_disk import SILLY_MARK


@dataclass
class VerifyReport:
    """What verifying found; `problems` name the file and both values."""

    checked_bytes: int = 0
    problems: list[str] = field(default_factory=list)
    place: str | None = None
    """The URL of a cache in a store: it is the objects that were compared."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def check(self, path: AnyFile, entry: Mapping[str, Any], *, hashing: bool = True) -> None:
        """Adds a file's bytes, or the problem where it is not what its entry says; without `hashing` by its size."""
        try:
            check_file(path, entry, verify=hashing)
            self.checked_bytes += int(entry["size_bytes"])
        except CacheCorruptError as err:
            self.problems.append(str(err))
        except OSError as err:  # a disk that cannot read a file is what verifying is for
            self.problems.append(f"{path} cannot be read: {err.strerror}")

    def to_json(self) -> dict[str, Any]:
        """Returns the `verify` part of `forebay inspect --json`."""
        place = {} if self.place is None else {"place": self.place}
        return {"ok": self.ok, "checked_bytes": self.checked_bytes, "problems": self.problems, **place}


def quick_problems(folder: Path) -> list[str]:
    """Returns what a stat of every file shows to be wrong: missing files, other sizes, metadata that is not true.

    Of a mirror what a listing of the store shows; RemoteError where the store does not answer.
    """
    return _check_all(folder, hashing=False, progress=False).problems


def verify_folder(folder: Path, *, progress: bool = False) -> VerifyReport:
    """Returns what re-hashing every file of a cache finds; foreign files in its folder are problems too.

    Of a mirror the store's objects are read, and nothing of them is kept; RemoteError where the store does not answer.
    """
    report = _check_all(folder, hashing=True, progress=progress)
    if report.ok and report.place is None:
        report.problems += _foreign(open_cache(folder, verify="never"))
    return report


def _check_all(folder: Path, *, hashing: bool, progress: bool) -> VerifyReport:
    report = VerifyReport()
    try:
        # Hashed before they are parsed: numpy's header parser answers damage with any exception, or a warning.
        cache = open_cache(folder, verify="touch" if hashing else "never")
    except CacheError as err:
        report.problems.append(str(err))
        return report
    if cache.mirror is not None:
        report.place = cache.place
        _check_objects(cache.mirror.bucket, cache, report, hashing=hashing, progress=progress)
        return report
    files = list(cache.files())
    with _bar(cache, progress=progress) as bar:
        for file, entry in files:
            report.check(file, entry, hashing=hashing)
            bar.update(int(entry["size_bytes"]))
    return report


def _bar(cache: Cache, *, progress: bool) -> Progress:
    total = sum(int(entry["size_bytes"]) for _, entry in cache.files())
    return Progress(total, unit="B", desc="verify", is_shown=progress)


def _check_objects(bucket: Bucket, cache: Cache, report: VerifyReport, *, hashing: bool, progress: bool) -> None:
    files = {file.place: entry for file, entry in cache.files()}
    report.problems, foreign = check_sizes(bucket, files)
    if not hashing or report.problems:
        return
    with _bar(cache, progress=progress) as bar:
        for size_bytes, problem in check_bytes(bucket, files):
            report.checked_bytes += size_bytes
            report.problems += [] if problem is None else [problem]
            bar.update(size_bytes)
    report.problems += foreign


def _foreign(cache: Cache) -> list[str]:
    # From the cache's own folder: one that was named relatively has other paths than the files of its cache.
    known = {file.path for file, _ in cache.files()} | {cache.folder / "metadata.json"}
    return [
        f"{path} does not belong to this cache"
        for path in sorted(cache.folder.rglob("*"))
        if path not in known and not path.name.startswith(SILLY_MARK) and not path.is_dir()
    ]
