"""Fields and columns of a data set that nothing takes: counted while it is listed, and named once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.preprocess.sources.rows import storable
from forebay.visible import printable

OTHERS = "(others)"
_MAX_NAMES = 100
_MAX_LENGTH = 60
_SHOWN = 20


@dataclass(slots=True)
class Unused:
    """Rows by the name of a field that they have and nothing takes.

    At most 100 names of 60 characters are kept, those that come first; the rest is counted as OTHERS, so that data with
    a name of its own in every row fills no memory.
    """

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, names: Iterable[str], *, rows: int = 1) -> None:
        """Counts rows that have these fields; sorted, because the names of a set come in another order every time."""
        for name in sorted(names):
            self._count(storable(name[:_MAX_LENGTH]), rows)

    def add_of(self, fields: Mapping[str, Any], taken: frozenset[str]) -> None:
        """Counts a row with these fields; null is no value."""
        if not fields.keys() <= taken:
            self.add(name for name in fields.keys() - taken if fields[name] is not None)

    def merge(self, counts: Mapping[str, int]) -> None:
        """Adds what another counted."""
        for name, rows in counts.items():
            self._count(name, rows)

    def _count(self, name: str, rows: int) -> None:
        if name not in self.counts and len(self.counts) >= _MAX_NAMES:
            name = OTHERS
        if rows:
            self.counts[name] = self.counts.get(name, 0) + rows


def merged(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the counts of several parts of a data set, put together in their order."""
    unused = Unused()
    for counts in parts:
        unused.merge(counts)
    return unused.counts


def described(counts: Mapping[str, int]) -> str:
    """Returns a line for a person, the most frequent first: `2 fields are not used: "a" (9 rows), "b" (1 row)`."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f'"{printable(name)}" ({_rows(rows)})' for name, rows in ordered[:_SHOWN])
    more = f", and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    are = "fields are" if len(ordered) != 1 else "field is"
    return f"{len(ordered)} {are} not used: {listed}{more}"


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"
