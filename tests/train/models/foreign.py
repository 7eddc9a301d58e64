"""Folders of tiny models that are of no family, made from their config classes, and batches that they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

BLANK = 0
VOCAB_SIZE = 12
NUM_LABELS = 3
_DROPS = ("hidden_dropout", "dropout", "attention_dropout", "activation_dropout")
_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def _folder(folder: Path, model_class: str | None, config: Any) -> Path:
    config.architectures = None if model_class is None else [model_class]
    config.save_pretrained(folder)
    return folder


def wav2vec2(folder: Path, model_class: str | None = "Wav2Vec2ForCTC", **changes: Any) -> Path:
    """Makes `folder` the config.json of a Wav2Vec2 with two convolutions, a frame every 20 samples."""
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    more = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    drops = dict.fromkeys(("layerdrop", "feat_proj_dropout", "final_dropout", *_DROPS), 0.0)
    settings = {**_SMALL, **convolutions, **more, **drops, "vocab_size": VOCAB_SIZE, "pad_token_id": BLANK, **changes}
    return _folder(folder, model_class, transformers.Wav2Vec2Config(**settings))


def parakeet(folder: Path, model_class: str | None = "ParakeetForCTC", *, every: int = 8, **changes: Any) -> Path:
    """Makes `folder` the config.json of a Parakeet with CTC, 16 mel bins, a frame for so many of them."""
    more = {"subsampling_conv_channels": 8, "num_mel_bins": 16, "subsampling_factor": every, "layerdrop": 0.0}
    encoder = {**_SMALL, **more, **dict.fromkeys(_DROPS, 0.0)}
    settings = {"vocab_size": VOCAB_SIZE, "pad_token_id": BLANK, **changes}
    return _folder(folder, model_class, transformers.ParakeetCTCConfig(encoder_config=encoder, **settings))


def vit(folder: Path, model_class: str | None = "ViTForImageClassification", **changes: Any) -> Path:
    """Makes `folder` the config.json of a ViT for images of 16 x 16."""
    names = {"id2label": {i: f"class {i}" for i in range(NUM_LABELS)}}
    sizes = {**_SMALL, "image_size": 16, "patch_size": 8}
    return _folder(folder, model_class, transformers.ViTConfig(**{**sizes, **names, **changes}))


def siglip(folder: Path, model_class: str | None = "SiglipModel", **texts: Any) -> Path:
    """Makes `folder` the config.json of a SigLIP for images of 16 x 16 and texts of 8 tokens."""
    text = {**_SMALL, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 8, "projection_size": 16, **texts}
    vision = {**_SMALL, "image_size": 16, "patch_size": 8}
    return _folder(folder, model_class, transformers.SiglipConfig(text_config=text, vision_config=vision))


def llama(folder: Path, model_class: str | None = "LlamaForCausalLM", *, vocab_size: int = VOCAB_SIZE) -> Path:
    """Makes `folder` the config.json of a Llama."""
    return _folder(folder, model_class, transformers.LlamaConfig(**_SMALL, vocab_size=vocab_size, pad_token_id=BLANK))


def speech2text(
    folder: Path,
    model_class: str | None = "Speech2TextForConditionalGeneration",
    *,
    vocab_size: int = VOCAB_SIZE,
    end: int = 2,
    bins: int = 8,
) -> Path:
    """Makes `folder` the config.json of a Speech2Text, whose labels its own forward moves: it begins with the end."""
    sides = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    more = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16, "input_feat_per_channel": bins}
    drops = dict.fromkeys(_DROPS[1:], 0.0)
    config = transformers.Speech2TextConfig(
        **{**sides, **more, **drops, "conv_channels": 16, "vocab_size": vocab_size},
        max_source_positions=64,
        decoder_start_token_id=end,
        eos_token_id=end,
    )
    return _folder(folder, model_class, config)


def gemma3(folder: Path, model_class: str | None = "Gemma3ForConditionalGeneration") -> Path:
    """Makes `folder` the config.json of a Gemma 3 that sees: four tokens an image of 16 x 16, of id 10."""
    text = {**_SMALL, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCAB_SIZE, "pad_token_id": BLANK}
    vision = {**_SMALL, "image_size": 16, "patch_size": 4, "vision_use_head": False}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=10, boi_token_index=9,
        eoi_token_index=11,
    )  # fmt: skip
    return _folder(folder, model_class, config)


def _draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _labels(seed: int, lengths: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    labels = torch.randint(1, 9, (len(lengths), max(lengths)), generator=_draws(seed))
    for row, length in zip(labels, lengths, strict=True):
        row[length:] = -100
    return labels


def sound(seed: int, lengths: tuple[int, ...] = (400, 640)) -> dict[str, torch.Tensor]:
    """Returns a batch of waveforms and their texts."""
    values = torch.randn(len(lengths), max(lengths), generator=_draws(seed))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).int()
    return {"input_values": values * mask, "attention_mask": mask, "labels": _labels(seed)}


def mel(seed: int, *, bins: int = 16) -> dict[str, torch.Tensor]:
    """Returns a batch of mel frames and their texts."""
    mask = (torch.arange(128) < torch.tensor([90, 128])[:, None]).int()
    values = torch.randn(2, 128, bins, generator=_draws(seed)) * mask[..., None]
    return {"input_features": values, "attention_mask": mask, "labels": _labels(seed)}


def classes(seed: int, rows: int = 4) -> dict[str, torch.Tensor]:
    """Returns a batch of images and their classes."""
    pixels = torch.randn(rows, 3, 16, 16, generator=_draws(seed))
    return {"pixel_values": pixels, "labels": torch.arange(rows) % NUM_LABELS}


def pairs(seed: int, rows: int = 4) -> dict[str, torch.Tensor]:
    """Returns a batch of images and their texts."""
    ids = torch.randint(1, VOCAB_SIZE, (rows, 8), generator=_draws(seed))
    return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=_draws(seed)), "input_ids": ids}


def texts(seed: int) -> dict[str, torch.Tensor]:
    """Returns a batch of texts alone."""
    labels = _labels(seed, (4, 6))
    known = labels != -100
    return {"input_ids": labels.clamp(min=0), "attention_mask": known.long(), "labels": labels}


def chats(seed: int) -> dict[str, torch.Tensor]:
    """Returns a batch of conversations with an image each."""
    batch = texts(seed)
    image = torch.tensor([9, 10, 10, 10, 10, 11]).expand(2, -1)
    ids = torch.cat([image, batch["input_ids"]], 1)
    labels = torch.cat([torch.full_like(image, -100), batch["labels"]], 1)
    mask = torch.cat([torch.ones_like(image), batch["attention_mask"]], 1)
    pixels = torch.randn(2, 3, 16, 16, generator=_draws(seed))
    return {
        "input_ids": ids, "attention_mask": mask, "token_type_ids": (ids == 10).long(), "pixel_values": pixels,
        "labels": labels,
    }  # fmt: skip


KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[int], dict[str, torch.Tensor]]]] = {
    "ctc": (wav2vec2, sound),
    "ctc of mel": (parakeet, mel),
    "classes": (vit, classes),
    "pairs": (siglip, pairs),
    "causal": (llama, texts),
    "seq2seq": (speech2text, lambda seed: mel(seed, bins=8)),
    "chat": (gemma3, chats),
}
"""By the kind: a folder, and batches by their seeds."""
