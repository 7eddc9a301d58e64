"""The model that a run trains: from `train.model` or from a checkpoint, with its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.config.tree import Config
from forebay.errors import ConfigError, ResumeError
from forebay.store.files import hash_file
from forebay.train.models.families import ModelFacts
from forebay.train.models.generic import tell
from forebay.train.models.lora import BASE, check_adapter, load_adapter, with_adapters
from forebay.train.models.model_folder import load_model, model_facts


def new_model(config: Config, facts: ModelFacts) -> Any:
    """Returns the model that a run begins with, on the CPU, in training mode; with [train.lora] only adapters learn.

    Raises ConfigError where `train.model` or [train.lora] is not usable, MissingExtraError without peft.
    """
    settings, seed = config.train, config.loader.seed
    model = load_model(facts.folder, seed=seed, init=settings.init, facts=facts)
    if facts.why:
        tell(facts)
    if settings.lora is None:
        return model
    base = facts.folder if settings.init == "pretrained" else None
    return with_adapters(model, settings.lora, seed=seed, base=base)


def checkpoint_model(
    config: Config, facts: ModelFacts, checkpoint: Path, *, base: Mapping[str, str] | None = None
) -> Any:
    """Returns the model of a checkpoint, in the form that `new_model` gives.

    base: the `base_hashes` of the run that wrote the checkpoint; None: not looked at. Raises ResumeError where the
    checkpoint is not of the config's model and adapters, or the weights under the adapters are others by now.
    """
    check_adapter(config.train.lora, checkpoint)
    if base is not None and (now := base_hashes(config, facts, checkpoint)) != base:
        raise ResumeError(
            f"the weights in {facts.folder} have checksums {now}, and the adapters in {checkpoint} were trained on "
            f"{dict(base)}; set train.model back, or train without --resume",
            code="FB514",
        )
    if config.train.lora is None:
        return _whole_model(facts, checkpoint)
    has_base = (checkpoint / BASE).is_dir()
    model = _whole_model(facts, checkpoint / BASE if has_base else facts.folder)
    adapted = with_adapters(model, config.train.lora, seed=config.loader.seed, base=None if has_base else facts.folder)
    load_adapter(adapted, checkpoint)
    return adapted


def base_hashes(config: Config, facts: ModelFacts, checkpoint: Path | None = None) -> dict[str, str]:
    """Returns the xxh3-128 of the weights under a run's adapters, by file name, where they lie in `train.model`.

    A checkpoint that holds an adapter alone is only what it was with the weights that it was trained on. Empty without
    [train.lora], and for weights that lie in the checkpoints.
    """
    if config.train.lora is None:
        return {}
    if (checkpoint / BASE).is_dir() if checkpoint is not None else config.train.init == "random":
        return {}
    return {path.name: hash_file(path) for path in sorted(facts.folder.glob("*.safetensors"))}


def _whole_model(wanted: ModelFacts, folder: Path) -> Any:
    try:
        stored = model_facts(folder)
        model = load_model(folder, seed=0, facts=stored)
    except ConfigError as err:
        raise ResumeError(f"cannot go on from {folder}: {err}; train without --resume") from err
    was, now = (
        {name: getattr(facts, name) for name in ("model_type", "model_class", "vocab_size", "num_labels")}
        | dict(facts.constants)
        for facts in (stored, wanted)
    )
    for name, value in now.items():
        if was.get(name) != value:
            raise ResumeError(
                f"{name} is {was.get(name)} in {folder} and {value} in {wanted.folder}; "
                "train without --resume, or set train.model back",
                code="FB514",
            )
    return model
