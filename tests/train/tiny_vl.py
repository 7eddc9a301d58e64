"""A tiny random Qwen3-VL, conversations for it, and a source of them, for the tests of packs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.config import Config, SourceConfig, TextConfig, TrainConfig, VisionConfig
from forebay.store.source import SampleSource
from forebay.train.models.model_folder import load_model
from tests.flat_constants import flat

Array = np.ndarray[Any, Any]
PAD, IMAGE, VIDEO, VISION_START, VISION_END = 1, 60, 61, 62, 63
VOCAB_SIZE = 64
PATCH_SIZE, MERGE_SIZE, COPIES = 16, 2, 2
WIDTH = 3 * PATCH_SIZE**2
TABLE = np.stack([(np.arange(256, dtype=np.float32) / 255 - mean) / 0.5 for mean in (0.5, 0.4, 0.6)])
CONSTANTS: Mapping[str, Any] = {
    "features": "patches",
    "prompt": "chat",
    "patch_size": PATCH_SIZE,
    "merge_size": MERGE_SIZE,
    "temporal_patch_size": COPIES,
    "patch_table": TABLE.tolist(),
    "image_token_id": IMAGE,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "pad_token_id": PAD,
    "codec": "raw",
}


def expanded(
    patches: torch.Tensor, constants: Mapping[str, Any] = CONSTANTS, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns the `pixel_values` of uint8 patches by looking up: `table[channel, value]`, each plane repeated."""
    table, copies = torch.tensor(constants["patch_table"]), int(constants["temporal_patch_size"])
    planes = patches.view(len(patches), 3, -1).long()
    values = table[torch.arange(3)[None, :, None], planes].to(dtype)
    return values[:, :, None].expand(-1, -1, copies, -1).flatten(1)


def qwen3_vl_folder(folder: Path, **changes: Any) -> Path:
    """Makes `folder` a config.json of a Qwen3-VL with two layers in each part; no weights."""
    config = {
        "model_type": "qwen3_vl",
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "pad_token_id": PAD,
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": COPIES,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return folder


def older_folder(folder: Path, model_type: str) -> Path:
    """Makes `folder` the config.json of a `qwen2_vl` or `qwen2_5_vl` of the same sizes as `qwen3_vl_folder`."""
    document = json.loads((qwen3_vl_folder(folder) / "config.json").read_bytes())
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
    text = {**document["text_config"], "model_type": f"{model_type}_text", "rope_parameters": rope}
    vision = {name: document["vision_config"][name] for name in ("depth", "num_heads", "patch_size")}
    vision |= {"spatial_merge_size": MERGE_SIZE, "temporal_patch_size": COPIES}
    if model_type == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 1}
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32, "fullatt_block_indexes": [1]}
        vision |= {"window_size": 64}
    changed = {"model_type": model_type, "text_config": text, "vision_config": vision}
    (folder / "config.json").write_text(json.dumps({**document, **changed}), encoding="utf-8")
    return folder


def qwen3_vl(folder: Path, *, attention: str = "sdpa", model_type: str = "qwen3_vl") -> Any:
    """Returns a float32 model of packs with large random weights, so a leak between samples is seen.

    model_type: `qwen3_vl`, or one of `older_folder`.
    """
    made = qwen3_vl_folder(folder) if model_type == "qwen3_vl" else older_folder(folder, model_type)
    return random_large(made, attention=attention)


def random_large(folder: Path, *, attention: str) -> Any:
    """Returns the model of a folder with such weights."""
    model = load_model(folder, seed=0, init="random")
    model.set_attn_implementation(attention)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    return model


def conversation(rng: np.random.Generator, grids: Sequence[tuple[int, int]], *, num_text: int = 6) -> dict[str, Any]:
    """Returns a sample: a question with images of such grids (in patches), `num_text` tokens between and behind."""
    ids: list[int] = []
    for height, width in grids:
        ids += [*rng.integers(2, 60, num_text), VISION_START, *[IMAGE] * (height * width // MERGE_SIZE**2), VISION_END]
    prompt = len(ids) + 1
    ids += [*rng.integers(2, 60, num_text + 1)]
    patches = tuple(rng.integers(0, 256, (height * width, WIDTH), dtype=np.uint8) for height, width in grids)
    for image in patches:
        image.flags.writeable = False
    return {
        "input_ids": np.array(ids, dtype=np.int32),
        "label_mask": (np.arange(len(ids)) >= prompt).astype(np.uint8),
        "image_grid_thw": np.array([(1, *grid) for grid in grids], dtype=np.int32).reshape(-1, 3),
        "patches": patches,
    }


def conversations(seed: int, count: int, *, max_images: int = 2) -> list[dict[str, Any]]:
    """Returns `count` random samples of 0 to `max_images` images; the first has one."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        num_images = rng.integers(0, max_images + 1) if index else 1
        grids = [tuple(2 * rng.integers(1, 4, 2)) for _ in range(num_images)]
        samples.append(conversation(rng, grids, num_text=int(rng.integers(1, 8))))
    return samples


def pixel_values(sample: Mapping[str, Any]) -> torch.Tensor:
    """Returns the model's input for a sample's patches by the definition: look up, then two copies in time."""
    patches = np.concatenate([np.empty((0, WIDTH), np.uint8), *sample["patches"]])
    looked_up = np.stack([TABLE[c][patches.reshape(-1, 3, PATCH_SIZE**2)[:, c]] for c in range(3)], axis=1)
    return torch.from_numpy(np.repeat(looked_up[:, :, None], COPIES, axis=2).reshape(len(patches), -1))


class FakeVlSource(SampleSource):
    """Conversations in memory."""

    def __init__(self, samples: Sequence[Mapping[str, Any]] = (), **constants: Any) -> None:
        self.key = self.recipe_key = "5" * 64
        self.constants = flat(**{**CONSTANTS, **constants})
        self.fields: Mapping[str, Any] = {}
        self.samples = list(samples)
        self.lengths: Mapping[str, Array] = {
            "num_tokens": np.array([len(s["input_ids"]) for s in self.samples], dtype=np.int32),
            "num_patches": np.array([sum(map(len, s["patches"])) for s in self.samples], dtype=np.int32),
            "num_images": np.array([len(s["patches"]) for s in self.samples], dtype=np.int32),
        }

    def __len__(self) -> int:
        return len(self.samples)

    def sample_id(self, index: int) -> str:
        return f"fake-{index}"

    def ids_digest(self) -> str:
        return self.key

    def read(self, index: int) -> Mapping[str, Any]:
        return self.samples[index]


def vl_config(folder: Path, *, model: Path, **train: Any) -> Config:
    """Returns a config of conversations whose run folder is `folder`/runs/tiny; `train` are fields of [train]."""
    return Config(
        name="tiny",
        source=SourceConfig(kind="jsonl", manifest=str(folder / "train.jsonl")),
        vision=VisionConfig(processor=str(model)),
        text=TextConfig(tokenizer=str(model), prompt="chat"),
        train=TrainConfig(model=str(model), output_dir=str(folder / "runs"), **{"init": "random", **train}),
        path=str(folder / "tiny.toml"),
    )
