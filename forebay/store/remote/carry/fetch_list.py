"""The objects below a URL, or the files that a manifest names. Nothing of the list is believed unseen.

The manifest of an evaluation set tells the hashes of its files. It is found beside them, or named itself, which a web
server needs, since that lists nothing. Which names may become files is decided before a byte is written.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from forebay.config.remote import RemoteConfig, Url
from forebay.errors import ConfigError, ManifestError, RemoteError, RemoteMissingError
from forebay.store.files import is_temporary
from forebay.store.remote.bucket.bucket import Bucket, ObjectInfo
from forebay.store.remote.carry.proof import DIGITS, HASHES, Expected, judge
from forebay.visible import an, human_bytes

_DRIVE = re.compile(r"[A-Za-z]:")
_MAX_SHOWN = 5


def problem_of(name: str, *, longest_part: int = 255, longest: int = 4095) -> str:
    """Returns why a name may be no file, else nothing. longest_part, longest: bytes of a part and of all of it."""
    if not name or name.startswith("/"):
        return "is absolute" if name else "is empty"
    if "\\" in name or _DRIVE.match(name):
        return "holds a backslash" if "\\" in name else "begins with a drive letter"
    if not name.isprintable() and any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in name):
        return "holds a control character"
    parts = name.split("/")
    if any(part in (".", "..") for part in parts):
        return "leads out of the folder"
    if "" in parts:
        return "has an empty part"
    if max(len(part.encode()) for part in parts) > longest_part or len(name.encode()) > longest:
        return f"is longer than the file system takes ({longest_part} bytes a part, {longest} in all)"
    if any(is_temporary(part) for part in parts):
        return "is a name of what forebay is writing"
    return ""


def problems(names: Collection[str], *, longest_part: int = 255, longest: int = 4095) -> list[str]:
    """Returns a line for each name that may be no file, and for each that is a folder of another one too."""
    bounds = {"longest_part": longest_part, "longest": longest}
    found = [f"{name!r} {problem}" for name in names if (problem := problem_of(name, **bounds))]
    return found + [f"{name!r} is a file, and a folder of others" for name in sorted(folders_of(names) & {*names})]


def folders_of(names: Iterable[str]) -> set[str]:
    """Returns every folder on the way to the names."""
    found: set[str] = set()
    for name in names:
        while (name := name.rpartition("/")[0]) and name not in found:
            found.add(name)
    return found


def alike(names: Collection[str]) -> list[tuple[str, str]]:
    """Returns pairs of names, or of folders of them, that differ by case or by Unicode form alone."""
    first: dict[str, str] = {}
    pairs = []
    for name in sorted({*names, *folders_of(names)}):
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())
        other = first.setdefault(folded, name)
        if other != name:
            pairs.append((other, name))
    return pairs


def some(lines: Collection[str]) -> str:
    """Returns a few lines as one text, which says how many more there are."""
    shown = list(lines)[:_MAX_SHOWN]
    return "; ".join(shown) + (f"; and {len(lines) - len(shown)} more" if len(lines) > len(shown) else "")


def limits(folder: str) -> tuple[int, int]:
    """Returns the bytes that a part of a name, and a whole name below a folder that is there, may have."""
    longest_part, longest = os.pathconf(folder, "PC_NAME_MAX"), os.pathconf(folder, "PC_PATH_MAX")
    return longest_part, longest - len(os.fsencode(os.path.abspath(folder))) - 2


MANIFEST = "evaluation_manifest.json"
MAKE = "forebay evalset CONFIG --out DIR"
_MAX_DOCUMENT = 64 * 1024 * 1024
_MAX_SETS = 1000
_MAX_LISTED = 10_000_000
"""Names that a listing may pass over: a store that never ends is told so."""
_SHOWN = 5
_HEX = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchOptions:
    """The request of a fetch.

    max_bytes, max_files: what it brings at most, all files together. overwrite: files with other bytes are replaced.
    etags: an etag of S3 that looks like an MD5 is one; buckets that encrypt with a key of their own have others.
    dry_run: nothing is downloaded.
    """

    max_bytes: int
    max_files: int
    prefix: str = ""
    overwrite: bool = False
    etags: bool = True
    dry_run: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        if self.prefix.startswith("/") or ".." in self.prefix.split("/"):
            raise ConfigError(f"--prefix {self.prefix!r} is of no name below the URL; for example: --prefix hi_")


def list_files(url: Url, settings: RemoteConfig, options: FetchOptions) -> FetchListing:
    """Returns the files below a URL, or of a manifest at the URL, whose names begin with the prefix.

    Raises RemoteError for nothing, or more than the bounds; ManifestError for a manifest that is none, or disagrees.
    """
    if url.name.endswith(".json") and url.key:
        found = FetchListing(Bucket(url.parent, settings), options)
        found.take_manifest(url.name, is_alone=True)
        return found.done()
    found = FetchListing(Bucket(url, settings), options)
    if url.is_web:
        try:
            found.take_manifest(MANIFEST, is_alone=True)
        except RemoteMissingError as err:
            raise RemoteError(
                f"{url}: a web server lists nothing, and {url / MANIFEST} is not there; name the manifest that lists "
                f"the files: forebay fetch {url}/NAME.json"
            ) from err
        return found.done()
    found.take_listing()
    if not found.files and not options.prefix and url.key:
        found = FetchListing(Bucket(url.parent, settings), options)
        found.take_object(url)
    return found.done()


class FetchListing:
    """The files to come from a bucket.

    tars: those of evaluation sets, by name, with what their set's index.json says, or None. others: without the prefix.
    """

    def __init__(self, bucket: Bucket, options: FetchOptions) -> None:
        self.bucket, self.prefix, self.options = bucket, options.prefix, options
        self.files: dict[str, Expected] = {}
        self.tars: dict[str, Any] = {}
        self.others: list[str] = []
        self.total = 0

    def take_listing(self) -> None:
        """Takes in all objects whose names begin with the prefix, and the manifests beside them."""
        sets: list[str] = []
        for number, info in enumerate(self.bucket.objects(self.prefix.rpartition("/")[0])):
            if number >= _MAX_LISTED:
                raise RemoteError(
                    f"{self.bucket.url} has more than {_MAX_LISTED:,} objects to look through; name a folder that is "
                    "further below"
                )
            if info.name.rpartition("/")[2] == MANIFEST and len(sets) < _MAX_SETS:
                sets.append(info.name)
            self._take(_expected(info))
        for name in folders_of(self.files) & self.files.keys():
            if not self.files[name].size_bytes:  # by such an object some tools mark a folder
                del self.files[name]
        for name in sets:
            self.take_manifest(name, is_alone=False)

    def take_object(self, url: Url) -> None:
        """Takes in the one object of a URL. Raises RemoteMissingError where there is none."""
        try:
            self._take(_expected(self.bucket.info(url.name)))
        except RemoteMissingError as err:
            raise RemoteMissingError(f"{url}: nothing is there, and nothing lies below it; name another URL") from err

    def take_manifest(self, name: str, *, is_alone: bool) -> None:
        """Takes in a manifest; is_alone: nothing else tells what is there. Raises ManifestError, RemoteMissingError."""
        where = self.bucket.url / name
        folder = name.rpartition("/")[0]
        below = f"{folder}/" if folder else ""
        data, info = read_document(self.bucket, name)
        if is_alone:
            self._take(replace(_expected(info), size_bytes=len(data)))
        if name in self.files:
            itself = (("xxh3_128", xxhash.xxh3_128_hexdigest(data)),)
            self.files[name] = replace(self.files[name], hashes=itself)
        files, index = _entries(_parsed(where, data), where)
        for file in [*files, index] if index is not None else files:
            expected = replace(file, name=below + file.name)
            if is_alone:
                self._take(expected)
            elif expected.name.startswith(self.prefix):
                self._join(expected, where)
        tars = [file.name for file in files if file.name.endswith(".tar") and (below + file.name) in self.files]
        said = self._index(below, index, where) if tars and index is not None else None
        for tar in tars:
            self.tars[below + tar] = None if said is None else said.get(tar, {})

    def _index(self, below: str, said: Expected, where: Url) -> Mapping[str, Any]:
        """Returns what an index says of the members of its tars, by their names. Raises ManifestError."""
        there = self.bucket.url / (below + said.name)
        data, _ = read_document(self.bucket, below + said.name)
        if problem := judge([data], said, etags_are_md5=False).problem:
            raise ManifestError(f"{there} is not what {where} says: {problem}; one of the two was replaced")
        tars = _parsed(there, data).get("tars")
        if not isinstance(tars, dict):
            raise ManifestError(f"{there} has no object `tars`; have the set made again: {MAKE}")
        return tars

    def _join(self, said: Expected, where: Url) -> None:
        """Adds what a manifest says to what the store says. Raises ManifestError where the two disagree."""
        there = self.files.get(said.name)
        if there is None:
            raise ManifestError(f"{where} names {said.name!r}, which {self.bucket.url} does not have; push it again")
        if there.size_bytes != said.size_bytes:
            raise ManifestError(
                f"{where} says that {said.name!r} has {said.size_bytes} bytes, the store says {there.size_bytes}; "
                "one of the two was replaced"
            )
        self.files[said.name] = replace(there, hashes=said.hashes)

    def _take(self, expected: Expected) -> None:
        name = expected.name
        if not name:  # `folder/` is an object of some tools
            return
        if not name.startswith(self.prefix):
            if len(self.others) < _SHOWN:
                self.others.append(name)
            return
        if (other := self.files.get(name)) is not None:
            if other.size_bytes and not expected.size_bytes:  # `name/`, see above
                return
            if other.size_bytes or not expected.size_bytes:
                raise ManifestError(f"{self.bucket.url}: {name!r} is there twice; a folder holds it once")
        self.files[name] = expected
        self.total += expected.size_bytes
        self._check_bounds()

    def _check_bounds(self) -> None:
        if len(self.files) > self.options.max_files:
            raise RemoteError(
                f"{self.bucket.url} has more than {self.options.max_files:,} files{self._said()}; name fewer by "
                "--prefix, or raise --max-files"
            )
        if self.total > self.options.max_bytes:
            raise RemoteError(
                f"{self.bucket.url}: the first {len(self.files):,} files{self._said()} have {self.total:,} "
                f"bytes ({human_bytes(self.total)}), at most {self.options.max_bytes:,} "
                f"({human_bytes(self.options.max_bytes)}) are allowed; name fewer by --prefix, or raise --max-size-gb"
            )

    def _said(self) -> str:
        return f" that begin with {self.prefix!r}" if self.prefix else ""

    def done(self) -> FetchListing:
        """Returns what was found. Raises RemoteMissingError where that is nothing."""
        if self.files:
            return self
        if not self.others:
            raise RemoteMissingError(f"{self.bucket.url}: nothing lies below it; name another URL")
        raise RemoteMissingError(
            f"{self.bucket.url}: no name below it begins with {self.prefix!r}; there are {', '.join(self.others)}"
            f"{' and others' if len(self.others) == _SHOWN else ''}"
        )


def _expected(info: ObjectInfo) -> Expected:
    return Expected(name=info.name, size_bytes=info.size_bytes, etag=info.quoted_etag, modified_ns=info.modified_ns)


def read_document(bucket: Bucket, name: str) -> tuple[bytes, ObjectInfo]:
    """Returns a JSON document of a store, and what the store says of it. Raises RemoteError for one that is huge."""
    info, data = bucket.info(name), bytearray()
    for piece in bucket.stream(name, etag=info.quoted_etag):
        data += piece
        if len(data) > _MAX_DOCUMENT:
            raise RemoteError(f"{bucket.url / name} has more than {_MAX_DOCUMENT:,} bytes, which no manifest has")
    return bytes(data), info


def _parsed(where: Url, data: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise ManifestError(f"{where} is no JSON ({err}); name the manifest of an evaluation set") from err
    if not isinstance(document, dict):
        raise ManifestError(f"{where} is {an(type(document).__name__)}, wanted an object with `files`")
    return document


def _entries(document: Mapping[str, Any], where: Url) -> tuple[list[Expected], Expected | None]:
    """Returns a manifest's files (a null name: a language without samples) and index; ManifestError for less."""
    files = document.get("files")
    if not isinstance(files, list) or not files:
        raise ManifestError(f"{where} has no list `files`; name the manifest of an evaluation set ({MANIFEST})")
    found, what = [], ""
    try:
        for number, entry in enumerate(files):
            what = f"files[{number}]"
            if entry["name"] is not None:
                found.append(_entry(entry))
        what, index = "index", document.get("index")
        return found, None if index is None else _entry(index)
    except (ValueError, KeyError, TypeError) as err:
        raise ManifestError(
            f"{where}: {what} says no name, size_bytes and one of {', '.join(HASHES)}: {err!r}; have the set made "
            f"again: {MAKE}"
        ) from err


def _entry(entry: Mapping[str, Any]) -> Expected:
    name, size = entry["name"], entry["size_bytes"]
    if not isinstance(name, str) or not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"name {name!r}, size_bytes {size!r}")
    hashes = []
    for kind in HASHES:
        digest = entry.get(kind)
        if digest is None:
            continue
        if not isinstance(digest, str) or len(digest) != DIGITS[kind] or not _HEX.fullmatch(digest):
            raise ValueError(f"{kind} {digest!r} is no {DIGITS[kind]} hex digits")
        hashes.append((kind, digest))
    if not hashes:
        raise ValueError(f"{name!r} has no hash")
    return Expected(name=name, size_bytes=size, hashes=tuple(hashes))
