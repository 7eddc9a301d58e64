"""Whether a tar of an evaluation set is what its index.json says, and holds nothing but files of plain names."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from forebay.errors import TarError
from forebay.store.remote.fetch.names import problem_of
from forebay.tar.members import TarIndex
from forebay.tar.scan import scan_tar

_MAKE = "have the set made again: forebay evalset CONFIG --out DIR"


def check_members(path: Path, name: str, said: Any) -> None:
    """Raises TarError for a member that is a link or leads out, or that is not as index.json says.

    path: where the tar is now. name: what it is called. said: what index.json says of the tar, its members in their
    order; or None.
    """
    index = scan_tar(path)
    if index.refused:
        member, reason, offset = index.refused[0]
        raise TarError(f"{name}: its member {member!r} at offset {offset} is refused: {reason}; {_MAKE}")
    for member in index.names:
        if problem := problem_of(member):
            raise TarError(f"{name}: its member {member!r} {problem}; {_MAKE}")
    if len(index.rows) < len(index):
        twice = next(member for row, member in enumerate(index.names) if index.rows[member] != row)
        raise TarError(f"{name}: its member {twice!r} is there twice; {_MAKE}")
    if said is not None:
        _compare(index, name, said)


def _compare(index: TarIndex, name: str, said: Any) -> None:
    try:
        wanted = [(entry["name"], entry["offset"], entry["size"]) for entry in said["members"]]
    except (TypeError, KeyError) as err:
        raise TarError(f"{name}: its index.json says not which members it has ({err!r}); {_MAKE}") from err
    found = list(zip(index.names, index.offsets.tolist(), index.sizes.tolist(), strict=True))
    for here, there in itertools.zip_longest(found, wanted):
        if here != there:
            raise TarError(f"{name} has {_shown(here)} where its index.json says {_shown(there)}; {_MAKE}")


def _shown(member: tuple[Any, Any, Any] | None) -> str:
    return "no member" if member is None else "the member {!r} at offset {} of {} bytes".format(*member)
