"""Whether a tar of an evaluation set is what its index.json says, and holds nothing but files of plain names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.errors import TarError
from forebay.store.remote.fetch.names import problem_of
from forebay.tar.members import TarIndex
from forebay.tar.scan import scan_tar


def check_members(path: Path, name: str, said: Any) -> None:
    """Raises TarError for a member that is a link or leads out, or that is not as index.json says.

    path: where the tar is now. name: what it is called. said: of each member its offset and size, or None.
    """
    index = scan_tar(path)
    if index.refused:
        member, reason, offset = index.refused[0]
        raise TarError(f"{name}: its member {member!r} at offset {offset} is refused: {reason}")
    for member in index.names:
        if problem := problem_of(member):
            raise TarError(f"{name}: its member {member!r} {problem}")
    if isinstance(said, Mapping):
        _compare(index, name, said)


def _compare(index: TarIndex, name: str, said: Mapping[str, Any]) -> None:
    places = zip(index.offsets.tolist(), index.sizes.tolist(), strict=True)
    found = {
        member: {"offset": offset, "size": size} for member, (offset, size) in zip(index.names, places, strict=True)
    }
    for member in sorted(found.keys() | said.keys()):
        if found.get(member) != said.get(member):
            raise TarError(f"{name}: {member!r} is {found.get(member)}, its index.json says {said.get(member)}")
