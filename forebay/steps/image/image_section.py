"""`[vision]`: from the settings of a section to the step of the group `image`, and what they cannot do together.

What `vision.images` comes to is read from documents alone, without transformers: keys and lookup ask for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from forebay.config.data import SourceConfig
from forebay.config.pretrained_folder import processor_digest
from forebay.config.tree import Config, VisionConfig
from forebay.errors import ConfigError
from forebay.steps.image.video_frames import require_av
from forebay.steps.image.video_settings import VideoSettings, video_settings
from forebay.steps.sections import GroupRecipe
from forebay.steps.step import ImageStep, Step, TextStep
from forebay.steps.table import STEPS, made, problems, settings_of, steps_named
from forebay.steps.text.chat.chat_steps import VISION_TOKENS
from forebay.store.image.codec import Codec
from forebay.store.image.image_settings import image_settings, is_native, processor_document
from forebay.store.layout import Group

_OF_SOUND = ("min_duration_s", "max_duration_s", "overlong", "languages", "duration_tolerance")
"""Settings of `[source]`."""
_VOCABULARIES = ("tokenizer", "tokenizer_config", "added_tokens", "special_tokens_map", "vocab")
"""Files of JSON that may hold tokens."""


@dataclass(frozen=True, kw_only=True)
class ImageGroup(GroupRecipe):
    """Images. folder: of the processor. codec: how they are stored, which is in no key."""

    name: ClassVar[Group] = "image"
    section: ClassVar[str] = "vision"
    settings: ClassVar[type] = VisionConfig

    step: ImageStep
    folder: str = field(compare=False)
    codec: Codec = "raw"

    @classmethod
    def problems(cls, values: Mapping[str, Any]) -> list[str]:
        own = cls.own_names()
        rest = {setting: value for setting, value in values.items() if setting not in own}
        tried = [problems(cls.name, name, rest, section=cls.section, key="", own=own) for name in STEPS[cls.name]]
        return min(tried, key=bool)

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:
        """See `GroupRecipe`; of a processor without a document nothing but what the recipe says."""
        vision, found = config.vision, _of_sound(config)
        if vision is not None and vision.images == "none":
            is_taken = any("image" in model.taken for model in config.model)
            return found if is_taken else [*found, 'vision.images is "none", and no [[model]] takes images; add one']
        name = None if vision is None else _step_name(config, vision)
        if vision is None or name is None:
            return found
        (other,) = STEPS[cls.name].keys() - {name}
        found += [
            f'vision.{setting} is for images = "{other}", and images are stored by "{name}"; leave it out, or set '
            f'vision.images = "{other}"'
            for setting in vision.settings
            if setting not in settings_of(cls.name, name)
        ]
        return [*found, *_step(name).contradictions(config)]

    @classmethod
    def of(cls, config: Config) -> Self | None:
        vision, step = config.vision, image_step_of(config)
        if vision is None or step is None:
            return None
        given: dict[str, Any] = {
            "processor": processor_digest(Path(vision.processor)),
            "folder": vision.processor,
            "max_pixels": config.source.max_pixels,
            "max_sample_bytes": config.source.max_sample_bytes,
            "more_images": config.source.more_images,
        }
        if "video" in step.given:
            given |= {"max_video_s": config.source.max_video_s, "video": _video_of(vision, step)}
        made_step = made(step, vision.settings, **{name: given[name] for name in step.given})
        return cls(step=made_step, folder=vision.processor, codec=vision.codec)

    @property
    def steps(self) -> tuple[Step, ...]:
        return (self.step,)

    @property
    def made_with(self) -> dict[str, str]:
        """transformers, where its processor makes the values."""
        return {"transformers": version("transformers")} if self.step.is_of_transformers else {}

    def check(self, text: TextStep, kept: Collection[str]) -> None:  # noqa: ARG002
        """Raises MissingExtraError where videos are to be decoded, and nothing here can."""
        if getattr(self.step, "video", None) is not None:
            require_av("vision.fps")

    def document(self) -> dict[str, Any]:
        return {"images": self.step.name, **self.step.compared()}


def _video_of(vision: VisionConfig, step: type[ImageStep]) -> VideoSettings | None:
    if vision.settings.get("fps") is None:
        return None
    folder = Path(vision.processor)
    found = video_settings(folder, image_settings(folder))
    if (found.family == "omni") is not step.is_of_transformers:
        takes = "Qwen2.5-Omni and Qwen3-Omni" if step.is_of_transformers else "Qwen2-VL, Qwen2.5-VL and Qwen3-VL"
        raise ConfigError(
            f'vision.fps is set for videos, which images = "{step.name}" has of {takes} alone, and {folder} is of '
            "another model; leave vision.fps out, or vision.images",
            code="FB107",
        )
    return found


def image_step_of(config: Config) -> type[ImageStep] | None:
    """Returns the step of a config's images; None where none is stored. Reads documents of the processor alone."""
    vision = config.vision
    return None if vision is None or vision.images == "none" else _step(_step_name(config, vision) or "patches")


def _step(name: str) -> type[ImageStep]:
    (step,) = steps_named(ImageGroup.name, name)
    return cast(type[ImageStep], step)


def _step_name(config: Config, vision: VisionConfig) -> str | None:
    """Returns what `vision.images` comes to; None where no document says it.

    "auto" takes patches where the processor is of the Qwen2-VL family and `prompt = "chat"` finds that family's tokens
    of images in the tokenizer's files, else the processor; so it does beside recordings.
    """
    text = config.text
    if vision.images != "auto":
        return vision.images
    if text is None or text.prompt != "chat" or config.audio is not None:
        return "processor"
    try:
        _, document = processor_document(Path(vision.processor))
    except ConfigError:
        return None
    return "patches" if is_native(document) and has_vision_tokens(Path(text.tokenizer)) else "processor"


def has_vision_tokens(folder: Path) -> bool:
    """Whether a tokenizer's files name the tokens of images; True where there is no file, so that it is missed."""
    wanted = {token.encode() for token in VISION_TOKENS}
    paths = [path for name in _VOCABULARIES if (path := folder / f"{name}.json").is_file()]
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError:
            return True
        wanted = {token for token in wanted if token not in data}
        if not wanted:
            return True
    return not paths


def _of_sound(config: Config) -> list[str]:
    """Returns which settings of a config with images are of sound alone."""
    if not config.vision:
        return []
    plain = SourceConfig(kind="", manifest="-")
    names = [] if config.audio else [n for n in _OF_SOUND if getattr(config.source, n) != getattr(plain, n)]
    found = [f"source.{name} is only for audio, not for a config with [vision]" for name in names]
    if config.loader.crop_s is not None:
        found.append("loader.crop_s is only for audio, not for a config with [vision]")
    return found
