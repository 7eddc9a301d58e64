"""`[[model]]`: from a section to a group of fields that a frozen model makes, and what sections cannot do together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from forebay.config.code import facts_of, not_allowed
from forebay.config.frozen_models import TAKEN, ModelConfig
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.extras import require_module
from forebay.steps.model.model_step import CODE, ModelStep
from forebay.steps.sections import GroupRecipe
from forebay.steps.step import Step, TextStep
from forebay.store.layout import Group
from forebay.visible import did_you_mean


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
        """Returns which models are given what rows do not have, and which names stand twice.

        Raises ConfigError where one takes the fields of no earlier section, or the text of conversations.
        """
        for place, model in enumerate(config.model):
            if not model.taken:
                _require_earlier(model, [each.name for each in config.model], place)
            if "text" in model.taken:
                _require_one_text(model, config)
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
            for name in ("call", "keep", "layer")
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
        if self.step.target is None or self.step.is_code:
            return {name: version(name) for name in ("torch", "transformers")}
        require_diffusers(self.section)
        return {name: version(name) for name in ("torch", "diffusers")}

    def document(self) -> dict[str, Any]:
        return self.step.document()

    def check(self, text: TextStep, kept: Collection[str]) -> None:  # noqa: ARG002
        """Raises ConfigError for a model that is not known, or an argument that its call has not."""
        if not self.step.is_code:
            self.step.arguments(self.step.family())


def _require_one_text(model: ModelConfig, config: Config) -> None:
    """Raises ConfigError for a model that would be given the messages of conversations as JSON."""
    prompt = None if config.text is None else config.text.prompt
    if prompt == "chat" or config.meaning == "conversations":
        said = "" if prompt is None else f" and text.prompt {prompt}"
        raise ConfigError(
            f"model.{model.name} takes the text of a row, and rows here are conversations (source.meaning is "
            f"{config.meaning}{said}): it would read their messages as JSON. Make a config in which a row has the one "
            'text that it is to read: source.meaning = "captions", or a class of your own, and text.prompt = "plain"',
            code="FB147",
        )


def _require_earlier(model: ModelConfig, names: Sequence[str], place: int) -> None:
    """Raises ConfigError for a model that takes fields of no earlier section, or that is no class of the user.

    names: of all sections. place: of this one.
    """
    takes = str(model.takes)
    if takes in names[:place] and model.is_code:
        return
    if takes in names[:place]:
        why = f"and {model.folder} is a folder, whose input comes from rows; a class of your own takes fields"
    elif takes in names:
        why = "which is not above it; a model takes what an earlier section keeps"
    else:
        known = (*TAKEN, *names[:place])
        why = f"wanted {', '.join(known[:-1])} or {known[-1]}{did_you_mean(takes, known)}"
    raise ConfigError(f'model.{model.name}.takes is "{takes}", {why}', code="FB147")
