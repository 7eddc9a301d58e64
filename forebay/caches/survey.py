"""A survey of a cache root: every file that forebay writes there belongs to one item, and the rest to nobody.

Caches of a root that lies in a store are items too, whose files are objects below the root's URL. No lock of a store
tells who reads a cache, so none goes without `--force`. metadata.json goes first: from then on nobody opens the cache,
and a removal that was cut off leaves what a push of the same cache fills up again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forebay.caches.kinds import FOREIGN, HOLDERS, KINDS, kinds_at
from forebay.caches.ours import names_of_cache, read_document
from forebay.caches.root_items import File, Kept, Root, RootContents, RootItem, Survey, contents_of, entered, file_of
from forebay.errors import CacheError, RemoteError
from forebay.store.files import is_temporary
from forebay.store.held import ORIGIN
from forebay.store.layout import NOTES
from forebay.store.memo import uses_of
from forebay.store.metadata import FILE_NAME, read_metadata
from forebay.store.remote.bucket.bucket import ObjectInfo
from forebay.store.remote.small_files import LISTED, RemoteRoot
from forebay.store.remote.small_files import NAME as COLUMNS
from forebay.visible import an


def survey(root: Root) -> Survey:
    """Returns what lies under a root, here and in the store that it stands for, by name; nothing changes.

    Whatever cannot be read is an item that says why.
    """
    items: list[RootItem] = []
    found, kinds = _entries(root, root.descriptor, ""), kinds_at("")
    for name, file in found.items():
        if file.kind == "folder" and name in HOLDERS:
            items += _below(root, name)
        elif name not in (NOTES, ORIGIN, ".planning", "..", "."):
            items += _items(root, kinds, name, file, found)
    items += [] if root.remote is None else _stored_items(root.remote)
    return Survey(root=root, items=items, origin=_origin(root))


def _entries(root: Root, descriptor: int, prefix: str) -> dict[str, File]:
    """Returns what is directly in a folder, by name."""
    found: dict[str, File] = {}
    for name in sorted(os.listdir(descriptor)):
        with contextlib.suppress(FileNotFoundError):  # it went meanwhile
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            found[name] = file_of(f"{prefix}{name}", status, device=root.device)
    return found


def _below(root: Root, holder: str) -> Iterator[RootItem]:
    """Yields the items of a folder of the root that holds things of its kinds."""
    with entered(holder, within=root.descriptor) as below:
        found, kinds = _entries(root, below, f"{holder}/"), kinds_at(holder)
    for name, file in found.items():
        if name != NOTES:
            yield from _items(root, kinds, name, file, found)


def _items(root: Root, kinds: Sequence[Kept], name: str, file: File, found: Mapping[str, File]) -> Iterator[RootItem]:
    """Yields the item that a name in a folder is, by the kinds that lie there; a file beside an item is none."""
    if is_temporary(name) and file.kind != "other":
        yield _item(root, KINDS["leftover"], file)
        return
    for kept in kinds:
        if kept.names is None or (file.kind == kept.form and kept.is_named(name)):
            item = _item(root, kept, file)
            item.beside = [found[name + end] for end in kept.beside if name + end in found]
            yield item
            return
        stem = next((name.removesuffix(end) for end in kept.beside if name.endswith(end)), None)
        if stem is not None and file.kind == "file" and kept.is_named(stem):
            if stem not in found:
                yield _item(root, KINDS["leftover"], file)
            return
    yield _foreign(file, f"no name of {kinds[0].one or an(kinds[0].name)}" if kinds[0].folder else _what(root, file))


def _item(root: Root, kept: Kept, file: File) -> RootItem:
    """Returns an item; where its kind says something of itself and it does not, a foreign one that says why."""
    item = RootItem(kept=kept, name=file.name, file=file, made_ns=file.changed_ns)
    if file.kind != "folder":
        return item if kept.read is None else _foreign(file, "no folder, or on another disk")
    try:
        with entered(file.name, within=root.descriptor) as descriptor:
            if kept.read is not None:
                item.document, item.made_ns = kept.read(Path(root.folder / file.name), descriptor)
            item.contents = contents_of(descriptor, device=root.device)
    except OSError as err:
        if kept.read is not None:
            return _foreign(file, f"cannot be read: {err.strerror}")
    except (CacheError, ValueError, RecursionError) as err:
        return _foreign(file, str(err).partition("; run:")[0])
    item.uses = uses_of(root.descriptor, file.name) if kept.is_noted else ()
    return item


def _foreign(file: File, problem: str) -> RootItem:
    return RootItem(kept=FOREIGN, name=file.name, file=file, problem=problem, made_ns=file.changed_ns)


def _what(root: Root, file: File) -> str:
    with contextlib.suppress(OSError):
        mode = os.stat(file.name, dir_fd=root.descriptor, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            return "a link, which is never followed"
        if stat.S_ISDIR(mode) and file.kind == "other":
            return "on another disk"
    return "nothing that forebay writes"


def _origin(root: Root) -> str | None:
    with contextlib.suppress(OSError, CacheError, ValueError, RecursionError):
        url = read_document(root.descriptor, ORIGIN)[0].get("url")
        return url if isinstance(url, str) else None
    return None


def _stored_items(remote: RemoteRoot) -> list[RootItem]:
    """Returns the sealed caches below a URL, and as foreign what else lies there, by name. One listing of all."""
    folders = {url.name: folder for url, folder in remote.caches()}
    found: dict[str, list[ObjectInfo]] = {}
    for one in remote.bucket.objects():
        found.setdefault(one.name.partition("/")[0], []).append(one)
    return [_stored_item(remote, name, objects, folders.get(name)) for name, objects in sorted(found.items())]


def _stored_item(remote: RemoteRoot, name: str, objects: list[ObjectInfo], folder: Path | None) -> RootItem:
    contents = RootContents(files=[_object(one, name, number) for number, one in enumerate(objects)])
    item = RootItem(kept=FOREIGN, name=name, file=_object(None, name, -1), contents=contents, remote=remote)
    try:
        if folder is None:
            raise CacheError(f"it has no {FILE_NAME}, so no cache is sealed there")
        item.document = read_metadata(folder)
        item.kept, item.made_ns = KINDS["cache"], contents.changed_ns
    except CacheError as err:
        item.problem = str(err).partition("; run:")[0]
    return item


def _object(one: ObjectInfo | None, name: str, number: int) -> File:
    """An object as a file. Its inode is of no disk: objects have no links, and each counts by itself."""
    size, changed = (one.size_bytes, one.modified_ns) if one else (0, 0)
    path = one.name.removeprefix(f"{name}/") if one else name
    return File(path, "file" if one else "folder", (hash(name), number), size, 1, changed, 0)


def stored_strangers(item: RootItem) -> str | None:
    """Returns what below the URL of a cache is not forebay's, None where there is nothing else."""
    try:
        names = names_of_cache(Path(item.name), item.document) | {COLUMNS}
    except CacheError as err:
        return str(err).partition("; run:")[0]
    odd = [name for name in item.contents.names if name not in names]
    return f"it holds what forebay did not write: {', '.join(odd[:3])}; move that elsewhere first" if odd else None


def remove_stored(item: RootItem, remote: RemoteRoot) -> str | None:
    """Removes a cache of a store and returns None, or why it stays: it changed since it was looked at."""
    try:
        found = [_object(one, item.name, number) for number, one in enumerate(remote.bucket.objects(item.name))]
        if found != item.contents.files:
            return "it changed meanwhile, or is gone"
        remote.bucket.remove([f"{item.name}/{FILE_NAME}"])
        remote.bucket.remove([f"{item.name}/{file.name}" for file in found if file.name != FILE_NAME])
    except RemoteError as err:
        return f"it cannot be removed: {err}"
    shutil.rmtree(remote.folder / LISTED / item.name, ignore_errors=True)
    return None
