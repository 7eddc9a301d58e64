"""The steps of a config are opened as a build opens them, so that what cannot be built is said now.

Only steps that transformers' classes are in: those of forebay's own need no trial, and no transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forebay.errors import ConfigError, DecodeError
from forebay.init.draft import Draft
from forebay.init.toml import Section
from forebay.steps.audio.extractor.extractor_call import OutputError
from forebay.steps.audio.extractor.extractor_probe import noise
from forebay.steps.audio.extractor.extractor_step import Extractor
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.image.processor.outputs import UnstorableError
from forebay.steps.image.processor.processor_step import Processed
from forebay.steps.recipe import Recipe, TextGroup
from forebay.visible import from_here, printable

_LIMITS_S = (30.0, 10.0)
"""Bounds of clips that are tried where an extractor does not take the longest one whole."""
_ALONE = "images of other shapes are not padded: each is a batch of its own"
_LEFT_OUT = "what is given there cannot be stored; if the model needs it, this cache is not for it"


def tried(made: Draft, recipe: Recipe) -> bool:
    """Returns whether a config can be built as it is; False where a setting was added, and it is to be tried again.

    Comments say what was found. Raises ConfigError where nothing helps.
    """
    try:
        if recipe.image is not None and isinstance(recipe.image.step, Processed):
            return _images(made, recipe.image.step, recipe.text)
        if recipe.audio is not None and isinstance(recipe.audio.features, Extractor):
            return _sound(made, recipe.audio.features)
    except OutputError as err:
        if err.is_drawn:
            raise _with_folder(made, err) from err
        return _left_out(made, "audio", [err.name])
    except UnstorableError as err:
        return _left_out(made, "vision", err.names)
    except ConfigError as err:
        raise _with_folder(made, err) from err
    return True


def _sound(made: Draft, step: Extractor) -> bool:
    _note(made, "audio", step.batch_form())
    seconds = made.found.sounds.seconds if made.found.sounds is not None else []
    source = _section(made, "source")
    if not seconds or any(name == "max_duration_s" for name, *_ in source.lines):
        return True
    longest = max(seconds)
    problem = _problem(step, longest)
    if problem is None:
        return True
    limit = next((limit for limit in _LIMITS_S if limit < longest and _problem(step, limit) is None), None)
    if limit is None:
        raise ConfigError(f"a clip of {longest:.1f} s, as the data has one: {problem}", code="FB121")
    source.add("max_duration_s", limit, f"of {longest:.1f} s, {step.kind} makes other values, or several pieces")
    source.add("overlong", "drop", "longer clips are left out, counted and listed")
    return False


def _problem(step: Extractor, seconds: float) -> str | None:
    """Returns why an extractor does not make one clip's values of a clip so long; None where it does."""
    try:
        step.make([noise(round(seconds * step.rate_hz), seed=1)])
    except (DecodeError, OutputError) as err:
        return str(err)
    return None


def _images(made: Draft, step: Processed, text: TextGroup) -> bool:
    form, plan = step.opened(None).form, _section(made, "plan")
    _note(made, "vision", form)
    if any(map(_has_no_room, form.stored)) and ("batch_size", 1, _ALONE) not in plan.lines:
        plan.lines = [("batch_size", 1, _ALONE) if line[0] == "batch_size" else line for line in plan.lines]
        return False
    try:
        text.step.opened(Path(text.folder), merge_size=None)
    except ConfigError as err:
        raise _again(f"{err}; to store the images without their texts, give --prompt none", err) from err
    return True


def _has_no_room(field: FieldForm) -> bool:
    """Returns whether arrays of different shapes cannot stand in one batch."""
    return field.join == "stack" and None in field.shape and field.pad is None


def _note(made: Draft, name: str, form: BatchForm) -> None:
    section = _section(made, name)
    stored = [field for field in form.stored if field.table is not None]
    codes = "; floats as codes and a table of their values, bit for bit" if stored else ""
    names = ", ".join(field.name for field in form.fields)
    note = f"{form.made_by} gives {names}{codes}. Batches beside those that it makes itself: {form.promise}."
    if note not in section.notes:
        section.notes.append(note)
        said = f"{note} docs/any-model.md says what that means."
        if form.promise.kind == "alone" and said not in made.found.notes:
            made.found.notes.append(said)


def _left_out(made: Draft, name: str, names: Sequence[str]) -> bool:
    section = _section(made, name)
    made.said.append(f"{name}.leave_out: {', '.join(names)} cannot be stored")
    before: list[str] = next((value for name, value, _ in section.lines if name == "leave_out"), [])
    section.lines = [line for line in section.lines if line[0] != "leave_out"]
    section.add("leave_out", sorted({*before, *names}), _LEFT_OUT)
    return False


def _section(made: Draft, name: str) -> Section:
    return next(section for section in made.sections if section.name == name)


def _with_folder(made: Draft, err: ConfigError) -> ConfigError:
    folder = "" if made.model is None else from_here(Path(made.model.folder))
    return _again(f"--model {printable(folder)}: {err}", err)


def _again(said: str, err: ConfigError) -> ConfigError:
    """Returns an error of the same code that says more."""
    found = ConfigError(said)
    found.code = err.code
    return found
