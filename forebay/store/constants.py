"""Values that collating needs and all samples of a source share, by group: kinds, rates, token ids, tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from forebay.store.layout import TEXT, Group


class Constants(Mapping[str, Any]):
    """The constants of every group of a source, text last.

    As a mapping it has those of all groups by name. Where several groups have one of a name, that of the first group
    has the name alone, and those of the others stand behind their group: `image.form`.
    """

    __slots__ = ("_by_name", "groups")

    def __init__(self, groups: Mapping[Group, Mapping[str, Any]]) -> None:
        order = sorted(groups, key=lambda group: (group == TEXT, group))
        self.groups: dict[Group, dict[str, Any]] = {group: dict(groups[group]) for group in order}
        self._by_name: dict[str, Any] = {}
        for group, values in self.groups.items():
            self._by_name |= {f"{group}.{n}" if n in self._by_name else n: value for n, value in values.items()}

    @classmethod
    def common(cls, found: Sequence[Constants]) -> Self:
        """Returns what several sources have alike."""
        first, *others = (each.groups for each in found)
        shared = {group: values for group, values in first.items() if all(group in other for other in others)}
        return cls(
            {
                group: {
                    name: value
                    for name, value in values.items()
                    if all(name in other[group] and other[group][name] == value for other in others)
                }
                for group, values in shared.items()
            }
        )

    def of(self, group: Group) -> Mapping[str, Any]:
        """Returns the constants of one group; of a group that is not there, none."""
        return self.groups.get(group, {})

    @property
    def has_items(self) -> bool:
        """Whether samples have items of any group beside their text."""
        return any(group != TEXT for group in self.groups)

    def __getitem__(self, name: str) -> Any:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __eq__(self, other: object) -> bool:
        return self.groups == other.groups if isinstance(other, Constants) else self._by_name == other

    def __repr__(self) -> str:
        return f"Constants({self.groups!r})"

    def to_json(self) -> dict[Group, dict[str, Any]]:
        """Returns the constants as metadata.json has them."""
        return self.groups
