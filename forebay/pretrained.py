"""Classes of transformers made of a folder: nothing is fetched, and no code of the folder is run, whoever says yes."""

from __future__ import annotations

import contextlib
import inspect
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_UNASKED = ("class_info_file", "repo_path")
"""Settings by which a class opens any file, or asks the Hub for it, as soon as it is made, and which no input of a
model needs: OneFormer's names of classes."""
_REACHING = {
    "apply_ocr": "starts the program tesseract, with the folder's options",
    "header_text": "draws a text with a font that is fetched",
}
"""Settings by which a class reaches out of its process when it is asked, and that change what it answers."""
_lock = threading.Lock()
_inside: list[bool] = []
"""What the Hub's switch was before the first of the blocks that are open, for each of them."""


def from_folder(loader: Any, folder: Path, **options: Any) -> Any:
    """Returns `loader.from_pretrained(folder)`, for every class of transformers that has it; raises what that raises.

    Left out, `trust_remote_code` is a question on the terminal in transformers, and a `y` runs the folder's code.
    """
    with offline():
        return loader.from_pretrained(str(folder), **options, local_files_only=True, trust_remote_code=False)


def from_document(cls: Any, document: Mapping[str, Any]) -> Any:
    """Returns `cls.from_dict(document)`, made without what would open a file; raises what that raises."""
    with offline():
        return cls.from_dict({name: value for name, value in document.items() if name not in _UNASKED})


def reaching(cls: Any, document: Mapping[str, Any]) -> str | None:
    """Returns the setting of a class, by a document, that would start a program or fetch; None where none does."""
    found = (name for name in _REACHING if document.get(name, inspect.getattr_static(cls, name, None)))
    return next((f'{name} {_REACHING[name]}, which nothing allows: write "{name}": null' for name in found), None)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Nothing is fetched within the block: a class may load a tokenizer by its name on the Hub (`MgpstrProcessor`)."""
    from huggingface_hub import constants

    with _lock:
        _inside.append(_inside[0] if _inside else constants.HF_HUB_OFFLINE)
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        with _lock:
            constants.HF_HUB_OFFLINE = _inside.pop() or bool(_inside)


@contextlib.contextmanager
def no_bar() -> Iterator[None]:
    """Hides transformers' bars: a second bar would have to move the cursor of the terminal."""
    from transformers.utils import logging as transformers_logging

    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()


def kernels_in(document: Any) -> Iterator[str]:
    """Yields the implementations of attention and the like that a config.json names by a repository, at any depth."""
    values = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in values:
        if "_implementation" in str(key) and "/" in json.dumps(value):
            yield f"{key} = {json.dumps(value)}"
        else:
            yield from kernels_in(value)


def without_dropout(tokenizer: Any) -> None:
    """Makes a fast tokenizer give a text the same tokens each time."""
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if getattr(model, "dropout", None):
        model.dropout = None
