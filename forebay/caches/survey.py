"""A survey of a cache root: every file that forebay writes there belongs to one item, and the rest to nobody."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forebay.caches.kinds import FOREIGN, HOLDERS, KINDS, kinds_at
from forebay.caches.ours import read_document
from forebay.caches.root_files import File, Root, contents_of, entered, file_of
from forebay.caches.root_items import Kept, RootItem, Survey
from forebay.errors import CacheError
from forebay.store.files import is_temporary
from forebay.store.held import ORIGIN
from forebay.store.layout import NOTES
from forebay.store.memo import uses_of
from forebay.visible import an

_OWN = (NOTES, ORIGIN, ".planning", "..", ".")


def survey(root: Root) -> Survey:
    """Returns what lies under a root, by name. Whatever cannot be read is an item that says why; nothing changes."""
    items: list[RootItem] = []
    found, kinds = _entries(root, root.descriptor, ""), kinds_at("")
    for name, file in found.items():
        if file.kind == "folder" and name in HOLDERS:
            items += _below(root, name)
        elif name not in _OWN:
            items += _items(root, kinds, name, file, found)
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


def _items(
    root: Root, kinds: Sequence[Kept], name: str, file: File, found: Mapping[str, File]
) -> Iterator[RootItem]:
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
