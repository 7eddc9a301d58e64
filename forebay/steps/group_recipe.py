"""The steps of one group, which a section of a config comes to. A group says itself what is wrong with its section."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

from forebay.config.tree import Config
from forebay.steps.step import Step, TextStep
from forebay.store.layout import Group


class GroupRecipe(ABC):
    """The steps of one group of fields. A new group is a class of this form; nothing asks which group it is.

    section: of a config, with the values of `settings`.
    """

    name: ClassVar[Group]
    section: ClassVar[str]
    settings: ClassVar[type]

    @classmethod
    def own_names(cls) -> set[str]:
        """Returns the fields of the section itself, not those of its step."""
        return {field.name for field in fields(cls.settings) if field.name != "settings"}

    @classmethod
    @abstractmethod
    def problems(cls, values: Mapping[str, Any]) -> list[str]:
        """Returns what is wrong with the section by itself, by dotted names. values: as the file has them."""

    @classmethod
    @abstractmethod
    def contradictions(cls, config: Config) -> list[str]:
        """Returns what the sections of a config say that the steps of the group cannot do together."""

    @classmethod
    @abstractmethod
    def of(cls, config: Config) -> Self | None:
        """Returns the group of a config without problems; None where samples have no such items."""

    @property
    @abstractmethod
    def steps(self) -> tuple[Step, ...]:
        """The steps, in their order: their identities are in the keys of the group's shards."""

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """Returns what the recipe key is made of: settings by name, contents instead of paths."""

    @property
    def made_with(self) -> dict[str, str]:
        """Packages that make values, beside forebay's own, and their versions; in no key."""
        return {}

    def without_code(self) -> Self:
        """Returns the group without the functions of the user; for those who only look, and run no code."""
        return self

    def check(self, text: TextStep, kept: Collection[str]) -> None:  # noqa: B027  most steps are trusted
        """Returns if a build may trust the steps beside a text and kept columns. Raises ConfigError."""
