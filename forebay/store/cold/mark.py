"""How a cold form says what it is. Nothing here needs zarr.

The root's `zarr.json` is written last: with it the cold form is whole. What was begun is known by the group `files`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from forebay.errors import CacheMismatchError
from forebay.store.key import SHORT

ROOT = "zarr.json"
BEGUN = "files/zarr.json"
FORM_VERSION = 1
"""The newest form that is written and read."""

_ABOUT = "forebay"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """What a cold form is made of, and how: two of equal marks have the same names with the same values.

    metadata: xxh3-128 of the cache's metadata.json. level: of zstd. chunk_bytes, shard_bytes: values that are
    compressed together, and that are one object.
    """

    key: str
    metadata: str
    level: int
    chunk_bytes: int
    shard_bytes: int
    form_version: int = FORM_VERSION

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes of a group that is marked."""
        return {_ABOUT: asdict(self)}

    def __str__(self) -> str:
        return f"the zarr form of the cache of key {self.key[:SHORT]}"


def pull_hint(data: bytes, where: object) -> str | None:
    """Returns what to do with a cold form that was named as a cache; None where a root's document is of none."""
    mark = mark_of(data, where)
    return (
        None if mark is None else f"{where} is {mark}, nothing reads samples of it; run: forebay cache pull {where} DIR"
    )


def mark_of(data: bytes, where: object) -> Mark | None:
    """Returns the mark of a `zarr.json`; None where it is of no cold form.

    Raises CacheMismatchError where a newer forebay wrote it.
    """
    try:
        about = json.loads(data)["attributes"][_ABOUT]
        version = int(about["form_version"])
        if version <= FORM_VERSION:
            numbers = {name: int(about[name]) for name in ("level", "chunk_bytes", "shard_bytes", "form_version")}
            return Mark(key=str(about["key"]), metadata=str(about["metadata"]), **numbers)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    raise CacheMismatchError(
        f"{where}: form_version is {version}, this forebay reads up to {FORM_VERSION}; upgrade forebay", code="FB406"
    )
