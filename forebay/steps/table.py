"""The steps by the name that a config has for them, one line each, and the steps that settings ask for."""

from __future__ import annotations

import difflib
import importlib
import json
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from forebay.steps.audio.own.own_class import entry_named
from forebay.steps.step import AudioStep, ImageStep, Step, TextStep

Table = dict[str, str]
"""Name -> module and class. The module is imported when the name is asked for."""

AUDIO: Table = {
    "log_mel": "forebay.steps.audio.log_mel:LogMel",
    "qwen3_asr": "forebay.steps.audio.qwen3_asr_features:Qwen3Asr",
    "w2v_bert": "forebay.steps.audio.w2v_bert:W2vBert",
    "waveform": "forebay.steps.audio.waveform:Waveform",
    "mel": "forebay.steps.audio.mel:Mel",
    "given": "forebay.steps.audio.given:Given",
    "extractor": "forebay.steps.audio.extractor.extractor_step:Extractor",
    "none": "forebay.steps.audio.given:NoAudio",
}
OWN = "forebay.steps.audio.own.own_step:Own"
"""The step of code of the user."""
FORMS: ChainMap[str, str] = ChainMap(
    {"declared": "forebay.steps.audio.declared:Declared", "patches": "forebay.steps.image.qwen2_vl:Patches"}, AUDIO
)
"""What caches call the features that they hold: steps, and those whose batches the cache itself declares."""
TRANSCRIPTS: Table = {
    "plain": "forebay.steps.text.plain:Plain",
    "whisper": "forebay.steps.text.whisper_prompt:Whisper",
    "qwen3_asr": "forebay.steps.text.qwen3_asr_prompt:Qwen3AsrChat",
    "given": "forebay.steps.text.plain:GivenLabels",
    "tts": "forebay.steps.text.tts:Tts",
}
"""What `text.prompt` names beside recordings, and for texts alone."""
PACKED: Table = {"chat": "forebay.steps.text.chat.packed_chat:Chat"}
"""What it names beside patches."""
TEXT: Table = {**TRANSCRIPTS, **PACKED}
OF_IMAGES: Table = {
    "chat": "forebay.steps.text.chat.chat_of_processor:ProcessorChat",
    "none": "forebay.steps.text.label:NoText",
    "label": "forebay.steps.text.label:Label",
    "plain": "forebay.steps.text.caption:Caption",
}
"""What `text.prompt` names beside images that a processor makes, `images = "processor"`."""
IMAGE: Table = {
    "patches": "forebay.steps.image.qwen2_vl:Patches",
    "processor": "forebay.steps.image.processor.processor_step:Processed",
}

StepT = TypeVar("StepT", bound=Step)

_TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def audio_step(name: str) -> type[AudioStep]:
    """Returns the step that `audio.features` names: of the table, or code of the user.

    Raises KeyError for a name that is neither.
    """
    found: type[AudioStep] = _load(OWN if name not in AUDIO and is_own(name) else AUDIO[name])
    return found


def is_own(name: str) -> bool:
    """Whether `audio.features` names code of the user: `file.py:Class`, or an installed step that is not forebay's."""
    return name not in AUDIO and (":" in name or entry_named(name) is not None)


def form_step(name: str) -> type[AudioStep]:
    """Returns the step that has the batches of a cache's `features`. Raises KeyError for a name not in `FORMS`."""
    found: type[AudioStep] = _load(FORMS[name])
    return found


def text_step(name: str, table: Table = TEXT) -> type[TextStep]:
    """Returns the step that `text.prompt` names. Raises KeyError for a name that is not in the table."""
    found: type[TextStep] = _load(table[name])
    return found


def prompts_beside(images: str | None) -> Table:
    """Returns what `text.prompt` may name beside images that are stored so; None: where there are no images."""
    return {"patches": PACKED, "processor": OF_IMAGES}.get(images or "", TRANSCRIPTS)


def image_step(name: str) -> type[ImageStep]:
    """Returns the step that images are stored by. Raises KeyError for a name that is not in the table."""
    found: type[ImageStep] = _load(IMAGE[name])
    return found


def step_class(table: Table, name: str) -> type[Step]:
    """Returns the step that a table has under a name. Raises KeyError for a name that is not in the table."""
    found: type[Step] = _load(table[name])
    return found


def settings_of(table: Table, name: str) -> dict[str, Any]:
    """Returns the settings of a step that a config may give, with their types."""
    return _settings(_load(table[name]))


def axis_names(constants: Mapping[str, Any]) -> dict[str, str | int]:
    """Returns the `axes` of the steps whose values a cache with these constants has, as far as they are known."""
    audio, text = constants.get("features"), constants.get("prompt")
    entries = [
        *([AUDIO["waveform"], FORMS[audio]] if isinstance(audio, str) and audio in FORMS else IMAGE.values()),
        *([TEXT[text]] if isinstance(text, str) and text in TEXT else []),
    ]
    return {name: axis for entry in entries for name, axis in _load(entry).axes.items()}


def unknown(table: Table, name: object) -> str:
    """Returns what to say of a name that is not in a table: the nearest one, and all."""
    near = difflib.get_close_matches(str(name), table, n=1)
    return f"{'did you mean ' + json.dumps(near[0]) + '? ' if near else ''}wanted one of {_listed(table)}"


def problems(table: Table, name: str, values: Mapping[str, Any], *, section: str, key: str, own: set[str]) -> list[str]:
    """Returns what is wrong with the settings of a step, by dotted names; an empty list where nothing is.

    values: what the section holds beside its own fields `own`. key: the field of the section that names the step.
    """
    if name not in table:
        return [f"{section}.{key}: unknown step {json.dumps(name)}; {unknown(table, name)}"]
    cls, step = _load(table[name]), f'{key} = "{name}"' if key else section
    hints, found = _settings(cls), []
    for setting, value in values.items():
        if setting not in hints:
            near = difflib.get_close_matches(setting, {*hints, *own}, n=1)
            advice = f"; did you mean {section}.{near[0]}?" if near else f" of {step}{_owners(table, setting, key)}"
            found.append(f"{section}.{setting}: unknown field{advice}")
        elif not _fits(value, hints[setting]):
            found.append(f"{section}.{setting}: {step} wants {_wanted(hints[setting])}, got {value!r:.200}")
    if not found:
        try:
            made(cls, values, **dict.fromkeys(cls.given))
        except ValueError as err:
            found.append(f"{section}: {err}")
    return found


def made(cls: type[StepT], values: Mapping[str, Any], **given: Any) -> StepT:
    """Returns the step with settings that `problems` has nothing to say of. given: the fields of `cls.given`."""
    hints = _settings(cls)
    plain = {name: _plain(value, hints[name]) for name, value in values.items()}
    return cls(**cls.completed(plain), **given)


def _plain(value: Any, hint: Any) -> Any:
    """Returns a value of a config as the step has it: integers of numbers as floats, lists as tuples."""
    if type(value) is int and _fits(0.5, hint):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _load(entry: str) -> Any:
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


def _settings(cls: type[Step]) -> dict[str, Any]:
    """Returns the types of the fields that a config may set."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls) if f.init and f.name not in {*cls.given, "version"}}


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, (list, tuple)) and all(_fits(part, get_args(hint)[0]) for part in value)
    if get_origin(hint) is Mapping:  # the step itself looks into it
        return isinstance(value, Mapping)
    return type(value) is hint or (hint is float and type(value) is int)


def _wanted(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(json.dumps, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a list of {_TYPES[get_args(hint)[0]].partition(' ')[2]}s"
    if get_origin(hint) is Mapping:
        return "a table"
    parts = [part for part in get_args(hint) or (hint,) if part is not type(None)]
    return " or ".join(_TYPES.get(part) or _wanted(part) for part in parts)


def _owners(table: Table, setting: str, key: str) -> str:
    """Returns which steps have a setting that another lacks."""
    owners = {name: None for name, entry in table.items() if setting in _settings(_load(entry))}
    return f"; it is only for {key} = {_listed(owners)}" if owners else ""


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(map(json.dumps, names))
