"""A config becomes its recipe: section, settings, steps, and the document that the recipe key is made of.

Everything that changes values is in the document, by content; `[layout]`, `[plan]`, `[loader]`, `[mixture]`, `[train]`
and `[run]` are not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from forebay.config.load import read_config, refuse
from forebay.config.plan import PackConfig
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.extras import require_major
from forebay.steps.audio.audio_section import AudioGroup
from forebay.steps.audio.given import NoAudio
from forebay.steps.image.image_section import ImageGroup
from forebay.steps.model.model_section import ModelGroup
from forebay.steps.sections import GroupRecipe, source_document, source_problems
from forebay.steps.text.text_section import TextGroup, item_steps_of
from forebay.store.key import recipe_key
from forebay.store.layout import TEXT, Group
from forebay.store.where import parse_where

_GROUPS: tuple[type[GroupRecipe], ...] = (AudioGroup, ImageGroup, TextGroup)
"""What the sections of a config come to, text last."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The steps of a config: groups, text last, and what decides which rows of the source are samples.

    source: the settings of `[source]` that do.
    """

    groups: tuple[GroupRecipe, ...]
    source: dict[str, Any] = field(compare=False, repr=False)

    @cached_property
    def document(self) -> dict[str, Any]:
        """The document that the recipe key is the digest of: sections named as in the config, contents for paths."""
        return {"source": self.source, **{group.section: group.document() for group in self.groups}}

    @cached_property
    def key(self) -> str:
        """The digest of the document."""
        return recipe_key(self.document)

    @cached_property
    def by_name(self) -> dict[Group, GroupRecipe]:
        """The groups by their names, in their order."""
        return {group.name: group for group in self.groups}

    @property
    def text(self) -> TextGroup:
        """The group in which a row is a sample."""
        found = self.by_name[TEXT]
        assert isinstance(found, TextGroup)
        return found

    @property
    def audio(self) -> AudioGroup | None:
        """The recordings, where samples have such."""
        found = self.by_name.get(AudioGroup.name)
        return found if isinstance(found, AudioGroup) else None

    @property
    def image(self) -> ImageGroup | None:
        """The images, where samples have such."""
        found = self.by_name.get(ImageGroup.name)
        return found if isinstance(found, ImageGroup) else None

    @property
    def models(self) -> tuple[ModelGroup, ...]:
        """The groups that models make."""
        return tuple(group for group in self.groups if isinstance(group, ModelGroup))

    @property
    def made_with(self) -> dict[str, str]:
        """Packages that make values, beside forebay's own, and their versions; in no key."""
        return {name: found for group in self.groups for name, found in group.made_with.items()}

    @property
    def libraries(self) -> tuple[str, ...]:
        """Modules that a process needs which makes values: see `GroupRecipe.libraries`."""
        return tuple(dict.fromkeys(name for group in self.groups for name in group.libraries))

    def without_code(self) -> Self:
        """Returns the recipe without functions and models of the user; for those who only look, and run no code."""
        code = [group for group in self.models if group.step.is_code]
        return replace(self, groups=tuple(group.without_code() for group in self.groups if group not in code))

    def check(self) -> None:
        """Returns if samples can be made: by the packages that are installed, of code that can be trusted.

        Raises ConfigError for code of the user, MissingExtraError for a transformers of which nothing is made.
        """
        if self.text.folder or "transformers" in self.made_with:
            require_major("transformers", 5, "build", what="making tokens or features by a model's folder")
        for group in self.groups:
            group.check(self.text.step, self.source.get("keep_columns", ()))


def load_config(path: str | os.PathLike[str] | Mapping[str, Any], *, overrides: Sequence[str] = ()) -> Config:
    """Returns the config of a TOML file with `section.field=value` overrides applied; its paths are absolute.

    As `forebay.config.load.read_config`, with the settings of the steps checked too.
    Raises ConfigError, which lists every unknown field (with the nearest name), wrong type and impossible value.
    """
    config = read_config(path, overrides=overrides, check=section_problems)
    refuse(config.path, contradictions(config))
    return config


AnyConfig = Config | str | os.PathLike[str] | Mapping[str, Any]
"""A config, or what `load_config` makes one of."""


def as_config(config: AnyConfig) -> Config:
    """Returns a config; of a path, or of a mapping, that of `load_config`, which says what it raises."""
    return config if isinstance(config, Config) else load_config(config)


def recipe_of(config: Config) -> Recipe:
    """Returns the steps of a config; reads the tokenizer's and the processor's files.

    Raises ConfigError where such a folder is not there, or where a step does not take what its section says.
    """
    refuse(config.path, _settings_problems(config) or contradictions(config))
    *items, text = (group.of(config) for group in _GROUPS)
    groups = (*items, *ModelGroup.all_of(config), text)
    return Recipe(groups=tuple(group for group in groups if group is not None), source=source_document(config))


def section_problems(section: str, values: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the settings of the step that a section of a config file names, by dotted names.

    Of `[filter]`: what is wrong with its condition.
    """
    where = values.get("where")
    if section == "filter" and isinstance(where, str):
        try:
            parse_where(where, setting="filter.where")
        except ConfigError as err:
            return [str(err)]
    return next((group.problems(values) for group in _GROUPS if group.section == section), [])


def contradictions(config: Config) -> list[str]:
    """Returns what is wrong with `[source]`, or else what sections say that their steps cannot do together."""
    if found := source_problems(config):
        return found
    found = [*ImageGroup.contradictions(config), *TextGroup.contradictions(config), *ModelGroup.contradictions(config)]
    return found or [*AudioGroup.contradictions(config), *_units_problems(config)]


def _units_problems(config: Config) -> list[str]:
    """Returns which budget of packs is of other items than those of a config."""
    if not isinstance(config.plan, PackConfig):
        return []
    units = {step.unit for step in item_steps_of(config).values()} or {NoAudio.unit}
    return [
        f"plan.max_{unit} is set, and this config has {wanted}: set plan.max_{wanted}"
        for unit in config.plan.budgets
        for wanted in units
        if unit not in units
    ]


def _settings_problems(config: Config) -> list[str]:
    """Returns what is wrong with the settings of a config that was made in code; of a file `load_config` said it."""
    found: list[str] = []
    for group in _GROUPS:
        if (values := getattr(config, group.section)) is not None:
            own = {name: getattr(values, name) for name in group.own_names()}
            found += group.problems({**own, **values.settings})
    return found


def plan_example(config: Config) -> str:
    """Returns what a `[plan]` section for the data of a config may say."""
    first = next(iter(item_steps_of(config).values()), NoAudio)
    return f"[plan] with {first.plan}"
