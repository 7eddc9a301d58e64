"""Checkpoints of the Trainer whose weights have other names than the model's: transformers loads them only in part.

`save_pretrained` writes the weights of many models (ViT, models that see) under the names that they had when the model
was published. The Trainer puts a file back by the names of today and passes over what is left, with one warning: a
resumed run would go on with the weights that its script began with. `from_pretrained` knows both names.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, TrainerCallback

from forebay.errors import ResumeError
from forebay.pretrained import from_folder
from forebay.visible import an

_logger = logging.getLogger(__name__)
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class WholeWeights(TrainerCallback):  # type: ignore[misc]
    """Makes the model that of its checkpoint behind the Trainer's own loading: at a resume, and of the best at the end.

    Weights that ranks hold in parts (FSDP, DeepSpeed) have files of their own and are left to the Trainer.
    """

    def __init__(self, model: Any, *, resumed: Path | None) -> None:
        """Loads nothing yet. model: the bare one. resumed: the checkpoint that the run goes on from."""
        self._model, self._resumed = model, resumed

    def on_train_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Called by the Trainer in front of the first step, when it has loaded a checkpoint."""
        if self._resumed is not None:
            load_renamed(self._model, self._resumed)

    def on_train_end(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Called by the Trainer when it has loaded its best checkpoint, if `load_best_model_at_end` wants that."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            load_renamed(self._model, Path(state.best_model_checkpoint))


def load_renamed(model: Any, checkpoint: Path) -> None:
    """Loads a checkpoint into a model of transformers where its files have names that the model does not know.

    Raises ResumeError where `from_pretrained` does not find every weight either.
    """
    if not isinstance(model, PreTrainedModel) or not _names(checkpoint) - set(model.state_dict()):
        return
    wanted: dict[str, Any] = {"dtype": model.dtype, "use_safetensors": True, "output_loading_info": True}
    try:
        stored, loading = from_folder(type(model), checkpoint, **wanted)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as err:
        raise ResumeError(f"cannot load the weights in {checkpoint}: {err}; resume from an earlier checkpoint") from err
    if lost := sorted(loading["missing_keys"]):
        raise ResumeError(
            f"the weights in {checkpoint} lack {lost[0]} (and {len(lost) - 1} more) of {an(type(model).__name__)}; "
            "resume from another checkpoint, or with the class that wrote this one",
            code="FB514",
        )
    model.load_state_dict(stored.state_dict())
    _logger.info("%s: all weights are loaded now, by the names of today; what transformers missed is there", checkpoint)


def _names(checkpoint: Path) -> set[str]:
    """Returns the names of the weights in a checkpoint; none where it has no safetensors (adapters, shards)."""
    if (checkpoint / _WEIGHTS).is_file():
        with safe_open(checkpoint / _WEIGHTS, framework="pt") as file:
            return set(file.keys())
    if (checkpoint / _INDEX).is_file():
        return set(json.loads((checkpoint / _INDEX).read_bytes())["weight_map"])
    return set()
