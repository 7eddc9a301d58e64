"""Files that a manifest names: their names in the key, paths and numbers, and whether they are what was listed.

Each has the stat from before it is read: what is read later is of the same bytes as long as the stat is. Where that
moved, contents are compared.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from forebay.config.data import PICTURES, SOURCE_KINDS, SourceConfig
from forebay.config.pretrained_folder import hub_advice, processor_digest
from forebay.config.remote import is_url
from forebay.errors import BuildError, ManifestError
from forebay.store.memo import Hashed, Memo, Stat, hash_now, is_same, stat_now
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.raw_sources import identity, is_elsewhere, is_folder, look_up, named_path, place_of
from forebay.store.source_files import ABSENT, SourceFile, anchor, hf_splits, leads_out, listed_files
from forebay.task_map import Map

_YOUNG_NS = 2_000_000_000
_TICK_S, _COARSE_TICK_S = 0.02, 2.0
"""Time stamps move in ticks of the kernel's clock, 10 ms at most, or every two seconds (FAT, old NFS)."""
_WAITS = 3


class NamedFiles:
    """A growing list of different source files: first the manifests, then what these name, in order of appearance."""

    def __init__(self, manifests: Sequence[SourceFile], source: SourceConfig) -> None:
        self.files = list(manifests)
        self._num_stamped = len(self.files)
        self._numbers = {str(file.path): number for number, file in enumerate(manifests)}
        self._anchors = [anchor(entry) for entry in source.places]
        self._source = source

    def number(self, written: str, *, manifest: SourceFile, folder: Path | None = None) -> int:
        """Returns the number of a file named in a manifest, added to the list where it is new.

        A relative name is relative to `folder`, by default `source.media_dir`, or else the manifest's. It enters the
        key relative to the folder of the manifest entry, or to `source.media_dir`; an absolute one outside of it as it
        is written.
        Raises ManifestError under `source.confined` for a file that lies outside of that folder.
        """
        entry, media_dir = manifest.entry, self._source.media_dir
        if media_dir is not None:
            entry, folder = len(self._source.manifests), folder or Path(media_dir)
        path = named_path(written, manifest.path.parent if folder is None else folder, named_in=manifest.path)
        known = self._numbers.get(str(path))
        if known is None:
            name = self._name(path, written, self._anchors[entry])
            file = SourceFile(name, path, entry, listed=False)
            require_confined([file], self._source, named_in=manifest.path)
            known = self._numbers[str(path)] = len(self.files)
            self.files.append(file)
        return known

    def listed(self, path: str) -> int:
        """Returns the number of a manifest, by its path."""
        return self._numbers[path]

    def stamp(self) -> None:
        """Notes the stat of the files that were added since the last call, before any of them is read."""
        self.files[self._num_stamped :] = stamped(self.files[self._num_stamped :])
        self._num_stamped = len(self.files)

    def _name(self, path: Path, written: str, base: Path) -> str:
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
        if PurePosixPath(written).is_absolute() or is_url(written):
            return written
        return (Path(os.path.relpath(path.parent, base)) / path.name).as_posix()


def manifest_files(source: SourceConfig, *, meaning: str = "recordings") -> list[SourceFile]:
    """Returns the files that `source.manifest` stands for, with the stat that they have before they are read.

    meaning: the name of what their rows are.
    Raises ManifestError where an entry stands for none, two for the same, or under `source.confined` for a file outside
    of its folder.
    """
    files = listed_files(source, meaning=meaning)
    found = {file.entry for file in files}
    for number, entry in enumerate(source.manifests):
        if number not in found and source.kind == "python":
            raise ManifestError(
                "source.manifest: the samples of this code are not listed yet, and nothing else runs it; run: forebay "
                "preprocess CONFIG",
                code="FB129",
            )
        if number not in found:
            raise ManifestError(f"source.manifest {entry} {_nothing(Path(entry), source)}", code="FB201")
    seen: set[Path] = set()
    for file in files:
        if file.path in seen:
            raise ManifestError(f"source.manifest names {file.path} twice; name it once")
        seen.add(file.path)
    require_confined(files, source)
    return stamped(files)


def require_folder(source: SourceConfig) -> None:
    """Raises ManifestError where the folder that names of recordings or images are relative to is none."""
    if source.media_dir is not None and not os.path.isdir(source.media_dir):
        name = "audio_dir" if source.audio_dir is not None else "image_dir"
        raise ManifestError(
            f"source.{name} {Path(source.media_dir)} is no folder; correct it in the config", code="FB201"
        )


def _nothing(entry: Path, source: SourceConfig) -> str:
    """Says why an entry of `source.manifest` stands for no file, and what to do."""
    is_dataset = SOURCE_KINDS[source.kind].has_splits
    if is_dataset and (splits := hf_splits(entry)):
        return (
            f'has no split "{source.split}", it has {", ".join(splits)}; set source.split to one of them, or name '
            "files in source.manifest"
        )
    what = f"holds no manifest of kind {source.kind}" if is_folder(entry) else "does not exist"
    advice = hub_advice(entry, "dataset") if is_dataset else ""
    return f"{what}; correct source.manifest or source.kind in the config{advice}"


def require_confined(files: Iterable[SourceFile], source: SourceConfig, *, named_in: Path | None = None) -> None:
    """Returns if `source.confined` is off, or every file lies below the folder of its manifest entry, links followed.

    named_in: the manifest that names the files. Raises ManifestError for the first one that lies elsewhere.
    """
    for file in files if source.confined else ():
        entry = source.places[file.entry]
        if (real := leads_out(file.path, entry)) is not None:
            raise ManifestError(
                f"{named_in or f'source.manifest {entry}'} names {str(file.path)!r}, which is {real!r} and not "
                f"below {identity(anchor(entry))!r}; source.confined allows no other place: move "
                "the file there, or set source.confined = false for a manifest that you trust",
                code="FB206",
            )


def shown_name(file: SourceFile) -> str:
    r"""Returns the name of a file for keys and messages: a byte that is not UTF-8 is written as `\xe9`."""
    return os.fsencode(file.name).decode("utf-8", "backslashreplace")


def usable_name(written: str, home: Path | None = None) -> str | None:
    """Returns what is wrong with a file name in a manifest, or None.

    home: the manifest, or the folder that its names are relative to; with it, a URL of elsewhere is no file name.
    """
    if not written:
        return "is empty, wanted a file name"
    if written[:5].lower() == "data:":
        return "is a data: URI, the file itself, wanted a file name"
    if home is not None and is_url(written) and is_elsewhere(written, place_of(home)):
        return f"is {written[:200]!r}, and nothing is fetched from elsewhere; put it beside the manifest, under a name"
    return "holds a NUL character, wanted a file name" if "\0" in written else None


def is_picture(file: SourceFile) -> bool:
    """Whether a file is an image by its name."""
    return file.path.name.lower().endswith(PICTURES)


def path_stem(written: str) -> str:
    """Returns a file name without its extension, folders kept, as it is written; `.hidden` has none."""
    folder, slash, name = written.rpartition("/")
    stem, dot, _ = name.rpartition(".")
    return f"{folder}{slash}{stem}" if dot and stem else written


def stamped(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Returns the files with their stat as it is now; those that have one keep it.

    A file that was changed just now could be changed again in the same tick and keep its stat: where there is one, this
    waits for the next tick, once for all of them. One stat a file; of objects of a store its listing.
    """
    todo = [number for number, file in enumerate(files) if file.stat is None]
    look_up([files[number].path for number in todo])
    stats = {number: stat_now(files[number].path) for number in todo}
    now_ns = time.time_ns()
    young = [number for number, stat in stats.items() if stat is not None and stat[-1] > now_ns - _YOUNG_NS]
    for _ in range(_WAITS):
        if not young:
            break
        is_coarse = any((stat := stats[number]) is not None and not stat[-1] % 1_000_000_000 for number in young)
        time.sleep(_COARSE_TICK_S if is_coarse else _TICK_S)
        again = {number: stat_now(files[number].path) for number in young}
        young = [number for number in young if again[number] != stats[number]]
        stats |= again
    return [replace(file, stat=stats[number]) if number in stats else file for number, file in enumerate(files)]


def require_unchanged(files: Sequence[SourceFile], *, memo: Memo, map_: Map) -> None:
    """Raises BuildError, with the name, for a file whose content is not what was listed.

    It costs one stat a file, and the hash of a file whose stat moved. Stores are asked anew.
    """
    forget()
    look_up([file.path for file in files])
    moved = [file for file in files if file.xxh3_128 != ABSENT and not is_same(stat_now(file.path), file.stat)]
    try:
        hashes = memo.hashes([file.path for file in moved], map_=map_)
    except FileNotFoundError as err:
        raise _changed(str(err.filename), "is gone") from err
    for file, now in zip(moved, hashes, strict=True):
        _require_content(file, now)


def unchanged_stats(files: Iterable[SourceFile]) -> list[Stat | None]:
    """Returns the stat of each file as it is now. Raises BuildError where a content is not what was listed.

    For workers: a file that moved is hashed by each of them, once for each state.
    """
    files = list(files)
    look_up([file.path for file in files])
    return [_unchanged_stat(file) for file in files]


def require_processor(folder: Path, wanted: str) -> None:
    """Raises BuildError where the files of an image processor, which was just loaded, are not those of the key.

    wanted: their digest in the key.
    """
    now = processor_digest(folder)
    if now != wanted:
        raise _changed(str(folder), f"its digest was {wanted[:16]} when the build began and is {now[:16]} now")


def _unchanged_stat(file: SourceFile) -> Stat | None:
    stat = stat_now(file.path)
    if is_same(stat, file.stat):
        return stat
    if stat is None:
        raise _changed(str(file.path), "is gone")
    hashed = _hashed(file.path, stat)
    _require_content(file, hashed.xxh3_128)
    return hashed.stat


@functools.lru_cache(maxsize=4096)
def _hashed(path: Path, stat: Stat) -> Hashed:  # noqa: ARG001  one state of the file
    return hash_now(path)


def _require_content(file: SourceFile, now: str) -> None:
    if now != file.xxh3_128:
        raise _changed(str(file.path), f"its xxh3-128 was {file.xxh3_128} when it was listed and is {now} now")


def _changed(name: str, how: str) -> BuildError:
    return BuildError(
        f"{name} changed during the build ({how}): nothing is sealed, finished shards are kept; "
        "wait until nothing writes to it, then run: forebay preprocess CONFIG",
        code="FB303",
    )
