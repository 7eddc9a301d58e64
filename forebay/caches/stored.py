"""The caches of a root that lies in a store: items as those of a disk, whose files are objects below the root's URL.

No lock of a store tells who reads a cache, so none goes without `--force`. metadata.json goes first: from then on
nobody opens the cache, and a removal that was cut off leaves what a push of the same cache fills up again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from forebay.caches.kinds import FOREIGN, KINDS
from forebay.caches.ours import names_of_cache
from forebay.caches.root_files import File, Root, RootContents
from forebay.caches.root_items import RootItem, Survey
from forebay.caches.survey import survey as survey_here
from forebay.errors import CacheError, RemoteError
from forebay.store.metadata import FILE_NAME, read_metadata
from forebay.store.remote.bucket.bucket import ObjectInfo
from forebay.store.remote.root import LISTED, RemoteRoot
from forebay.store.remote.carry.sent_columns import NAME as COLUMNS


def survey(root: Root) -> Survey:
    """Returns what lies under a root, here and in the store that it stands for."""
    found = survey_here(root)
    found.items += [] if root.remote is None else _stored_items(root.remote)
    return found


def _stored_items(remote: RemoteRoot) -> list[RootItem]:
    """Returns the sealed caches below a URL, and as foreign what else lies there, by name. One listing of all."""
    folders = {url.name: folder for url, folder in remote.caches()}
    found: dict[str, list[ObjectInfo]] = {}
    for one in remote.bucket.objects():
        found.setdefault(one.name.partition("/")[0], []).append(one)
    return [_item(remote, name, objects, folders.get(name)) for name, objects in sorted(found.items())]


def _item(remote: RemoteRoot, name: str, objects: list[ObjectInfo], folder: Path | None) -> RootItem:
    contents = RootContents(files=[_file(one, name, number) for number, one in enumerate(objects)])
    item = RootItem(kept=FOREIGN, name=name, file=_file(None, name, -1), contents=contents, remote=remote)
    try:
        if folder is None:
            raise CacheError(f"it has no {FILE_NAME}, so no cache is sealed there")
        item.document = read_metadata(folder)
        item.kept, item.made_ns = KINDS["cache"], contents.changed_ns
    except CacheError as err:
        item.problem = str(err).partition("; run:")[0]
    return item


def _file(one: ObjectInfo | None, name: str, number: int) -> File:
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
        found = [_file(one, item.name, number) for number, one in enumerate(remote.bucket.objects(item.name))]
        if found != item.contents.files:
            return "it changed meanwhile, or is gone"
        remote.bucket.remove([f"{item.name}/{FILE_NAME}"])
        remote.bucket.remove([f"{item.name}/{file.name}" for file in found if file.name != FILE_NAME])
    except RemoteError as err:
        return f"it cannot be removed: {err}"
    shutil.rmtree(remote.folder / LISTED / item.name, ignore_errors=True)
    return None
