"""What a folder says of its feature extractor, read without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config.digest import extractor_digest
from forebay.errors import ConfigError

_NESTED, _PLAIN = "processor_config.json", "preprocessor_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractorFolder:
    """A folder's feature extractor as its files say it. path: of the file that defines it, for messages.

    kind: its class, empty where the file names none. processor_class: of the processor that it is a part of, empty
    where no file names one. model_type: of config.json, by which transformers finds a class that no file names.
    """

    path: Path
    digest: str
    document: Mapping[str, Any]
    kind: str
    processor_class: str
    model_type: str

    @classmethod
    def read(cls, folder: Path) -> ExtractorFolder:
        """Returns what a folder says. Raises ConfigError where it holds no feature extractor, or names code of its own.

        As transformers 5 reads it: `feature_extractor` of processor_config.json where that is there, else
        preprocessor_config.json.
        """
        digest = extractor_digest(folder)
        nested, plain, config = (_json(folder / name) for name in (_NESTED, _PLAIN, "config.json"))
        own = nested.get("feature_extractor", nested.get("audio_processor"))
        path, document = (folder / _PLAIN, plain) if own is None else (folder / _NESTED, own)
        if not isinstance(document, dict):
            raise refused(
                path, f"its feature extractor is {json.dumps(document)[:80]}, wanted an object; save it again"
            )
        for place, each in ((folder / _NESTED, nested), (folder / _PLAIN, plain), (path, document)):
            if "auto_map" in each:
                raise refused(
                    place,
                    "it has auto_map, which names code of its own; forebay runs no code of a folder: take a folder "
                    "whose class transformers has, or remove auto_map where that class is the right one",
                )
        kind = _name(document.get("feature_extractor_type"))
        image = _name(document.get("image_processor_type")) or _image_kind(nested)
        if not kind and (image or not document):
            raise refused(
                folder,
                f"it defines an image processor alone ({image or 'no settings of a feature extractor'}); point "
                "audio.extractor at the folder of a model of audio; images are for [vision] processor",
            )
        return cls(
            path=path,
            digest=digest,
            document=document,
            kind=kind,
            processor_class=_name(document.get("processor_class")) or _name(nested.get("processor_class")),
            model_type=_name(config.get("model_type")),
        )


def refused(path: Path, why: str) -> ConfigError:
    """Returns the error that a folder or file cannot be `audio.extractor`."""
    return ConfigError(f"audio.extractor: {path}: {why}", code="FB121")


def _json(path: Path) -> dict[str, Any]:
    """Returns the object in a file; an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_bytes())
    except OSError as err:
        raise refused(path, f"cannot read it: {err.strerror}") from err
    except (ValueError, RecursionError) as err:
        raise refused(path, f"it is no JSON: {err}; save it again") from err
    if not isinstance(document, dict):
        raise refused(path, "it holds no JSON object; save it again")
    return document


def _name(value: object) -> str:
    return value if isinstance(value, str) else ""


def _image_kind(nested: Mapping[str, Any]) -> str:
    image = nested.get("image_processor")
    return _name(image.get("image_processor_type")) if isinstance(image, dict) else ""
