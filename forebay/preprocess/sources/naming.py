"""Files that a manifest names: their names in the key, their paths, their numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from forebay.config import SourceConfig
from forebay.config.hub import hub_advice
from forebay.errors import ManifestError
from forebay.preprocess.sources.stamp import stamped
from forebay.store.sources import SourceFile, anchor, hf_splits, listed_files


class NamedFiles:
    """A growing list of source files without repeats: first the manifests, then what they name, in order of appearance."""

    def __init__(self, manifests: Sequence[SourceFile], source: SourceConfig) -> None:
        self.files = list(manifests)
        self._num_stamped = len(self.files)
        self._numbers = {str(file.path): number for number, file in enumerate(manifests)}
        self._anchors = [anchor(entry) for entry in source.manifests]
        self._is_confined = source.confined

    def number(self, written: str, *, manifest: SourceFile, folder: Path | None = None) -> int:
        """Returns the number of a file named in a manifest, added to the list where it is new.

        A relative name is relative to `folder`, by default the manifest's. It enters the key relative to the folder of
        the manifest entry; an absolute one outside of it as it is written.
        Raises ManifestError under `source.confined` for a file that lies outside of that folder.
        """
        path = (manifest.path.parent if folder is None else folder) / written
        known = self._numbers.get(str(path))
        if known is None:
            if self._is_confined:
                self._confine(path, manifest)
            known = self._numbers[str(path)] = len(self.files)
            name = self._name(path, written, self._anchors[manifest.entry])
            self.files.append(SourceFile(name, path, manifest.entry, False))
        return known

    def stamp(self) -> None:
        """Notes the stat of the files that were added since the last call, before any of them is read."""
        self.files[self._num_stamped :] = stamped(self.files[self._num_stamped :])
        self._num_stamped = len(self.files)

    def _confine(self, path: Path, manifest: SourceFile) -> None:
        base, real = (Path(os.path.realpath(p)) for p in (self._anchors[manifest.entry], path))
        if not real.is_relative_to(base):
            raise ManifestError(
                f"{manifest.path} names {str(path)!r}, which is {str(real)!r} and not below {str(base)!r}; source.confined allows "
                "no other place: move the file there, or set source.confined = false for a manifest that you trust"
            )

    def _name(self, path: Path, written: str, base: Path) -> str:
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
        if PurePosixPath(written).is_absolute():
            return written
        return (Path(os.path.relpath(path.parent, base)) / path.name).as_posix()


def manifest_files(source: SourceConfig) -> list[SourceFile]:
    """Returns the files that `source.manifest` stands for, with the stat that they have before they are read.

    Raises ManifestError where an entry stands for none, or two for the same.
    """
    files = listed_files(source)
    found = {file.entry for file in files}
    for number, entry in enumerate(source.manifests):
        if number not in found:
            raise ManifestError(f"source.manifest {entry} {_nothing(Path(entry), source)}")
    seen: set[Path] = set()
    for file in files:
        if file.path in seen:
            raise ManifestError(f"source.manifest names {file.path} twice; name it once")
        seen.add(file.path)
    return stamped(files)


def _nothing(entry: Path, source: SourceConfig) -> str:
    """Says why an entry of `source.manifest` stands for no file, and what to do."""
    if source.kind == "hf" and (splits := hf_splits(entry)):
        return (
            f'has no split "{source.split}", it has {", ".join(splits)}; set source.split to one of them, or name '
            "files in source.manifest"
        )
    what = f"holds no manifest of kind {source.kind}" if entry.is_dir() else "does not exist"
    advice = hub_advice(entry, "dataset") if source.kind == "hf" else ""
    return f"{what}; correct source.manifest or source.kind in the config{advice}"


def usable_name(written: str) -> str | None:
    """Returns what is wrong with a file name in a manifest, or None."""
    if not written:
        return "is empty, wanted a file name"
    return "holds a NUL character, wanted a file name" if "\0" in written else None


def path_stem(written: str) -> str:
    """Returns a file name without its extension, folders kept, as it is written; `.hidden` has none."""
    folder, slash, name = written.rpartition("/")
    stem, dot, _ = name.rpartition(".")
    return f"{folder}{slash}{stem}" if dot and stem else written
