"""What data is of: recordings, texts alone or images; and what of a config and of training follows from that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from forebay.errors import ConfigError
from forebay.init import plan
from forebay.init.found import Found
from forebay.init.hearing import PROCESSORS
from forebay.init.learning import class_problem, is_of_task, new_head
from forebay.init.model import Model
from forebay.init.seeing import vision
from forebay.init.tasks import OF_SOUND
from forebay.init.toml import Section
from forebay.steps.text.normalize import whisper_code
from forebay.visible import an, from_here

if TYPE_CHECKING:
    from forebay.init.draft import Draft

Setting = tuple[str, Any, str]
"""Name, value and comment."""


class Recordings:
    """Sound, with or without texts: what other subjects differ from.

    mixed: settings of `[mixture]` where such data stands beside other data. is_alone: it stands beside none. may_miss:
    it may stand without its texts, which are then looked for.
    """

    name: ClassVar[str] = "speech"
    mixed: ClassVar[tuple[Setting, ...]] = ()
    is_alone: ClassVar[bool] = False
    may_miss: ClassVar[bool] = True

    def check(self, model: Model | None) -> None:
        """Raises ConfigError where the data needs a model's folder and there is none, or the model takes other data."""
        if model is not None and not model.audio and model.sees:
            raise ConfigError(
                f"--model {model.folder} is {_kind(model)} and hears no sound; name a Whisper or Qwen3-ASR folder, or "
                "any other with a feature extractor (docs/models.md)"
            )

    def limits(self, made: Draft) -> list[Setting]:
        """Returns what `[source]` says of items that are too long."""
        if not _is_heard_in_part(made):
            return []
        return [
            ("max_duration_s", plan.HEARD_S, "Whisper hears 30 s"),
            ("overlong", "drop", "longer clips are left out, counted and listed"),
        ]

    def sections(self, made: Draft) -> list[Section]:
        """Returns the sections of steps and plan."""
        found, model = made.found, made.model
        audio = Section("audio")
        for name, value in _audio(made).items():
            audio.add(name, made.relative(value) if isinstance(value, Path) else value)
        if model is not None and model.audio and not found.audio:
            audio.notes.append(f"{model.audio_why[:1].upper()}{model.audio_why[1:]}.")
        if model is None and not found.audio:
            audio.notes.append(
                "Features for Whisper; also: qwen3_asr, w2v_bert, waveform. With forebay init --model DIR they are the "
                "model's, and texts become tokens."
                if audio.lines[0][1] == "log_mel"
                else "Many recordings are longer than the 30 s that Whisper hears, so waveforms are stored as they are."
            )
        text = None if model is None or model.prompt is None else _text(made, model, model.prompt)
        if text is not None and model is not None and _is_ctc(model) and not found.has_labels:
            assert model.task is not None
            text.lines.insert(2, ("end_token", False, f"CTC: {model.task.why}"))
        return [audio, *([] if text is None else [text]), _buckets(found, "", self._room(made))]

    def _room(self, made: Draft) -> Setting:
        found = made.found
        if _is_heard_in_part(made) or found.audio:
            return ("batch_size", plan.batch_size(found), "clips a batch; Whisper pads each to 30 s")
        return ("batch_seconds", plan.batch_seconds(found), "padded seconds a batch")

    def trains(self, found: Found, model: Model) -> bool:
        """Returns whether `forebay train` can train a model on what was found, as far as config.json says it."""
        if not found.has_text:
            return False
        if model.trains:
            return model.audio.get("features") != "extractor"
        return model.task is not None and model.task.name in OF_SOUND and model.prompt is not None and bool(model.audio)

    def not_learnt(self, found: Found, model: Model) -> str:  # noqa: ARG002
        """Returns why `forebay train` does not train a model on what was found, and what to do."""
        if model.model_type and model.task is not None and model.prompt is None:
            return f"forebay train needs a tokenizer: put its tokenizer.json into {from_here(model.folder)}"
        return _unknown(model)


class Texts(Recordings):
    """Texts alone."""

    name = "text"
    mixed = (("batches", "per_source", ""), ("asr_ratio", 0.8, "four of five batches have sound"))
    may_miss = False

    def check(self, model: Model | None) -> None:
        if model is None:
            raise ConfigError(
                "texts are stored as tokens; give --model DIR: the folder of a model, or of a tokenizer alone "
                "(tokenizer.json)"
            )
        if model.text_prompt is None:
            raise ConfigError(
                f"--model {model.folder} is {_kind(model)}; texts alone need a tokenizer of a speech or text model"
            )

    def limits(self, made: Draft) -> list[Setting]:  # noqa: ARG002
        return []

    def sections(self, made: Draft) -> list[Section]:
        model = made.model
        assert model is not None
        assert model.text_prompt is not None
        text = _text(made, model, model.text_prompt)
        audio = Section("audio", [("features", "none", "")])
        room = ("batch_tokens", 4096, "padded tokens a batch")
        return [audio, *([] if text is None else [text]), _buckets(made.found, " of like length", room)]

    def trains(self, found: Found, model: Model) -> bool:  # noqa: ARG002
        return model.trains and model.audio.get("features") != "extractor"

    def not_learnt(self, found: Found, model: Model) -> str:  # noqa: ARG002
        return _unknown(model)


class Images(Recordings):
    """Images, with conversations, classes, texts or nothing beside them."""

    name = "vision"
    is_alone = True
    may_miss = False

    def check(self, model: Model | None) -> None:
        if model is None:
            raise ConfigError(
                "images are stored as a model's processor makes them; give --model DIR: the folder of a model that "
                "sees, with preprocessor_config.json, and for conversations and texts tokenizer.json and, where it "
                "talks, a chat template"
            )
        if not model.sees:
            raise ConfigError(
                f"--model {model.folder} is {_kind(model)} and sees no images: {' and '.join(PROCESSORS)} name no "
                "image processor; name the folder of a model that sees, or save its processor there with "
                "processor.save_pretrained(folder)"
            )

    def limits(self, made: Draft) -> list[Setting]:  # noqa: ARG002
        return []

    def sections(self, made: Draft) -> list[Section]:
        return vision(made)

    def trains(self, found: Found, model: Model) -> bool:
        packs = model.trains and model.images is not None and found.prompt == "chat"
        return packs or (is_of_task(found, model) and class_problem(found, model) is None)

    def not_learnt(self, found: Found, model: Model) -> str:
        if is_of_task(found, model) and (problem := class_problem(found, model)):
            return f"not trained yet: {problem}; {new_head(found, model)}"
        if model.task is not None:
            return f"not trained: the model is for another task ({model.task.why}); your own loop takes the batches"
        return _unknown(model)


_SUBJECTS: dict[str, Recordings] = {each.name: each for each in (Recordings(), Texts(), Images())}


def subject_of(found: Found) -> Recordings:
    """Returns what was found is of."""
    return _SUBJECTS[found.modality]


def _kind(model: Model) -> str:
    return model.model_type or "a tokenizer"


def _is_ctc(model: Model) -> bool:
    return model.task is not None and model.task.name == "CTC"


def _unknown(model: Model) -> str:
    if not model.model_type:
        return f"forebay train needs the model itself: its config.json in {from_here(model.folder)}"
    return (
        f"init knows no task of {an(model.model_type)} for this data; if transformers has a class of it that "
        "learns this, name the folder as train.model (docs/any-model.md)"
    )


def _audio(made: Draft) -> dict[str, Any]:
    if made.found.audio:
        return made.found.audio
    if made.model is not None and made.model.audio:
        return made.model.audio
    seconds = made.found.sounds.seconds if made.found.sounds is not None else []
    is_long = bool(seconds) and sum(each > plan.HEARD_S for each in seconds) > len(seconds) / 4
    return {"features": "waveform"} if is_long else {"features": "log_mel"}


def _is_heard_in_part(made: Draft) -> bool:
    return _audio(made).get("features") == "log_mel"


def _text(made: Draft, model: Model, prompt: str) -> Section | None:
    """Returns `[text]`. prompt: that of the model."""
    found = made.found
    if not found.has_text:
        return None
    section = Section("text")
    section.add("tokenizer", made.relative(model.folder))
    section.add("prompt", "given" if found.has_labels else prompt)
    if prompt == "whisper" and not found.has_labels:
        unknown = _untagged(model, found)
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
    return section


def _untagged(model: Model, found: Found) -> set[str]:
    """Returns the languages of the data that a Whisper's tokenizer has no tag for."""
    unknown = {language for language in found.languages if f"<|{_code(language)}|>" not in model.tags}
    return {language for language in unknown if f"<|{whisper_code(language)}|>" not in model.tags}


def _code(language: str) -> str:
    return re.split("[-_]", language.strip().lower())[0]


def _buckets(found: Found, which: str, room: Setting) -> Section:
    why = f"buckets{which}" if which else "buckets, with the edges that pad these durations least"
    section = Section("plan", [("k", plan.num_buckets(found), why), room])
    if plan.is_few(found):
        section.add("lockstep", 1, "a small set: no groups of batches of equal shape")
    return section
