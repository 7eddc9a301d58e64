"""The model that a run trains, from `train.model` or from a checkpoint, with its adapters; and its parts that learn.

Of these their share of the learning rate: frozen modules, embeddings, weight decay.

Memory and speed of the model's passes: activations that are computed again, and torch.compile.

Steps that the scaler of fp16 skips, since a gradient is not finite: counted, and too many in a row end the run.
"""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forebay.config.train import TrainConfig
from forebay.config.tree import Config
from forebay.errors import ConfigError, ForebayError, ResumeError
from forebay.store.files import hash_file
from forebay.train.models.families import ModelFacts
from forebay.train.models.generic import tell
from forebay.train.models.lora import BASE, check_adapter, load_adapter, with_adapters
from forebay.train.models.model_folder import load_model, model_facts

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


BACKEND = "inductor"
"""What `torch.compile` compiles with. Tests take one that needs no compiler of C++."""


def set_passes(model: Any, settings: TrainConfig) -> None:
    """Makes the model's passes those of `train.gradient_checkpointing` and `train.compile`.

    The model itself is compiled, or layers in it, in place: names of weights have no `_orig_mod.`
    Raises ConfigError for a model that cannot compute activations again.
    """
    if settings.gradient_checkpointing:
        # transformers has a new name for it and says that the old one goes; the first argument is the same.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        try:
            # Re-entrant checkpoints would lose the gradients of what is behind a frozen layer.
            enable({"use_reentrant": False})
        except ValueError as err:
            raise ConfigError(f"train.gradient_checkpointing: {err}; set it to false") from err
        logging.getLogger("transformers.utils.generic").addFilter(_is_about_no_cache)
    if settings.compile:
        # A size that differs from the one before becomes a symbol (dynamic = None), so that not every width of a batch
        # is compiled.
        for part in _compiled_parts(model):
            part.compile(backend=BACKEND, dynamic=None)


def _compiled_parts(model: Any) -> list[Any]:
    """Returns the layers of the language model in a model that sees or hears, which are alike and one graph; else it.

    A tower splits its attention by item, so that each size of one would be a graph, and what it gives has as many rows
    as a mask has ones, which cuts the graph of whatever takes it.
    """
    inner = (part for name, part in model.named_modules() if name.rpartition(".")[2] == "language_model")
    return [*getattr(next(inner, None), "layers", [])] or [model]


def _is_about_no_cache(record: logging.LogRecord) -> bool:
    # The loop gives the model use_cache = False. Whisper's encoder, which has no cache, reads its config instead and
    # warns of a cache that nobody made.
    return "`use_cache=True` is incompatible with gradient checkpointing" not in record.getMessage()


def num_compilations() -> int:
    """Returns the graphs that torch.compile has compiled in this process, those of new shapes included."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # whose import takes seconds
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


@dataclass(kw_only=True, slots=True)
class SkippedSteps:
    """The steps that a run has skipped; the same on every rank. The first steps are often so: the scale begins high."""

    limit: int
    """Skipped steps in a row that end the run: `train.max_skipped_steps`."""
    total: int = 0
    """Since the run began, before a resume too."""
    in_a_row: int = 0
    """Up to the last step."""

    def add(self, step: int, *, is_skipped: bool) -> None:
        """Counts a step. Raises ForebayError where it is the last of `limit` skipped ones in a row."""
        self.total += is_skipped
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0
        if self.in_a_row >= self.limit:
            raise ForebayError(
                f"the scaler of fp16 has skipped steps {step - self.in_a_row + 1} to {step}, which are "
                f"train.max_skipped_steps = {self.limit} in a row: their gradients are not finite at any scale; lower "
                "train.learning_rate or train.embed_lr_mult (new embeddings grow fastest), or set "
                'train.mixed_precision = "bf16", then run: forebay train --resume',
                code="FB702",
            )


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
