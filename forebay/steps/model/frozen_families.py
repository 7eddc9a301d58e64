"""Families of models: how each is opened and called, and which output is stored where a config names none.

A family is found by the `model_type` of config.json, or by diffusers' `_class_name`. A new one is a line of `FAMILIES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from forebay.store.layout import Group

Steps = Callable[[Any, int], int]
"""How many steps of an output are a sample's own, of the model and the rows of its input; the rest is padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenFamily:
    """How a kind of model is used.

    takes: a kind of item, or `image+text`. loader: the class of transformers, or diffusers, that opens the folder.
    part: the attribute that is the model proper. output: what is stored. steps: None where outputs are of one length.
    layered: the call takes `output_hidden_states`. args: what `[[model]] args` may set of the call. is_causal: whether
    it is a language model, which has logits of a text's own tokens.
    library: that has the loader. factor: of an autoencoder, by its config.json: pixels of a side to one of a latent.
    facts: values of config.json that the cache's constants hold. least: by config.json, the fewest rows of its input
    that give a step.
    """

    takes: Group
    loader: str = "AutoModel"
    part: str = ""
    call: str = "forward"
    output: str = "last_hidden_state"
    steps: Steps | None = None
    batch: int = 8
    layered: bool = True
    args: frozenset[str] = frozenset()
    is_causal: bool = False
    library: Literal["transformers", "diffusers"] = "transformers"
    factor: Callable[[Mapping[str, Any]], int] | None = None
    facts: tuple[str, ...] = ()
    least: Callable[[Mapping[str, Any]], int] | None = None


def by_hop(model: Any, rows: int) -> int:
    """Returns the frames of a codec for so many audio samples: one for each hop that has begun."""
    config = model.config
    hop: int = getattr(config, "hop_length", None) or round(config.sampling_rate / config.frame_rate)
    return math.ceil(rows / hop)


def by_convolutions(model: Any, rows: int) -> int:
    """Returns the frames behind the convolutions of a wav2vec2-like encoder, by its own formula."""
    import torch  # not at import: keys are made without it

    return int(model._get_feat_extract_output_lengths(torch.tensor(rows)))


def receptive_field(document: Mapping[str, Any]) -> int:
    """Returns the audio samples of a frame of a wav2vec2-like encoder; defaults are those of its config class."""
    kernels = document.get("conv_kernel", (10, 3, 3, 3, 3, 2, 2))
    strides = document.get("conv_stride", (5, 2, 2, 2, 2, 2, 2))
    return int(1 + sum((kernel - 1) * math.prod(strides[:place]) for place, kernel in enumerate(kernels)))


def by_blocks(document: Mapping[str, Any]) -> int:
    """Returns the pixels of a side to one of a latent of `AutoencoderKL`: each block but the last halves both."""
    return int(2 ** (len(document.get("block_out_channels", (64,))) - 1))


def as_many(model: Any, rows: int) -> int:  # noqa: ARG001
    """Returns as many steps as the input has rows: tokens, frames of filter banks."""
    return rows


def _codec(*args: str) -> FrozenFamily:
    return FrozenFamily(
        takes="audio",
        call="encode",
        output="audio_codes",
        steps=by_hop,
        batch=1,  # codes near the end of a clip move with what stands behind it
        layered=False,
        args=frozenset(args),
    )


# Of most of these the first norm goes over all of a batch, padding too.
_WAVES = FrozenFamily(takes="audio", steps=by_convolutions, batch=1, least=receptive_field)
_TEXTS = FrozenFamily(takes="text", steps=as_many, batch=32)
_CAUSAL = replace(_TEXTS, is_causal=True)
_IMAGES = FrozenFamily(takes="image", batch=16)
FAMILIES: Mapping[str, tuple[FrozenFamily, ...]] = {
    "mimi": (_codec("num_quantizers"),),
    "encodec": (_codec("bandwidth"),),
    "dac": (_codec("n_quantizers"),),
    "xcodec": (_codec("bandwidth"),),
    **dict.fromkeys(("hubert", "wav2vec2", "wavlm", "data2vec-audio", "unispeech-sat"), (_WAVES,)),
    "wav2vec2-bert": (FrozenFamily(takes="audio", steps=as_many),),
    "whisper": (FrozenFamily(takes="audio", part="encoder"),),
    **{
        name: (FrozenFamily(takes="text", loader=f"{name.upper()}EncoderModel", steps=as_many, batch=32),)
        for name in ("t5", "mt5", "umt5")
    },
    **dict.fromkeys(("clip_text_model", "bert", "roberta", "xlm-roberta"), (_TEXTS,)),
    **dict.fromkeys(("qwen2", "qwen3", "llama", "mistral", "gemma3_text", "gpt2", "gpt_neox"), (_CAUSAL,)),
    **dict.fromkeys(("clip_vision_model", "siglip_vision_model", "dinov2", "vit"), (_IMAGES,)),
    "AutoencoderKL": (
        FrozenFamily(
            takes="image",
            library="diffusers",
            loader="AutoencoderKL",
            call="encode",
            output="latent_dist.parameters",
            batch=4,
            layered=False,
            factor=by_blocks,
            facts=("scaling_factor", "shift_factor", "latents_mean", "latents_std"),
        ),
    ),
    **dict.fromkeys(
        ("clip", "siglip"),
        (
            FrozenFamily(takes="image", part="vision_model", batch=16),
            FrozenFamily(takes="text", part="text_model", steps=as_many, batch=32),
            FrozenFamily(takes="image+text", output="similarity", batch=16, layered=False),
        ),
    ),
}
