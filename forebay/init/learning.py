"""How the classes that were found stand to those of a model, and what to do where they are others."""

from __future__ import annotations

import json
import shlex

from forebay.init.found import Found
from forebay.init.model import Model
from forebay.visible import from_here

_SHOWN = 3
_MOST_NAMES = 20


def is_of_task(found: Found, model: Model) -> bool:
    """Returns whether a model is trained on what rows of images were read as."""
    return model.task is not None and model.task.name == found.prompt


def class_problem(found: Found, model: Model) -> str | None:
    """Returns how the classes that were found differ from a model's; None where they are among them."""
    if found.prompt != "label" or model.num_classes is None:
        return None
    met = sorted(found.classes)
    if all(name.isdecimal() for name in met):
        fits = all(int(name) < model.num_classes for name in met)
    elif model.class_names:
        fits = set(met) <= set(model.class_names)
    else:
        fits = len(met) == model.num_classes if found.has_all_classes else len(met) <= model.num_classes
    return (
        None
        if fits
        else f"the data has {_shown(met)}, and the model {_shown(list(model.class_names), model.num_classes)}"
    )


def _shown(names: list[str], count: int | None = None) -> str:
    some = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
    number = len(names) if count is None else count
    return f"{number:,} class{'es' * (number != 1)}" + (f" ({some})" if some else "")


def classes_setting(found: Found, model: Model) -> tuple[str, ...] | None:
    """Returns `text.classes`, where the model's classes have other numbers than the sorted names of the data."""
    names = model.class_names
    if found.prompt != "label" or not names or not is_of_task(found, model) or class_problem(found, model) is not None:
        return None
    met = tuple(sorted(found.classes))
    is_numbers = all(name.isdecimal() for name in met)
    return None if is_numbers or (found.has_all_classes and met == names) else names


def new_head(found: Found, model: Model) -> str:
    """Returns the command that makes a model of the classes that were found."""
    names = dict(enumerate(sorted(found.classes)))
    folder = from_here(model.folder)
    if len(names) > _MOST_NAMES:
        return f"give {folder}/config.json an id2label of these {len(names):,} classes, which forebay inspect lists"
    if not model.has_weights:
        return f'write into {folder}/config.json: "id2label": {json.dumps(names)}'
    code = (
        "from transformers import AutoModelForImageClassification as A, AutoImageProcessor as P; "
        f"A.from_pretrained({folder!r}, id2label={names!r}, label2id={ {n: i for i, n in names.items()}!r}, "
        f"ignore_mismatched_sizes=True).save_pretrained({folder + '-own'!r}); "
        f"P.from_pretrained({folder!r}).save_pretrained({folder + '-own'!r})"
    )
    quoted = shlex.quote(code) if set(code) & set('"$`\\!') else f'"{code}"'
    return f"make it a head for them, and run init with that folder: python -c {quoted}"
