"""The steps by the name that a config has for them, one line each, and the steps that settings ask for."""

from __future__ import annotations

import difflib
import functools
import importlib
import json
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from forebay.errors import ConfigError
from forebay.steps.audio.own_class import entry_named
from forebay.steps.step import CLIPS, AudioStep, ItemStep, Step, Stored, TextStep
from forebay.store.layout import TEXT, Constants, Group

if TYPE_CHECKING:
    from forebay.steps.form import BatchForm

Table = dict[str, str]
"""Name -> module and class; where several classes share a name, all of them: a config means the first that stands
beside its items. A module is imported when its name is asked for."""

_AUDIO, _IMAGE, _TEXT = (f"forebay.steps.{group}" for group in ("audio", "image", "text"))
STEPS: dict[Group, Table] = {
    "audio": {
        "log_mel": f"{_AUDIO}.log_mel:LogMel",
        "qwen3_asr": f"{_AUDIO}.log_mel:Qwen3Asr",
        "w2v_bert": f"{_AUDIO}.w2v_bert:W2vBert",
        "waveform": f"{_AUDIO}.waveform:Waveform",
        "mel": f"{_AUDIO}.mel:Mel",
        "given": f"{_AUDIO}.given:Given",
        "extractor": f"{_AUDIO}.extractor.extractor_step:Extractor",
        "lengths": f"{_AUDIO}.given:Lengths",
        "none": f"{_AUDIO}.given:NoAudio",
    },
    "image": {"patches": f"{_IMAGE}.qwen2_vl:Patches", "processor": f"{_IMAGE}.processor.processor_step:Processed"},
    TEXT: {
        "plain": f"{_TEXT}.plain:Plain {_TEXT}.caption:Caption",
        "whisper": f"{_TEXT}.plain:Whisper",
        "qwen3_asr": f"{_TEXT}.qwen3_asr_prompt:Qwen3AsrChat",
        "given": f"{_TEXT}.plain:GivenLabels",
        "tts": f"{_TEXT}.tts:Tts",
        "chat": " ".join(f"{_TEXT}.chat.chat_steps:{name}" for name in ("Chat", "SoundChat", "ProcessorChat")),
        "none": f"{_TEXT}.label:NoText",
        "label": f"{_TEXT}.label:Label",
    },
}
"""By group: what `audio.features`, `vision.images` and `text.prompt` name."""

_OWN = f"{_AUDIO}.own_step:Own"
"""The step of code of the user."""

_FORMS = ChainMap(
    {
        "declared": f"{_AUDIO}.declared:Declared",
        "patches": STEPS["image"]["patches"],
        "images": STEPS["image"]["processor"],
        "model": "forebay.steps.model.model_step:ModelStep",
        CLIPS: f"{_AUDIO}.extractor.conversation_sound:ConversationSound",
    },
    STEPS["audio"],
)
"""What caches call the features that they hold: steps, and those whose batches the cache itself declares."""

StepT = TypeVar("StepT", bound=Step)
_TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def steps_named(group: Group, name: str) -> tuple[type[Step], ...]:
    """Returns the steps of a group that have a name. Raises KeyError for a name that is not in the table."""
    return tuple(map(_load, STEPS[group][name].split()))


def audio_step(name: str) -> type[AudioStep]:
    """Returns the step that `audio.features` names: of the table, or code of the user.

    Raises KeyError for a name that is neither.
    """
    found: type[AudioStep] = _load(_OWN if is_own(name) else STEPS["audio"][name])
    return found


def is_own(name: str) -> bool:
    """Whether `audio.features` names code of the user: `file.py:Class`, or an installed step that is not forebay's."""
    return name not in STEPS["audio"] and (":" in name or entry_named(name) is not None)


def form_step(features: str) -> type[ItemStep] | None:
    """Returns the step that has the batches of a cache's `features`; None of features that nobody knows."""
    return cast(type[ItemStep], _load(_FORMS[features])) if features in _FORMS else None


def text_step(name: str, items: Mapping[Group, str]) -> type[TextStep] | None:
    """Returns the step that `text.prompt` names beside items; None where there is none.

    items: what caches call the features of each group.
    """
    found = cast(tuple[type[TextStep], ...], steps_named(TEXT, name)) if name in STEPS[TEXT] else ()
    return next((step for step in found if step.stands_beside(items)), None)


def text_step_of(constants: Constants) -> type[TextStep] | None:
    """Returns the step that made the texts of a source with these constants; None where none is known."""
    others = {group: values for group, values in constants.groups.items() if group != TEXT}
    items = {group: str(values.get("features")) for group, values in others.items() if not _is_of_texts(values, others)}
    return text_step(str(constants.of(TEXT).get("prompt")), items)


def _is_of_texts(values: Mapping[str, Any], groups: Mapping[Group, Mapping[str, Any]]) -> bool:
    """Whether these are outputs of a model for texts, or for such outputs: no items that texts stand beside."""
    takes = str(values.get("takes"))
    return takes == TEXT or (takes in groups and _is_of_texts(groups[takes], groups))


def forms_of(stored: Stored) -> dict[Group, BatchForm]:
    """Returns the forms of what a cache stores of its items, by group: those of their steps, or that it declares.

    Raises ConfigError where there is none, or where two of a batch's fields would have one name.
    """
    found: dict[Group, BatchForm] = {}
    text = text_step_of(stored.constants)
    owners = dict.fromkeys(() if text is None else text.batch_names, f"text.prompt = {text and text.name!r}")
    for group in stored.constants.groups:
        if group == TEXT:
            continue
        of_group = replace(stored, group=group)
        features = of_group.constant("features")
        if (step := form_step(features)) is None:
            known = unknown(STEPS["audio"], features)
            raise ConfigError(f"{stored.name}: no batch form for features {features!r}; {known}")
        form = found[group] = step.batch(of_group)
        names = {field.name for field in form.fields}
        if taken := sorted(names.intersection(owners)):
            raise ConfigError(
                f"{stored.name}: a batch would have two fields {taken[0]!r}, by {form.made_by} and by "
                f"{owners[taken[0]]}; take other features, or another prompt",
                code="FB125",
            )
        owners |= dict.fromkeys(names, form.made_by)
    return found


def prompts_beside(items: Mapping[Group, str]) -> Table:
    """Returns what `text.prompt` may name beside items."""
    return {name: entry for name, entry in STEPS[TEXT].items() if text_step(name, items) is not None}


def settings_of(group: Group, name: str) -> dict[str, Any]:
    """Returns the settings of a step, or of the steps that share a name, that a config may give, with their types."""
    return {setting: hint for step in steps_named(group, name) for setting, hint in _settings(step).items()}


def axis_names(constants: Constants) -> dict[str, str | int]:
    """Returns the `axes` of the steps whose values a cache with these constants has, as far as they are known."""
    steps = [form_step(str(values.get("features"))) for values in constants.groups.values()]
    found: list[type[Step] | None] = [*steps_named("audio", "waveform"), *steps, text_step_of(constants)]
    return {name: axis for step in found if step is not None for name, axis in step.axes.items()}


def unknown(table: Mapping[str, Any], name: object) -> str:
    """Returns what to say of a name that is not in a table: the nearest one, and all."""
    near = difflib.get_close_matches(str(name), table, n=1)
    return f"{'did you mean ' + json.dumps(near[0]) + '? ' if near else ''}wanted one of {_listed(table)}"


def problems(group: Group, name: str, values: Mapping[str, Any], *, section: str, key: str, own: set[str]) -> list[str]:
    """Returns what is wrong with the settings of a step, by dotted names; an empty list where nothing is.

    values: what the section holds beside its own fields `own`. key: the field of the section that names the step.
    Where several steps share the name, nothing is wrong that one of them takes.
    """
    if name not in STEPS[group]:
        return [f"{section}.{key}: unknown step {json.dumps(name)}; {unknown(STEPS[group], name)}"]
    tried = [
        problems_of(step, values, table=STEPS[group], section=section, key=key, own=own)
        for step in steps_named(group, name)
    ]
    return min(tried, key=bool)


def problems_of(
    cls: type[Step], values: Mapping[str, Any], *, table: Table, section: str, key: str, own: set[str]
) -> list[str]:
    """Returns what is wrong with the settings of one step. table: of the steps that may stand in its place."""
    step = f'{key} = "{cls.name}"' if key else section
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


_hints = cast("Callable[[Any], dict[str, Any]]", functools.cache(get_type_hints))  # mypy: a step has no hash


def _settings(cls: type[Step]) -> dict[str, Any]:
    """Returns the types of the fields that a config may set."""
    hints = _hints(cls)
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
    owners = {
        name: None for name, entry in table.items() if any(setting in _settings(_load(one)) for one in entry.split())
    }
    return f"; it is only for {key} = {_listed(owners)}" if owners else ""


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(map(json.dumps, names))
