"""Low-rank adapters by peft: put around a model, written into a checkpoint, and read from one."""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from forebay.config.train import LoraConfig
from forebay.errors import ConfigError, ResumeError
from forebay.extras import require_module

ADAPTER_CONFIG = "adapter_config.json"
"""Its presence tells that a folder holds an adapter and not a whole model."""
BASE = "base"
"""Folder in a checkpoint: the weights under the adapter, where they are in no other folder."""
_WEIGHTS = "adapter_model.safetensors"
_NAME = "default"
_LAYERS = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


def with_adapters(model: Any, settings: LoraConfig, *, seed: int, base: Path | None) -> Any:
    """Returns a `peft.PeftModel` around `model`, in training mode: the adapters learn, all other weights rest.

    seed: the adapters' first weights are made from it alone; the caller's random state does not move. base: the folder
    whose weights `model` has, which checkpoints name; None if no folder has them: they go into every checkpoint.
    Raises MissingExtraError without peft, ConfigError where a target is no module that can have an adapter.
    """
    peft = _peft()
    _check_targets(model, settings)
    wanted = peft.LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, lora_dropout=settings.dropout, target_modules=list(settings.targets)
    )
    with torch.random.fork_rng(), _quiet():
        torch.manual_seed(seed)
        try:
            adapted = peft.get_peft_model(model, wanted)
        except ValueError as err:
            raise ConfigError(f"train.lora.targets: peft refuses {list(settings.targets)}: {err}") from err
    # An absolute path: peft takes a name that is no folder for one of the hub, and would fetch it.
    adapted.peft_config[_NAME].base_model_name_or_path = None if base is None else str(base.resolve())
    return adapted.train()


def _peft() -> Any:
    require_module("peft", "lora", what="[train.lora]")
    import peft

    return peft


@contextmanager
def _quiet() -> Iterator[None]:
    # peft asks every model for an attribute that transformers is about to drop.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield


def _check_targets(model: Any, settings: LoraConfig) -> None:
    names = [name for name, module in model.named_modules() if isinstance(module, _LAYERS)]
    for target in settings.targets:
        if any(f".{name}".endswith(f".{target}") for name in names):
            continue
        length = target.count(".") + 1
        known = sorted({".".join(name.split(".")[-length:]) for name in names})
        near = difflib.get_close_matches(target, known, n=3) or known
        raise ConfigError(
            f"train.lora.targets: no layer of {type(model).__name__} is called {target!r}; "
            f"the nearest: {', '.join(map(repr, near))}"
        )


def is_adapted(model: Any) -> bool:
    """Returns whether `with_adapters` made the model."""
    return getattr(model, "peft_config", None) is not None


def base_of(model: Any) -> Any:
    """Returns the transformers model in a model with adapters; any other model as it is."""
    return model.get_base_model() if is_adapted(model) else model


def save_adapter(model: Any, folder: Path, *, target: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Makes `folder`, which is to become `target`, hold the adapter in peft's form and the generation config.

    `from_pretrained` of peft's AutoPeftModel, of transformers' Auto classes and of the model's own class then works on
    `target`: adapter_config.json names the folder of the weights under the adapter by its absolute path. That is
    `train.model`, or `base/` in the checkpoint for weights that are in no folder (`train.init = "random"`). There is
    no config.json: with one, transformers looks for whole weights.
    weights: the model's state dict, where the model itself has only parts of it.
    """
    state = dict(model.state_dict() if weights is None else weights)
    settings = model.peft_config[_NAME]
    has_folder = settings.base_model_name_or_path is not None
    if not has_folder:
        base_of(model).save_pretrained(folder / BASE, state_dict=_base_weights(state))
        settings.base_model_name_or_path = str(target.resolve() / BASE)
    try:
        # Without the last option peft asks the hub for the config.json of a folder that it does not find.
        model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
    finally:
        if not has_folder:
            settings.base_model_name_or_path = None
    (folder / "README.md").unlink(missing_ok=True)  # an empty form for the hub
    if (generation := getattr(base_of(model), "generation_config", None)) is not None:
        generation.save_pretrained(folder)


def _base_weights(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights under the adapters, by the names that they have without adapters."""
    prefix = "base_model.model."
    return {
        name.removeprefix(prefix).replace(".base_layer.", "."): tensor
        for name, tensor in state.items()
        if name.startswith(prefix) and ".lora_" not in name
    }


def load_adapter(model: Any, checkpoint: Path) -> None:
    """Makes the adapters of `model` those of a checkpoint; ResumeError where they do not fit each other."""
    from peft import set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(checkpoint / _WEIGHTS)
        found = set_peft_model_state_dict(model, weights)
    except (OSError, RuntimeError, SafetensorError) as err:
        raise ResumeError(f"cannot read {checkpoint / _WEIGHTS}: {err}; train without --resume") from err
    lost = [name for name in found.missing_keys if ".lora_" in name]
    if lost or found.unexpected_keys:
        name = (lost or found.unexpected_keys)[0]
        raise ResumeError(
            f"the adapters in {checkpoint} are not those of the model in train.model: {name} is in one of them only; "
            "train without --resume, or set train.model back",
            code="FB514",
        )


def check_adapter(settings: LoraConfig | None, checkpoint: Path) -> None:
    """Returns where a checkpoint's adapters are those that [train.lora] asks for, none where it asks for none.

    Raises ResumeError with both values where they differ. Dropout may differ: it is no part of the adapters.
    """
    stored = _stored(checkpoint)
    if (stored is None) != (settings is None):
        has, wants = ("no", "wants some") if stored is None else ("LoRA", "wants none")
        raise ResumeError(
            f"{checkpoint} has {has} adapters and [train.lora] {wants}; train without --resume, or set it back",
            code="FB514",
        )
    if stored is None or settings is None:
        return
    was = {"rank": stored.get("r"), "alpha": stored.get("lora_alpha"), "targets": _sorted(stored.get("target_modules"))}
    now = {"rank": settings.rank, "alpha": settings.alpha, "targets": sorted(settings.targets)}
    for name, value in now.items():
        if was[name] != value:
            raise ResumeError(
                f"train.lora.{name} is {was[name]} in {checkpoint} and {value} in the config; "
                "train without --resume, or set it back",
                code="FB514",
            )


def _stored(checkpoint: Path) -> dict[str, Any] | None:
    path = checkpoint / ADAPTER_CONFIG
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as err:
        raise ResumeError(f"cannot read {path}: {err}; train without --resume") from err
    if not isinstance(document, dict):
        raise ResumeError(f"{path} is not an adapter config of peft; train without --resume")
    return document


def _sorted(value: object) -> object:
    return sorted(value) if isinstance(value, list) and all(isinstance(each, str) for each in value) else value
