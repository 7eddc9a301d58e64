"""`[text]`: from the settings of a section to the step of the group `text`, and what they cannot do together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from forebay.config.data import SOURCE_KINDS
from forebay.config.pretrained_folder import processor_digest, tokenizer_digest
from forebay.config.tree import AudioConfig, Config, TextConfig
from forebay.errors import ConfigError
from forebay.steps.audio.audio_section import audio_step_of, extractor_folder
from forebay.steps.audio.given import NoAudio
from forebay.steps.image.image_section import image_step_of
from forebay.steps.model.model_step import ModelStep
from forebay.steps.sections import GroupRecipe
from forebay.steps.step import ItemStep, Step, TextStep, no_such_column
from forebay.steps.table import STEPS, made, problems, problems_of, prompts_beside, steps_named, text_step
from forebay.steps.text.chat.written_boxes import BoxWriter
from forebay.steps.text.label import NoText
from forebay.steps.text.line import TextLine
from forebay.steps.text.normal.normal_step import Where
from forebay.steps.text.normal.normal_step import problems_of as problems_of_line
from forebay.steps.text.tokenizer_files import ALONE, TRANSFORMERS, is_plain
from forebay.store.layout import TEXT, Group


@dataclass(frozen=True, kw_only=True)
class TextGroup(GroupRecipe):
    """The text of a row, as steps. folder: of the tokenizer. needs_text: a row without a text is left out.

    is_given: whether the config has `[text]`; without it nothing is made of texts.
    """

    name: ClassVar[Group] = TEXT
    section: ClassVar[str] = "text"
    settings: ClassVar[type] = TextConfig

    step: TextStep
    folder: str = field(default="", compare=False)
    needs_text: bool = False
    is_given: bool = True

    @classmethod
    def problems(cls, values: Mapping[str, Any]) -> list[str]:
        """See `GroupRecipe`. Which of two steps of a name is meant, the whole config says: `contradictions`."""
        own, name = cls.own_names(), values.get("prompt", TextConfig().prompt)
        rest = {setting: value for setting, value in values.items() if setting not in own}
        if not isinstance(name, str):  # the config itself refuses it
            return []
        found = problems(cls.name, name, rest, section=cls.section, key="prompt", own=own)
        steps = steps_named(cls.name, name) if name in STEPS[cls.name] else ()
        is_missing = values.get("tokenizer", "") == "" and all("tokenizer" in step.given for step in steps)
        return [*(["text.tokenizer: missing"] if steps and is_missing else []), *found] or problems_of_line(rest)

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:
        items, text = item_steps_of(config), config.text
        first = next(iter(items.values()), NoAudio)
        prompts = prompts_beside(_features(items))
        if text is None:
            labels = config.source.columns.labels
            found = [] if items else [NoAudio.no_prompt(None, prompts)]
            return found or ([] if labels is None else [no_such_column("labels", labels, "text.prompt", None)])
        step = text_step(text.prompt, _features(items))
        if step is None:
            return [first.no_prompt(text.prompt, prompts)]
        own = cls.own_names()
        found = problems_of(step, text.settings, table=prompts, section=cls.section, key="prompt", own=own)
        return found or step.contradictions(config)

    @classmethod
    def of(cls, config: Config) -> Self:
        text, vision, audio = config.text, config.vision, config.audio
        if text is None:
            return cls(step=NoText(), is_given=False)
        step = text_step(text.prompt, _features(item_steps_of(config)))
        assert step is not None
        given: dict[str, Any] = {"tokenizer_folder": text.tokenizer}
        sections = {"audio": audio, "image": vision}
        given["kinds"] = tuple(group for group, section in sections.items() if section is not None)
        if "processor" in step.given and (vision or audio):
            folder = vision.processor if vision else extractor_folder(config, audio or AudioConfig())
            # An autoencoder has no processor: texts beside its images are as their tokenizer has them.
            is_bare = any(model.size is not None and model.folder == folder for model in config.model)
            digest = "" if is_bare else processor_digest(Path(folder))
            given |= {"processor": digest, "processor_folder": text.tokenizer if is_bare else folder}
        if "box_writer" in step.given and vision is not None and not vision.settings.get("crops"):
            given["box_writer"] = BoxWriter.of(Path(vision.processor), text.settings.get("boxes"))
        given["videos"] = vision is not None and vision.settings.get("fps") is not None
        given["sound"] = given["videos"] and bool(vision is not None and vision.settings.get("sound"))
        if "tokenizer" in step.given:
            given["tokenizer"] = _tokenizer(config, text, step)
        if "line" in step.given:
            given["line"] = text_line(config, text)
        made_step = made(step, text.settings, **{name: given[name] for name in step.given if name in given})
        needs_text = SOURCE_KINDS[config.source.kind].needs_text and step.is_of_texts
        return cls(step=made_step, folder=text.tokenizer, needs_text=needs_text)

    @property
    def steps(self) -> tuple[Step, ...]:
        return (self.step,)

    @property
    def libraries(self) -> tuple[str, ...]:
        alone = self.step.libraries
        return TRANSFORMERS if alone == ALONE and not is_plain(Path(self.folder)) else alone

    def document(self) -> dict[str, Any]:
        return {"prompt": self.step.name, **self.step.document()}

    def without_code(self) -> Self:
        """Returns the group without functions in the text line; see `TextLine.without_code`."""
        return replace(self, step=self.step.without_code())

    def check(self, text: TextStep, kept: Collection[str]) -> None:  # noqa: ARG002
        self.step.check()


def item_steps_of(config: Config) -> dict[Group, type[ItemStep]]:
    """Returns the steps of the groups whose items samples have, as far as documents say them."""
    found: dict[Group, type[ItemStep] | None] = {"audio": audio_step_of(config), "image": image_step_of(config)}
    if found["image"] is None:
        found |= {model.name: ModelStep for model in config.model if "image" in model.taken}
    return {group: step for group, step in found.items() if step is not None}


def _features(items: Mapping[Group, type[ItemStep]]) -> dict[Group, str]:
    return {group: step.form() for group, step in items.items()}


def text_line(config: Config, text: TextConfig) -> TextLine:
    """Returns the text line of a config: reads the files that its steps name, not the tokenizer's."""
    where = Where(
        folder=Path(config.path).parent,
        tokenizer=Path(text.tokenizer),
        allow_code=config.run.allow_code,
        phones=text.settings.get("phones"),
    )
    return TextLine.of(text.settings, where)


def _tokenizer(config: Config, text: TextConfig, step: type[TextStep]) -> str:
    """Returns the digest of the tokenizer. Raises ConfigError where its folder has none."""
    folder, vision = Path(text.tokenizer), config.vision
    try:
        return tokenizer_digest(folder)
    except ConfigError as err:
        if vision and text.tokenizer == vision.processor:
            # The processor's folder stands for a [text] that is left out.
            advice = 'where images stand without conversations, set [text] prompt = "label", "plain" or "none"'
        elif step.takes_symbols and not folder.exists():
            advice = f"without a model's tokenizer, write one of the texts' own symbols: forebay symbols {config.named}"
        else:
            raise
        raise ConfigError(f"{err}; or, {advice}", code="FB105") from err
