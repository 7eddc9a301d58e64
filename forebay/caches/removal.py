"""Removing an item of a root: looked at, locked, renamed aside, looked at again, then deleted by descriptors.

A kill at any moment leaves the item where it was, or aside under a name that the next `sweep` or prune removes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from forebay.caches.guard import Guard, Processes, in_use, is_mount_within, locked, opened, strangers
from forebay.caches.root_files import FOLDER, File, Root, RootContents, contents_of, entered
from forebay.caches.root_items import RootItem
from forebay.caches.stored import remove_stored
from forebay.store.files import temporary_name
from forebay.store.layout import NOTES
from forebay.store.memo import uses_of
from forebay.store.metadata import FILE_NAME


def remove(item: RootItem, guard: Guard) -> str | None:
    """Removes an item and returns None, or why it stays: it is in use by now, or not what was surveyed."""
    root = guard.root
    if (why := guard.reason(item)) is not None:
        return why
    if item.remote is not None:
        return remove_stored(item, item.remote)
    try:
        with opened(root, item) as (descriptor, parent):
            if descriptor is None:
                return _remove_file(item, parent)
            with locked(root, item, descriptor, force=guard.force) as problem:
                return problem or _remove_folder(guard, item, descriptor, parent)
    except FileNotFoundError:
        return "it is gone, or replaced"
    except OSError as err:
        return f"it cannot be removed: {err.strerror}"


def _remove_file(item: RootItem, parent: int) -> str | None:
    name = os.path.basename(item.name)
    aside = temporary_name(Path(name)).name
    os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=parent)
    status = os.stat(aside, dir_fd=parent, follow_symlinks=False)
    if (status.st_dev, status.st_ino) != item.file.inode:
        return _put_back(aside, name, parent, "another file has its name by now")
    os.unlink(aside, dir_fd=parent)
    return None


def _remove_folder(guard: Guard, item: RootItem, descriptor: int, parent: int) -> str | None:
    """Removes an opened folder whose lock is held."""
    name = os.path.basename(item.name)
    aside = temporary_name(Path(name)).name
    os.utime(descriptor)  # a sweep of another host takes what is aside and old
    os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=parent)
    place = guard.root.folder / os.path.dirname(item.name) / aside
    contents = contents_of(descriptor, device=guard.root.device)
    why = _changed(guard, item, parent, aside) or strangers(item, contents, descriptor, place)
    if why is None and is_mount_within(place):
        why = "another disk is mounted in it"
    if (why := why or in_use(place, contents, Processes(guard.root.folder))) is not None:
        return _put_back(aside, name, parent, why)
    _delete(descriptor, contents)
    os.rmdir(aside, dir_fd=parent)
    _remove_beside(guard.root, item)
    forget(guard.root, item)
    return None


def _changed(guard: Guard, item: RootItem, parent: int, aside: str) -> str | None:
    """Returns why what was renamed is not what was decided on, or was used since."""
    status = os.stat(aside, dir_fd=parent, follow_symlinks=False)
    if (status.st_dev, status.st_ino) != item.file.inode:
        return "another folder has its name by now"
    noted = uses_of(guard.root.descriptor, item.name)
    if noted and (not item.uses or noted[0].used_ns > item.uses[0].used_ns) and not guard.force:
        return "it was used just now"
    return None


def _put_back(aside: str, name: str, parent: int, why: str) -> str:
    """Gives what was put aside its name again, unless something else has it by now."""
    try:
        if os.path.lexists(f"/proc/self/fd/{parent}/{name}"):
            raise FileExistsError(name)
        os.rename(aside, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        return f"{why}, and something else has its name: the earlier one is {aside} until nobody reads it"
    return why


def _delete(descriptor: int, contents: RootContents) -> None:
    """Deletes exactly what was seen in a folder. Each folder is entered by its number, so no link leads out."""
    with contextlib.ExitStack() as stack:
        folders: dict[str, int] = {"": descriptor}
        for file in contents.files:
            if file.kind == "folder":
                folders[file.name] = _entered(folders, file)
                stack.callback(os.close, folders[file.name])
        # The metadata go last: until then the lock on them tells a sweep that somebody is at work.
        for file in sorted(contents.files, key=lambda file: file.name == FILE_NAME):
            if file.kind == "file":
                where, name = os.path.split(file.name)
                os.unlink(name, dir_fd=folders[where])
        for file in reversed(contents.files):
            if file.kind == "folder":
                where, name = os.path.split(file.name)
                os.rmdir(name, dir_fd=folders[where])


def _entered(folders: Mapping[str, int], file: File) -> int:
    where, name = os.path.split(file.name)
    descriptor = os.open(name, FOLDER, dir_fd=folders[where])
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != file.inode:
        os.close(descriptor)
        raise FileNotFoundError(2, "it was replaced meanwhile", file.name)
    return descriptor


def _remove_beside(root: Root, item: RootItem) -> None:
    for file in item.beside:
        holder, name = os.path.split(file.name)
        with contextlib.suppress(OSError), entered(holder, within=root.descriptor) as parent:
            os.unlink(name, dir_fd=parent)


def forget(root: Root, item: RootItem) -> None:
    """Removes the notes of an item that is gone."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        holder, notes = -1, root.descriptor
        for part in (NOTES, *item.name.split("/")):
            holder, notes = notes, stack.enter_context(entered(part, within=notes))
        for entry in os.listdir(notes):
            os.unlink(entry, dir_fd=notes)
        os.rmdir(os.path.basename(item.name), dir_fd=holder)
