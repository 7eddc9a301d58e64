"""`[audio]`: from the settings of a section to the steps of the group `audio`, and what they cannot do together."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Self

from forebay.config.code import facts_of, not_allowed
from forebay.config.plan import PackConfig
from forebay.config.pretrained_folder import extractor_digest, model_place, processor_digest
from forebay.config.tree import AudioConfig, Config
from forebay.errors import ConfigError
from forebay.steps.audio.declared import Declared
from forebay.steps.audio.extractor.conversation_sound import ConversationSound
from forebay.steps.audio.extractor.extractor_step import Extractor
from forebay.steps.audio.mel import Mel
from forebay.steps.audio.own_step import Own, own_problems
from forebay.steps.audio.pitch import Energy, Pitch
from forebay.steps.audio.speeds import Speeds
from forebay.steps.audio.waveform import Decode, Waveform
from forebay.steps.sections import GroupRecipe
from forebay.steps.step import AudioStep, Step, TextStep
from forebay.steps.table import STEPS, audio_step, is_own, made, problems
from forebay.store.layout import Group


@dataclass(frozen=True, kw_only=True)
class AudioGroup(GroupRecipe):
    """Recordings. waveform: None where it is not kept. beside: of values by the frames of the features."""

    name: ClassVar[Group] = "audio"
    section: ClassVar[str] = "audio"
    settings: ClassVar[type] = AudioConfig

    decode: Decode
    features: AudioStep
    waveform: Waveform | None = None
    beside: tuple[AudioStep, ...] = ()
    speeds: tuple[float, ...] = ()

    @classmethod
    def problems(cls, values: Mapping[str, Any]) -> list[str]:
        own, name = cls.own_names(), values.get("features", AudioConfig().features)
        rest = {setting: value for setting, value in values.items() if setting not in own}
        if not isinstance(name, str):  # the config itself refuses it
            return []
        if is_own(name):
            return own_problems(name, rest)
        found = problems("audio", name, rest, section="audio", key="features", own=own)
        if found and name not in STEPS["audio"]:
            return [f'{line}, or a class of your own: "file.py:Class", or an installed step' for line in found]
        return found

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:
        audio = config.audio
        if audio is None:
            return []
        step = audio_step(audio.features)
        if in_conversations(config) and (found := _conversation_problems(config, audio)):
            return found
        if issubclass(step, Own) and not config.run.allow_code:
            return [not_allowed("audio.features", audio.features)]
        found = [*step.contradictions(config), *_packs(config)]
        if audio.speeds and (not step.has_audio or not step.reads_sound or step.form() == Waveform.name):
            advice = '; set [[augment]] kind = "speed"' if step.form() == Waveform.name else ""
            found.append(f'audio.speeds is for features that are made of sound, and features is "{step.name}"{advice}')
        if not step.has_audio:
            return [*found, *([] if config.loader.crop_s is None else [no_crop(config.loader.crop_s, step.name)])]
        rate_hz = step.wanted_rate_hz(audio.settings)
        if rate_hz not in (None, audio.sample_rate_hz):
            of_a_preset = f' with preset = "{audio.settings["preset"]}"' if step.sample_rate_hz is None else ""
            return [
                *found,
                f'audio: features = "{step.name}"{of_a_preset} is defined at {rate_hz} Hz; '
                f"sample_rate_hz is {audio.sample_rate_hz}",
            ]
        try:
            return [*found, *_fields_and_crop(config, audio, step)]
        except ValueError as err:
            return [*found, f"audio: {err}"]

    @classmethod
    def of(cls, config: Config) -> Self | None:
        """Returns the group of a config; None where samples have no sound."""
        audio = config.audio
        if audio is None or audio_step_of(config) is None:
            return None
        features = features_of(config, audio)
        limits = [config.source.max_duration_s if config.source.overlong == "clip" else None, features.max_s]
        return cls(
            decode=Decode(
                sample_rate_hz=audio.sample_rate_hz,
                clip_s=min((float(limit) for limit in limits if limit is not None), default=None),
                max_sample_bytes=config.source.max_sample_bytes,
            ),
            features=features,
            waveform=Waveform() if audio.keep_waveform else None,
            beside=beside_of(config, audio),
            speeds=audio.speeds,
        )

    @property
    def stored(self) -> tuple[AudioStep, ...]:
        """The steps whose values are stored, in their order."""
        return (self.features, *(() if self.waveform is None else (self.waveform,)), *self.beside)

    @property
    def variants(self) -> Speeds:
        """The speeds at which recordings are stored too."""
        return Speeds.of(self.speeds, self.stored, rate_hz=self.decode.sample_rate_hz)

    @property
    def steps(self) -> tuple[Step, ...]:
        return (self.decode, *self.stored)

    @property
    def made_with(self) -> dict[str, str]:
        return self.features.made_with

    def document(self) -> dict[str, Any]:
        return {
            **self.features.compared(),
            "features": self.features.name,
            "sample_rate_hz": self.decode.sample_rate_hz,
            "clip_s": self.decode.clip_s,
            "keep_waveform": self.waveform is not None,
            **{step.name: asdict(step) for step in self.beside},
            **({"speeds": list(self.variants.factors)} if self.speeds else {}),
            "version": [step.identity()["version"] for step in self.steps],
        }

    def check(self, text: TextStep, kept: Collection[str]) -> None:
        """Raises ConfigError for code that cannot be trusted, or that names a field which samples have anyway."""
        self.features.check_code()
        if not isinstance(self.features, Declared):
            return
        form = self.features.batch_form()
        taken = {*kept, *(spec.name for spec in text.fields())}
        taken |= {spec.name for step in self.stored[1:] for spec in step.fields()}
        if found := sorted(taken.intersection(spec.name for spec in self.features.fields())):
            raise ConfigError(
                f"audio.features: {form.made_by} makes a field {found[0]!r}, and samples have one of that name "
                "already; rename the field, or the column of source.keep_columns"
            )
        if found := sorted({field.name for field in form.fields}.intersection(text.batch_names)):
            raise ConfigError(
                f"audio.features: {form.made_by} makes a field {found[0]!r}, and a batch has the {found[0]} of "
                f'text.prompt = "{text.name}" by that name; rename the field, or take another prompt'
            )


def audio_step_of(config: Config) -> type[AudioStep] | None:
    """Returns the step of a config's recordings; None where samples have none."""
    if config.audio is not None and in_conversations(config):
        return ConversationSound
    step = None if config.audio is None else audio_step(config.audio.features)
    return step if step is not None and step.has_audio else None


def in_conversations(config: Config) -> bool:
    """Whether the recordings of a config are clips that conversations list."""
    facts = facts_of(config)
    return "audio" in facts.groups and "audio" in facts.lists


def _fields_and_crop(config: Config, audio: AudioConfig, step: type[AudioStep]) -> list[str]:
    """Returns which fields have a name twice, or else why a crop is none. Raises ValueError for what stands beside."""
    steps = beside_of(config, audio)
    if not issubclass(step, Declared):  # no code of somebody else is asked
        steps = (features_of(config, audio), *steps)
    names, found = {spec.name for each in steps for spec in each.fields()}, []
    if kept := sorted(names.intersection(config.source.keep_columns)):
        found.append(f"source.keep_columns: {kept[0]!r} is the name of a field of the audio; rename the column")
    stores_waveform = "waveform" in names
    if stores_waveform and audio.keep_waveform:
        found.append(f'audio: keep_waveform is only for features other than "{step.name}"')
    if not found and config.loader.crop_s is not None:
        try:
            crop_samples(
                config.loader.crop_s,
                features=features_of(config, audio).name,
                sample_rate_hz=audio.sample_rate_hz,
                has_waveform=audio.keep_waveform or stores_waveform,
            )
        except ConfigError as err:
            found.append(str(err))
    return found


def _conversation_problems(config: Config, audio: AudioConfig) -> list[str]:
    """Returns what is not for clips of conversations."""
    vision, found = config.vision, []
    if audio.features != Extractor.name:
        found.append(
            f'audio.features is "{audio.features}", and clips in conversations are as the model\'s own processor makes '
            'them: set audio.features = "extractor" and audio.extractor to the model\'s folder'
        )
    elif vision is not None and not _is_one_folder(config, vision.processor, audio):
        found.append(
            "audio.extractor and vision.processor name two processors, and one writes a conversation; name in both the "
            "folder of one model that hears and sees, or leave [audio] out"
        )
    others = {"keep_waveform": audio.keep_waveform, "speeds": audio.speeds}
    named = [f"audio.{name}" for name, given in others.items() if given]
    named += [] if config.source.languages is None else ["source.languages"]
    found += [f"{name} is not for clips in conversations; leave it out" for name in named]
    if config.augment:
        found.append("augment changes recordings that are samples themselves, not clips in conversations; leave it out")
    if isinstance(config.plan, PackConfig) and config.plan.has_shapes:
        found.append('plan.shapes is "fixed", and the clips of packs are as many as there are; leave it out')
    if config.loader.crop_s is not None:
        found.append("loader.crop_s cuts recordings, and clips in conversations are whole; leave it out")
    return found


def _is_one_folder(config: Config, processor: str, audio: AudioConfig) -> bool:
    try:
        return extractor_digest(Path(extractor_folder(config, audio))) == processor_digest(Path(processor))
    except ConfigError:  # whoever opens it says what is wrong
        return True


def extractor_folder(config: Config, audio: AudioConfig) -> str:
    """Returns the folder that `audio.extractor` names. Raises ConfigError for what names none."""
    return model_place(str(audio.settings.get("extractor", "")), Path(config.path).parent)


def _packs(config: Config) -> list[str]:
    """Returns what packs of sound are not."""
    plan, found = config.plan, []
    if not isinstance(plan, PackConfig):
        return []
    if config.text is None:
        found.append('plan.kind is "pack", and packs are of tokens: add [text], or set plan.kind = "bucket"')
    if config.loader.crop_s is not None:
        found.append('plan.kind is "pack", and crops of loader.crop_s have no text; set plan.kind = "bucket"')
    if plan.has_shapes and plan.max_frames is None:
        found.append('plan.shapes is "fixed", which needs plan.max_frames, the most that a pack has')
    return found


def features_of(config: Config, audio: AudioConfig) -> AudioStep:
    """Returns the step of the features of a section. Raises ValueError where its rate and settings do not fit."""
    step, folder, rate_hz = audio_step(audio.features), Path(config.path).parent, audio.sample_rate_hz
    if issubclass(step, Own):
        allow_code = config.run.allow_code
        return step.of(audio.features, audio.settings, folder=folder, allow_code=allow_code, rate_hz=rate_hz)
    if issubclass(step, Extractor):
        step = ConversationSound if in_conversations(config) else step
        return step.of(audio.settings, folder=folder, rate_hz=rate_hz)
    return made(step, audio.settings, **({"rate_hz": rate_hz} if "rate_hz" in step.given else {}))


def beside_of(config: Config, audio: AudioConfig) -> tuple[AudioStep, ...]:
    """Returns the steps of `audio.pitch` and `audio.energy`. Raises ValueError where the features have no such."""
    wanted = [name for name, is_on in (("energy", audio.energy), ("pitch", audio.pitch is not None)) if is_on]
    if not wanted:
        return ()
    features = features_of(config, audio)
    if not isinstance(features, Mel):
        raise ValueError(
            f'{" and ".join(wanted)} are by the frames of features = "mel", and features is "{features.name}"; '
            "leave them out"
        )
    framing = asdict(features.framing)
    steps: list[AudioStep] = [Energy(**framing)] if audio.energy else []
    if audio.pitch is not None:
        steps.append(Pitch(rate_hz=audio.sample_rate_hz, **framing, **asdict(audio.pitch)))
    return tuple(steps)


def crop_samples(crop_s: float, *, features: str, sample_rate_hz: int, has_waveform: bool) -> int:
    """Returns the audio samples of a crop of `crop_s` seconds, read as a decimal: 0.1 s at 16 kHz is 1600.

    features: as in `audio.features`. has_waveform: whether samples hold the field `waveform`. Raises ConfigError for
    features that a crop cannot be cut from, a missing waveform, a part of a sample, or too short a crop.
    """
    step = audio_step(features) if features in STEPS["audio"] else Declared
    if step.grid_samples is None:
        raise ConfigError(no_crop(crop_s, features))
    if not has_waveform:
        raise ConfigError(
            f"loader.crop_s is {crop_s}, and batches of crops hold the waveform, which is not kept; "
            "set audio.keep_waveform = true and run: forebay preprocess CONFIG"
        )
    samples = Fraction(repr(float(crop_s))) * sample_rate_hz if math.isfinite(crop_s) else Fraction(0)
    if samples.denominator != 1 or samples < step.min_samples:
        raise ConfigError(
            f"loader.crop_s is {crop_s}, {float(samples)} samples at {sample_rate_hz} Hz; "
            f"wanted a whole number of samples, {step.min_samples} or more"
        )
    return int(samples)


def no_crop(crop_s: float, features: str) -> str:
    """Returns what to say of crops of features that nothing can be cut from."""
    possible = " or ".join(f'"{name}"' for name in STEPS["audio"] if audio_step(name).grid_samples is not None)
    return (
        f'loader.crop_s is {crop_s} and audio.features is "{features}", whose frames depend on the whole clip; '
        f"crops need {possible}"
    )
