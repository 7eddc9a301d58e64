"""Folders of strangers: settings that name files, repositories and programs, for every class of transformers."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.processing_utils import ImagesKwargs

from benchmarks.zoo.classes import CannotError, Known, class_of, extractors, processors, quiet
from forebay.errors import ConfigError, DecodeError
from forebay.pretrained import from_folder
from forebay.steps.audio.extractor.extractor_call import OpenExtractor, load_extractor
from forebay.steps.audio.extractor.extractor_folder import ExtractorFolder
from forebay.steps.image.processor.processor_call import ask
from forebay.steps.image.processor.processor_probe import picture
from forebay.steps.image.processor.whole import image_processor_of, whole_processor
from tests.faults.row import Row

CANARY = "forebay-canary"
"""In the name of every file and repository that a folder names."""
_OF_WHOLE = {"speaker_embeddings": False, "decoder": False, "audio_tokenizer": False}
_OUTSIDE = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
_seen: list[str] = []
_watching: list[bool] = []


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _watching and (event in _OUTSIDE or (event == "open" and CANARY in str(args[0]))):
        _seen.append(f"{event} {args[0]!r}"[:300])


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Gives the files of a stranger that are opened, hosts that are asked and programs that are started, in words."""
    if not _watching:
        sys.addaudithook(_watch)  # for good: nothing takes one away
    _seen.clear()
    _watching.append(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        try:
            yield _seen
        finally:
            _watching.clear()


@dataclass(frozen=True)
class _Site:
    known: tuple[Known | str, ...]
    """Classes of image processors and extractors; names of whole processors."""
    canary: Path


@contextlib.contextmanager
def all_classes(folder: Path) -> Iterator[_Site]:
    canary = folder / f"{CANARY}.json"
    canary.write_text('{"0": {"name": "wall", "isthing": 0}}')
    whole = sorted({name for name in PROCESSOR_MAPPING_NAMES.values() if name})
    yield _Site((*processors(more=False), *extractors(more=False), *whole), canary)


def settings_of(cls: Any) -> dict[str, bool]:
    """Returns the settings of a class alone that are words or switches, and whether they are switches."""
    told = getattr(getattr(cls, "valid_kwargs", None), "__annotations__", {})
    made = [p for base in cls.__mro__ if "__init__" in vars(base) for p in inspect.signature(base).parameters.values()]
    kinds = {p.name: f"{p.annotation} {type(p.default).__name__}" for p in made} | {n: str(k) for n, k in told.items()}
    usual = {*ImagesKwargs.__annotations__, "self", "args", "kwargs"}
    return {n: "bool" in k for n, k in kinds.items() if n not in usual and re.search("str|bool|None|Path|_empty", k)}


def asked(site: _Site, number: int, folder: Path) -> str:
    """Opens folders that name canaries in each setting of a class by itself, and in all, and asks what was made."""
    known = site.known[number % len(site.known)]
    try:
        names = _OF_WHOLE if isinstance(known, str) else settings_of(class_of(known))
    except (CannotError, ImportError):
        return "not here"
    outcomes = set()
    with watched() as seen, quiet():
        each = {name: True if is_switch else str(site.canary) for name, is_switch in names.items()}
        asks_hub = {name: True if is_switch else f"{CANARY}/hub" for name, is_switch in names.items()}
        for settings in (asks_hub, each, *({name: value} for name, value in each.items())):
            outcomes.add(_opened(known, settings, folder))
            assert seen == [], f"{known}: {settings}"
    return " and ".join(sorted(outcomes))


def _opened(known: Known | str, settings: dict[str, Any], folder: Path) -> str:
    """Opens a folder as a build does, and asks what it holds once."""
    try:
        if isinstance(known, str):
            return _whole(known, settings, folder)
        _write(folder / "preprocessor_config.json", {_TYPES[known.kind]: known.name, **settings})
        if known.kind == "extractor":
            read = ExtractorFolder.read(folder)
            OpenExtractor.of(load_extractor(read)).alone(np.zeros(8000, np.float32))
        else:
            made = image_processor_of(folder)
            with contextlib.suppress(Exception):  # whatever a class says of odd settings when it is asked
                ask(made, [picture((24, 16), 0)])
    except (ConfigError, DecodeError):
        return "refused"
    return "asked"


@functools.cache
def _tokenizer() -> Any:
    return from_folder(AutoTokenizer, _MODEL)


_MODEL = Path(__file__).parents[2] / "demo" / "vision" / "model"
_TYPES = {"extractor": "feature_extractor_type", "processor": "image_processor_type"}


def _whole(name: str, settings: dict[str, Any], folder: Path) -> str:
    _write(folder / "processor_config.json", {"processor_class": name, **settings})
    _write(folder / "speaker_embeddings_path.json", {"repo_or_path": CANARY, "a": settings})
    outcome = "refused"
    for group, part in _parts().items():
        with contextlib.suppress(ConfigError):
            whole_processor(folder, tokenizer=_tokenizer(), tokenizer_folder=_MODEL, parts={group: part})
            outcome = "asked"
    return outcome


@functools.cache
def _parts() -> dict[str, Any]:
    hears = _MODEL.parents[1] / "speech" / "model"
    return {"image": image_processor_of(_MODEL), "audio": load_extractor(ExtractorFolder.read(hears))}


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document))


ROW: Row[_Site] = Row(
    name="folders",
    fault="a model folder whose settings name files, repositories and programs, in each setting of a class in turn",
    outcome="no file is opened, no host asked, no program started: left aside, or a typed error",
    prepared=all_classes,
    trial=asked,
    short=12,
    long=lambda site: len(site.known),
)


@pytest.mark.parametrize("share", [0.2, pytest.param(1, marks=pytest.mark.wide)])
def test_no_setting_of_any_class_opens_a_file_or_asks_a_host(share: float, tmp_path: Path) -> None:
    """A fifth of the classes takes 3 s; every run draws it anew."""
    with all_classes(tmp_path) as site:
        assert len(site.known) > 100
        numbers = random.sample(range(len(site.known)), int(share * len(site.known)))
        outcomes = [ROW.once(site, number, tmp_path) for number in numbers]
    assert all(outcomes)
