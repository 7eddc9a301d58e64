"""Memory and speed of the model's passes: activations that are computed again, and torch.compile."""

from __future__ import annotations

import logging
import sys
from typing import Any

from forebay.config.train import TrainConfig
from forebay.errors import ConfigError

BACKEND = "inductor"
"""What `torch.compile` compiles with. Tests take one that needs no compiler of C++."""


def set_passes(model: Any, settings: TrainConfig) -> None:
    """Makes the model's passes those of `train.gradient_checkpointing` and `train.compile`.

    The model itself is compiled, in place, and no wrapper of it is made: names of weights have no `_orig_mod.`
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
        model.compile(backend=BACKEND, dynamic=None)


def _is_about_no_cache(record: logging.LogRecord) -> bool:
    # The loop gives the model use_cache = False. Whisper's encoder, which has no cache, reads its config instead and
    # warns of a cache that nobody made.
    return "`use_cache=True` is incompatible with gradient checkpointing" not in record.getMessage()


def num_compilations() -> int:
    """Returns the graphs that torch.compile has compiled in this process, those of new shapes included."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # whose import takes seconds
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
