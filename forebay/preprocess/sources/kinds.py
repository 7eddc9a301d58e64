"""Which kinds of source there are: one line a kind and modality, its module imported when the kind is asked for.

A kind is a module with a `KIND`, see `SpeechKind` and `VisionKind`.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

from forebay.errors import ConfigError

KINDS: dict[str, dict[str, str]] = {
    "speech": {
        "tar": "forebay.preprocess.sources.speech.tar",
        "filelist": "forebay.preprocess.sources.speech.filelist",
        "webdataset": "forebay.preprocess.sources.speech.webdataset",
        "jsonl": "forebay.preprocess.sources.speech.jsonl",
        "hf": "forebay.preprocess.sources.speech.hf",
        "ljspeech": "forebay.preprocess.sources.speech.ljspeech",
        "text": "forebay.preprocess.sources.speech.text",
    },
    "vision": {
        "jsonl": "forebay.preprocess.sources.vision.jsonl",
        "hf": "forebay.preprocess.sources.vision.hf",
        "webdataset": "forebay.preprocess.sources.vision.webdataset",
    },
}
"""Module by modality and `source.kind`."""


def kind_of(modality: str, name: str) -> Any:
    """Returns the `KIND` of a name. Raises ConfigError, with the nearest name and all of them, for an unknown one."""
    modules = KINDS[modality]
    if name not in modules:
        near = difflib.get_close_matches(name, modules, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f'source.kind is "{name}", for {modality} wanted one of {", ".join(modules)}{hint}')
    return import_module(modules[name]).KIND
