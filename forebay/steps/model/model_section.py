"""`[[model]]`: from a section to a group of fields that a frozen model makes, and what sections cannot do together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from forebay.config.code import facts_of, not_allowed
from forebay.config.tree import Config
from forebay.extras import require_module
from forebay.steps.model.model_step import CODE, ModelStep
from forebay.steps.sections import GroupRecipe
from forebay.steps.step import Step, TextStep
from forebay.store.layout import Group


def require_diffusers(section: str) -> None:
    """Returns if autoencoders can be opened. Raises MissingExtraError for a section that names one."""
    require_module("diffusers", "diffusers", what=f"{section}, an autoencoder,")


@dataclass(frozen=True, kw_only=True)
class ModelGroup(GroupRecipe):
    """The fields that a model makes of the items of another group. name: of the group."""

    step: ModelStep
    name: Group  # type: ignore[misc]  # each section has its own

    @property
    def section(self) -> str:  # type: ignore[override]
        """Where a recipe's document has it."""
        return f"model.{self.name}"

    @classmethod
    def problems(cls, values: Mapping[str, Any]) -> list[str]:  # noqa: ARG003  the config itself says it all
        return []

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:
        """Returns which models are given what rows do not have, and which names stand twice."""
        facts = facts_of(config)
        allowed = config.run.allow_code
        captions = config.source.captions
        has = {*facts.groups, *({"text"} & {*facts.columns, *(["text"] if captions and captions.column else [])})}
        known = " and ".join(sorted(has))
        found = [
            f'model.{model.name}: takes = "{kind}", and rows that are {facts.name} have {known} alone'
            for model in config.model
            for kind in model.taken
            if kind not in has
        ]
        if captions and not any("text" in model.taken for model in config.model):
            found.append('source.captions are of a [[model]] with takes = "text", and there is none; add one')
        found += [not_allowed(CODE.setting, model.folder) for model in config.model if model.is_code and not allowed]
        found += [
            f"model.{model.name}.{name} is of a folder, and {model.folder} is code; leave it out"
            for model in config.model
            if model.is_code
            for name in ("call", "keep", "layer", "size")
            if getattr(model, name) is not None
        ]
        names = Counter(model.name for model in config.model)
        return [*found, *(f"model: {count} models are called {name!r}" for name, count in names.items() if count > 1)]

    @classmethod
    def of(cls, config: Config) -> None:
        """Returns none: a config has any number of these groups, see `all_of`."""

    @classmethod
    def all_of(cls, config: Config) -> tuple[ModelGroup, ...]:
        """Returns the groups of a config."""
        return tuple(cls(name=model.name, step=ModelStep.of(model, config)) for model in config.model)

    @property
    def steps(self) -> tuple[Step, ...]:
        return (self.step,)

    @property
    def made_with(self) -> dict[str, str]:
        if self.step.target is None:
            return {name: version(name) for name in ("torch", "transformers")}
        require_diffusers(self.section)
        return {name: version(name) for name in ("torch", "diffusers")}

    def document(self) -> dict[str, Any]:
        return self.step.document()

    def check(self, text: TextStep, kept: Collection[str]) -> None:  # noqa: ARG002
        """Raises ConfigError for a model that is not known, or an argument that its call has not."""
        if not self.step.is_code:
            self.step.arguments(self.step.family())
