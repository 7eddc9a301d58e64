"""The sections of a config: source, training and mixtures; steps and plan of recordings, of images, and of texts alone.

Images are packs of patches, or what an image processor gives, with the classes of a model.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from forebay.config.data import OWN_COLUMNS, SOURCE_KINDS
from forebay.config.tree import Config
from forebay.errors import ConfigError, DecodeError, SampleError
from forebay.init.candidate import Candidate, Draft, RowMeaning, Section, Setting, python_line, value_of
from forebay.init.found_model import OF_SOUND, PROCESSORS, Model
from forebay.init.questions import BESIDE
from forebay.rows.list_rows import check_pieces
from forebay.steps.audio.extractor.extractor_call import OutputError
from forebay.steps.audio.extractor.extractor_probe import noise
from forebay.steps.audio.extractor.extractor_step import Extractor
from forebay.steps.image.processor.processor_step import Processed
from forebay.steps.image.video_settings import Sampling, VideoSettings, video_settings
from forebay.steps.recipe import Recipe
from forebay.steps.text.line import whisper_code
from forebay.store.image.image_settings import ImageSettings, grid_thw
from forebay.visible import an, from_here

_HEARD_S = 30.0
"""Seconds of a clip that Whisper's features hold."""
BATCH_SIZE, BATCH_TOKENS = 8, 4096
_FOR_WHISPER = (
    "Features for Whisper; also: qwen3_asr, w2v_bert, waveform. With forebay init --model DIR they are the model's, "
    "and texts become tokens."
)
_FOR_LONG = "Many recordings are longer than the 30 s that Whisper hears, so waveforms are stored as they are."


class RecordingSections(RowMeaning):
    """Sound, with or without texts."""

    name = "speech"
    may_miss = True

    def check(self, model: Model | None) -> None:
        if model is not None and not model.audio and model.sees:
            raise ConfigError(
                f"--model {model.folder} is {kind_of(model)} and hears no sound; name a Whisper or Qwen3-ASR folder, "
                "or any other with a feature extractor (docs/models.md)"
            )

    def sections(self, made: Draft) -> list[Section]:
        found, model = made.found, made.model
        audio = Section("audio")
        for name, value in _audio(made).items():
            audio.add(name, made.relative(value) if isinstance(value, Path) else value)
        if model is not None and model.audio and not found.audio:
            audio.notes.append(f"{model.audio_why[:1].upper()}{model.audio_why[1:]}.")
        is_in_part = audio.lines[0][1] == "log_mel"
        if model is None and not found.audio:
            audio.notes.append(_FOR_WHISPER if is_in_part else _FOR_LONG)
        text = [] if model is None or model.prompt is None else _text(made, model, model.prompt)
        if text and model is not None and model.task is not None and model.task.name == "CTC" and not found.has_labels:
            text[0].lines.insert(2, ("end_token", False, f"CTC: {model.task.why}"))
        if is_in_part:
            source = made.section("source")
            source.add("max_duration_s", _HEARD_S, "Whisper hears 30 s")
            source.add("overlong", "drop", "longer clips are left out, counted and listed")
        room = ("batch_seconds", _batch_seconds(found), "padded seconds a batch")
        if is_in_part or found.audio:
            size = max(1, min(BATCH_SIZE, found.count // 4 or 1))
            room = ("batch_size", size, "clips a batch; Whisper pads each to 30 s")
        return [audio, *text, buckets(found, "", room)]

    def check_rows(self, found: Candidate, config: Config) -> None:
        # Kinds whose rows may be of pieces of recordings, and how many of them are listed to see it.
        if found.kind in ("table", "jsonl", "folder", "tar") and found.count <= 200_000:
            check_pieces(config)

    def try_steps(self, made: Draft, recipe: Recipe) -> bool:
        step = None if recipe.audio is None else recipe.audio.features
        if not isinstance(step, Extractor):
            return True
        made.note_form("audio", step.batch_form())
        source, longest = made.section("source"), max(made.found.sounds.seconds, default=0.0)
        is_bounded = not longest or any(name == "max_duration_s" for name, *_ in source.lines)
        if is_bounded or (problem := _problem(step, longest)) is None:
            return True
        # Bounds of clips that are tried where an extractor does not take the longest one whole.
        limit = next((limit for limit in (30.0, 10.0) if limit < longest and _problem(step, limit) is None), None)
        if limit is None:
            raise ConfigError(f"a clip of {longest:.1f} s, as the data has one: {problem}", code="FB121")
        source.add("max_duration_s", limit, f"of {longest:.1f} s, {step.kind} makes other values, or several pieces")
        source.add("overlong", "drop", "longer clips are left out, counted and listed")
        return False

    def trains(self, found: Candidate, model: Model) -> bool:
        if not found.has_text:
            return False
        if model.trains:
            return model.audio.get("features") != "extractor"
        return model.task is not None and model.task.name in OF_SOUND and model.prompt is not None and bool(model.audio)

    def not_learnt(self, found: Candidate, model: Model) -> str:
        if not found.has_text:
            return "forebay train needs texts, and none were found; your own loop takes the batches"
        if model.model_type and model.task is not None and model.prompt is None:
            return f"forebay train needs a tokenizer: put its tokenizer.json into {from_here(model.folder)}"
        return not_known(model)


class TextSections(RowMeaning):
    """Texts alone."""

    name = "text"
    mixed: tuple[Setting, ...] = (("batches", "per_source", ""), ("asr_ratio", 0.8, "four of five batches have sound"))

    def check(self, model: Model | None) -> None:
        if model is None:
            raise ConfigError(
                "texts are stored as tokens; give --model DIR: the folder of a model, or of a tokenizer alone "
                "(tokenizer.json)"
            )
        if model.text_prompt is None:
            raise ConfigError(
                f"--model {model.folder} is {kind_of(model)}; texts alone need a tokenizer of a speech or text model"
            )

    def sections(self, made: Draft) -> list[Section]:
        model = made.model
        assert model is not None
        assert model.text_prompt is not None
        audio = Section("audio", [("features", "none", "")])
        room = ("batch_tokens", BATCH_TOKENS, "padded tokens a batch")
        return [audio, *_text(made, model, model.text_prompt), buckets(made.found, " of like length", room)]

    def trains(self, found: Candidate, model: Model) -> bool:  # noqa: ARG002
        return model.trains and model.audio.get("features") != "extractor"

    def not_learnt(self, found: Candidate, model: Model) -> str:  # noqa: ARG002
        return not_known(model)


def _problem(step: Extractor, seconds: float) -> str | None:
    """Returns why an extractor does not make one clip's values of a clip so long; None where it does."""
    try:
        step.make([noise(round(seconds * step.rate_hz), seed=1)])
    except (DecodeError, OutputError) as err:
        return str(err)
    return None


def kind_of(model: Model) -> str:
    """Returns what to call a model."""
    return model.model_type or "a tokenizer"


def not_known(model: Model) -> str:
    """Returns why a model of which nothing is known is not trained."""
    if not model.model_type:
        return f"forebay train needs the model itself: its config.json in {from_here(model.folder)}"
    return (
        f"init knows no task of {an(model.model_type)} for this data; if transformers has a class of it that "
        "learns this, name the folder as train.model (docs/training.md)"
    )


def _audio(made: Draft) -> dict[str, Any]:
    if made.found.audio:
        return made.found.audio
    if made.model is not None and made.model.audio:
        return made.model.audio
    seconds = made.found.sounds.seconds
    return {"features": "waveform" if sum(each > _HEARD_S for each in seconds) > len(seconds) / 4 else "log_mel"}


def _text(made: Draft, model: Model, prompt: str) -> list[Section]:
    """Returns `[text]`, nothing where there are no texts. prompt: that of the model."""
    found = made.found
    if not found.has_text:
        return []
    section = Section("text", [("tokenizer", made.relative(model.folder), "")])
    section.add("prompt", "given" if found.has_labels else prompt)
    if prompt == "whisper" and not found.has_labels:
        codes = {each: (re.split("[-_]", each.strip().lower())[0], whisper_code(each)) for each in found.languages}
        unknown = {each for each, own in codes.items() if not model.tags.intersection(f"<|{code}|>" for code in own)}
        if unknown:
            note = f"the tokenizer has no tag for {', '.join(sorted(unknown)[:5])}: no language is written"
            section.add("language_tag_mode", "none", note)
            made.said.append(f'{note} (text.language_tag_mode = "none")')
        elif not found.languages and model.tags:
            note = (
                "The language of the texts is not known, and Whisper is told none: name it in a column language, or "
                'set text.language = "detect"'
            )
            section.notes.append(f"{note}.")
            made.said.append(note)
        if model.max_label_tokens is not None:
            section.add("max_label_tokens", model.max_label_tokens, "the model's decoder positions")
    return [section]


def buckets(found: Candidate, which: str, room: Setting) -> Section:
    """Returns `[plan]`. which: samples stand in a bucket; empty: by their durations. room: the setting of a batch."""
    why = f"buckets{which}" if which else "buckets, with the edges that pad these durations least"
    return Section("plan", [("k", num_buckets(found), why), room, *small_set(found)])


def num_buckets(found: Candidate) -> int:
    """Returns how many edges there may be, so that buckets still hold full batches."""
    return max(2, min(32, found.count // 16))


def small_set(found: Candidate) -> list[Setting]:
    """Returns the setting for a set of which groups of batches of equal shape would leave many incomplete."""
    return [("lockstep", 1, "a small set: no groups of batches of equal shape")] if found.count < 4_000 else []


def _batch_seconds(found: Candidate) -> int:
    """Returns padded seconds a batch: some of the longest clips, and several batches of a small set."""
    if not found.sounds.seconds:
        return 120
    wanted = min(max(2 * max(found.sounds.seconds), 120.0), found.hours * 3600 / 8)
    return max(20, min(240, 10 * math.ceil(wanted / 10)))


RECORDINGS, TEXTS = RecordingSections(), TextSections()


def add_sections(made: Draft) -> None:
    """Adds all sections of a config of one source."""
    named = Section("", [("name", made.name, "the first part of the cache folder's name")])
    made.sections = [named, *_source(made)]
    made.sections += made.found.meaning.sections(made)
    if made.model is not None and made.trains:
        made.sections.append(_train(made, made.model))


def _source(made: Draft) -> list[Section]:
    found = made.found
    paths = [made.relative(path) for path in found.manifests]
    source = Section("source", [("kind", found.kind, ""), ("manifest", paths[0] if len(paths) == 1 else paths, "")])
    for name, value in found.source.items():
        source.add(name, made.relative(value) if isinstance(value, Path) else value)
    source.offers = _kept(found)
    columns = Section("source.columns", [(role, name, "") for role, name in found.columns.items()])
    return [source, columns] if columns.lines else [source]


def _kept(found: Candidate) -> list[tuple[str, list[str]]]:
    """Returns the setting that keeps columns which nothing takes, as many as a line has room for."""
    names = [name for name in found.others if name.isidentifier() and name.isascii() and name not in OWN_COLUMNS]
    while len(value_of(names)) > 100:
        names.pop()
    return [("keep_columns", names)] if names and found.meaning.name in SOURCE_KINDS[found.kind].keeps else []


def _train(made: Draft, model: Model) -> Section:
    section = Section("train", [("model", made.relative(model.folder), "")])
    if made.weights == "random":
        empty = "the folder holds none; put model.safetensors there for more"
        section.add("init", "random", f"random weights: {'not those of the folder' if model.has_weights else empty}")
        section.add("learning_rate", 1e-3)
    else:
        section.add("learning_rate", 1e-5, "for fine-tuning; raise it for adapters or few layers")
    section.add("warmup_ratio", 0.05)
    section.add("epochs", 3, "or --steps N on the command line")
    return section


def mix(whole: Draft, parts: Sequence[Draft]) -> None:
    """Makes a config of one source read those of other configs, by weights."""
    whole.head = ["Several sources, each with a config and a cache of its own; this one mixes them.", whole.head[-1]]
    mixed = [*dict.fromkeys(line for part in parts for line in part.found.meaning.mixed)]
    plan = whole.section("plan")
    if mixed and any(setting == "batch_seconds" for setting, *_ in plan.lines):
        plan.add("batch_tokens", BATCH_TOKENS, "padded tokens a batch of texts")
    how = "" if mixed else ", by its hours; or give each a weight"
    notes = [f"Each source is a cache of its own{how} (docs/training.md)."]
    whole.sections.append(Section("mixture", mixed, notes=notes))
    for part in parts:
        whole.sections.append(Section("mixture.source", [("config", whole.relative(part.out), "")], is_entry=True))


_LEAST_TOKENS, _MOST_TOKENS = 1024, 16_384
_TEMPLATE_TOKENS = 24
_FPS = 2.0
_TIME_TOKENS = 12
"""Tokens that may stand before two frames of a video."""
_ALONE = "images of other shapes are not padded: each is a batch of its own"


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
        if any(made.found.videos_a_row) and (model.images is None or made.found.are_pairs or _films_of(model) is None):
            made.said.append("conversations with videos are left out, counted and listed: the model takes none here")
        if made.found.prompt == "chat" and model.images is not None and not made.found.are_pairs:
            return _packs(made, model, model.images)
        found, folder = made.found, made.relative(model.folder)
        stored = ("processor", folder, "images are stored as the folder's image processor gives them")
        images, text, batches = Section("vision", [stored]), Section("text"), Section("plan")
        is_chat = found.prompt == "chat"
        if is_chat or found.prompt == "plain":
            text.add("tokenizer", folder)
        beside = BESIDE[found.prompt]
        why = f": {model.task.why}" if model.task is not None and model.task.name == found.prompt else ""
        text.add("prompt", found.prompt, f"{beside.said}{why}")
        if found.are_pairs:
            text.lines.append(("pairs", True, "an answer to prefer and one to reject: batches of TRL's DPOTrainer"))
            text.offers.append(("learn_through", "newline"))
            images.lines += [("images", "processor", "of pairs there are no packs")] if model.images else []
        if (classes := _classes(found, model)) is not None:
            text.add("classes", [*classes], "the model's, in the order of their numbers (id2label of its config.json)")
        if is_chat:
            batches.add("k", num_buckets(found), "buckets of like length, in tokens")
        size = max(1, min(BATCH_SIZE if is_chat else 32, found.count // 4 or 1))
        batches.add("batch_size", size, f"{beside.noun} a batch")
        batches.lines += small_set(found)
        return [images, text, batches]

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
        if found.are_pairs:
            return False
        packs = model.trains and model.images is not None and found.prompt == "chat"
        return packs or (_is_of_task(found, model) and _class_problem(found, model) is None)

    def not_learnt(self, found: Candidate, model: Model) -> str:
        if found.are_pairs:
            return "not trained here, which has no loss of preferences: examples/trl_dpo.py trains on such batches"
        if _is_of_task(found, model) and (problem := _class_problem(found, model)):
            return f"not trained yet: {problem}; {_new_head(found, model)}"
        if model.task is not None:
            return f"not trained: the model is for another task ({model.task.why}); your own loop takes the batches"
        return not_known(model)


IMAGES = ImageSections()


def _packs(made: Draft, model: Model, settings: ImageSettings) -> list[Section]:
    folder, (usual, longest) = made.relative(model.folder), _conversation_tokens(made.found, settings, _films_of(model))
    wanted = max(_LEAST_TOKENS, longest, min(4 * usual, _MOST_TOKENS))
    # A power of two that holds the longest conversation, and some of the usual ones.
    length = min(1 << math.ceil(math.log2(wanted)), model.max_positions or 4 * _MOST_TOKENS)
    if longest > length:
        made.said.append(f"conversations of more than {length} tokens are left out of packs, counted and listed")
    tokens = f"tokens of a pack; a conversation has about {usual}, the longest about {longest}"
    template = "the folder's chat template; what the assistant says is learnt"
    vision = Section("vision", [("processor", folder, "")])
    if any(made.found.videos_a_row) and _films_of(model) is not None:
        vision.add("fps", _FPS, "frames a second that are shown of videos")
    return [
        vision,
        Section("text", [("tokenizer", folder, ""), ("prompt", "chat", template)]),
        Section("plan", [("kind", "pack", ""), ("seq_len", length, tokens)]),
    ]


def _films_of(model: Model) -> VideoSettings | None:
    """Returns the video settings of a model of packs; None where it takes no videos."""
    with contextlib.suppress(ConfigError):
        return None if model.images is None else video_settings(model.folder, model.images)
    return None


def _conversation_tokens(found: Candidate, settings: ImageSettings, video: VideoSettings | None) -> tuple[int, int]:
    """Returns about how many tokens a conversation has: in the mean, and the longest that can be of what was seen."""
    images: list[int] = []
    for size in found.pictures.sizes:
        images.append(2)
        with contextlib.suppress(SampleError):  # the processor refuses it
            _, rows, columns = grid_thw(*size, settings)
            images[-1] += rows * columns // settings.merge_size**2
    films = [0]
    for film in found.films.seen:
        with contextlib.suppress(SampleError):
            if video is None:
                break
            shown = video.indices(film.num_frames, film.fps, Sampling(fps=_FPS))
            t, rows, columns = video.grid(len(shown), film.width, film.height)
            films.append(t * (rows * columns // settings.merge_size**2 + _TIME_TOKENS))
    words = [len(text) / 2.5 + _TEMPLATE_TOKENS for text in found.texts] or [_TEMPLATE_TOKENS]
    of_items = [(found.images_a_row or [1], images or [0]), (found.videos_a_row or [0], films[1:] or films)]
    usual, longest = ([of(words), *(of(a_row) * of(tokens) for a_row, tokens in of_items)] for of in (mean, max))
    return round(sum(usual)), round(sum(longest))


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
    some = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
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
    if len(names) > 20:
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
