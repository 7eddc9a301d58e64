"""The models of the reference loop: from a local folder, checked against what the batches hold, with a summed loss."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional

from forebay.config.digest import hub_advice
from forebay.errors import CacheMismatchError, ConfigError
from forebay.pretrained import from_folder
from forebay.steps.table import audio_step, made

if TYPE_CHECKING:
    from forebay.config import Config

_logger = logging.getLogger(__name__)

IGNORED_LABEL = -100
"""Label of a position that is no target, as in torch and transformers."""

_CLASSES = {
    "whisper": "WhisperForConditionalGeneration",
    "qwen3_asr": "Qwen3ASRForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
_FEATURES = {"whisper": "log_mel", "qwen3_asr": "qwen3_asr", "qwen3_vl": "patches"}
_PROMPTS = {"whisper": "whisper", "qwen3_asr": "qwen3_asr", "qwen3_vl": "chat"}
_ID_FIELDS = {"whisper": "decoder_input_ids", "qwen3_asr": "input_ids", "qwen3_vl": "input_ids"}
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_GENERATION = "generation_config.json"
_PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_MAX_LISTED = 20

Init = Literal["pretrained", "random"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What a model folder's config.json says about the batches that the model takes."""

    folder: Path
    model_type: Literal["whisper", "qwen3_asr", "qwen3_vl"]
    n_mels: int | None
    """Of a speech model."""
    vocab_size: int
    max_label_tokens: int | None
    """Positions of Whisper's decoder; None where the model sets no such limit."""
    audio_token_id: int | None
    """Placeholder of one audio position (Qwen3-ASR)."""
    labels_are_shifted: bool
    """True: `labels[:, t]` is the target of position t (Whisper). False: of position t - 1 (causal, Qwen3-ASR, Qwen3-VL)."""
    vision: VisionFacts | None = None
    """Of a vision-language model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionFacts:
    """What a vision cache was made for, under the names of its constants."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    image_token_id: int


def model_facts(folder: Path) -> ModelFacts:
    """Returns what the config.json in `folder` says; nothing is fetched, no code of the folder is run.

    Raises ConfigError where there is no usable config.json or its `model_type` is none of whisper, qwen3_asr and qwen3_vl.
    """
    config = _transformers_config(folder)
    if config.model_type == "whisper":
        return ModelFacts(
            folder=folder,
            model_type="whisper",
            n_mels=config.num_mel_bins,
            vocab_size=config.vocab_size,
            max_label_tokens=config.max_target_positions,
            audio_token_id=None,
            labels_are_shifted=True,
        )
    if config.model_type == "qwen3_vl":
        return ModelFacts(
            folder=folder,
            model_type="qwen3_vl",
            n_mels=None,
            vocab_size=config.text_config.vocab_size,
            max_label_tokens=None,
            audio_token_id=None,
            labels_are_shifted=False,
            vision=VisionFacts(
                patch_size=config.vision_config.patch_size,
                merge_size=config.vision_config.spatial_merge_size,
                temporal_patch_size=config.vision_config.temporal_patch_size,
                image_token_id=config.image_token_id,
            ),
        )
    return ModelFacts(
        folder=folder,
        model_type="qwen3_asr",
        n_mels=config.audio_config.num_mel_bins,
        vocab_size=config.text_config.vocab_size,
        max_label_tokens=None,
        audio_token_id=config.audio_token_id,
        labels_are_shifted=False,
    )


def _transformers_config(folder: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = folder / "config.json"
    try:
        document = json.loads(path.read_bytes())
        model_type = document["model_type"]
        kernels = list(_kernels(document))
    except OSError as err:
        raise ConfigError(
            f"train.model: cannot read {path} ({err.strerror}); name a folder with a transformers config.json"
            f"{hub_advice(folder, 'model')}"
        ) from err
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise ConfigError(f"train.model: {path} is not a transformers config.json: {err!r}") from err
    if kernels:
        raise ConfigError(
            f"train.model: {path} asks for {kernels[0]!r}, code that transformers would fetch and run; remove that entry"
        )
    if model_type not in _CLASSES:
        raise ConfigError(f"train.model: {path} has model_type {model_type!r}, wanted one of {', '.join(_CLASSES)}")
    try:
        return from_folder(AutoConfig, folder)
    except (OSError, ValueError, TypeError, StrictDataclassError) as err:
        raise ConfigError(f"train.model: transformers refuses {path}: {err}") from err


def _kernels(document: Any) -> Iterator[str]:
    """Yields the implementations of attention and the like that a config.json names by a repository, at any depth."""
    values = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in values:
        if "_implementation" in str(key) and "/" in json.dumps(value):
            yield f"{key} = {json.dumps(value)}"
        else:
            yield from _kernels(value)


def check_config(facts: ModelFacts, config: Config) -> None:
    """Returns when the model takes what the config makes, else raises ConfigError with both values; reads no data."""
    if (facts.vision is None) != (config.vision is None):
        takes, has = ("audio", "a") if facts.vision is None else ("packs of images and text", "no")
        raise ConfigError(
            f"train.model: {facts.folder} is a {facts.model_type} model and takes {takes}, but {config.path} has {has} "
            "[vision] section; name another train.model or change the config"
        )
    if facts.vision is not None:
        return
    if config.audio.features == "none" and not facts.labels_are_shifted:
        return  # a causal model trains on text alone, too
    wanted = _FEATURES[facts.model_type]
    if config.audio.features != wanted:
        raise ConfigError(
            f'audio.features is "{config.audio.features}", but {facts.folder} is a {facts.model_type} model and takes '
            f'"{wanted}"; set audio.features = "{wanted}" or another train.model'
        )
    n_mels = made(audio_step(wanted), config.audio.settings).fields()[0].shape[0]
    if n_mels != facts.n_mels:
        raise ConfigError(
            f"audio.n_mels is {n_mels}, but the model in {facts.folder} takes {facts.n_mels} mel bins; "
            f"set audio.n_mels = {facts.n_mels} and run: forebay preprocess {config.path}"
        )
    if config.text is None or config.text.prompt != facts.model_type:
        prompt = None if config.text is None else config.text.prompt
        raise ConfigError(
            f'text.prompt is {prompt!r}, but {facts.folder} is a {facts.model_type} model; set text.prompt = "{facts.model_type}"'
        )


def check_constants(facts: ModelFacts, constants: Mapping[str, Any]) -> None:
    """Returns when a source's constants are the model's, else raises CacheMismatchError with both values.

    Text without audio fits a causal model and no other.
    """
    if constants.get("features") == "none":
        if facts.labels_are_shifted:
            raise CacheMismatchError(
                f"features: the {facts.model_type} model in {facts.folder} takes no text without audio, and the cache has "
                f'"none"; leave that cache out of train.mixture, or name a qwen3_asr model'
            )
        return
    wanted: dict[str, Any] = {
        "features": _FEATURES[facts.model_type],
        "prompt": _PROMPTS[facts.model_type],
    }
    if facts.n_mels is not None:
        wanted["n_mels"] = facts.n_mels
    if facts.audio_token_id is not None:
        wanted["audio_token_id"] = facts.audio_token_id
    if facts.vision is not None:
        wanted |= asdict(facts.vision)
    for name, value in wanted.items():
        stored = constants.get(name)
        if stored is not None and stored != value:
            raise CacheMismatchError(
                f"{name}: the model in {facts.folder} wants {value!r}, the cache has {stored!r}; "
                "name another train.model, or change the config and run forebay preprocess"
            )


def check_batch(facts: ModelFacts, batch: Mapping[str, torch.Tensor]) -> None:
    """Returns when the model can take this batch (on the host), else raises CacheMismatchError with both values.

    An id beyond the embedding is an index error without a name on the CPU and a device-side assertion on CUDA, and a
    rare token can come late, so every batch is looked at: two reductions over a few thousand integers.
    """
    ids_name = _ID_FIELDS[facts.model_type]
    values = _value_fields(facts, batch)
    missing = [name for name in (*values, ids_name, "labels") if name not in batch]
    if missing:
        remedy = (
            f'set audio.features = "{_FEATURES[facts.model_type]}" and text.prompt = "{_PROMPTS[facts.model_type]}"'
        )
        if facts.vision is not None:
            remedy = 'give the config a [vision] section and plan.kind = "pack"'
        raise CacheMismatchError(
            f"batch has no field {missing[0]} (it has {', '.join(sorted(batch))}), which a {facts.model_type} model needs; "
            f"{remedy}, then run forebay preprocess"
        )
    if "input_features" in batch and (n_mels := batch["input_features"].shape[1]) != facts.n_mels:
        raise CacheMismatchError(
            f"model in {facts.folder} wants {facts.n_mels} mel bins, the cache has {n_mels}; "
            f"set audio.n_mels = {facts.n_mels} and run forebay preprocess, or name another train.model"
        )
    if not values and facts.audio_token_id is not None and facts.audio_token_id in batch[ids_name]:
        raise CacheMismatchError(
            f"batch has audio tokens (id {facts.audio_token_id}) in {ids_name} and no field input_features; "
            f'set audio.features = "{_FEATURES[facts.model_type]}", then run forebay preprocess'
        )
    for name in (ids_name, "labels"):
        _check_ids(facts, name, batch[name])


def _value_fields(facts: ModelFacts, batch: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    if facts.vision is None:
        # A causal model takes text alone, which has nothing of audio: neither features nor their mask.
        is_text = not facts.labels_are_shifted and not {"input_features", "input_features_mask"} & batch.keys()
        return () if is_text else ("input_features",)
    # Without the positions the samples of a pack would see each other.
    return ("pixel_values" if "pixel_values" in batch else "patches", "image_grid_thw", "position_ids")


def _check_ids(facts: ModelFacts, name: str, ids: torch.Tensor) -> None:
    if not ids.numel():
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if high >= facts.vocab_size or low < (IGNORED_LABEL if name == "labels" else 0):
        raise CacheMismatchError(
            f"{name} holds token ids {low} to {high}, the model in {facts.folder} has ids 0 to {facts.vocab_size - 1}; "
            "its text.tokenizer is not the model's: name the model's folder there and run forebay preprocess"
        )
    if facts.max_label_tokens is not None and ids.shape[1] > facts.max_label_tokens:
        raise CacheMismatchError(
            f"{name} has {ids.shape[1]} tokens, the model in {facts.folder} takes {facts.max_label_tokens}; "
            f"set text.max_label_tokens = {facts.max_label_tokens} and run forebay preprocess"
        )


def check_weights(folder: Path, *, init: Init) -> None:
    """Raises ConfigError, which lists what the folder holds, where `init` wants weights and none are there.

    Weights that are there and not wanted are logged: somebody may have meant them.
    """
    found = [name for name in (*_WEIGHTS, *_PICKLED_WEIGHTS) if (folder / name).is_file()]
    if init == "random":
        if found:
            _logger.warning('train.init = "random": the weights in %s are not used (%s)', folder, ", ".join(found))
        return
    if not found:
        raise ConfigError(
            f"train.model: {folder} has no weights, neither {' nor '.join(_WEIGHTS)}; it holds {_listed(folder)}; name a folder "
            'that save_pretrained has written, or set train.init = "random" to begin with random ones'
        )
    if not set(found) & set(_WEIGHTS):
        raise ConfigError(f"train.model: {folder} has pickled weights only; save them as model.safetensors first")


def _listed(folder: Path) -> str:
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    shown = ", ".join(map(repr, names[:_MAX_LISTED]))
    return shown + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")


def load_model(folder: Path, *, seed: int, init: Init = "pretrained") -> Any:
    """Returns the float32 model of `folder` on the CPU, in training mode.

    init: `pretrained` loads the folder's safetensors (none, a missing or a misfitting weight raises ConfigError); `random`
    makes weights from `seed` alone: equal in every run and on every rank. The caller's random state does not move.
    """
    import transformers

    config = _transformers_config(folder)
    check_weights(folder, init=init)
    model_class = getattr(transformers, _CLASSES[config.model_type])
    if init == "pretrained":
        model = _pretrained(model_class, folder)
        _freeze_as_made(model, model_class, config)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            # float(): the parts of a composite model are made in the dtype that its config.json names.
            model = model_class(config).float()
        if (folder / _GENERATION).exists():
            model.generation_config = _generation_config(folder / _GENERATION)
    return model.train()


def _generation_config(path: Path) -> Any:
    from transformers import GenerationConfig

    try:  # `from_folder` would write trust_remote_code into it, and with it into every checkpoint
        return GenerationConfig.from_dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as err:
        raise ConfigError(f"train.model: {path} is not a transformers generation_config.json: {err}") from err


def _pretrained(model_class: Any, folder: Path) -> Any:
    from safetensors import SafetensorError

    try:
        model, loading = from_folder(
            model_class,
            folder,
            # float32 also from half-precision files: AdamW on bfloat16 weights loses small updates.
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as err:
        raise ConfigError(f"train.model: cannot load the weights in {folder}: {err}") from err
    if lost := sorted(loading["missing_keys"]):
        raise ConfigError(
            f"train.model: the weights in {folder} lack {lost[0]} (and {len(lost) - 1} more) of its config.json; "
            'mend the folder, or set train.init = "random" to begin with random ones'
        )
    return model


def _freeze_as_made(model: Any, model_class: Any, config: Any) -> None:
    # transformers' from_pretrained replaces every parameter by a trainable one, so Whisper's fixed sinusoidal positions
    # would drift in a model that was loaded and stand still in one that was made from its config.json.
    with torch.device("meta"):
        made = dict(model_class(config).named_parameters())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(made[name].requires_grad)


def count_targets(labels: torch.Tensor, *, labels_are_shifted: bool) -> int:
    """Returns how many positions of `labels` [batch, tokens] count in the loss."""
    targets = labels if labels_are_shifted else labels[:, 1:]
    return int((targets != IGNORED_LABEL).sum())


def summed_loss(logits: torch.Tensor, labels: torch.Tensor, *, labels_are_shifted: bool) -> torch.Tensor:
    """Returns the cross-entropy summed over all targets, float32 scalar, in nats; 0 where there are none.

    logits: [batch, tokens, vocab]; labels: int64 [batch, tokens]. The sum over `count_targets` is what
    `model(**batch).loss` gives; the sum itself can be weighted by the targets of all micro-batches and ranks.
    """
    if not labels_are_shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
