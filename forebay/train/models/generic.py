"""A model of no family: any class of transformers that takes the batch's names and returns a loss.

Which class of transformers a config.json means: the one that it names, else the one for what the config makes.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from forebay.config.tree import Config
from forebay.errors import CacheMismatchError, ConfigError
from forebay.steps.audio.audio_section import audio_step_of, in_conversations
from forebay.steps.batch import IGNORED
from forebay.steps.image.image_section import image_step_of
from forebay.train.collate.patches import PatchBatch, fields_of, weight_of
from forebay.train.models import ctc
from forebay.train.models.families import ModelFacts, OwnLoss
from forebay.train.models.lora import base_of
from forebay.train.models.objective import OTHER_MODEL, accepted, count_units, described, has_loss, unknown_names
from forebay.visible import an, printable

TASKS = (
    "CTC",
    "SPEECH_SEQ_2_SEQ",
    "AUDIO_CLASSIFICATION",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "IMAGE_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "CAUSAL_LM",
)
"""The tables of transformers' Auto classes whose models return a loss for what forebay makes, the nearest first."""
CLASSES = ("AUDIO_CLASSIFICATION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION")
"""The tables of models of classes."""
_OF_GROUP = {
    "audio": ("CTC", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM", "AUDIO_CLASSIFICATION"),
    "image": ("ZERO_SHOT_IMAGE_CLASSIFICATION",),
    "text": ("CAUSAL_LM",),
}
"""By the first group of a config; images beside a text are pairs, unless its prompt says more."""
_BARE = ("PRETRAINING",)
_OF_PROMPT = {
    ("image", "label"): ("IMAGE_CLASSIFICATION",),
    ("image", "chat"): ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    ("audio", "chat"): ("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT"),
    ("image", "none"): _BARE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassChoice:
    """A class by its name, and why it is the one."""

    name: str
    why: str


def tasks_of(config: Config | None) -> tuple[str, ...]:
    """Returns the tables in which a model for what a config makes is looked for; all where there is no config."""
    if config is None:
        return TASKS
    steps = {"audio": audio_step_of(config), "image": image_step_of(config)}
    group = next((name for name, step in steps.items() if step is not None), "text")
    prompt = "none" if config.text is None else config.text.prompt
    return _OF_PROMPT.get((group, prompt), _OF_GROUP[group])


def choose(config: Any, *, path: Path, tasks: Sequence[str]) -> ClassChoice:
    """Returns the class for a config.json: that of `architectures` where it returns a loss, else that of `tasks`.

    config: what transformers read of the file at `path`. Raises ConfigError, with what was looked at, without one.
    """
    model_type, named = str(config.model_type), named_class(config)
    bare = tuple(tasks) == _BARE
    if named is not None and gives_loss(named, of_images_alone=bare):
        return ClassChoice(name=named, why=f"{path.name} names it")
    for task, name in _by_task(model_type, tasks):
        if gives_loss(name, of_images_alone=bare):
            has = "names no class" if named is None else f"names {named}, which returns no loss"
            return ClassChoice(name=name, why=f"{path.name} {has}, and it is the {task} of {model_type}")
    looked = ", ".join(task.lower() for task in tasks)
    raise ConfigError(
        f"train.model: {printable(str(path))} has model_type {printable(model_type)!r} and architectures "
        f"{printable(str(config.architectures))}, and transformers has no model of it that returns a loss "
        f"({looked} were looked at); name a model for what the config makes",
        code="FB108",
    )


def named_class(config: Any) -> str | None:
    """Returns the class that a config.json names first, where transformers has it for such a config; else None."""
    import transformers

    found = config.architectures
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        return None
    known: Any = getattr(transformers, found[0], None) if found[0].isidentifier() else None
    if not isinstance(known, type) or not issubclass(known, transformers.PreTrainedModel):
        return None
    wanted = getattr(known, "config_class", None)
    return found[0] if wanted is None or isinstance(config, wanted) else None


def gives_loss(name: str, *, of_images_alone: bool = False) -> bool:
    """Returns whether a class takes what a loss is made of: `labels`, or `return_loss`.

    of_images_alone: classes count, too, whose output has a loss without either (a masked autoencoder).
    """
    import transformers

    return has_loss(getattr(transformers, name).forward, always=of_images_alone)


def _by_task(model_type: str, tasks: Sequence[str]) -> Iterator[tuple[str, str]]:
    for task in tasks:
        if (name := _table(task).get(model_type)) is not None:
            yield task.lower(), name if isinstance(name, str) else name[0]


@lru_cache(maxsize=32)
def _table(task: str) -> Mapping[str, Any]:
    from transformers.models.auto import modeling_auto

    found: Mapping[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    return found


def is_of(name: str, tasks: Sequence[str]) -> bool:
    """Returns whether a class stands in one of these tables of transformers."""
    return any(name == found or name in found for task in tasks for found in _table(task).values())


def check_model_type(model_type: object, path: Path) -> None:
    """Returns where transformers knows a model type; else raises ConfigError with the nearest that it knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if isinstance(model_type, str) and model_type in CONFIG_MAPPING_NAMES:
        return
    near = difflib.get_close_matches(str(model_type), CONFIG_MAPPING_NAMES, n=1)
    raise ConfigError(
        f"train.model: {printable(str(path))} has model_type {printable(str(model_type))!r}, which the installed "
        "transformers does not have" + (f"; the nearest is {near[0]!r}" if near else ""),
        code="FB108",
    )


_OF_PACKED_CLIPS = frozenset(
    f"{name}ForConditionalGeneration" for name in ("Qwen2Audio", "Qwen2_5OmniThinker", "Qwen3OmniMoeThinker")
)
"""The models that read packs of conversations with clips: as separate forward passes, by the positions."""
_logger = logging.getLogger(__name__)
_TOKENIZER = "its text.tokenizer is not the model's: name the model's folder there and run forebay preprocess"
_NUM_LABELS = "give its config.json an id2label with the classes of the cache (forebay inspect lists them)"


def facts(folder: Path, config: Any, *, tasks: Sequence[str] = TASKS) -> ModelFacts:
    """Returns what the model in `folder` wants of a batch; config: what transformers read of its config.json.

    tasks: of which class the model is to be where `architectures` does not say it. Raises ConfigError where there is
    no class that returns a loss.
    """
    choice = choose(config, path=folder / "config.json", tasks=tasks)
    text = config.get_text_config()
    has_classes = is_of(choice.name, CLASSES)
    return ModelFacts(
        folder=folder,
        model_type=str(config.model_type),
        model_class=choice.name,
        constants={},
        vocab_size=None if has_classes else _number(text, "vocab_size"),
        labels_are_shifted=False,
        own_loss=_own_loss(choice.name, config),
        num_labels=int(config.num_labels) if has_classes else None,
        class_names=tuple(str(config.id2label[i]) for i in sorted(config.id2label)) if has_classes else None,
        blank_id=_number(config, "pad_token_id") if is_of(choice.name, ("CTC",)) else None,
        generates=_generates(choice.name, config),
        max_positions=_positions(choice.name, config),
        why=choice.why,
    )


def tell(facts: ModelFacts) -> None:
    """Logs which class a model is of, why, and what its loss is."""
    own = facts.own_loss
    per = "sample" if own is not None and own.per == "sample" else "target token"
    _logger.info(
        "train.model: %s is a %s (%s); its own loss is learnt, by the %s",
        *(printable(str(facts.folder)), facts.model_class, printable(facts.why), per),
    )


def is_other_than(config: Any, family: ModelFacts) -> bool:
    """Returns whether a config.json names a class with a loss that is not that of its family."""
    named = named_class(config)
    return named is not None and named != family.model_class and gives_loss(named)


def num_targets(model: Any, batch: PatchBatch | Mapping[str, Any]) -> int:
    """Returns how many targets the loss that a model gives for a batch is a mean of: tokens, or samples; 0 of a filler.

    By these numbers the losses of several ranks and micro-batches are weighted.
    """
    import transformers

    bare = base_of(getattr(model, "module", model))
    names = (
        kind.__name__ for kind in type(bare).__mro__ if "forward" in vars(kind) and hasattr(transformers, kind.__name__)
    )
    name = next(names, None)
    own = OwnLoss(per="next_token") if name is None else _own_loss(name, bare.config)
    return weight_of(batch) * (1 if own.is_sum else count_units(own, fields_of(batch)))


def _own_loss(name: str, config: Any) -> OwnLoss:
    if "labels" not in accepted(name).names:
        return OwnLoss(per="sample", is_asked=True)
    if is_of(name, ("CTC",)):
        return OwnLoss(per="sample", is_sum=getattr(config, "ctc_loss_reduction", "mean") == "sum")
    if is_of(name, CLASSES) or not is_of(name, (*TASKS, "SEQ_TO_SEQ_CAUSAL_LM")):
        return OwnLoss(per="sample")
    return OwnLoss(per="token" if config.is_encoder_decoder else "next_token")


def _generates(name: str, config: Any) -> bool:
    """Returns whether a class hears, and its `generate` needs nothing but what it hears."""
    import transformers

    hears = getattr(config, "is_encoder_decoder", False) and is_of(name, ("SPEECH_SEQ_2_SEQ",))
    known: Any = getattr(transformers, name)
    return bool(hears and known.main_input_name != "input_ids" and known.can_generate())


def _positions(name: str, config: Any) -> int | None:
    """Returns the tokens that a decoder has places for; None where its config does not say it."""
    if is_of(name, ("CAUSAL_LM",)):
        return _number(config.get_text_config(), "max_position_embeddings")
    if not _generates(name, config):
        return None
    own = config.get_text_config(decoder=True)
    names = ("max_target_positions", "max_text_positions", "max_position_embeddings")
    return next((found for each in names if (found := _number(own, each)) is not None), None)


def _number(config: Any, name: str) -> int | None:
    found = getattr(config, name, None)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def check_config(facts: ModelFacts, config: Config) -> None:
    """Returns where a model of no family can be trained on a config; else raises ConfigError. Reads no data."""
    is_packed = config.plan is not None and config.plan.kind == "pack"
    if is_packed and not (facts.model_class in _OF_PACKED_CLIPS and in_conversations(config)):
        raise ConfigError(
            f'{config.path}: plan.kind is "pack", and {facts.model_class} in {facts.folder} takes no packs; set '
            'plan.kind = "bucket", or name a model whose packs forebay knows (model_type qwen3_vl)',
            code="FB109",
        )
    if config.audio is not None and config.audio.features == "waveform":
        _check_waveform(facts.folder)
    if facts.blank_id is not None:
        ctc.check_config(facts, config)


def _check_waveform(folder: Path) -> None:
    for name in ("preprocessor_config.json", "processor_config.json"):
        try:
            document = json.loads((folder / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue  # a folder need not have them
        own = document.get("feature_extractor", document) if isinstance(document, dict) else None
        if isinstance(own, dict) and own.get("do_normalize") is True and "feature_extractor_type" in own:
            raise ConfigError(
                f'audio.features is "waveform", but the feature extractor in {folder} normalises each clip '
                f'(do_normalize of {name}); set audio.features = "extractor" and audio.extractor = "{folder}", then '
                "run forebay preprocess",
                code="FB109",
            )


def check_constants(facts: ModelFacts, constants: Mapping[str, Any]) -> None:
    """Returns where a source's constants do not speak against the model; else raises CacheMismatchError."""
    if "patch_table" in constants:
        raise CacheMismatchError(
            f"features: the cache holds patches for packs of a Qwen-VL, and the model in {facts.folder} is a "
            f'{facts.model_class}; set vision.images = "processor" and run forebay preprocess',
            code="FB404",
        )
    if facts.blank_id is not None:
        ctc.check_constants(facts, constants)
    if facts.num_labels is not None and constants.get("num_classes") is not None:
        _check_classes(facts, constants["num_classes"], constants.get("classes"))


def _check_classes(facts: ModelFacts, count: int, names: Sequence[str] | None) -> None:
    if count != facts.num_labels:
        raise CacheMismatchError(
            f"the cache has {count} classes, and the model in {facts.folder} has {facts.num_labels} (`id2label` of its "
            "config.json); give it one of as many, or the cache text.classes with the model's names",
            code="FB404",
        )
    # Names that nobody gave are LABEL_0, LABEL_1, ...
    own = facts.class_names
    if names is None or own is None or all(name == f"LABEL_{i}" for i, name in enumerate(own)):
        return
    for number, (wanted, stored) in enumerate(zip(own, names, strict=True)):
        if wanted != stored:
            raise CacheMismatchError(
                f"class {number} is {printable(stored)!r} in the cache and {printable(wanted)!r} in the model in "
                f"{facts.folder} (`id2label` of its config.json); make them one: set text.classes to the model's names "
                "in their order and run forebay preprocess, or change id2label",
                code="FB404",
            )


def check_batch(facts: ModelFacts, batch: Mapping[str, Any]) -> None:
    """Returns where the model can take a batch (on the host); else raises CacheMismatchError with both values."""
    takes = accepted(facts.model_class)
    if not takes.takes_others and (hidden := takes.hidden(batch)):
        raise unknown_names(hidden, takes=takes, who=facts.who, advice=OTHER_MODEL)
    for name in _wanted(facts):
        if name not in batch:
            raise CacheMismatchError(
                f"batch has no field {name} (it has {', '.join(sorted(batch))}), which {an(facts.model_class)} needs; "
                "change the config so that it makes it, then run forebay preprocess, or name another train.model",
                code="FB404",
            )
    _check_rank(facts, batch)
    for name in ("input_ids", "decoder_input_ids"):
        if name in batch:
            check_ids(facts, name, batch[name], limit=facts.vocab_size)
    if "labels" in batch and not batch["labels"].is_floating_point():
        check_ids(facts, "labels", batch["labels"], limit=facts.num_labels or facts.vocab_size)
    if facts.blank_id is not None:
        ctc.check_batch(facts, batch)


def _wanted(facts: ModelFacts) -> list[str]:
    import transformers

    takes = accepted(facts.model_class)
    of_pairs = facts.own_loss is not None and facts.own_loss.is_asked
    own = ("input_ids", "pixel_values") if of_pairs else ("labels",)
    main = getattr(transformers, facts.model_class).main_input_name
    return [name for name in dict.fromkeys((main, *sorted(takes.required), *own)) if name in takes.names]


def _check_rank(facts: ModelFacts, batch: Mapping[str, Any]) -> None:
    labels = batch.get("labels")
    if labels is None:
        return
    if facts.num_labels is not None and facts.own_loss is not None and labels.ndim != 1 and labels.dtype == torch.int64:
        raise CacheMismatchError(
            f"labels are {list(labels.shape)}, token ids, and {facts.model_class} in {facts.folder} wants a class a "
            'sample, [batch]; set text.prompt = "label" and run forebay preprocess, or name another train.model',
            code="FB404",
        )
    if facts.num_labels is None and facts.vocab_size is not None and labels.ndim != 2:
        raise CacheMismatchError(
            f"labels are {list(labels.shape)}, and {facts.model_class} in {facts.folder} wants token ids, "
            f"[batch, tokens] ({described(batch)}); give the config a text.prompt of texts, or name another "
            "train.model",
            code="FB404",
        )


def check_ids(facts: ModelFacts, name: str, ids: torch.Tensor, *, limit: int | None) -> None:
    """Returns where ids lie below a limit, and labels among them may be ignored; else raises CacheMismatchError."""
    if not ids.numel() or limit is None:
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if high < limit and low >= (IGNORED if name == "labels" else 0):
        return
    is_class = name == "labels" and facts.num_labels is not None
    raise CacheMismatchError(
        f"{name} holds {'classes' if is_class else 'token ids'} {low} to {high}, the model in {facts.folder} has "
        f"{'classes' if is_class else 'ids'} 0 to {limit - 1}; {_NUM_LABELS if is_class else _TOKENIZER}",
        code="FB404",
    )
