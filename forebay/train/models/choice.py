"""Which class of transformers a config.json means: the one that it names, else the one for what the config makes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.steps.audio.audio_section import audio_step_of
from forebay.steps.image.image_section import image_step_of
from forebay.train.models.arguments import has_loss
from forebay.visible import printable

TASKS = (
    "CTC",
    "SPEECH_SEQ_2_SEQ",
    "AUDIO_CLASSIFICATION",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "IMAGE_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "CAUSAL_LM",
)
"""The tables of transformers' Auto classes whose models return a loss for what forebay makes, the nearest first."""
CLASSES = ("AUDIO_CLASSIFICATION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION")
"""The tables of models of classes."""
_OF_GROUP = {
    "audio": ("CTC", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM", "AUDIO_CLASSIFICATION"),
    "image": ("ZERO_SHOT_IMAGE_CLASSIFICATION",),
    "text": ("CAUSAL_LM",),
}
"""By the first group of a config; images beside a text are pairs, unless its prompt says more."""
_BARE = ("PRETRAINING",)
_OF_PROMPT = {
    ("image", "label"): ("IMAGE_CLASSIFICATION",),
    ("image", "chat"): ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    ("image", "none"): _BARE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A class by its name, and why it is the one."""

    name: str
    why: str


def tasks_of(config: Config | None) -> tuple[str, ...]:
    """Returns the tables in which a model for what a config makes is looked for; all where there is no config."""
    if config is None:
        return TASKS
    steps = {"audio": audio_step_of(config), "image": image_step_of(config)}
    group = next((name for name, step in steps.items() if step is not None), "text")
    prompt = "none" if config.text is None else config.text.prompt
    return _OF_PROMPT.get((group, prompt), _OF_GROUP[group])


def choose(config: Any, *, path: Path, tasks: Sequence[str]) -> Choice:
    """Returns the class for a config.json: that of `architectures` where it returns a loss, else that of `tasks`.

    config: what transformers read of the file at `path`. Raises ConfigError, with what was looked at, where there is
    none.
    """
    model_type, named = str(config.model_type), named_class(config)
    bare = tuple(tasks) == _BARE
    if named is not None and gives_loss(named, of_images_alone=bare):
        return Choice(name=named, why=f"{path.name} names it")
    for task, name in _by_task(model_type, tasks):
        if gives_loss(name, of_images_alone=bare):
            has = "names no class" if named is None else f"names {named}, which returns no loss"
            return Choice(name=name, why=f"{path.name} {has}, and it is the {task} of {model_type}")
    looked = ", ".join(task.lower() for task in tasks)
    raise ConfigError(
        f"train.model: {printable(str(path))} has model_type {printable(model_type)!r} and architectures "
        f"{printable(str(config.architectures))}, and transformers has no model of it that returns a loss "
        f"({looked} were looked at); name a model for what the config makes",
        code="FB108",
    )


def named_class(config: Any) -> str | None:
    """Returns the class that a config.json names first, where transformers has it for such a config; else None."""
    import transformers

    found = config.architectures
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        return None
    known: Any = getattr(transformers, found[0], None) if found[0].isidentifier() else None
    if not isinstance(known, type) or not issubclass(known, transformers.PreTrainedModel):
        return None
    wanted = getattr(known, "config_class", None)
    return found[0] if wanted is None or isinstance(config, wanted) else None


def gives_loss(name: str, *, of_images_alone: bool = False) -> bool:
    """Returns whether a class takes what a loss is made of: `labels`, or `return_loss`.

    of_images_alone: classes count, too, whose output has a loss without either (a masked autoencoder).
    """
    import transformers

    return has_loss(getattr(transformers, name).forward, always=of_images_alone)


def _by_task(model_type: str, tasks: Sequence[str]) -> Iterator[tuple[str, str]]:
    for task in tasks:
        if (name := _table(task).get(model_type)) is not None:
            yield task.lower(), name if isinstance(name, str) else name[0]


@lru_cache(maxsize=32)
def _table(task: str) -> Mapping[str, Any]:
    from transformers.models.auto import modeling_auto

    found: Mapping[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    return found


def is_of(name: str, tasks: Sequence[str]) -> bool:
    """Returns whether a class stands in one of these tables of transformers."""
    return any(name == found or name in found for task in tasks for found in _table(task).values())


def check_model_type(model_type: object, path: Path) -> None:
    """Returns where transformers knows a model type; else raises ConfigError with the nearest that it knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if isinstance(model_type, str) and model_type in CONFIG_MAPPING_NAMES:
        return
    near = difflib.get_close_matches(str(model_type), CONFIG_MAPPING_NAMES, n=1)
    raise ConfigError(
        f"train.model: {printable(str(path))} has model_type {printable(str(model_type))!r}, which the installed "
        "transformers does not have" + (f"; the nearest is {near[0]!r}" if near else ""),
        code="FB108",
    )
