"""Every feature extractor and image processor class of the installed transformers, made from its defaults.

`extractors()` and `processors()` list them. `make` gives one as an object, `save` writes the folder that a user would
have, and both raise `CannotError` with a reason for a class that cannot be used on this machine. No part of forebay is
needed, so what is made here can stand beside what forebay makes.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import transformers
from transformers.models.auto.feature_extraction_auto import (
    FEATURE_EXTRACTOR_MAPPING_NAMES,
    feature_extractor_class_from_name,
)
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
    get_image_processor_class_from_name,
)

Kind = Literal["extractor", "processor"]


class CannotError(Exception):
    """A class cannot be used here; the text is the reason, as the page shows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """One class of transformers. families: the model types that use it. settings: what it needs beside its defaults."""

    name: str
    kind: Kind
    families: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    """Says what `settings` are for."""

    @property
    def label(self) -> str:
        """The name that the page shows: two entries of one class have different settings."""
        return f"{self.name} ({self.note})" if self.note else self.name


_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "ImageGPTImageProcessorPil": (
        {"clusters": [[r / 4 - 1, g / 4 - 1, b / 4 - 1] for r in range(8) for g in range(8) for b in range(8)]},
        "512 clusters",
    ),
    "LayoutLMv2ImageProcessorPil": ({"apply_ocr": False}, "apply_ocr = false"),
    "LayoutLMv3ImageProcessorPil": ({"apply_ocr": False}, "apply_ocr = false"),
}
"""Settings of classes that do nothing without them."""

_MORE: dict[str, tuple[dict[str, Any], str]] = {
    "Wav2Vec2FeatureExtractor": ({"return_attention_mask": True}, "return_attention_mask"),
    "WhisperFeatureExtractor": ({"feature_size": 128}, "128 mels"),
    "ClapFeatureExtractor": ({"truncation": "rand_trunc"}, "rand_trunc"),
    "SpeechT5FeatureExtractor": ({"do_normalize": True}, "do_normalize"),
}
"""Second entries of classes: settings of checkpoints that many people have."""

_CANNOT = {
    "EfficientLoFTRImageProcessorPil": "takes pairs of images",
    "IdeficsImageProcessorPil": "gives one array without a name",
    "LightGlueImageProcessorPil": "takes pairs of images",
    "SuperGlueImageProcessorPil": "takes pairs of images",
    "VitMatteImageProcessorPil": "takes a trimap beside each image",
    "VitPoseImageProcessorPil": "takes boxes beside each image",
}
"""Classes that take or give something else than images and named arrays. They are made and saved like the others."""


def extractors(*, more: bool = True) -> list[Known]:
    """Returns the classes of AutoFeatureExtractor by name; with `more`, second entries for other usual settings."""
    families: dict[str, list[str]] = {}
    for family, name in FEATURE_EXTRACTOR_MAPPING_NAMES.items():
        families.setdefault(name, []).append(family)
    return list(_listed("extractor", families, more=more))


def processors(*, more: bool = True) -> list[Known]:
    """Returns the classes of AutoImageProcessor by name: of each family its PIL class, if there is one."""
    families: dict[str, list[str]] = {}
    for family, backends in IMAGE_PROCESSOR_MAPPING_NAMES.items():
        families.setdefault(backends.get("pil") or backends["torchvision"], []).append(family)
    return list(_listed("processor", families, more=more))


def _listed(kind: Kind, families: Mapping[str, list[str]], *, more: bool) -> Iterator[Known]:
    for name in sorted(families, key=str.lower):
        settings, note = _SETTINGS.get(name, ({}, ""))
        yield Known(name=name, kind=kind, families=tuple(sorted(families[name])), settings=settings, note=note)
        if more and name in _MORE:
            settings, note = _MORE[name]
            yield Known(name=name, kind=kind, families=tuple(sorted(families[name])), settings=settings, note=note)


def class_of(known: Known) -> Any:
    """Returns the class itself; one whose package is missing is a stand-in that raises when it is made."""
    find = feature_extractor_class_from_name if known.kind == "extractor" else get_image_processor_class_from_name
    with quiet():
        found = find(known.name)
    if found is None:
        raise CannotError(f"transformers {transformers.__version__} has no such class")
    return found


def make(known: Known) -> Any:
    """Returns the extractor or processor. Raises CannotError with a reason where that cannot be."""
    try:
        with quiet():
            return class_of(known)(**known.settings)
    except Exception as err:  # whatever a foreign class raises is its reason
        raise CannotError(reason(err)) from err


def save(known: Known, folder: Path) -> Path:
    """Returns `folder`, into which the class wrote its `preprocessor_config.json`. Raises CannotError as `make`."""
    with quiet():
        make(known).save_pretrained(folder)
    return folder


def takes_other_input(known: Known) -> str:
    """Returns why this class cannot be asked for arrays of one clip or image; "" if it can."""
    return _CANNOT.get(known.name, "")


def usable(known: Known) -> Any:
    """Returns `make(known)`. Raises CannotError also for a class that takes or gives something else than arrays."""
    made = make(known)
    if why := takes_other_input(known):
        raise CannotError(why)
    return made


def reason(err: Exception) -> str:
    """Returns why a class could not be used, in a few words: a missing package is named."""
    text = " ".join(str(err).split())
    if missing := re.findall(r"requires (?:the )?([\w.-]+) library", text):
        names = sorted({name.lower() for name in missing})
        return f"needs {', '.join(names)}, which {'is' if len(names) == 1 else 'are'} not installed"
    return f"{type(err).__name__}: {text[:120]}" if text else type(err).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Foreign classes warn and print of things that no reader of the page can change."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
