"""What is wrong with the sections of a config together: settings that no source, step or plan can follow at once."""

from __future__ import annotations

import difflib
from dataclasses import asdict

from forebay.config.code import not_allowed
from forebay.config.data import READS, SOURCE_KINDS, AudioConfig, SourceColumns, TextConfig, VisionConfig
from forebay.config.loader import LoaderConfig
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.steps.audio.declared import Declared
from forebay.steps.audio.own.own_step import Own
from forebay.steps.image.choice import images_by
from forebay.steps.image.processor.processor_step import Processed
from forebay.steps.image.qwen2_vl import Patches
from forebay.steps.sections import beside_of, columns_read, crop_samples, features_of, names_of, no_crop
from forebay.steps.step import AudioStep
from forebay.steps.table import (
    IMAGE,
    OF_IMAGES,
    PACKED,
    TRANSCRIPTS,
    audio_step,
    problems,
    settings_of,
    text_step,
    unknown,
)
from forebay.steps.text.normal.normal_step import code_in
from forebay.steps.text.transcript import Transcript
from forebay.store.inputs import inputs_problem


def contradictions(config: Config) -> list[str]:
    """Returns what is wrong with `[source]`, or else what sections say that their steps cannot do together."""
    if found := _source_problems(config):
        return found
    if config.vision is not None:
        return _vision_contradictions(config, config.vision)
    step, text = audio_step(config.audio.features), config.text
    if text is not None and text.prompt not in TRANSCRIPTS:
        return [f'text.prompt = "{text.prompt}" is only for a config with [vision]']
    if found := _kept_and_detected(config):
        return found
    if text is not None and not config.run.allow_code and (code := code_in(text.settings)):
        return [not_allowed("text.normalize", entry) for entry in code]
    if issubclass(step, Own) and not config.run.allow_code:
        return [not_allowed("audio.features", config.audio.features)]
    if SOURCE_KINDS[config.source.kind].has_audio != step.has_audio:
        return [
            f'source.kind is "{config.source.kind}" and audio.features is "{step.name}"; text alone needs '
            'kind = "text" and features = "none"'
        ]
    if found := _column_problems(config):
        return found
    if not step.has_audio:
        return _text_alone_contradictions(config)
    return [*_given_contradictions(config, step), *_audio_contradictions(config, step)]


def _kept_and_detected(config: Config) -> list[str]:
    """Returns which columns a config keeps that are written beside detected languages."""
    mode = "manifest" if config.text is None else config.text.settings.get("language", "manifest")
    taken = {"language_detected", "language_confidence", "language_manifest"}.intersection(config.source.keep_columns)
    if mode == "manifest" or not taken:
        return []
    return [
        f'source.keep_columns has {", ".join(sorted(taken))}, and text.language = "{mode}" writes columns of these '
        "names; leave them out, or rename them in the source"
    ]


def _source_problems(config: Config) -> list[str]:
    source, modality = config.source, config.modality
    kinds = [name for name, kind in SOURCE_KINDS.items() if modality in kind.holds]
    if source.kind not in kinds:
        near = difflib.get_close_matches(source.kind, kinds, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return [f'source.kind is "{source.kind}", for {modality} wanted one of {", ".join(kinds)}{hint}']
    if source.kind == "python" and (problem := inputs_problem(config)) is not None:
        return [problem]
    # What is not in the key must not be read either: a column that is in no key has its default name.
    known, found = columns_read(config), _table_problems(config)
    return found + [
        f'source.columns.{name} is "{column}", and source.kind = "{source.kind}" for {modality} reads '
        f"{'only the columns ' + ', '.join(known) if known else 'no columns by name'}; leave it out"
        for name, column in asdict(source.columns).items()
        if name not in known and column != getattr(SourceColumns(), name)
    ]


def _table_problems(config: Config) -> list[str]:
    """Returns which settings of tables a config has whose kind of source takes none."""
    source, found = config.source, _folder_of_media_problems(config)
    for name in ("texts", "languages_from_folders"):
        if getattr(source, name) and source.kind != "folder":
            found.append(f'source.{name} is for source.kind = "folder", and it is "{source.kind}"; leave it out')
    if source.kind == "folder" and config.vision is not None:
        found += _folder_problems(config)
    elif source.kind == "folder":
        if source.keep_columns and source.texts is None:
            found.append(
                "source.keep_columns are columns of source.texts, and there is none; name the table, or leave "
                "keep_columns out"
            )
        given = [name for name in ("features", "labels") if getattr(source.columns, name) is not None]
        found += [f'source.columns.{name} is not for source.kind = "folder"; leave it out' for name in given]
    if source.keep_columns and config.modality not in SOURCE_KINDS[source.kind].keeps:
        kinds = [f'"{name}"' for name, kind in SOURCE_KINDS.items() if config.modality in kind.keeps]
        wanted = f"wanted {' or '.join(kinds)}" if kinds else f"for {config.modality} no kind keeps columns yet"
        found.append(f'source.keep_columns are not read from source.kind = "{source.kind}", {wanted}; leave them out')
    return found


def _folder_of_media_problems(config: Config) -> list[str]:
    source, found = config.source, []
    if source.audio_dir is not None and source.kind != "table":
        found.append(f'source.audio_dir is for source.kind = "table", and it is "{source.kind}"; leave it out')
    elif source.audio_dir is not None and config.vision is not None:
        found.append("source.audio_dir is for recordings; name the folder of the images as source.image_dir")
    if source.image_dir is not None and config.vision is None:
        found.append("source.image_dir is for images; name the folder of the recordings as source.audio_dir")
    elif source.image_dir is not None and source.kind not in ("jsonl", "table"):
        found.append(
            f'source.image_dir is for source.kind = "table" or "jsonl", and it is "{source.kind}"; leave it out'
        )
    return found


def _folder_problems(config: Config) -> list[str]:
    """Returns what a folder of images does not have."""
    source, found = config.source, []
    if config.reads == "conversations":
        wanted = " or ".join(f'"{prompt}"' for prompt, reads in READS.items() if reads != "conversations")
        found.append(f'source.kind is "folder", which has images and no conversations; set [text] prompt = {wanted}')
    found += [
        f"source.{name} is for recordings, and the first folder below source.manifest is the class of an image, or "
        f"NAME.txt beside it its text; leave {name} out"
        for name in ("texts", "languages_from_folders")
        if getattr(source, name)
    ]
    return found


def _column_problems(config: Config) -> list[str]:
    """Returns which columns the text is made of that the source does not keep."""
    text = config.text
    prompt = None if text is None else text_step(text.prompt)
    if text is None or prompt is None or not issubclass(prompt, Transcript):
        return []
    return [
        f'text.{setting} is "{column}", and source.keep_columns does not name it; add it there'
        for setting, column in prompt.columns_read(text.settings).items()
        if column not in config.source.keep_columns
    ]


def _audio_contradictions(config: Config, step: type[AudioStep]) -> list[str]:
    audio, found = config.audio, []
    rate_hz = step.wanted_rate_hz(audio.settings)
    if rate_hz not in (None, audio.sample_rate_hz):
        of_a_preset = f' with preset = "{audio.settings["preset"]}"' if step.sample_rate_hz is None else ""
        return [
            f'audio: features = "{step.name}"{of_a_preset} is defined at {rate_hz} Hz; '
            f"sample_rate_hz is {audio.sample_rate_hz}"
        ]
    try:
        names = _field_names(config, step)
    except ValueError as err:
        return [f"audio: {err}"]
    if kept := sorted(names.intersection(config.source.keep_columns)):
        found.append(f"source.keep_columns: {kept[0]!r} is the name of a field of the audio; rename the column")
    stores_waveform = "waveform" in names
    if stores_waveform and audio.keep_waveform:
        found.append(f'audio: keep_waveform is only for features other than "{step.name}"')
    if not found and config.loader.crop_s is not None:
        try:
            crop_samples(
                config.loader.crop_s,
                features=features_of(config).name,
                sample_rate_hz=audio.sample_rate_hz,
                has_waveform=audio.keep_waveform or stores_waveform,
            )
        except ConfigError as err:
            found.append(str(err))
    return found


def _field_names(config: Config, step: type[AudioStep]) -> set[str]:
    """Returns the fields that the audio of a config has, as far as no code of somebody else says it."""
    steps = beside_of(config)
    if not issubclass(step, Declared):
        steps = (features_of(config), *steps)
    return {spec.name for made_step in steps for spec in made_step.fields()}


def _given_contradictions(config: Config, step: type[AudioStep]) -> list[str]:
    """Returns where `[source.columns]` and the steps differ about what is read, features or sound, labels or text."""
    columns, found = config.source.columns, []
    prompt = None if config.text is None else text_step(config.text.prompt)
    pairs = (
        ("features", "audio.features", step.name, not step.reads_sound),
        ("labels", "text.prompt", getattr(prompt, "name", None), getattr(prompt, "reads_labels", False)),
    )
    for name, setting, value, is_read in pairs:
        column = getattr(columns, name)
        if is_read == (column is None):
            found.append(
                f"source.columns.{name} is {column!r} and {setting} is {value!r}; {name} that the source holds need "
                f'source.kind = "hf", source.columns.{name} = "{name if column is None else column}" and {setting} = '
                '"given"'
            )
    if not step.reads_sound and config.audio.keep_waveform:
        found.append(f'audio: keep_waveform is for sound, and features = "{step.name}" reads none; leave it out')
    if not step.reads_sound and config.source.overlong == "clip":
        found.append(f'source.overlong is "clip", and features = "{step.name}" are taken whole; set "keep" or "drop"')
    return found


def _text_alone_contradictions(config: Config) -> list[str]:
    name, text, source, found = config.audio.features, config.text, config.source, []
    for setting in ("sample_rate_hz", "keep_waveform", "energy", "pitch"):
        if (value := getattr(config.audio, setting)) != getattr(AudioConfig(), setting):
            found.append(f'audio: {setting} is {value!r} and features = "{name}" has no audio; leave it out')
    alone = [prompt for prompt in TRANSCRIPTS if getattr(text_step(prompt), "stands_alone", False)]
    if text is None or text.prompt not in alone:
        given = "no [text] section" if text is None else f'text.prompt is "{text.prompt}"'
        found.append(
            f'{given} and audio.features is "{name}"; text alone is tokenised: give text.tokenizer and prompt = '
            + " or ".join(f'"{prompt}"' for prompt in alone)
        )
    if source.duration_tolerance is not None:
        found.append(f'source.duration_tolerance is for audio, and audio.features is "{name}"; leave it out')
    if source.min_duration_s or source.max_duration_s is not None:
        found.append(
            f'source.min_duration_s and max_duration_s are for audio, and audio.features is "{name}"; leave them out '
            "(text.max_label_tokens limits texts)"
        )
    if config.loader.crop_s is not None:
        found.append(no_crop(config.loader.crop_s, name))
    return found


def _vision_contradictions(config: Config, vision: VisionConfig) -> list[str]:
    """Returns what the sections of a config with `[vision]` say that its images, stored as they are, cannot be."""
    match images_by(config):
        case "patches":
            return _patches_contradictions(config, vision)
        case "processor":
            return _processor_contradictions(config, vision)
    return []  # no document of a processor, which the recipe refuses


def _patches_contradictions(config: Config, vision: VisionConfig) -> list[str]:
    found, prompt = _of_other_step(vision, Patches.name), "" if config.text is None else config.text.prompt
    if prompt not in PACKED:
        wanted = " or ".join(f'"{name}"' for name in PACKED)
        found.append(
            f'text.prompt is "{prompt}", with patches of [vision] wanted {wanted}; or set vision.images = "processor"'
        )
    if vision.codec == "source" and (backend := vision.settings.get("backend", "pil")) != "pil":
        found.append(f'vision: codec = "source" decodes at load with backend "pil"; backend is "{backend}"')
    if config.plan is not None and config.plan.kind != "pack":
        found.append(
            f'plan.kind is "{config.plan.kind}", wanted "pack": batches of patches are packs; or set vision.images = '
            '"processor" for batches of what the processor gives'
        )
    return found


def _processor_contradictions(config: Config, vision: VisionConfig) -> list[str]:
    found, text = _of_other_step(vision, Processed.name), config.text
    if text is not None and text.prompt not in OF_IMAGES:
        found.append(f'text.prompt is "{text.prompt}", with images of a processor {unknown(OF_IMAGES, text.prompt)}')
    elif text is not None:
        found += problems(OF_IMAGES, text.prompt, text.settings, section="text", key="prompt", own=names_of(TextConfig))
    if vision.codec not in ("raw", "zstd"):
        found.append(
            f'vision.codec is "{vision.codec}", which holds patches alone; images of a processor are "raw" or "zstd"'
        )
    if config.plan is not None and config.plan.kind == "pack":
        found.append(
            'plan.kind is "pack", wanted "bucket" or "window": packs are of patches, and images of a processor stand '
            'in batches, for example [plan] kind = "bucket" with batch_size = 32'
        )
    elif config.plan is not None and config.plan.batch_seconds is not None:
        found.append("plan.batch_seconds is of audio, and images have no seconds; give plan.batch_size")
    if config.loader.pack_shapes != LoaderConfig().pack_shapes or config.loader.varlen != LoaderConfig().varlen:
        found.append("loader.pack_shapes and loader.varlen are of packs of patches; leave them out")
    if config.loader.pixels != LoaderConfig().pixels:
        found.append(
            f'loader.pixels is "{config.loader.pixels}" and is of patches; loader.dtype is that of what a processor '
            "gives, and make_loader(device=...) copies codes and expands them there; leave it out"
        )
    return found


def _of_other_step(vision: VisionConfig, name: str) -> list[str]:
    """Returns which settings of `[vision]` are of the step that the images are not stored by."""
    known = settings_of(IMAGE, name)
    by = "patches" if name == Patches.name else "processor"
    other = "processor" if by == "patches" else "patches"
    return [
        f'vision.{setting} is for images = "{other}", and images are stored by "{by}"; leave it out, or set '
        f'vision.images = "{other}"'
        for setting in vision.settings
        if setting not in known
    ]
