"""The node's shard cache: what all processes of a machine keep of stores, in one folder with a bound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from forebay.errors import RemoteError
from forebay.store.files import write_all, write_aside
from forebay.store.remote.bucket import Bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The object that a file is to be: its name below the bucket's URL, its size, its hash or etag where one is known."""

    name: str
    size_bytes: int
    xxh3_128: str = ""
    etag: str = ""


class NodeCache:
    """The files under `remote.shard_dir`. Processes share it by what lies on disk alone."""

    def __init__(self, folder: Path, *, bound_bytes: int) -> None:
        self.folder, self.bound_bytes = folder, bound_bytes

    def fetch(self, target: Path, wanted: Wanted, bucket: Bucket, *, distance: int = 0) -> str:  # noqa: ARG002
        """Makes `target` the object, whole, by one download of this node, and returns the xxh3-128 of its bytes.

        distance: steps until it is needed; 0: now. Raises RemoteError where the object is another one than is wanted.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        state = xxhash.xxh3_128()
        with write_aside(target) as file:
            for piece in bucket.stream(wanted.name, etag=wanted.etag):
                state.update(piece)
                write_all(file, piece)
            found = state.hexdigest()
            if wanted.xxh3_128 and found != wanted.xxh3_128:
                raise RemoteError(
                    f"{bucket.url / wanted.name}: its xxh3-128 is {found}, wanted {wanted.xxh3_128}; "
                    "push the cache again"
                )
        return found
