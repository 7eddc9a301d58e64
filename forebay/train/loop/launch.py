"""accelerate as the loop uses it: the ranks of a run, and the accelerator that places, casts and scales."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.extras import require_module
from forebay.steps.audio.audio_section import audio_step_of
from forebay.train.loop.trackers import tracker_settings

_logger = logging.getLogger(__name__)


def require_extras(config: Config, *, command: str, writes: bool) -> None:
    """Returns where what a run needs is installed, before any data is read. writes: the model's texts are compared.

    Raises MissingExtraError.
    """
    require_module("accelerate", "train", what=command)
    if config.train.lora is not None:
        require_module("peft", "lora", what="[train.lora]")
    if config.train.eval and writes and audio_step_of(config) is not None:
        require_module("jiwer", "train", what="evaluation by WER")


def process_state() -> Any:
    """Returns accelerate's process state, its process group started; every rank that torchrun started is in it."""
    require_module("accelerate", "train", what="forebay train")
    from accelerate import PartialState

    state = PartialState(cpu=_is_on_cpu())
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != started:
        raise ConfigError(
            f"WORLD_SIZE is {started}, but accelerate sees {state.num_processes} rank(s), and each would train alone: "
            "make no PartialState or Accelerator before forebay's",
            code="FB705",
        )
    return state


def make_accelerator(config: Config, *, has_text_alone: bool, may_rest: bool = False) -> Any:
    """Returns accelerate's Accelerator in the precision of the config.

    has_text_alone: some micro-batches have no audio, and give the audio encoder no gradient. may_rest: parts of the
    model may have no gradient in a step (layer drop, masks that are not drawn).
    Raises ConfigError for a precision that is not possible here, and for text alone under FSDP; MissingExtraError
    without accelerate.
    """
    state, settings = process_state(), config.train
    if has_text_alone and state.num_processes > 1 and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise ConfigError(
            "a rank with a text alone has no use for the audio encoder, whose weights the other ranks then wait for: "
            "mixtures with text alone do not go with FSDP; use DDP (distributed_type: MULTI_GPU in accelerate's "
            "configuration), or leave the cache without audio out of mixture.source"
        )
    if settings.mixed_precision == "fp16" and state.device.type == "cpu":
        raise ConfigError(
            'train.mixed_precision = "fp16" needs an accelerator, and this run is on the CPU; set it to "bf16" or "no"'
        )
    given = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if given not in ("no", settings.mixed_precision) and state.is_main_process:
        _logger.warning(
            'accelerate\'s configuration says mixed_precision %s; train.mixed_precision = "%s" holds',
            given,
            settings.mixed_precision,
        )
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

    finds_unused = has_text_alone or may_rest
    try:
        # The plugin, because a bare number is overridden by an environment variable, and `backward` divides by it.
        return Accelerator(
            cpu=_is_on_cpu(),
            mixed_precision=settings.mixed_precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            # DDP otherwise waits for the gradients of an encoder that a text has no use for.
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] if finds_unused else None,
            **tracker_settings(config),
        )
    except ValueError as err:
        raise ConfigError(f'train.mixed_precision = "{settings.mixed_precision}" is not possible here: {err}') from err


def _is_on_cpu() -> bool:
    # Unless told so, accelerate takes the ranks of torchrun on a machine without an accelerator for single processes.
    return not torch.accelerator.is_available()
