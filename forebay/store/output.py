"""Files that a command writes: never in the place of anything but an output of the same kind.

A folder that is filled file by file goes on, after any interruption, where it was. Every file is written aside, fsynced
and renamed. Then a line of the journal says that it is whole. A document is written last, and the journal goes then.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.store.files import fsync_folder, hash_file, sweep, write_all, write_bytes
from forebay.store.lookup import SOURCES_NAME
from forebay.store.shared_disk import try_alone
from forebay.store.source_comparison import path_of
from forebay.store.source_files import StoredSource, listed_files, load_sources
from forebay.terminal import first_of

_SUFFIXES = {
    "--html": (".html", ".htm"),
    "--png": (".png",),
    "--wav": (".wav",),
    "--export": (".parquet",),
    "--drop-ids": (".txt", ".ids", ".lst", ".list"),
}

_OF_A_MODEL = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "model.safetensors")
_OWN = ("cache_root", "output_dir", "shard_dir")
"""Settings that name where forebay itself writes."""


def check_output(path: Path, option: str, *, folder: Path | None = None, config: Config | None = None) -> None:
    """Raises ConfigError where `option` cannot make `path` a file, or would replace what is no output of its kind.

    folder: of the cache or plan that is looked at. config: whose file, sources and models stay as they are.
    """
    above = path.absolute().parent
    if not above.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {above}; make it, or name another file")
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name a file")
    if (what := _taken(path, option, folder, config)) is not None:
        raise ConfigError(f"{option} {path} {what}; name a file elsewhere", code="FB708")


def _taken(path: Path, option: str, folder: Path | None, config: Config | None) -> str | None:
    """Returns why a file is not to be written, None where nothing is lost."""
    place = path.parent.resolve() / path.name
    for above in place.parents:
        if (folder is not None and above == folder.resolve()) or _is_sealed(above):
            return f"lies inside the cache {above}, which is sealed"
    named = list(_named(config)) if config is not None else []
    for name, at in named:
        if not name.startswith("source.") and at.is_dir() and at.resolve() in place.parents:
            return f"lies inside of {name} = {at}, which the config reads"
    if any((place.parent / name).exists() for name in _OF_A_MODEL):
        return f"lies inside of {place.parent}, the folder of a model"
    if not path.exists():
        return None
    if (mine := next((name for name, at in named if at.exists() and at.samefile(path)), None)) is not None:
        return f"is {mine} of the config, and would be replaced"
    if path.suffix.lower() not in (wanted := _SUFFIXES[option]):
        return f"is there, and is no earlier output: it would be replaced by a file of another kind than {wanted[0]}"
    return "is a source of the samples, and would be replaced" if _is_source(path, folder, config) else None


def _is_sealed(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("metadata.json", "slots.npy"))


def _named(config: Config) -> Iterator[tuple[str, Path]]:
    """Yields every file and folder that a config reads, by the setting that names it, and the config's own file."""
    yield "the file", Path(config.path)
    yield from _paths(config, "", Path(config.path).parent)


def _paths(value: Any, name: str, base: Path) -> Iterator[tuple[str, Path]]:
    """Yields the paths of a section: what is declared so, and of the settings of steps every text that is a file."""
    if is_dataclass(value):
        for field in fields(value):
            part, own = getattr(value, field.name), f"{name}.{field.name}".lstrip(".")
            if field.metadata.get("path") and field.name not in _OWN:
                yield from ((own, Path(each)) for each in (part if isinstance(part, tuple) else [part]) if each)
            elif isinstance(part, Mapping | tuple) or is_dataclass(part):
                yield from _paths(part, own.removesuffix(".settings"), base)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _paths(part, f"{name}.{key}", base)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _paths(part, name, base)
    elif isinstance(value, str) and os.path.isfile(base / value):
        yield name, base / value


def _is_source(path: Path, folder: Path | None, config: Config | None) -> bool:
    """Whether a file is one that the samples were made of: by its place, or of a cache by its content."""
    is_there = folder is not None and (folder / SOURCES_NAME).is_file()
    stored: Sequence[StoredSource] = load_sources(folder / SOURCES_NAME) if folder and is_there else []
    paths = [path_of(config, source) for source in stored if source.name.endswith(path.name)] if config else []
    if config is not None and any(Path(each) in path.absolute().parents for each in config.source.places):
        paths += [source.path for source in listed_files(config.source, meaning=config.meaning)]
    if any(each is not None and each.exists() and each.samefile(path) for each in paths):
        return True
    alike = {source.xxh3_128 for source in stored if source.size_bytes == path.stat().st_size}
    return bool(alike) and hash_file(path) in alike


Entry = dict[str, Any]
"""What is said of a finished file: its `name` and `size_bytes`, and what the writer adds. A name of None: no file."""
_SHOWN = 40
"""Characters of a value that a message shows."""


@dataclass
class Filling:
    """A folder that this process fills. finished: the entries of whole files; document: that of a whole folder."""

    folder: Path
    document_name: str
    identity: Mapping[str, Any]
    finished: list[Entry] = field(default_factory=list)
    document: Mapping[str, Any] | None = None
    _journal: BinaryIO | None = None

    def add(self, entry: Entry) -> None:
        """Notes that a file is whole; it bears its name already."""
        self._append(entry)
        self.finished.append(entry)

    def seal(self, document: Mapping[str, Any]) -> None:
        """Makes the folder whole. document: JSON; the identity is added to it."""
        self.document = {"identity": dict(self.identity), **document}
        write_bytes(self.folder / self.document_name, json.dumps(self.document, indent=1).encode("ascii") + b"\n")
        journal_of(self.folder, self.document_name).unlink(missing_ok=True)
        fsync_folder(self.folder)

    def _append(self, line: Mapping[str, Any]) -> None:
        assert self._journal is not None
        write_all(self._journal, json.dumps(line).encode("ascii") + b"\n")
        os.fsync(self._journal.fileno())


@contextlib.contextmanager
def filling(folder: Path, document_name: str, *, identity: Mapping[str, Any], option: str) -> Iterator[Filling]:
    """Yields a folder to fill: an empty or new one, or one that the same command began, with what is whole there.

    identity: what decides the bytes of all files; plain JSON. option: what named the folder.
    Raises ConfigError where the folder holds anything else, or another process fills it.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise _refused(f"{option} {folder} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    filled = Filling(folder, document_name, identity)
    if (folder / document_name).exists():
        filled.document = _whole(folder, document_name, identity, option)
        yield filled
        return
    journal = journal_of(folder, document_name)
    if not journal.exists():
        _require_empty(folder, option)
    with open(journal, "ab+", buffering=0) as file:
        if try_alone(file.fileno()) == "taken":  # without locks both write the same bytes
            raise _refused(f"{option} {folder}: another process is filling it; wait for its end")
        filled._journal = file
        filled.finished = _begun(filled, file, option)
        yield filled


def journal_of(folder: Path, document_name: str) -> Path:
    """Returns where the files that are whole are noted, until the folder is."""
    return folder / f".{document_name}.unfinished"


class Summed(io.BufferedIOBase):
    """A file that counts and hashes what is written to it. It writes all that it is given, or raises."""

    def __init__(self, file: BinaryIO, *, with_sha256: bool = False) -> None:
        self._file = file
        self._xxh3, self._sha256 = xxhash.xxh3_128(), hashlib.sha256() if with_sha256 else None
        self.size_bytes = 0

    def writable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns how many bytes were written."""
        return self.size_bytes

    def write(self, data: Any, /) -> int:
        """Writes all bytes of a buffer and returns how many there are."""
        view = memoryview(data).cast("B")
        write_all(self._file, view)
        self._xxh3.update(view)
        if self._sha256 is not None:
            self._sha256.update(view)
        self.size_bytes += len(view)
        return len(view)

    def sums(self) -> Entry:
        """Returns `size_bytes`, `xxh3_128` and, where asked for, `sha256` of what was written."""
        sums: Entry = {"size_bytes": self.size_bytes, "xxh3_128": self._xxh3.hexdigest()}
        return sums if self._sha256 is None else {**sums, "sha256": self._sha256.hexdigest()}


def _require_empty(folder: Path, option: str) -> None:
    names = sorted(os.listdir(folder))
    if names:
        raise _refused(
            f"{option} {folder} is not empty: it holds {first_of(list(map(repr, names)), 1)}, which this command did "
            "not write; name a new or empty folder"
        )


def _begun(filled: Filling, file: BinaryIO, option: str) -> list[Entry]:
    """Returns the entries of the journal whose files are as they say; the journal is begun where it is empty."""
    file.seek(0)
    lines = file.read().split(b"\n")
    whole, torn = lines[:-1], lines[-1]
    if torn:  # the process ended in the middle of a line
        file.truncate(sum(len(line) + 1 for line in whole))
    if not whole:
        filled._append(filled.identity)
        return []
    try:
        # A file that was damaged and made again is named twice, by lines that are the same.
        identity, *entries = [json.loads(line) for line in dict.fromkeys(whole)]
        require_same(filled.folder, identity, filled.identity, option)
        return [entry for entry in entries if _problem(filled.folder, entry) is None]
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        if isinstance(err, ConfigError):
            raise
        journal = journal_of(filled.folder, filled.document_name)
        raise _refused(f"{journal} is none that forebay writes; name another folder, or remove that one") from err


def _whole(folder: Path, name: str, identity: Mapping[str, Any], option: str) -> Mapping[str, Any]:
    try:
        document = json.loads((folder / name).read_bytes())
        stored, entries = document["identity"], document["files"]
        require_same(folder, stored, identity, option)
        problems = [problem for entry in entries if (problem := _problem(folder, entry)) is not None]
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        if isinstance(err, ConfigError):
            raise
        raise _refused(f"{option} {folder}: its {name} is none that forebay writes; name a new folder") from err
    if problems:
        raise _refused(f"{option} {folder}: its {name} says that it is whole, and {problems[0]}; remove the folder")
    found: Mapping[str, Any] = document
    return found


def require_same(folder: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any], option: str) -> None:
    """Raises ConfigError, with the first field and both values, where a folder holds what another command began."""
    for name in {**wanted, **stored}:
        if stored.get(name) != wanted.get(name):
            was, now = (str(each.get(name))[:_SHOWN] for each in (stored, wanted))
            raise _refused(
                f"{option} {folder} holds what another command wrote: {name} is {was} there, {now} is wanted; "
                "name another folder, or remove that one"
            )


def _problem(folder: Path, entry: Entry) -> str | None:
    if entry["name"] is None:
        return None
    try:
        size = os.stat(folder / entry["name"], follow_symlinks=False).st_size
    except FileNotFoundError:
        return f"{entry['name']} is not there"
    return None if size == entry["size_bytes"] else f"{entry['name']} has {size} bytes, not {entry['size_bytes']}"


def _refused(what: str) -> ConfigError:
    return ConfigError(what, code="FB115")
