"""Tiny models of families that hear and speak: folders as of `tests.vlm_families`, recordings, and lists of talks.

Clips are cut from the demo's recordings; extractors take two seconds, so that encoders are small.
"""

from __future__ import annotations

import functools
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from benchmarks.zoo.conversations import HEARING
from tests.vlm_families import DEMO, Family, write_family

_AUDIO = {
    "num_mel_bins": 16,
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
}
_VISION = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
}
SPEECH = DEMO.parent / "speech" / "train-00000.tar"
RATE_HZ = 16_000


def _qwen2_audio(ids: Callable[[str], int], size: int) -> Any:
    from transformers import Qwen2AudioConfig

    return Qwen2AudioConfig(
        audio_config={**_AUDIO, "max_source_positions": 100},
        text_config={"model_type": "qwen2", "vocab_size": size, **_TEXT},
        audio_token_index=ids("<|AUDIO|>"),
    )


def _qwen2_5_omni(ids: Callable[[str], int], size: int) -> Any:
    from transformers import Qwen2_5OmniThinkerConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    return Qwen2_5OmniThinkerConfig(
        audio_config={**_AUDIO, "max_source_positions": 100, "n_window": 20, "output_dim": 32},
        vision_config={**_VISION, "fullatt_block_indexes": [0]},
        text_config={"vocab_size": size, "rope_parameters": rope, **_TEXT},
        audio_token_id=ids("<|AUDIO|>"),
        image_token_id=ids("<|IMAGE|>"),
        video_token_id=ids("<|VIDEO|>"),
        audio_token_index=ids("<|AUDIO|>"),
        image_token_index=ids("<|IMAGE|>"),
        video_token_index=ids("<|VIDEO|>"),
        vision_start_token_id=ids("<|vision_bos|>"),
        vision_end_token_id=ids("<|vision_eos|>"),
        audio_start_token_id=ids("<|audio_bos|>"),
        audio_end_token_id=ids("<|audio_eos|>"),
    )


def _qwen3_omni(ids: Callable[[str], int], size: int) -> Any:
    from transformers import Qwen3OmniMoeThinkerConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "head_dim": 16}
    return Qwen3OmniMoeThinkerConfig(
        audio_config={
            **_AUDIO,
            "n_window": 50,
            "n_window_infer": 100,
            "downsample_hidden_size": 8,
            "output_dim": 32,
        },
        vision_config={**_VISION, "deepstack_visual_indexes": [0]},
        text_config={"vocab_size": size, "rope_parameters": rope, **_TEXT, **experts},
        audio_token_id=ids("<|AUDIO|>"),
        image_token_id=ids("<|IMAGE|>"),
        video_token_id=ids("<|VIDEO|>"),
        vision_start_token_id=ids("<|vision_bos|>"),
        audio_start_token_id=ids("<|audio_bos|>"),
    )


def hearing(token: str, image: str = "") -> str:
    """Returns a template that shows a clip as a token, and an image as another one."""
    return HEARING.replace("AUDIO", token).replace("IMAGE", image) if image else HEARING.replace("AUDIO", token)


_OMNI = {
    "audio_bos_token": "<|audio_bos|>",
    "audio_token": "<|AUDIO|>",
    "audio_eos_token": "<|audio_eos|>",
    "vision_bos_token": "<|vision_bos|>",
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "vision_eos_token": "<|vision_eos|>",
}
QWEN2_AUDIO = Family(
    processor="Qwen2AudioProcessor",
    image_processor="WhisperFeatureExtractor",
    image_settings={"feature_size": 16, "chunk_length": 2},
    template=hearing("<|audio_bos|><|AUDIO|><|audio_eos|>"),
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    eos="<|im_end|>",
    answer="{}<|im_end|>",
    config=_qwen2_audio,
    model="Qwen2AudioForConditionalGeneration",
)
QWEN2_5_OMNI = Family(
    processor="Qwen2_5OmniProcessor",
    image_processor="WhisperFeatureExtractor",
    image_settings={"feature_size": 16, "chunk_length": 2},
    template=hearing("<|audio_bos|><|AUDIO|><|audio_eos|>", "<|vision_bos|><|IMAGE|><|vision_eos|>"),
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_OMNI.values()),
    eos="<|im_end|>",
    answer="{}<|im_end|>",
    tokens=_OMNI,
    config=_qwen2_5_omni,
    model="Qwen2_5OmniThinkerForConditionalGeneration",
)
QWEN3_OMNI = replace(
    QWEN2_5_OMNI,
    processor="Qwen3OmniMoeProcessor",
    config=_qwen3_omni,
    model="Qwen3OmniMoeThinkerForConditionalGeneration",
)
FAMILIES: Mapping[str, Family] = {
    "qwen2_audio": QWEN2_AUDIO,
    "qwen2_5_omni": QWEN2_5_OMNI,
    "qwen3_omni": QWEN3_OMNI,
}
_SIDES = {"shortest_edge": 784, "longest_edge": 3136}
SEES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2_5_omni": ("Qwen2VLImageProcessorPil", {"size": _SIDES}),
    "qwen3_omni": ("Qwen2VLImageProcessorPil", {"size": _SIDES, "patch_size": 16}),
}
"""The image processors of families that see too, by their names."""


def model_folder(name: str, root: Path) -> Path:
    """Returns the folder of a family, written once below a root."""
    folder = root / name
    if not folder.exists():
        write_family(FAMILIES[name], folder)
        if name in SEES:
            _add_images(folder, *SEES[name])
    return folder


def _add_images(folder: Path, cls: str, settings: Mapping[str, Any]) -> None:
    """Writes an image processor beside the extractor of a folder, as transformers saves a processor of both."""
    import transformers

    path = folder / "processor_config.json"
    parts = {
        "feature_extractor": json.loads((folder / "preprocessor_config.json").read_text()),
        "image_processor": getattr(transformers, cls)(**settings).to_dict(),
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}), encoding="utf-8")
    (folder / "preprocessor_config.json").unlink()


def random_model(name: str, folder: Path) -> Any:
    """Returns a model of a folder's config with random weights, the same ones every time."""
    import torch
    import transformers

    from forebay.pretrained import from_folder

    torch.manual_seed(0)
    cls = getattr(transformers, FAMILIES[name].model)
    return cls(from_folder(transformers.AutoConfig, folder)).eval()


@functools.cache
def recordings(count: int = 6) -> tuple[np.ndarray[Any, Any], ...]:
    """Returns recordings of the demo, float32 [num_samples] at 16 kHz."""
    found: list[np.ndarray[Any, Any]] = []
    with tarfile.open(SPEECH) as tar:
        for member in tar:
            if len(found) < count and member.name.endswith((".flac", ".wav")):
                file = tar.extractfile(member)
                assert file is not None
                found.append(soundfile.read(io.BytesIO(file.read()), dtype="float32")[0])
    return tuple(found)


def clips(folder: Path, seconds: Sequence[float], *, ending: str = "flac") -> list[str]:
    """Writes the beginnings of recordings into a folder; returns their names in it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"clip{number}.{ending}" for number in range(len(seconds))]
    for number, (name, length) in enumerate(zip(names, seconds, strict=True)):
        sound = recordings()[number % 6]
        soundfile.write(folder / name, np.resize(sound, round(length * RATE_HZ)), RATE_HZ)
    return names


def listed(folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "train.jsonl") -> Path:
    """Writes rows as JSON lines."""
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return folder / name


def said(question: str, answer: str, **row: Any) -> dict[str, Any]:
    """Returns a row of one turn."""
    talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": talk, **row}
