"""A model's folder: what its config.json says, the model itself, with stored weights or random ones, and further files.

These turn audio or images into a model's inputs, and tokens into text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from forebay.config.pretrained_folder import hub_advice, is_whole
from forebay.config.tree import Config
from forebay.errors import CacheMismatchError, ConfigError
from forebay.pretrained import from_folder, kernels_in
from forebay.steps.audio.audio_section import audio_step_of, features_of
from forebay.steps.image.image_section import image_step_of
from forebay.steps.table import steps_named
from forebay.store.image.codec import PATCHES
from forebay.terminal import first_of
from forebay.train.collate.device_features import config_seen
from forebay.train.models import generic
from forebay.train.models.families import FAMILIES, ModelFacts, family_of
from forebay.train.models.generic import check_ids, check_model_type, tasks_of
from forebay.train.models.lora import ADAPTER_CONFIG
from forebay.train.models.objective import accepted
from forebay.visible import an

_logger = logging.getLogger(__name__)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_GENERATION = "generation_config.json"
_PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_MAX_LISTED = 20
Init = Literal["pretrained", "random"]


def model_facts(folder: Path, config: Config | None = None) -> ModelFacts:
    """Returns what the config.json in `folder` says; nothing is fetched, no code of the folder is run.

    config: of the run, which says what kind of model is meant where config.json leaves that open. Raises ConfigError
    where there is no usable config.json, or transformers has no model of it that returns a loss.
    """
    found = _transformers_config(folder)
    family = family_of(found.model_type)
    facts = None if family is None else family.facts(folder, found)
    if facts is not None and not generic.is_other_than(found, facts) and not _makes_no_packs(facts, config):
        return facts
    return generic.facts(folder, found, tasks=tasks_of(config))


def _makes_no_packs(facts: ModelFacts, config: Config | None) -> bool:
    """Returns whether a config makes images as a processor gives them, for a model that also takes packs."""
    image = None if config is None else image_step_of(config)
    return facts.takes_packs and image is not None and image.is_of_transformers


def _transformers_config(folder: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = folder / "config.json"
    if folder.is_dir() and not is_whole(folder):
        raise _refused(f"train.model: {folder} lacks files{hub_advice(folder, 'model')}")
    try:
        document = json.loads(path.read_bytes())
        model_type = document["model_type"]
        kernels = list(kernels_in(document))
    except OSError as err:
        raise _refused(
            f"train.model: cannot read {path} ({err.strerror}); name a folder with a transformers config.json"
            f"{hub_advice(folder, 'model')}{_adapter_advice(folder)}"
        ) from err
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise _refused(f"train.model: {path} is not a transformers config.json: {err!r}") from err
    if kernels:
        raise _refused(
            f"train.model: {path} asks for {kernels[0]!r}, code that transformers would fetch and run; "
            "remove that entry"
        )
    check_model_type(model_type, path)
    if "auto_map" in document and model_type not in FAMILIES:
        raise _refused(
            f"train.model: {path} has auto_map, which names code of its own, and forebay runs none; remove auto_map if "
            "transformers has the model itself"
        )
    try:
        return from_folder(AutoConfig, folder)
    except (OSError, ValueError, TypeError, StrictDataclassError) as err:
        raise _refused(f"train.model: transformers refuses {path}: {err}") from err


def _adapter_advice(folder: Path) -> str:
    """Returns what to do with a folder of adapters alone, such as a checkpoint of LoRA; nothing for another folder."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return ""
    merge = f"peft.AutoPeftModel.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained('merged')"
    return f'; it holds adapters without the weights under them: merge both with python -c "import peft; {merge}"'


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
        raise _refused(
            f"train.model: {folder} has no weights, neither {' nor '.join(_WEIGHTS)}; it holds {_listed(folder)}; "
            'name a folder that save_pretrained has written, or set train.init = "random" to begin with random ones'
        )
    if not set(found) & set(_WEIGHTS):
        raise _refused(f"train.model: {folder} has pickled weights only; save them as model.safetensors first")


def _listed(folder: Path) -> str:
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    return first_of(list(map(repr, names)), _MAX_LISTED)


def load_model(
    folder: Path,
    *,
    seed: int,
    init: Init = "pretrained",
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    facts: ModelFacts | None = None,
) -> Any:
    """Returns the model of `folder` on the CPU, in training mode.

    init: `pretrained` loads the folder's safetensors (none, a missing or a misfitting weight raises ConfigError);
    `random` makes weights from `seed` alone: equal in every run and on every rank. The caller's random state does not
    move. dtype: of loaded weights; `auto` is that of the files. Random ones are float32. facts: which class it is to
    be, where somebody knows; left out, what config.json says alone.
    """
    import transformers

    config = _transformers_config(folder)
    check_weights(folder, init=init)
    model_class = getattr(transformers, (facts or model_facts(folder)).model_class)
    if init == "pretrained":
        model = _pretrained(model_class, folder, dtype=dtype)
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


def _pretrained(model_class: Any, folder: Path, *, dtype: torch.dtype | Literal["auto"]) -> Any:
    from safetensors import SafetensorError

    if (folder / ADAPTER_CONFIG).exists():
        raise _refused(
            f"train.model: {folder / ADAPTER_CONFIG} lies beside whole weights, and transformers would load the model "
            "that it names in their place; take it out of a copy of the folder, or merge both"
        )
    try:
        model, loading = from_folder(
            model_class,
            folder,
            dtype=dtype,  # by default float32, from half-precision files too: AdamW on bfloat16 loses small updates
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as err:
        raise _refused(f"train.model: cannot load the weights in {folder}: {err}") from err
    if lost := sorted(loading["missing_keys"]):
        head = f"transformers.{model_class.__name__}.from_pretrained({str(folder)!r}).save_pretrained('with-head')"
        raise _refused(
            f"train.model: the weights in {folder} lack {lost[0]} (and {len(lost) - 1} more) of its config.json; "
            'mend the folder, or set train.init = "random" to begin with random ones; a new head alone is made '
            f'random by: python -c "import transformers; {head}"'
        )
    return model


def _freeze_as_made(model: Any, model_class: Any, config: Any) -> None:
    # transformers' from_pretrained replaces every parameter by a trainable one, so Whisper's fixed sinusoidal positions
    # would drift in a model that was loaded and stand still in one that was made from its config.json.
    with torch.device("meta"):
        made = dict(model_class(config).named_parameters())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(made[name].requires_grad)


def check_config(facts: ModelFacts, config: Config) -> None:
    """Returns when the model takes what the config makes, else raises ConfigError with both values; reads no data."""
    config = config_seen(config)
    if facts.own_loss is not None:
        generic.check_config(facts, config)
        return
    if facts.takes_packs != (image_step_of(config) is not None):
        takes, has = ("packs of images and text", "no") if facts.takes_packs else ("audio", "a")
        raise ConfigError(
            f"train.model: {facts.folder} is {an(facts.model_type)} model and takes {takes}, but {config.path} "
            f"has {has} [vision] section; name another train.model or change the config",
            code="FB109",
        )
    if facts.takes_packs:
        return
    if config.plan is not None and config.plan.kind == "pack":
        raise ConfigError(
            f'{config.path}: plan.kind is "pack", and {an(facts.model_type)} model takes no packs; set plan.kind = '
            '"bucket"',
            code="FB109",
        )
    audio, prompt = config.audio, None if config.text is None else config.text.prompt
    if facts.text_prompt is not None and audio_step_of(config) is None:
        _check_prompt(facts, prompt, facts.text_prompt)
        return
    assert audio is not None
    wanted, step = facts.constants["features"], features_of(config, audio)
    if step.form() != wanted:
        raise ConfigError(
            f'audio.features is "{audio.features}", but {facts.folder} is {an(facts.model_type)} model and '
            f'takes "{wanted}"; set audio.features = "{wanted}" or another train.model',
            code="FB109",
        )
    n_mels = facts.constants.get("n_mels")
    made_of = step.fields()[0]
    if n_mels is not None and (bins := made_of.shape[0]) != n_mels:
        raise ConfigError(
            f"audio.n_mels is {bins}, but the model in {facts.folder} takes {n_mels} mel bins; "
            f"set audio.n_mels = {n_mels} and run: forebay preprocess {config.named}",
            code="FB109",
        )
    _check_prompt(facts, prompt, facts.constants["prompt"])


def _check_prompt(facts: ModelFacts, prompt: str | None, wanted: str) -> None:
    if prompt is None or wanted not in {step.form() for step in steps_named("text", prompt)}:
        raise ConfigError(
            f"text.prompt is {prompt!r}, but {facts.folder} is {an(facts.model_type)} model; "
            f'set text.prompt = "{wanted}"',
            code="FB109",
        )


def check_constants(facts: ModelFacts, constants: Mapping[str, Any]) -> None:
    """Returns when a source's constants are the model's, else raises CacheMismatchError with both values."""
    if facts.own_loss is not None:
        generic.check_constants(facts, constants)
        return
    if constants.get("features") == "none":
        _check_text_alone(facts, constants.get("prompt"))
        return
    for name, wanted in facts.constants.items():
        stored = constants.get(name)
        if stored is not None and stored != wanted:
            raise CacheMismatchError(
                f"{name}: the model in {facts.folder} wants {wanted!r}, the cache has {stored!r}; "
                "name another train.model, or change the config and run forebay preprocess",
                code="FB404",
            )


def _check_text_alone(facts: ModelFacts, prompt: str | None) -> None:
    if facts.text_prompt is None:
        raise CacheMismatchError(
            f"features: the {facts.model_type} model in {facts.folder} takes no text without audio, and the cache "
            'has "none"; leave that cache out of mixture.source, or name a model that is trained on text alone, too',
            code="FB404",
        )
    if prompt not in (None, facts.text_prompt):
        raise CacheMismatchError(
            f"prompt: the model in {facts.folder} wants {facts.text_prompt!r} for text without audio, the cache has "
            f'{prompt!r}; set text.prompt = "{facts.text_prompt}" in its config and run forebay preprocess',
            code="FB404",
        )


def check_batch(facts: ModelFacts, batch: Mapping[str, torch.Tensor]) -> None:
    """Returns when the model can take this batch (on the host), else raises CacheMismatchError with both values.

    A token id beyond the embedding is an index error without a name on the CPU and a device-side assertion on CUDA. A
    rare token can come late, so every batch is looked at: two reductions over a few thousand integers.
    """
    if facts.own_loss is not None:
        generic.check_batch(facts, batch)
        return
    _check_fields(facts, batch)
    n_mels = facts.constants.get("n_mels")
    is_mel = n_mels is not None and "input_features" in batch
    if is_mel and (has := batch["input_features"].shape[1]) != n_mels:
        raise CacheMismatchError(
            f"model in {facts.folder} wants {n_mels} mel bins, the cache has {has}; "
            f"set audio.n_mels = {n_mels} and run forebay preprocess, or name another train.model",
            code="FB404",
        )
    audio_token_id = facts.constants.get("audio_token_id")
    if audio_token_id is not None and "input_features" not in batch and audio_token_id in batch[facts.ids_field]:
        raise CacheMismatchError(
            f"batch has audio tokens (id {audio_token_id}) in {facts.ids_field} and no field input_features; "
            f'set audio.features = "{facts.constants["features"]}", then run forebay preprocess',
            code="FB404",
        )
    for name in (facts.ids_field, "labels"):
        check_ids(facts, name, batch[name], limit=facts.vocab_size)
        _check_width(facts, name, batch[name])


def _check_fields(facts: ModelFacts, batch: Mapping[str, torch.Tensor]) -> None:
    # Packs have their images in one of two forms: uint8 patches, and what the model takes.
    names = {*batch, PATCHES} if "pixel_values" in batch else set(batch)
    of_media = {field for name in facts.value_fields for field in (name, f"{name}_mask")}
    is_text = facts.text_prompt is not None and not of_media & names
    for name in (*(() if is_text else facts.value_fields), facts.ids_field, "labels"):
        if name not in names:
            wanted = (
                'give the config a [vision] section and plan.kind = "pack"'
                if facts.takes_packs
                else 'set audio.features = "{features}" and text.prompt = "{prompt}"'.format_map(facts.constants)
            )
            raise CacheMismatchError(
                f"batch has no field {name} (it has {', '.join(sorted(batch))}), which {an(facts.model_type)} model "
                f"needs; {wanted}, then run forebay preprocess",
                code="FB404",
            )


def _check_width(facts: ModelFacts, name: str, ids: torch.Tensor) -> None:
    if facts.max_label_tokens is not None and ids.numel() and ids.shape[1] > facts.max_label_tokens:
        raise CacheMismatchError(
            f"{name} has {ids.shape[1]} tokens, the model in {facts.folder} takes {facts.max_label_tokens}; "
            f"set text.max_label_tokens = {facts.max_label_tokens} and run forebay preprocess",
            code="FB404",
        )


_SUFFIXES = {".json", ".txt", ".jinja", ".model"}
# What says something about other weights, or is written with the model itself.
_NOT_COPIED = {"config.json", "generation_config.json", "adapter_config.json", "state.json", "trainer_state.json"}
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
_TOKENIZER = {*_VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"}
_TOKENIZER |= {"normalizer.json"}
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def processor_files(config: Config, facts: ModelFacts) -> dict[str, Path]:
    """Returns by name the files of processor, tokenizer and prompt that go into every checkpoint of a run.

    They come from `train.model`'s folder. What that folder lacks comes from `text.tokenizer` and `vision.processor`.
    """
    found = _files(facts.folder)
    if config.text is not None and config.text.tokenizer:
        tokenizer = _files(Path(config.text.tokenizer))
        if not _has_any(found, _VOCABULARIES):
            found |= {name: path for name, path in tokenizer.items() if name in _TOKENIZER}
        if not _has_template(found):
            found |= {name: path for name, path in tokenizer.items() if name in _TEMPLATES}
    if config.vision and not _has_any(found, _PREPROCESSORS):
        processor = _files(Path(config.vision.processor))
        found |= {name: path for name, path in processor.items() if "processor" in name}
    return found


def warn_of_missing(files: Mapping[str, Path], facts: ModelFacts) -> None:
    """Logs one warning that names what checkpoints with these files lack for inference, none if they lack nothing."""
    missing = []
    if facts.vocab_size is not None and not _has_any(files, _VOCABULARIES):
        missing.append("tokenizer (tokenizer.json)")
    if _takes_media(facts) and not _has_any(files, _PREPROCESSORS):
        missing.append("processor (preprocessor_config.json)")
    if facts.constants.get("prompt") in ("qwen3_asr", "chat") and not _has_template(files):
        missing.append("prompt (chat_template.jinja)")
    if missing:
        _logger.warning(
            "checkpoints will lack what inference needs: %s; put the files into %s", *(", ".join(missing), facts.folder)
        )


def _takes_media(facts: ModelFacts) -> bool:
    if facts.own_loss is None:
        return bool(facts.value_fields)
    return not accepted(facts.model_class).names.isdisjoint({"pixel_values", "input_values", "input_features"})


def processor_class(files: Mapping[str, Path], model_type: str) -> str | None:
    """Returns the class that AutoProcessor cannot find in these files without a config.json; None where it can."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    if any("processor_class" in _document(path) for name, path in files.items() if name.endswith("_config.json")):
        return None
    name: str | None = PROCESSOR_MAPPING_NAMES.get(model_type)
    return name if "processor_config.json" not in files else None


def _files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        return {}
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix in _SUFFIXES
        and path.name not in _NOT_COPIED
        and ".safetensors" not in path.name
        and ".bin" not in path.name
    }


def _has_any(files: Mapping[str, Path], names: tuple[str, ...]) -> bool:
    return any(name in files for name in names)


def _has_template(files: Mapping[str, Path]) -> bool:
    if _has_any(files, _TEMPLATES):
        return True
    return "tokenizer_config.json" in files and "chat_template" in _document(files["tokenizer_config.json"])


def _document(path: Path) -> dict[str, object]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _refused(what: str) -> ConfigError:
    return ConfigError(what, code="FB108")
