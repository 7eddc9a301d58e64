"""The sections of a config with images: packs of patches, or what an image processor gives, and classes of a model."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from forebay.errors import ConfigError, SampleError
from forebay.init.candidate import Candidate, Draft, RowMeaning
from forebay.init.config_sections import BATCH_SIZE, kind_of, not_known, num_buckets, small_set
from forebay.init.config_text import Section, python_line
from forebay.init.found_model import PROCESSORS, Model
from forebay.init.questions import BESIDE
from forebay.steps.image.processor.processor_step import Processed
from forebay.steps.recipe import Recipe
from forebay.store.image.image_settings import ImageSettings, grid_thw
from forebay.visible import from_here

_IMAGES = 32
_LEAST_TOKENS, _MOST_TOKENS = 1024, 16_384
_CHARS_A_TOKEN = 2.5
_TEMPLATE_TOKENS = 24
_SHOWN = 3
_ALONE = "images of other shapes are not padded: each is a batch of its own"
_MOST_NAMES = 20


class ImageSections(RowMeaning):
    """Images, with conversations, classes, texts or nothing beside them."""

    name = "vision"
    is_alone = True

    def check(self, model: Model | None) -> None:
        if model is None:
            raise ConfigError(
                "images are stored as a model's processor makes them; give --model DIR: the folder of a model that "
                "sees, with preprocessor_config.json, and for conversations and texts tokenizer.json and, where it "
                "talks, a chat template"
            )
        if not model.sees:
            raise ConfigError(
                f"--model {model.folder} is {kind_of(model)} and sees no images: {' and '.join(PROCESSORS)} name no "
                "image processor; name the folder of a model that sees, or save its processor there with "
                "processor.save_pretrained(folder)"
            )

    def sections(self, made: Draft) -> list[Section]:
        model = made.model
        assert model is not None
        if made.found.prompt == "chat" and model.images is not None:
            return _packs(made, model, model.images)
        return _processed(made, model)

    def try_steps(self, made: Draft, recipe: Recipe) -> bool:
        step = None if recipe.image is None else recipe.image.step
        if not isinstance(step, Processed):
            return True
        form, plan = step.opened(None).form, made.section("plan")
        made.note_form("vision", form)
        # Arrays of different shapes cannot stand in one batch.
        is_alone = any(each.join == "stack" and None in each.shape and each.pad is None for each in form.stored)
        if is_alone and ("batch_size", 1, _ALONE) not in plan.lines:
            plan.lines = [("batch_size", 1, _ALONE) if line[0] == "batch_size" else line for line in plan.lines]
            return False
        try:
            recipe.text.step.opened(Path(recipe.text.folder), merge_size=None)
        except ConfigError as err:
            raise ConfigError(
                f"{err}; to store the images without their texts, give --prompt none", code=err.code
            ) from err
        return True

    def trains(self, found: Candidate, model: Model) -> bool:
        packs = model.trains and model.images is not None and found.prompt == "chat"
        return packs or (_is_of_task(found, model) and _class_problem(found, model) is None)

    def not_learnt(self, found: Candidate, model: Model) -> str:
        if _is_of_task(found, model) and (problem := _class_problem(found, model)):
            return f"not trained yet: {problem}; {_new_head(found, model)}"
        if model.task is not None:
            return f"not trained: the model is for another task ({model.task.why}); your own loop takes the batches"
        return not_known(model)


IMAGES = ImageSections()


def _packs(made: Draft, model: Model, settings: ImageSettings) -> list[Section]:
    folder = made.relative(model.folder)
    usual, longest = _conversation_tokens(made.found, settings)
    wanted = max(_LEAST_TOKENS, longest, min(4 * usual, _MOST_TOKENS))
    # A power of two that holds the longest conversation, and some of the usual ones.
    length = min(1 << math.ceil(math.log2(wanted)), model.max_positions or 4 * _MOST_TOKENS)
    if longest > length:
        made.said.append(f"conversations of more than {length} tokens are left out of packs, counted and listed")
    tokens = f"tokens of a pack; a conversation has about {usual}, the longest about {longest}"
    template = "the folder's chat template; what the assistant says is learnt"
    return [
        Section("vision", [("processor", folder, "")]),
        Section("text", [("tokenizer", folder, ""), ("prompt", "chat", template)]),
        Section("plan", [("kind", "pack", ""), ("seq_len", length, tokens)]),
    ]


def _conversation_tokens(found: Candidate, settings: ImageSettings) -> tuple[int, int]:
    """Returns about how many tokens a conversation has: in the mean, and the longest that can be of what was seen."""
    images: list[int] = []
    for size in found.pictures.sizes:
        images.append(2)
        with contextlib.suppress(SampleError):  # the processor refuses it
            _, rows, columns = grid_thw(*size, settings)
            images[-1] += rows * columns // settings.merge_size**2
    words = [len(text) / _CHARS_A_TOKEN + _TEMPLATE_TOKENS for text in found.texts] or [_TEMPLATE_TOKENS]
    a_row, images = found.images_a_row or [1], images or [0]
    return round(mean(words) + mean(a_row) * mean(images)), round(max(words) + max(a_row) * max(images))


def _processed(made: Draft, model: Model) -> list[Section]:
    found, folder = made.found, made.relative(model.folder)
    stored = ("processor", folder, "images are stored as the folder's image processor gives them")
    images, text, batches = Section("vision", [stored]), Section("text"), Section("plan")
    is_chat = found.prompt == "chat"
    if is_chat or found.prompt == "plain":
        text.add("tokenizer", folder)
    beside = BESIDE[found.prompt]
    why = f": {model.task.why}" if model.task is not None and model.task.name == found.prompt else ""
    text.add("prompt", found.prompt, f"{beside.said}{why}")
    if (classes := _classes(found, model)) is not None:
        text.add("classes", [*classes], "the model's, in the order of their numbers (id2label of its config.json)")
    if is_chat:
        batches.add("k", num_buckets(found), "buckets of like length, in tokens")
    size = max(1, min(BATCH_SIZE if is_chat else _IMAGES, found.count // 4 or 1))
    batches.add("batch_size", size, f"{beside.noun} a batch")
    batches.lines += small_set(found)
    return [images, text, batches]


def _is_of_task(found: Candidate, model: Model) -> bool:
    """Returns whether a model is trained on what rows of images were read as."""
    return model.task is not None and model.task.name == found.prompt


def _class_problem(found: Candidate, model: Model) -> str | None:
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
    if fits:
        return None
    return f"the data has {_shown(met, len(met))}, and the model {_shown(model.class_names, model.num_classes)}"


def _shown(names: Sequence[str], count: int) -> str:
    some = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
    return f"{count:,} class{'es' * (count != 1)}" + (f" ({some})" if some else "")


def _classes(found: Candidate, model: Model) -> tuple[str, ...] | None:
    """Returns `text.classes`, where the model's classes have other numbers than the sorted names of the data."""
    names = model.class_names
    if found.prompt != "label" or not names or not IMAGES.trains(found, model):
        return None
    is_same = found.has_all_classes and tuple(sorted(found.classes)) == names
    return None if is_same or all(map(str.isdecimal, found.classes)) else names


def _new_head(found: Candidate, model: Model) -> str:
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
    return f"make it a head for them, and run init with that folder: {python_line(code)}"
