"""What lies under a cache root: every file that forebay writes there belongs to one item, and the rest to nobody."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from forebay.caches.root_files import RootContents, File, Sizes, contents_of, file_of, sizes_of
from forebay.caches.root_files import FOLDER, Root
from forebay.errors import CacheCorruptError, CacheError
from forebay.store.inputs import FOLDER as INPUTS
from forebay.store.cold.arrays import ROOT as COLD
from forebay.store.held import ORIGIN
from forebay.store.inputs import SAMPLES
from forebay.store.memo import NOTES, Use, uses_of
from forebay.store.layout import FORMAT_VERSION
from forebay.store.memo import FILE_NAME as MEMO
from forebay.store.metadata import FILE_NAME, check_found, checksum
from forebay.store.remote.root import LISTED, RemoteRoot
from forebay.store.segments import count_of
from forebay.store.files import is_temporary
from forebay.store.texts import IDENTITY, SEGMENT, TEXTS

Kind = Literal[
    "cache",
    "texts",
    "inputs",
    "plan",
    "tar index",
    "text index",
    "listing",
    "hashes",
    "build",
    "prepared",
    "leftover",
    "known",
    "foreign",
]
"""`known`: what forebay keeps of the caches of a store. `foreign`: what is not forebay's, or cannot be read as such."""

KINDS: Mapping[Kind, str] = {
    "cache": "caches",
    "texts": "kept texts",
    "inputs": "samples of iterators",
    "plan": "plans",
    "tar index": "tar indexes",
    "text index": "indexes of lines of text",
    "listing": "listings",
    "hashes": "remembered hashes",
    "build": "unfinished builds",
    "prepared": "prepared builds",
    "leftover": "leftovers",
    "known": "caches of a store that are known here",
}

PLANS, TAR_INDEX, TEXT_INDEX, BUILDING, LISTINGS = "plans", "tar_index", "text_index", ".building", ".listings"
_BUILD = re.compile(r"[0-9a-f]{16}(-rebuild|-stage)?")
_PREPARED = re.compile(r"(prepared-[0-9a-f]{16})(\.lock|\.submitted\.json)?")
_INDEX: Mapping[str, tuple[Kind, re.Pattern[str]]] = {
    TAR_INDEX: ("tar index", re.compile(r"[0-9a-f]{32}\.parquet")),
    TEXT_INDEX: ("text index", re.compile(r"[0-9a-f]{32}\.lines")),
}
_LISTING = re.compile(r"[0-9a-f]{8,64}")
_TEXTS = re.compile(r"[0-9a-f]{16}")
_INPUTS = re.compile(r"[0-9a-f]{32}")
_READ_ENDS = (".tdz", ".media", ".image")
"""Ends of the files that readers of samples read."""
_MADE_NS = 60 * 10**9
"""Sealing reads shards too."""
_MOST_BYTES = 64 * 1024 * 1024
_Document = Callable[[Path, int], tuple[Mapping[str, Any], int]]
"""(folder, descriptor of it) -> what it says of itself, and when it was written. Raises CacheError, OSError."""


@dataclass(kw_only=True)
class RootItem:
    """Something under a root. name: its path there, which people call it by.

    inode: of the folder or file. beside: other files of the root that go with it. document: what it says of itself.
    problem: why it is foreign. uses: noted ones, the latest first. made_ns: when it was finished. remote: the root
    below whose URL it lies, where it lies in a store.
    """

    kind: Kind
    name: str
    file: File
    contents: RootContents = field(default_factory=RootContents)
    beside: Sequence[File] = ()
    document: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    uses: Sequence[Use] = ()
    made_ns: int = 0
    remote: RemoteRoot | None = None

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.file.kind == "folder"

    @cached_property
    def files(self) -> list[File]:
        """All files of it."""
        own = [] if self.is_folder else [self.file]
        return [*own, *self.contents.files, *self.beside]

    @cached_property
    def sizes(self) -> Sizes:
        """What it takes."""
        return sizes_of(self.files)

    @cached_property
    def used_ns(self) -> int:
        """When it was used last: the last note, when a shard was read or anything written, or when it was made.

        A process that opens a cache by itself notes nothing; many disks keep to a day when a file was read last.
        """
        noted = self.uses[0].used_ns if self.uses else 0
        written = self.contents.changed_ns if self.kind in _GROWING else 0
        read = max((file.read_ns for file in self.contents.files if file.name.endswith(_READ_ENDS)), default=0)
        return max(noted, written, read, self.made_ns)

    @property
    def is_used(self) -> bool:
        """Whether it was used after it was made, as far as that is known."""
        return bool(self.uses) or self.used_ns > self.made_ns + _MADE_NS


_GROWING: tuple[Kind, ...] = ("build", "prepared", "leftover", "listing", "texts")
"""Kinds that are used by being written."""


@dataclass(kw_only=True)
class Survey:
    """All items of a root. origin: the URL that the root stands for on this node."""

    root: Root
    items: list[RootItem]
    origin: str | None = None

    def of(self, *kinds: Kind) -> list[RootItem]:
        """Returns the items of these kinds."""
        return [item for item in self.items if item.kind in kinds]

    @property
    def caches(self) -> list[RootItem]:
        """The sealed caches."""
        return self.of("cache")

    def files(self) -> Iterator[File]:
        """Yields every file of every item."""
        for item in self.items:
            yield from item.files


def survey(root: Root) -> Survey:
    """Returns what lies under a root, by name. Whatever cannot be read is an item that says why; nothing changes."""
    items: list[RootItem] = []
    for name in sorted(os.listdir(root.descriptor)):
        with contextlib.suppress(FileNotFoundError):  # it went meanwhile
            status = os.stat(name, dir_fd=root.descriptor, follow_symlinks=False)
            items += _top(root, name, status)
    return Survey(root=root, items=items, origin=_origin(root))


def _top(root: Root, name: str, status: os.stat_result) -> Iterator[RootItem]:
    """Yields what an entry of the root is, or holds."""
    file = file_of(name, status, device=root.device)
    if file.kind == "folder" and name in _HOLDERS:
        yield from _below(root, name)
    elif file.kind == "folder" and name == LISTED:
        yield _item(root, "known", file)
    elif is_temporary(name) and file.kind != "other":
        yield _item(root, "leftover", file)
    elif file.kind == "folder" and not name.startswith("."):
        yield cache_item(root, file)
    elif file.kind == "file" and name == MEMO:
        yield _item(root, "hashes", file)
    elif name not in _OWN:
        yield _foreign(file, _what(file, status))


_OWN = (NOTES, ORIGIN, ".planning", "..", ".")


def _below(root: Root, holder: str) -> Iterator[RootItem]:
    """Yields the items of a folder of the root that holds things of one kind."""
    below = os.open(holder, FOLDER, dir_fd=root.descriptor)
    try:
        found: dict[str, File] = {}
        for name in sorted(os.listdir(below)):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=below, follow_symlinks=False)
                found[name] = file_of(f"{holder}/{name}", status, device=root.device)
        for name, file in found.items():
            if name != NOTES:
                yield from _HOLDERS[holder](root, name, file, found)
    finally:
        os.close(below)


def _plan(root: Root, name: str, file: File, _: Mapping[str, File]) -> Iterator[RootItem]:
    if is_temporary(name) and file.kind != "other":
        yield _item(root, "leftover", file)
        return
    yield _described(root, "plan", file, _document_of_plan)


def _index(root: Root, name: str, file: File, _: Mapping[str, File]) -> Iterator[RootItem]:
    if is_temporary(name) and file.kind != "other":
        yield _item(root, "leftover", file)
        return
    kind, pattern = _INDEX[file.name.partition("/")[0]]
    if file.kind == "file" and pattern.fullmatch(name):
        yield _item(root, kind, file)
    else:
        yield _foreign(file, f"no name of a {kind}")


def _build(root: Root, name: str, file: File, found: Mapping[str, File]) -> Iterator[RootItem]:
    prepared = _PREPARED.fullmatch(name)
    if is_temporary(name) and file.kind != "other":
        yield _item(root, "leftover", file)
    elif file.kind == "folder" and _BUILD.fullmatch(name):
        yield _item(root, "build", file)
    elif prepared and file.kind == "folder" and not prepared[2]:
        item = _described(root, "prepared", file, _document_of_prepared)
        item.beside = [found[f"{name}{end}"] for end in (".lock", ".submitted.json") if f"{name}{end}" in found]
        yield item
    elif prepared and file.kind == "file" and prepared[2]:
        if prepared[1] not in found:
            yield _item(root, "leftover", file)
    else:
        yield _foreign(file, "no name of a build")


def _described_below(
    kind: Kind, names: re.Pattern[str], what: str, read: _Document
) -> Callable[[Root, str, File, Mapping[str, File]], Iterator[RootItem]]:
    """Returns what yields the items of a folder that holds folders of one kind, each of which describes itself."""

    def items(root: Root, name: str, file: File, _: Mapping[str, File]) -> Iterator[RootItem]:
        if file.kind == "folder" and names.fullmatch(name):
            yield _described(root, kind, file, read)
        elif is_temporary(name) and file.kind != "other":
            yield _item(root, "leftover", file)
        else:
            yield _foreign(file, f"no name of {what}")

    return items


def cache_item(root: Root, file: File) -> RootItem:
    """Returns the cache of a folder directly under the root, or a foreign item that says why it is none."""
    return _described(root, "cache", file, _document_of_cache)


def _described(root: Root, kind: Kind, file: File, read: _Document) -> RootItem:
    """Returns the item of a folder that describes itself; a foreign one where it does not."""
    if file.kind != "folder":
        return _foreign(file, "no folder, or on another disk")
    try:
        descriptor = os.open(file.name, FOLDER, dir_fd=root.descriptor)
    except OSError as err:
        return _foreign(file, f"cannot be read: {err.strerror}")
    try:
        document, made_ns = read(Path(root.folder / file.name), descriptor)
        contents = contents_of(descriptor, device=root.device)
    except OSError as err:
        return _foreign(file, f"cannot be read: {err.strerror}")
    except (CacheError, ValueError, RecursionError) as err:
        return _foreign(file, str(err).partition("; run:")[0])
    finally:
        os.close(descriptor)
    uses = uses_of(root.descriptor, file.name) if kind in ("cache", "plan", "texts") else ()
    return RootItem(kind=kind, name=file.name, file=file, contents=contents, document=document, made_ns=made_ns, uses=uses)


def _item(root: Root, kind: Kind, file: File) -> RootItem:
    contents = RootContents()
    if file.kind == "folder":
        with contextlib.suppress(OSError):
            descriptor = os.open(file.name, FOLDER, dir_fd=root.descriptor)
            try:
                contents = contents_of(descriptor, device=root.device)
            finally:
                os.close(descriptor)
    return RootItem(kind=kind, name=file.name, file=file, contents=contents, made_ns=file.changed_ns)


def _foreign(file: File, problem: str) -> RootItem:
    return RootItem(kind="foreign", name=file.name, file=file, problem=problem, made_ns=file.changed_ns)


def _what(file: File, status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        return "a link, which is never followed"
    return "on another disk" if stat.S_ISDIR(status.st_mode) and file.kind == "other" else "nothing that forebay writes"


def _document_of_cache(folder: Path, descriptor: int) -> tuple[Mapping[str, Any], int]:
    """Returns the metadata of a cache as a look needs them: their checksum is compared, not how they are spelled."""
    if (what := _other_form(descriptor)) is not None:
        raise CacheCorruptError(what)
    document, made_ns = read_document(descriptor, FILE_NAME)
    if "plan_key" in document:
        raise CacheCorruptError("a plan, which belongs into the folder plans")
    version = document.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CacheCorruptError(f"format_version is {version}, this forebay reads up to {FORMAT_VERSION}")
    if "recipe" not in document or document.get("checksum") != checksum(document, is_parsed=True):
        raise CacheCorruptError(f"its {FILE_NAME} is damaged, or none that forebay writes")
    check_found(folder, document)
    if type(document.get("num_samples")) is not int:
        raise CacheCorruptError(f"its {FILE_NAME} does not say how many samples there are")
    return document, made_ns


def _other_form(descriptor: int) -> str | None:
    """Returns what a folder is that holds a cache in another form, None where it does not."""
    forms = {
        COLD: "the cold form of a cache (zarr), which forebay does not remove",
        ORIGIN: "what this node keeps of a store, which remote.cache_size_gb bounds",
    }
    for name, what in forms.items():
        with contextlib.suppress(OSError):
            os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            return what
    return None


def _document_of_plan(folder: Path, descriptor: int) -> tuple[Mapping[str, Any], int]:
    document, made_ns = read_document(descriptor, FILE_NAME)
    if "plan_key" not in document or document.get("checksum") != checksum(document, is_parsed=True):
        raise CacheCorruptError(f"{folder.name} is damaged, or no plan")
    return document, made_ns


def _document_of_listing(_: Path, descriptor: int) -> tuple[Mapping[str, Any], int]:
    document, made_ns = read_document(descriptor, "listing.json")
    if not {"files", "sums"} <= document.keys():
        raise CacheCorruptError("its listing.json is none that forebay writes")
    return document, made_ns


def _document_of_prepared(_: Path, descriptor: int) -> tuple[Mapping[str, Any], int]:
    document, made_ns = read_document(descriptor, "prepared.json")
    if not isinstance(document.get("key"), str) or not isinstance(document.get("files"), dict):
        raise CacheCorruptError("its prepared.json is none that forebay writes")
    return document, made_ns


def _document_of_texts(_: Path, descriptor: int) -> tuple[Mapping[str, Any], int]:
    try:
        document, made_ns = read_document(descriptor, IDENTITY)
    except CacheCorruptError:  # it is the first thing that is written there
        if IDENTITY in os.listdir(descriptor):
            raise
        document, made_ns = {"identity": {}}, 0
    if not isinstance(document.get("identity"), dict):
        raise CacheCorruptError(f"its {IDENTITY} is none that forebay writes")
    names = [name for name in os.listdir(descriptor) if SEGMENT.fullmatch(name)]
    return {**document, "num_texts": sum(_num_texts(name, descriptor) for name in names)}, made_ns


def _document_of_inputs(_: Path, descriptor: int) -> tuple[Mapping[str, Any], int]:
    try:
        status = os.stat(SAMPLES, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError as err:
        raise CacheCorruptError(f"it has no {SAMPLES}") from err
    if not stat.S_ISREG(status.st_mode):
        raise CacheCorruptError(f"its {SAMPLES} is no regular file")
    return {}, status.st_mtime_ns


def _num_texts(name: str, folder: int) -> int:
    """Returns how many texts a segment says that it has; those of another segment too are among them."""
    with contextlib.suppress(OSError, ValueError):
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            return count_of(file)
        finally:
            os.close(file)
    return 0


_HOLDERS = {
    PLANS: _plan,
    TAR_INDEX: _index,
    TEXT_INDEX: _index,
    BUILDING: _build,
    LISTINGS: _described_below("listing", _LISTING, "a listing", _document_of_listing),
    TEXTS: _described_below("texts", _TEXTS, "kept texts", _document_of_texts),
    INPUTS: _described_below("inputs", _INPUTS, "samples of an iterator", _document_of_inputs),
}


def read_document(descriptor: int, name: str) -> tuple[dict[str, Any], int]:
    """Returns the JSON object of a file in an opened folder, and when it was written. Raises CacheError, OSError."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=descriptor)
    except FileNotFoundError as err:
        raise CacheCorruptError(f"it has no {name}") from err
    with open(file, "rb", buffering=0) as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise CacheCorruptError(f"its {name} is no regular file, or too large")
        document = json.loads(opened.readall())
    if not isinstance(document, dict):
        raise CacheCorruptError(f"its {name} holds no object")
    return document, status.st_mtime_ns


def _origin(root: Root) -> str | None:
    with contextlib.suppress(OSError, CacheError, ValueError, RecursionError):
        url = read_document(root.descriptor, ORIGIN)[0].get("url")
        return url if isinstance(url, str) else None
    return None
