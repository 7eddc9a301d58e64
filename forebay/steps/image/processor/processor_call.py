"""Image processors of transformers: made of a document that was read and checked, and their answers as arrays.

They are the PIL classes. Nothing is asked of the folder again: transformers would look into other files there (a
config.json of timm, an `auto_map` that names code) for the class to take.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import ConfigError
from forebay.pretrained import from_document, offline, reaching
from forebay.steps.form import DTYPES, Join
from forebay.store.image.image_settings import class_name
from forebay.store.layout import Array
from forebay.visible import an

_log = logging.getLogger(__name__)


def pil_processor(path: Path, document: Mapping[str, Any]) -> Any:
    """Returns transformers' image processor of a document, of the class that works with Pillow.

    `image_processor_type` may be written as X, XFast or XPil, or as `feature_extractor_type` of old folders.

    Raises ConfigError, which names `path`, for a document that names code of its own, no class that transformers knows,
    one that needs torchvision or another package that is not there, or has settings that its class does not take, or
    by which it would start a program or fetch something.
    """
    if document.get("auto_map") is not None:
        raise ConfigError(
            f"{path}: auto_map names code of the folder ({json.dumps(document['auto_map'])}), which is never run; "
            "point vision.processor at a folder whose processor is a class of transformers",
            code="FB123",
        )
    if (problem := torchvision_problem()) is not None:
        hide_torchvision(problem)
    cls = _class_of(path, _type_in(path, document))
    refuse_reaching(cls, document, path)
    try:
        return from_document(cls, document)
    except ImportError as err:
        raise needs_package(path, cls.__name__, err) from err
    except Exception as err:  # whatever a foreign class raises of its settings
        raise ConfigError(
            f"vision.processor: {path} does not load as {an(cls.__name__)}: {err!r}; save the processor again",
            code="FB123",
        ) from err


def refuse_reaching(cls: Any, document: Mapping[str, Any], path: Path | str) -> None:
    """Raises ConfigError where a class, by these settings, would start a program or fetch something when it is asked.

    path: what messages call the file of the settings.
    """
    if (problem := reaching(cls, document)) is not None:
        raise ConfigError(f"vision.processor: {path} is {an(cls.__name__)} whose {problem} in {path}", code="FB140")


def needs_package(path: Path | str, name: str, err: ImportError) -> ConfigError:
    """Returns the error that says which package a processor lacks, in the words of what it raised."""
    said = " ".join(str(err).split()).split(". ")[0]
    return ConfigError(
        f"vision.processor: {path} is {an(name)}, which needs a package that is not installed: {said:.200}; "
        "install it, or point vision.processor at another processor",
        code="FB123",
    )


def torchvision_problem() -> str | None:
    """Returns why torchvision, which is there, cannot be imported; None where it can or is not there."""
    if sys.modules.get("torchvision", ...) is None or importlib.util.find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError, AttributeError) as err:
        return f"{type(err).__name__}: {err}"
    return None


def hide_torchvision(problem: str) -> None:
    """Makes this process go on as if torchvision were not there, and says so.

    One that does not load (built for another torch, as a rule) makes transformers fail for every backend, because
    transformers looks only whether it is there. Nothing could import it anyway.
    """
    from transformers.utils import import_utils

    sys.modules["torchvision"] = None  # type: ignore[assignment]  # Python's way to say: not to be imported
    import_utils.is_torchvision_available.cache_clear()
    import_utils.is_torchvision_v2_available.cache_clear()
    _log.warning("torchvision is installed but does not load (%s); going on as if it were not there", problem)


def _type_in(path: Path, document: Mapping[str, Any]) -> str:
    """The class's name as X, whatever spelling the document has."""
    kind = document.get("image_processor_type")
    if kind is None and isinstance(old := document.get("feature_extractor_type"), str):
        kind = old.replace("FeatureExtractor", "ImageProcessor")
    if not isinstance(kind, str) or not kind.isidentifier():
        raise ConfigError(
            f"{path}: image_processor_type is {json.dumps(kind)}, wanted the name of an image processor of "
            "transformers; save the processor again with processor.save_pretrained(folder)",
            code="FB123",
        )
    return class_name({"image_processor_type": kind})


def _class_of(path: Path, name: str) -> Any:
    from transformers.models.auto.image_processing_auto import (
        IMAGE_PROCESSOR_MAPPING_NAMES,
        get_image_processor_class_from_name,
    )

    pil = {names["pil"] for names in IMAGE_PROCESSOR_MAPPING_NAMES.values() if names.get("pil")}
    known = {found for names in IMAGE_PROCESSOR_MAPPING_NAMES.values() for found in names.values() if found}
    for wanted in (f"{name}Pil", name):
        if wanted in pil:
            try:
                return get_image_processor_class_from_name(wanted)
            except ImportError as err:
                raise needs_package(path, wanted, err) from err
    if name in known:
        raise ConfigError(
            f"vision.processor: {path} is {an(name)}, which exists for torchvision alone, and forebay uses processors "
            "by Pillow; point vision.processor at a processor that has a PIL class",
            code="FB123",
        )
    names = {(base := found.removesuffix("Pil")).lower(): base for found in sorted(pil)}
    near = difflib.get_close_matches(name.lower(), names, 1, 0.5)
    hint = f"; the nearest is {names[near[0]]}" if near else ""
    raise ConfigError(
        f'{path}: image_processor_type "{name}" is no class of the installed transformers{hint}; install a '
        "transformers that has it, or point vision.processor at another folder",
        code="FB123",
    )


@dataclass(frozen=True, slots=True)
class RaggedOutput:
    """Arrays of different shapes, or such lists again, in a list."""

    parts: tuple[Array | RaggedOutput, ...]


class NoArrayError(ValueError):
    """An output is no array of a dtype that a batch can have; the text says what it is."""


class UnstorableError(ConfigError):
    """Outputs of a processor cannot be stored. names: of these outputs, and of those that are left out already."""

    code = "FB124"

    def __init__(self, message: str, names: tuple[str, ...]) -> None:
        super().__init__(message, names)
        self.names = names

    def __str__(self) -> str:
        return str(self.args[0])


Output = Array | RaggedOutput


def ask(processor: Any, images: Any) -> dict[str, Output | NoArrayError]:
    """Returns a processor's outputs for images, a list or lists of them."""
    with offline():
        return outputs_of(processor(images=images))


def outputs_of(answer: Any) -> dict[str, Output | NoArrayError]:
    """Returns the outputs of a processor by name: arrays, lists of arrays that have no common shape, or why neither.

    An empty list is left out: it holds nothing of any image.
    """
    if not isinstance(answer, Mapping) and not hasattr(answer, "items"):
        raise NoArrayError(f"it gives {type(answer).__name__}, wanted outputs by name")
    found: dict[str, Output | NoArrayError] = {}
    for name, value in answer.items():
        if isinstance(value, list | tuple) and not value:
            continue
        try:
            found[str(name)] = as_array(value)
        except NoArrayError as err:
            found[str(name)] = err
    return found


def as_array(value: Any) -> Output:
    """Returns a value as an array, whole numbers as int64, or its parts where they have no common shape.

    Raises NoArrayError for texts, None, broken numbers and dtypes that no batch has.
    """
    if isinstance(value, bool | np.bool_):
        return np.asarray(value, bool)
    if isinstance(value, int):
        return np.asarray(value, np.int64)
    if isinstance(value, float):
        raise NoArrayError("numbers that numpy reads as float64 and torch as float32")
    if isinstance(value, list | tuple):
        return _joined([as_array(part) for part in value])
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype.name not in DTYPES:
        raise NoArrayError(f"{type(value).__name__} of dtype {array.dtype.name}")
    return array


def array_of(found: Array, join: Join) -> Array:
    """Returns the array of one image: a processor's output for it alone without the axis of the batch."""
    return found if found.ndim == 0 or join == "cat" else found[0]


def _joined(parts: Sequence[Output]) -> Output:
    arrays = [part for part in parts if not isinstance(part, RaggedOutput)]
    if len(arrays) < len(parts) or len({(array.shape, array.dtype) for array in arrays}) != 1:
        return RaggedOutput(tuple(parts))
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)
