"""A model's folder: what its config.json says, and the model itself, with stored weights or random ones."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from forebay.config.digest import hub_advice
from forebay.errors import ConfigError
from forebay.pretrained import from_folder
from forebay.train.models.facts import ModelFacts
from forebay.train.models.table import family_of

_logger = logging.getLogger(__name__)

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_GENERATION = "generation_config.json"
_PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_MAX_LISTED = 20

Init = Literal["pretrained", "random"]


def model_facts(folder: Path) -> ModelFacts:
    """Returns what the config.json in `folder` says; nothing is fetched, no code of the folder is run.

    Raises ConfigError where there is no usable config.json, or its `model_type` is none of the table.
    """
    config = _transformers_config(folder)
    return family_of(config.model_type, path=folder).facts(folder, config)


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
            f"train.model: {path} asks for {kernels[0]!r}, code that transformers would fetch and run; "
            "remove that entry"
        )
    family_of(model_type, path=path)
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
            f"train.model: {folder} has no weights, neither {' nor '.join(_WEIGHTS)}; it holds {_listed(folder)}; "
            'name a folder that save_pretrained has written, or set train.init = "random" to begin with random ones'
        )
    if not set(found) & set(_WEIGHTS):
        raise ConfigError(f"train.model: {folder} has pickled weights only; save them as model.safetensors first")


def _listed(folder: Path) -> str:
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    shown = ", ".join(map(repr, names[:_MAX_LISTED]))
    return shown + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")


def load_model(folder: Path, *, seed: int, init: Init = "pretrained") -> Any:
    """Returns the float32 model of `folder` on the CPU, in training mode.

    init: `pretrained` loads the folder's safetensors (none, a missing or a misfitting weight raises ConfigError);
    `random` makes weights from `seed` alone: equal in every run and on every rank. The caller's random state does not
    move.
    """
    import transformers

    config = _transformers_config(folder)
    check_weights(folder, init=init)
    model_class = getattr(transformers, family_of(config.model_type, path=folder).facts(folder, config).model_class)
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
