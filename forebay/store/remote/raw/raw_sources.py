"""Paths of raw data, of this machine or of a store: a URL of a manifest becomes a path in the mirror of its folder.

Such a path names an object and is itself no file. Whatever opens a source does so by `open_source` or `at_hand`: then
the node's copy is there, and a shared lock on its descriptor keeps it from eviction. Of a local path all of these do
what the operating system does.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import hashlib
import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from forebay.config.remote import RemoteConfig, Url, is_url, parse_url
from forebay.config.tree import Config
from forebay.errors import ConfigError, ForebayError, ManifestError, RemoteDeniedError, RemoteError
from forebay.store.files import write_bytes
from forebay.store.inputs import located
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.raw.origin import Place, Version, objects_of, origin_of
from forebay.store.shared_disk import wait_shared

MIRRORS = "/mirrors/"
"""Part of the path of every object."""
_ATTEMPTS = 3
_NO_FILE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP))


def localized(config: Config) -> Config:
    """Returns the config with paths in mirrors where `source.manifest` holds URLs; any other config as it is.

    Of code that yields samples: with the list of what it yielded.

    Raises ManifestError for a URL that is both an object and a folder, RemoteError where the store does not answer.
    """
    config = located(config)
    source = config.source
    if not any(map(is_url, source.manifests)):
        return config
    entries = tuple(local_entry(entry, config.remote) if is_url(entry) else entry for entry in source.manifests)
    return replace(config, source=replace(source, manifest=entries))


def local_entry(text: str, settings: RemoteConfig) -> str:
    """Returns the path, in the mirror of its folder, of a URL of an object, of a folder or with a glob in it."""
    url = parse_url(text)
    objects = objects_of(Url(url.scheme, url.bucket), settings, os.getpid())
    is_object = bool(url.key) and objects.info(url.key) is not None
    is_folder = not url.is_web and objects.is_folder(url.key)
    if is_object and is_folder:
        raise ManifestError(f"{url} is an object and a folder; name what is meant by a glob: {url}/*, or {url}*")
    if is_folder:
        return str(Mirror.at(url, settings).folder)
    base = url.parent
    while not is_object and glob.has_magic(base.key):
        base = base.parent
    return str(Mirror.at(base, settings).folder / url.key.removeprefix(base.key).lstrip("/"))


def place_of(path: str | os.PathLike[str]) -> Place | None:
    """Returns the object that a path in a mirror names; None for a path of this machine."""
    text = os.fspath(path)
    at = text.find(MIRRORS)
    while at >= 0:
        identity, _, name = text[at + len(MIRRORS) :].partition("/")
        try:
            origin = origin_of(f"{text[:at]}{MIRRORS}{identity}", os.getpid())
        except LookupError:
            at = text.find(MIRRORS, at + 1)
        else:
            return Place(origin, posixpath.normpath(f"{origin.url.key}/{name}").strip("/"), name)
    return None


def named_path(written: str, folder: Path, *, named_in: Path) -> Path:
    """Returns the path of a file that a manifest names, relative to a folder.

    A manifest of a store names objects of that store alone: not a file of this machine, not another host. Raises
    ManifestError for what is none, and for a URL in a manifest of this machine.
    """
    place = place_of(folder)
    if place is None:
        if is_url(written):
            raise ManifestError(
                f"{named_in} names {written!r}, and a manifest of this machine names files of this machine; put the "
                "manifest into the store, beside what it names",
                code="FB206",
            )
        return folder / written
    if is_url(written):
        return _other_path(written, place, named_in=named_in)
    if written.startswith("/") or written[:7].lower() == "file://":
        raise ManifestError(
            f"{named_in} names {written!r}, a place of one machine; a manifest of a store names objects of that store: "
            "relative to itself, or by URL",
            code="FB206",
        )
    path = folder / written
    if posixpath.normpath(f"{place.key}/{written}".lstrip("/")).startswith(".."):
        raise ManifestError(
            f"{named_in} names {written!r}, which leads out of its bucket; correct the manifest", code="FB206"
        )
    return path


def is_elsewhere(written: str, home: Place | None) -> bool:
    """Whether a name in a manifest is a URL of another store than the manifest's own, if that is in one."""
    if not is_url(written) or home is None:
        return is_url(written)
    try:
        url = parse_url(written)
    except ConfigError:
        return True
    own = home.origin.url
    return url.scheme != own.scheme or (url.is_web and url.bucket != own.bucket)


def _other_path(written: str, place: Place, *, named_in: Path) -> Path:
    """Returns the path of an object that a manifest of a store names by URL: in the same mirror if it lies below."""
    try:
        url = parse_url(written)
    except ConfigError as err:
        raise ManifestError(f"{named_in} names {written!r}: {err}; correct the manifest") from err
    home = place.origin.url
    if is_elsewhere(written, place):
        raise ManifestError(
            f"{named_in} names {written!r}, which is of another store than {home}; name objects of one store",
            code="FB206",
        )
    if url.bucket == home.bucket and f"{url.key}/".startswith(f"{home.key}/" if home.key else ""):
        return place.origin.folder / url.key.removeprefix(home.key).lstrip("/")
    return Mirror.at(url.parent, place.origin.mirror.settings).folder / url.name


def leads_out(path: Path, base: Path) -> str | None:
    """Returns where a file really lies if that is not below a folder, else None. Links are followed."""
    place, home = place_of(path), place_of(base)
    if place is None or home is None:
        real, root = (Path(os.path.realpath(where)) for where in (path, base))
        return None if real.is_relative_to(root) else str(real)
    is_below = home.origin.objects is place.origin.objects and f"{place.key}/".startswith(
        f"{home.key}/" if home.key else ""
    )
    return None if is_below else place.url


def is_file(path: Path) -> bool:
    """Whether a path is a file, or names an object. Raises RemoteError where its store does not say."""
    place = place_of(path)
    return path.is_file() if place is None else place.info() is not None


def file_stat(path: str | os.PathLike[str]) -> Version | None:
    """Returns the stat of what `is_file` says is a file, None for anything else. Raises as `is_file` does."""
    place = place_of(path)
    if place is not None:
        return None if place.info() is None else source_stat(path)
    try:
        status = os.stat(path)
    except (OSError, ValueError) as err:  # as `Path.is_file` has it
        if isinstance(err, OSError) and err.errno not in _NO_FILE:
            raise
        return None
    return stat_of_status(status) if stat.S_ISREG(status.st_mode) else None


def is_here(path: str | os.PathLike[str]) -> bool:
    """Whether reading a file asks no store: it is of this machine, or the node has a copy of the object as it is."""
    place = place_of(path)
    version = None if place is None else place.version()
    return place is None or (version is not None and place.origin.is_here(version))


def is_hash_known(path: str | os.PathLike[str]) -> bool:
    """Whether a path is of an object whose content this node has hashed."""
    place = place_of(path)
    try:
        version = None if place is None else place.version()
    except RemoteDeniedError:
        return False
    return place is not None and version is not None and place.origin.hash(version) is not None


def is_readable(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a file that this user may read, or an object that the store gives. Raises RemoteError."""
    place = place_of(path)
    if place is None:
        return os.path.isfile(path) and os.access(path, os.R_OK)
    try:
        return place.info() is not None
    except RemoteDeniedError:
        return False


def is_folder(path: Path) -> bool:
    """Whether a path is a folder, or objects lie below what it names."""
    place = place_of(path)
    if place is None:
        return path.is_dir()
    return not place.origin.url.is_web and place.origin.objects.is_folder(place.key)


def exists(path: Path) -> bool:
    """Whether anything is there."""
    return path.exists() if place_of(path) is None else is_file(path) or is_folder(path)


def files_in(folder: Path, pattern: str) -> list[Path]:
    """Returns the files directly in a folder whose names match, sorted, as `Path.glob` finds them."""
    place = place_of(folder)
    if place is None:
        return [path for path in sorted(folder.glob(pattern)) if is_meant(path)]
    if not is_folder(folder):
        return []
    names = [posixpath.basename(key) for key in place.origin.objects.level(place.key)[0]]
    return [folder / name for name in sorted(names) if fnmatch.fnmatchcase(name, pattern)]


def folders_in(folder: Path) -> list[Path]:
    """Returns the folders directly in a folder, sorted."""
    place = place_of(folder)
    if place is None:
        return sorted(path for path in folder.glob("*") if path.is_dir())
    return [folder / posixpath.basename(key) for key in place.origin.objects.level(place.key)[1]]


def names_in(folder: Path) -> set[str]:
    """Returns the names of what lies directly in a folder. Raises OSError where it is none."""
    place = place_of(folder)
    if place is None:
        return set(os.listdir(folder))
    if not is_folder(folder):
        raise FileNotFoundError(2, os.strerror(2), place.url)
    return {posixpath.basename(key) for keys in place.origin.objects.level(place.key) for key in keys}


def files_below(folder: Path, is_wanted: Callable[[Path], bool]) -> Iterator[Path]:
    """Yields the wanted files below a folder. is_wanted: of their paths relative to it."""
    place = place_of(folder)
    if place is None:
        found = (Path(base, name) for base, _, names in walk(folder) for name in names)
        yield from (path for path in found if is_wanted(path.relative_to(folder)) and path.is_file())
        return
    start = len(place.key) + 1 if place.key else 0
    keys = place.origin.objects.below(place.key, lambda key: is_wanted(Path(key[start:])))
    yield from (folder / key[start:] for key in keys)


def walk(folder: str | os.PathLike[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields what `os.walk` does of a folder of this machine; links are followed, but for those that go in circles."""
    for base, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not leads_up(f"{base}/{name}", folder)]
        yield base, folders, names


def walk_files(folder: str | os.PathLike[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields what `walk` does, its first value relative to the folder and "" for that itself, of files and links to
    files, gone ones too: reading a folder tells, and only links are looked at.
    """
    waiting = [""]
    while waiting:
        below = waiting.pop()
        folders: list[str] = []
        names: list[str] = []
        base = f"{os.fspath(folder)}/{below}" if below else os.fspath(folder)
        with contextlib.suppress(OSError), os.scandir(base) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir():
                        folders.append(entry.name)
                    elif is_meant(entry):
                        names.append(entry.name)
        yield below, folders, names
        front = f"{below}/" if below else ""
        waiting += [front + name for name in folders if not leads_up(f"{base}/{name}", folder)]


def is_meant(path: Path | os.DirEntry[str]) -> bool:
    """Whether a file is there, or a link to one that is gone, which is said then and never passed over."""
    return path.is_file() or (path.is_symlink() and not os.path.exists(path))


def leads_up(path: str, root: str | os.PathLike[str]) -> bool:
    """Whether a path is a link to a folder that it lies in, by the links on the way from a root to it."""
    if not os.path.islink(path):
        return False
    above = os.path.relpath(os.path.dirname(path), root).split("/")
    real = f"{os.path.realpath(path).rstrip('/')}/"
    ways = (os.path.join(root, *above[:depth]) for depth in range(len(above) + 1))
    return any(f"{os.path.realpath(way)}/".startswith(real) for way in ways)


def glob_files(pattern: Path) -> list[Path]:
    """Returns the files that a glob matches, sorted by their paths, as `glob.glob` finds them."""
    place = place_of(pattern)
    if place is None:
        found = (Path(name) for name in sorted(glob.glob(str(pattern), recursive=True)))
        return [path for path in found if is_meant(path)]
    base = pattern
    while glob.has_magic(str(base.relative_to(place.origin.folder))):
        base = base.parent
    wanted = pattern.relative_to(base).parts
    if len(wanted) == 1 and wanted[0] != "**":
        return [path for path in files_in(base, wanted[0]) if _matches((path.name,), wanted)]
    return sorted(files_below(base, lambda name: _matches(name.parts, wanted)), key=str)


def _matches(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether the parts of a name match those of a glob; `*` matches no hidden name, `**` any number of folders."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        if len(wanted) == 1:
            return not any(part.startswith(".") for part in parts)
        return _matches(parts, wanted[1:]) or (
            bool(parts) and not parts[0].startswith(".") and _matches(parts[1:], wanted)
        )
    if not parts or (parts[0].startswith(".") and not wanted[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])


def look_up(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Makes known what stores say of these paths, by few requests; nothing for paths of this machine."""
    keys: dict[int, tuple[Place, list[str]]] = {}
    for path in paths:
        if (place := place_of(path)) is not None:
            keys.setdefault(id(place.origin.objects), (place, []))[1].append(place.key)
    for place, wanted in keys.values():
        place.origin.objects.look_up(wanted)


def open_source(path: str | os.PathLike[str]) -> tuple[int, Version]:
    """Returns a descriptor of a file and its stat, see `stat_of_status`; of an object its version.

    An object's copy here is not evicted until it is closed. Raises OSError as `os.open` does, RemoteError.
    """
    place = place_of(path)
    if place is None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe would block
        return descriptor, stat_of_status(os.fstat(descriptor))
    for _ in range(_ATTEMPTS):
        with _as_os_errors(place.url):
            version, copy = place.fetch()
            with contextlib.suppress(FileNotFoundError):  # evicted in between
                descriptor = os.open(copy, os.O_RDONLY | os.O_NONBLOCK)
                wait_shared(descriptor)  # on a file system without locks what is open stays readable
                return descriptor, version
    raise RemoteError(
        f"{place.url}: the node's copy was evicted {_ATTEMPTS} times before it could be opened; raise "
        "remote.cache_size_gb",
        code="FB608",
    )


@contextlib.contextmanager
def at_hand(path: Path) -> Iterator[Path]:
    """Yields a path by which a file can be opened while the block lasts: of an object that of the node's copy."""
    if place_of(path) is None:
        yield path
        return
    descriptor, _ = open_source(path)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def stat_of_status(status: os.stat_result) -> Version:
    """Returns device, inode, size in bytes, and the times of the last change of the content and of anything, in ns."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def source_stat(path: str | os.PathLike[str]) -> Version:
    """Returns the stat of a file, or the version of an object. Raises OSError where there is none, RemoteError."""
    place = place_of(path)
    if place is None:
        return stat_of_status(os.stat(path))
    with _as_os_errors(place.url):
        version = place.version()
    if version is None:
        raise FileNotFoundError(2, os.strerror(2), place.url)
    return version


def modified_ns(path: str | os.PathLike[str]) -> int:
    """Returns when a file was changed last. Raises OSError where there is none, RemoteError."""
    place = place_of(path)
    if place is None:
        return os.stat(path).st_mtime_ns
    info = place.info()
    if info is None:
        raise FileNotFoundError(2, os.strerror(2), place.url)
    return info.modified_ns


def put_beside(path: Path, data: bytes) -> None:
    """Makes a file hold exactly `data`; an object is put into its store. Raises OSError, RemoteError."""
    place = place_of(path)
    if place is None:
        write_bytes(path, data)
        return
    place.origin.objects.bucket.put(place.key, data)
    place.origin.objects.forget(place.key)


@contextlib.contextmanager
def _as_os_errors(where: str) -> Iterator[None]:
    """Makes a refusal of a store what it is for a file: PermissionError, with the URL."""
    try:
        yield
    except RemoteDeniedError as err:
        raise PermissionError(13, f"{os.strerror(13)} ({err})", where) from err


def reader(path: str | os.PathLike[str]) -> Callable[[int, int], bytes] | None:
    """Returns what reads (size, offset) of an object by requests of their own, None where a copy of it is here."""
    place = place_of(path)
    version = None if place is None else place.version()
    if place is None or version is None or place.origin.is_here(version):
        return None
    return lambda size, offset: place.read_range(offset, min(offset + size, version[2]))


def identity(path: str | os.PathLike[str]) -> str:
    """Returns what a file is remembered by: its real path, or its URL."""
    place = place_of(path)
    return os.path.realpath(path) if place is None else place.url


def kept_path(path: str | os.PathLike[str], folder: Path, ending: str) -> Path:
    """Returns where a folder of the cache root keeps what is known of a file: by the hash of its identity."""
    return folder / f"{hashlib.sha256(os.fsencode(identity(path))).hexdigest()[:32]}{ending}"


_PATH = re.compile(r"[^\s'\",;]*?" + MIRRORS + r"[^\s'\",;:/]+(?:/[^\s'\",;:]*)?")


def shown(text: str) -> str:
    """Returns a text in which paths in mirrors are the URLs that they stand for."""
    return _PATH.sub(_url_of, text) if MIRRORS in text else text


def _url_of(found: re.Match[str]) -> str:
    place = place_of(found[0])
    return found[0] if place is None else place.url


@contextlib.contextmanager
def naming_urls() -> Iterator[None]:
    """Makes errors name URLs where they name paths in mirrors."""
    try:
        yield
    except ForebayError as err:
        err.args = tuple(shown(arg) if isinstance(arg, str) else arg for arg in err.args)
        raise
