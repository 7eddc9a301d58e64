"""Which column of a table has which role, where one is given, usual or chosen; and tables of the same columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forebay.errors import ConfigError
from forebay.init.choose import Choice, Chooser
from forebay.init.columns import Candidate
from forebay.init.readings.splits import split_of
from forebay.init.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Tables of the same columns and one split. first: the head of one. splits: all of these, by the splits' names."""

    own: tuple[Table, ...]
    splits: Mapping[str, Sequence[Table]] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where they are."""
        return tuple(table.path for table in self.own)

    @property
    def first(self) -> Table:
        """The head of one of them."""
        return self.own[0]

    @property
    def count(self) -> int:
        """How many rows they have."""
        return sum(table.num_rows for table in self.own)

    @property
    def is_exact(self) -> bool:
        """Whether these were counted."""
        return all(table.is_exact for table in self.own)

    @property
    def others(self) -> tuple[str, ...]:
        """What is left out: the names of tables of other splits, with their folders where those make the difference."""
        left = [table.path for tables in self.splits.values() for table in tables if table not in self.own]
        is_plain = {path.parent for path in left} <= {self.first.path.parent}
        return tuple(path.name if is_plain else f"{path.parent.name}/{path.name}" for path in left)

    def of_split(self, chooser: Chooser) -> Tables:
        """Returns those of the split that `--split` names; the same where it names none, or there are no splits."""
        if "split" not in chooser.given or not any(self.splits):
            return self
        chooser.used.add("split")
        own = self.splits.get(split_of(chooser.given["split"]))
        if own is None:
            known = ", ".join(filter(None, self.splits))
            raise ConfigError(
                f"--split {chooser.given['split']}: {self.label} is of no such split; wanted one of {known}"
            )
        return replace(self, own=tuple(own))

    @property
    def label(self) -> str:
        """What a person calls them."""
        name = self.first.path.name
        return name if len(self.own) == 1 else f"{name} and {len(self.own) - 1} more tables"


def pick(
    table: Table, role: str, candidates: Sequence[Candidate], chooser: Chooser, *, may_lack: bool = True
) -> str | None:
    """Returns the column that holds a role: the one that was given, the only one, or the one that is chosen."""
    option = f"column {role}"
    if option in chooser.given:
        chooser.used.add(option)
        name = chooser.given[option]
        if name not in table.names:
            raise ConfigError(
                f"--column {role}={name}: {table.path} has no such column; it has {', '.join(table.names)}"
            )
        return name
    if not candidates:
        if may_lack:
            return None
        raise ConfigError(
            f"{table.path}: no column looks like {role}; give --column {role}=NAME, one of {', '.join(table.names)}"
        )
    choices = [Choice(_label(table, each.name), each.name, each.name) for each in candidates]
    return chooser.one(f"which column of {table.path.name} is {role}", choices, option=option)


def _label(table: Table, name: str) -> str:
    values = table.values(name)
    shown = repr(str(values[0])[:50]) if values else "empty"
    return f"{name} (for example {shown})"


def unlike_usual(**columns: str | None) -> dict[str, str]:
    """Returns the columns of `[source.columns]` that have another name than they have when nothing is said."""
    usual = {"id": ("sample_id", "id"), "duration": ()}
    return {role: name for role, name in columns.items() if name is not None and name not in usual.get(role, (role,))}


def only(
    candidates: Sequence[Candidate], role: str, table: Table, chooser: Chooser, *, is_open: bool = True
) -> str | None:
    """Returns the likeliest column; asks only where several may be it and neither is the usual one."""
    named = [each for each in candidates if each.score >= 1]
    return pick(table, role, named[:1] or (candidates if is_open else []), chooser)


def splits_note(others: Sequence[str]) -> list[str]:
    """Returns what is said of tables of other splits."""
    return [f"Other splits are left out: {', '.join(others)}; --split NAME takes another."] if others else []
