"""Whether a cache on disk is, byte for byte, what was sealed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.errors import CacheCorruptError, CacheError
from forebay.store.cache import Cache, open_cache
from forebay.store.held import AnyFile
from forebay.store.metadata import check_file


@dataclass
class VerifyReport:
    """What verifying found; `problems` name the file and both values."""

    checked_bytes: int = 0
    problems: list[str] = field(default_factory=list)

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
        return {"ok": self.ok, "checked_bytes": self.checked_bytes, "problems": self.problems}


def quick_problems(folder: Path) -> list[str]:
    """Returns what a stat of every file shows to be wrong: missing files, other sizes, metadata that is not true."""
    return _check_all(folder, hashing=False, progress=False).problems


def verify_folder(folder: Path, *, progress: bool = False) -> VerifyReport:
    """Returns what re-hashing every file of a cache finds; foreign files in its folder are problems too."""
    report = _check_all(folder, hashing=True, progress=progress)
    if report.ok:
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
    from tqdm import tqdm

    files = list(cache.files())
    total = sum(int(entry["size_bytes"]) for _, entry in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="verify", disable=not progress, file=sys.stderr) as bar:
        for file, entry in files:
            report.check(file, entry, hashing=hashing)
            bar.update(int(entry["size_bytes"]))
    return report


def _foreign(cache: Cache) -> list[str]:
    # From the cache's own folder: one that was named relatively has other paths than the files of its cache.
    known = {file.path for file, _ in cache.files()} | {cache.folder / "metadata.json"}
    return [
        f"{path} does not belong to this cache"
        for path in sorted(cache.folder.rglob("*"))
        if path not in known and not path.is_dir()
    ]
