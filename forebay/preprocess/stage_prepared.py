"""A prepared build in a stage: one node lists and hashes the raw data, the parts of all nodes read what it found.

It lies in `<stage>/prepared-<id>/`. Tables have their hash in their names. `prepared.json` names them and is put when
they are there: of two nodes that prepare at once no mixture is read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from forebay.config.remote import RemoteConfig, Url
from forebay.config.tree import Config
from forebay.errors import RemoteError, RemoteExistsError, RemoteMissingError
from forebay.preprocess.listing_folder import COPY_OF
from forebay.preprocess.outline import DOCUMENT, folder_of, prepared_document
from forebay.preprocess.prepared import Prepared, load, locked, save
from forebay.steps.recipe import Recipe
from forebay.store.files import temporary_name, write_bytes
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.bucket.object_store import find, find_bytes
from forebay.store.remote.carry.proof import save_object
from forebay.store.remote.carry.tally import for_each
from forebay.store.remote.node.node import WantedFile

logger = logging.getLogger(__name__)

_BEGUN = "begun"
"""Object that says which node has prepared last, or does now."""
_OURS = re.compile(rf"{re.escape(DOCUMENT)}|{_BEGUN}|[a-z]+-[0-9a-f]{{32}}\.arrow")


def staged_prepared(config: Config, recipe: Recipe, stage: Url, make: Callable[[], Prepared]) -> tuple[Prepared, bool]:
    """Returns the prepared build of a config that is in a stage, or makes it and puts it there; says whether it did.

    stage: the URL below which builds are staged. make: hashes the sources, which takes long.
    """
    folder = folder_of(config, recipe)
    folder.parent.mkdir(parents=True, exist_ok=True)
    bucket = Bucket(stage / folder.name, config.remote)
    _remove_sealed(folder, stage, config.remote)
    with locked(folder.with_suffix(".lock")):
        is_there = _downloaded(bucket, folder)
        if (found := load(config, recipe)) is not None:
            if not is_there:
                _put(bucket, folder)
            return found, False
        # Before what takes long: whether anything can be put there.
        bucket.put(_BEGUN, socket.gethostname().encode("ascii", "replace"))
        made = make()
        save(folder, made)
        try:
            _put(bucket, folder, create=not is_there)
        except RemoteExistsError:  # another node was faster: all read the same
            if _downloaded(bucket, folder) and (found := load(config, recipe)) is not None:
                return found, False
            _put(bucket, folder)
        return made, True


def _remove_sealed(folder: Path, stage: Url, settings: RemoteConfig) -> None:
    """Removes this node's copies of other prepared builds that their stage has no more: their caches are sealed."""
    for other in folder.parent.glob("prepared-*"):
        document = None if other == folder else prepared_document(other)
        is_copy = document is not None and COPY_OF in document
        if is_copy and find(Bucket(stage / other.name, settings), DOCUMENT) is None:
            shutil.rmtree(other, ignore_errors=True)


def remove_staged(url: Url, settings: RemoteConfig) -> None:
    """Removes a prepared build from a stage. url: its own. A store that refuses is named in the log."""
    bucket = Bucket(url, settings)
    try:
        names = [info.name for info in bucket.objects() if _OURS.fullmatch(info.name)]
        bucket.remove(sorted(names, key=lambda name: name != DOCUMENT))
    except RemoteError as err:
        logger.warning("%s is not needed any more and could not be removed: %s", bucket.url, err)


def _downloaded(bucket: Bucket, folder: Path) -> bool:
    """Makes a folder the prepared build of a stage, if there is one; whether there is. Raises RemoteError."""
    if (data := find_bytes(bucket, DOCUMENT)) is None:
        return False
    digest = xxhash.xxh3_128_hexdigest(data)
    with contextlib.suppress(OSError):
        if (folder / DOCUMENT).read_bytes() == data:
            return True  # this node has put it
    if (here := prepared_document(folder)) is not None and here.get(COPY_OF) == digest:
        return True
    aside = temporary_name(folder)
    aside.mkdir()
    try:
        document = json.loads(data)
        files: Mapping[str, Any] = document["files"]

        def fetch(name: str) -> None:
            save_object(bucket, WantedFile.of(_object(name, files[name]), files[name]), aside / name)

        for_each(fetch, files, num_threads=bucket.settings.max_concurrent)
        write_bytes(aside / DOCUMENT, json.dumps({**document, COPY_OF: digest}).encode("ascii"))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(aside, folder)
    except (ValueError, KeyError, TypeError, AttributeError, RemoteMissingError) as err:
        logger.warning("%s is not whole (%s): the raw data is listed again", bucket.url, err)
        return False
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return True


def _put(bucket: Bucket, folder: Path, *, create: bool = False) -> None:
    """Puts a prepared build. create: raises RemoteExistsError where one is there by now."""
    document = prepared_document(folder)
    if document is None:
        return
    files: Mapping[str, Any] = document["files"]
    for_each(
        lambda name: bucket.put(_object(name, files[name]), folder / name),
        files,
        num_threads=bucket.settings.max_concurrent,
    )
    bucket.put(DOCUMENT, (folder / DOCUMENT).read_bytes(), create=create)


def _object(name: str, entry: Mapping[str, Any]) -> str:
    """Returns what a table is called in a stage. Raises ValueError for a name that is of no table."""
    found = f"{name.removesuffix('.arrow')}-{entry['xxh3_128']}.arrow"
    if not _OURS.fullmatch(found):
        raise ValueError(f"{name!r} is no table of a prepared build")
    return found
