"""What of a model learns, and at which share of the learning rate: frozen modules, embeddings, weight decay."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from forebay.config.train import TrainConfig
from forebay.errors import ConfigError

LR_FACTOR = "lr_factor"
"""Key of an optimizer's group: the factor on the learning rate of the step; 1 where it is missing."""
_MAX_LISTED = 8


def set_trainable(model: Any, settings: TrainConfig) -> None:
    """Makes the parameters rest that `train.freeze` and an `embed_lr_mult` of 0 name; the others stay as they were.

    A module that rests stays in the mode that it was in, so its dropout and layer drop go on, as under transformers'
    Trainer. Raises ConfigError for a name without a module, and where nothing is left that learns.
    """
    for name in settings.freeze:
        for module in _named(model, name):
            module.requires_grad_(requires_grad=False)
    if settings.embed_lr_mult == 0:
        for parameter in _embedding_parameters(model):
            parameter.requires_grad = False
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"train.freeze = {list(settings.freeze)} and train.embed_lr_mult = {settings.embed_lr_mult:g} leave no "
            "parameter that learns; freeze fewer modules"
        )


def _named(model: nn.Module, name: str) -> list[nn.Module]:
    """Returns the modules whose dotted name has `name` in it, as whole parts: `encoder` is in `model.encoder`."""
    wanted = f".{name}."
    found = [module for path, module in model.named_modules() if wanted in f".{path}."]
    if name and found:
        return found
    paths = [path for path, _ in model.named_modules() if path]
    parts = dict.fromkeys(part for path in paths for part in path.split(".") if not part.isdigit())
    near = difflib.get_close_matches(name, [*parts, *paths], n=3) or list(parts)[:_MAX_LISTED]
    raise ConfigError(
        f"train.freeze: {name!r} is the name of no module of this {type(model).__name__}; the nearest are "
        f"{', '.join(map(repr, near))}"
    )


def _embedding_parameters(model: Any) -> Iterator[nn.Parameter]:
    """Yields the parameters of the input and output embeddings; tied ones come twice, as the same object."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is not None:
            yield from module.parameters()


def adamw(model: Any, settings: TrainConfig) -> torch.optim.AdamW:
    """Returns AdamW over the model's trainable parameters; biases and norm weights (one axis) are not decayed.

    With an `embed_lr_mult` other than 1, the embeddings are groups of their own with that `LR_FACTOR`.
    """
    factor = settings.embed_lr_mult
    embeddings = set() if factor == 1 else {id(parameter) for parameter in _embedding_parameters(model)}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]  # a tied one comes once
    others = [parameter for parameter in trainable if id(parameter) not in embeddings]
    own = [parameter for parameter in trainable if id(parameter) in embeddings]
    groups = _groups(others, settings)
    groups += [{**group, LR_FACTOR: factor} for group in _groups(own, settings) if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.learning_rate)


def _groups(parameters: list[nn.Parameter], settings: TrainConfig) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Makes every group learn at `rate` times its `LR_FACTOR`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(LR_FACTOR, 1.0)
