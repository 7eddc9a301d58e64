"""Where a command may write a file: never in the place of anything but an output of the same kind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.store.files import hash_file
from forebay.store.lookup import SOURCES_NAME
from forebay.store.source_files import listed_files, load_sources, path_of

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
    stored = load_sources(folder / SOURCES_NAME) if folder and (folder / SOURCES_NAME).is_file() else []
    paths = [path_of(config, source) for source in stored if source.name.endswith(path.name)] if config else []
    if config is not None and any(Path(each) in path.absolute().parents for each in config.source.places):
        paths += [source.path for source in listed_files(config.source, meaning=config.meaning)]
    if any(each is not None and each.exists() and each.samefile(path) for each in paths):
        return True
    alike = {source.xxh3_128 for source in stored if source.size_bytes == path.stat().st_size}
    return bool(alike) and hash_file(path) in alike
