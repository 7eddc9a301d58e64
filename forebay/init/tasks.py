"""What a config.json says its model is trained on: the tables of transformers, asked for a class or a model type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OF_IMAGES = {
    "label": ("IMAGE_CLASSIFICATION",),
    "plain": ("ZERO_SHOT_IMAGE_CLASSIFICATION",),
    "chat": ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    "none": ("PRETRAINING",),
}
"""By `text.prompt`: the tables of the classes that take such batches, the surest first."""
_OF_TYPES = ("plain", "chat")
"""Prompts that a model type decides where no class is named: bodies of other models have classes of many kinds."""
OF_SOUND = ("CTC", "SPEECH_SEQ_2_SEQ")
"""Tables of models that write down what they hear."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a model is trained on. name: `text.prompt` of images, or CTC or SPEECH_SEQ_2_SEQ. why: how config.json says
    it. is_named: it names a class, so `forebay train` takes that one.
    """

    name: str
    why: str
    is_named: bool


def task_of_images(config: Mapping[str, Any]) -> Task | None:
    """Returns what a model that sees is trained on; None where its config.json leaves that open. Loads transformers."""
    named, model_type = _named(config), str(config.get("model_type", ""))
    for prompt, tables in _OF_IMAGES.items():
        if named and any(named in _classes(table) for table in tables):
            return Task(name=prompt, why=f"its config.json names {named}", is_named=True)
    for prompt in _OF_TYPES:
        for table in _OF_IMAGES[prompt]:
            if found := _classes_of(table, model_type):
                return Task(name=prompt, why=f"its config.json has model_type {model_type}, {found}", is_named=False)
    return None


def task_of_sound(config: Mapping[str, Any]) -> Task | None:
    """Returns CTC or SPEECH_SEQ_2_SEQ of a model that hears; None for other models. Loads transformers."""
    named, model_type = _named(config), str(config.get("model_type", ""))
    for table in OF_SOUND:
        if named and named in _classes(table):
            return Task(name=table, why=f"its config.json names {named}", is_named=True)
    for table in OF_SOUND:
        if found := _classes_of(table, model_type):
            return Task(name=table, why=f"its config.json has model_type {model_type}, {found}", is_named=False)
    return None


def _named(config: Mapping[str, Any]) -> str:
    found = config.get("architectures")
    return found[0] if isinstance(found, list) and found and isinstance(found[0], str) else ""


def _classes(table: str) -> set[str]:
    return {name for found in _table(table).values() for name in ([found] if isinstance(found, str) else found)}


def _classes_of(table: str, model_type: str) -> str:
    found = _table(table).get(model_type, "")
    return found if isinstance(found, str) else str(found[0])


def _table(task: str) -> Mapping[str, Any]:
    from transformers.models.auto import modeling_auto  # not at import: a folder of a native step needs none of it

    found: Mapping[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    return found
