"""Steps of installed packages: entry points of the group `forebay.steps`, looked up without importing any of them.

[project.entry-points."forebay.steps"]
fbank40 = "my_package.steps:Fbank40"
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path, PurePosixPath

from forebay.errors import ConfigError

GROUP = "forebay.steps"


def names() -> list[str]:
    """Returns the names of all installed steps, sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def entry_named(name: str) -> EntryPoint | None:
    """Returns the installed step of a name, None where there is none. Raises ConfigError where several have it."""
    found = {(entry.value, _called(entry)): entry for entry in entry_points(group=GROUP, name=name)}
    if len(found) > 1:
        who = " and ".join(sorted(f"{value} of {of}" for value, of in found))
        raise ConfigError(f'audio.features: "{name}" is the name of {who}; uninstall one of them', code="FB128")
    return next(iter(found.values()), None)


def distribution(entry: EntryPoint) -> str:
    """Returns the name and version of the distribution of a step, as `name 1.0`."""
    return _called(entry)


def content_digest(entry: EntryPoint) -> str:
    """Returns the sha256 over the content of the distribution of a step, without importing it.

    That is its RECORD: the hash of every file that it installed, by the file's name. Scripts, bytecode and the files of
    metadata are left out: they say how and where something was installed. A distribution whose RECORD does not hold the
    module (an editable one) has the files of the module's package read instead. Raises ConfigError where neither is
    there.
    """
    listed = sorted(_recorded(entry)) or sorted(_read(entry))
    if not listed:
        raise ConfigError(
            f'audio.features: the files of "{entry.name}", {entry.value} of {_called(entry)}, are not there; install '
            "the package again",
            code="FB128",
        )
    return hashlib.sha256("".join(f"{name}\0{found}\n" for name, found in listed).encode()).hexdigest()


def edited_file(entry: EntryPoint) -> str | None:
    """Returns a file of the step's package that is not what the RECORD says, None where all are."""
    dist = entry.dist
    for name, recorded in _recorded(entry):
        if dist is not None and _is_of(name, _top(entry)) and _sha256(Path(str(dist.locate_file(name)))) != recorded:
            return name
    return None


def _recorded(entry: EntryPoint) -> Iterator[tuple[str, str]]:
    """Yields the installed files and their hashes where RECORD holds the step's package, nothing where it does not."""
    files = (entry.dist.files if entry.dist is not None else None) or []
    kept = {str(path): path for path in files if _is_content(PurePosixPath(str(path)))}
    if not any(_is_of(name, _top(entry)) for name in kept):
        return
    for name, path in kept.items():
        if path.hash is None or path.hash.mode != "sha256":
            yield name, _sha256(Path(str(path.locate())))
        else:
            yield name, _as_hex(path.hash.value)


def _read(entry: EntryPoint) -> Iterator[tuple[str, str]]:
    """Yields the files of the package of a step and their hashes, found without importing the package."""
    try:
        spec = importlib.util.find_spec(_top(entry))
    except (ImportError, ValueError):
        return
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    for folder in folders:
        for path in folder.rglob("*"):
            name = f"{_top(entry)}/{path.relative_to(folder).as_posix()}"
            if path.is_file() and _is_content(PurePosixPath(name)) and "/." not in name:
                yield name, _sha256(path)
    if not folders and spec is not None and spec.origin is not None and Path(spec.origin).is_file():
        yield Path(spec.origin).name, _sha256(Path(spec.origin))


def _is_content(path: PurePosixPath) -> bool:
    is_metadata = any(part.endswith((".dist-info", ".egg-info")) for part in path.parts)
    return ".." not in path.parts and "__pycache__" not in path.parts and not is_metadata


def _is_of(name: str, top: str) -> bool:
    return PurePosixPath(name).parts[0].partition(".")[0] == top


def _top(entry: EntryPoint) -> str:
    return entry.module.partition(".")[0]


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as err:
        return f"unreadable: {err.strerror}"


def _as_hex(value: str) -> str:
    """Returns a hash of RECORD, base64 without its padding, as hex digits."""
    import base64
    import binascii

    try:
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    except (binascii.Error, ValueError):
        return value


def _called(entry: EntryPoint) -> str:
    dist: Distribution | None = entry.dist
    return "an unnamed distribution" if dist is None else f"{dist.name} {dist.version}"
