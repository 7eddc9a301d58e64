"""Losses of tiny models that hear: of forebay's batch of conversations with clips, and of the processor's own.

Models are the classes' own, with random weights, few and narrow layers, and the ids of the folder's tokenizer.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import soundfile
import torch
import transformers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from benchmarks.zoo.conversations import outcome_of
from benchmarks.zoo.inputs import clips
from forebay import load_config
from forebay.config.pretrained_folder import tokenizer_digest
from forebay.preprocess import Options, build
from forebay.steps.text.chat.processor_ids import Writer
from forebay.steps.text.vocabulary import Vocabulary
from forebay.train import make_loader

_LAYER = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_AUDIO = {**_LAYER, "num_mel_bins": 80}
_WITH_KV = {**_AUDIO, "num_key_value_heads": 2}
_WHISPER = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": 32}
_VISION = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
_TEXT = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16},
    **{"num_key_value_heads": 2, "max_position_embeddings": 4096},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_BOTH = ["sliding_attention", "full_attention"]
_GEMMA = {"layer_types": _BOTH, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
_MLA = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8)
_VIBE = {"hidden_size": 8, "num_filters": 2, "depths": (1,) * 7}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
_OUT_OF_16 = dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), 16)
TINY: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "AudioFlamingo3": {"audio": _AUDIO, "text": {"model_type": "qwen2"}},
    "Dots3Note": {
        "audio": {
            **{**_LAYER, "num_key_value_heads": 2, "head_dim": 8, "downsample_hidden_size": 8},
            **{"adapter_input_size": 16, "adapter_out_dim": 32, "conv_output_size": 128},
        },
        "vision": {**_LAYER, "mlp_layer_types": ["dense"], "adapter_in_dim": 16, "adapter_out_dim": 32},
        "text": {
            **{**_MLA, "v_head_dim": 16, "n_routed_experts": 2, "num_experts_per_tok": 1},
            **{"layer_types": ["sliding_attention"] * 2, "mlp_layer_types": ["dense"] * 2},
        },
    },
    "Gemma4": {"audio": _LAYER, "text": {**_GEMMA, "global_head_dim": 16, "vocab_size_per_layer_input": 512}},
    "Gemma4Unified": {"audio": {}, "text": {"layer_types": _BOTH, "global_head_dim": 16}},
    "GlmAsr": {"audio": _WITH_KV, "text": {"model_type": "llama"}},
    "MossTranscribeDiarize": {"audio": _AUDIO, "text": {"model_type": "qwen3"}},
    "MuseSpark": {
        "audio": {"hidden_sizes": (8,) * 4, "depths": (1,) * 4, "out_hidden_size": 32},
        "vision": {**_LAYER, "layer_types": ["full_attention"]},
        "text": {"layer_types": _BOTH, "layer_rope_theta": [10000.0, 0], "mlp_layer_types": ["dense"] * 2},
    },
    "MusicFlamingo": {"audio": {**_AUDIO, "model_type": "audioflamingo3_encoder"}, "text": {"model_type": "qwen2"}},
    "Nemotron3_5Transcribe": {
        "audio": {
            "asr_config": _WITH_KV,
            "diarization_config": {
                "audio_config": _WITH_KV,
                "head_config": {"hidden_size": 8, "audio_hidden_size": 16},
            },
        },
        "text": {"layers_block_type": ["full_attention", "mlp"], "mtp_layers_block_type": [], "n_routed_experts": 2},
        "word_timestamp": {**_LAYER, "vocab_size": 8, "blank_token_id": 7},
    },
    "Phi4Multimodal": {
        "audio": {"hidden_size": 16, "intermediate_size": 32, "num_blocks": 2, "num_attention_heads": 2, **_OUT_OF_16},
        "vision": {**_LAYER, "num_hidden_layers": 2, "crop_size": 28, "image_size": 28},
    },
    "Qwen2Audio": {"audio": {**_WHISPER, "num_mel_bins": 80}, "text": {"model_type": "qwen2"}},
    "Qwen2_5Omni": {
        "audio": {**_WHISPER, "num_mel_bins": 80},
        "vision": {**_VISION, "fullatt_block_indexes": [0]},
        "text": {"rope_parameters": _ROPE},
    },
    "Qwen3ASR": {"audio": {**_WHISPER, "downsample_hidden_size": 8}, "text": {"model_type": "qwen3"}},
    "Qwen3OmniMoe": {
        "audio": {**_WHISPER, "num_mel_bins": 80, "downsample_hidden_size": 8},
        "vision": {**_VISION, "deepstack_visual_indexes": [0]},
        "text": {"rope_parameters": {**_ROPE, "mrope_interleaved": True}, **_EXPERTS},
    },
    "VibeVoiceAsr": {
        "acoustic_tokenizer_encoder": _VIBE,
        "semantic_tokenizer_encoder": _VIBE,
        "text": {"model_type": "qwen2"},
    },
}
"""By the beginnings of classes' names the settings that make them small, by section."""
WITHOUT = {
    "EmbeddingGemma2Processor": "it has no model with a loss",
    "Gemma3nProcessor": "its model's tower for images needs timm",
}
"""Why no loss of a class is compared."""
NOTES = {
    "Phi4MultimodalProcessor": "beside a longer clip it leaves a frame of a clip's end behind the mask, which its "
    "model reads; a cache has the clip as it is alone"
}
"""Why losses of a class differ."""


OWN_LEAST = 1e-6
"""What losses of forebay's own log-mel are within: on some machines they are the same."""


def loss_section() -> str:
    """Returns the part of docs/models.md of losses: of every class that writes conversations with clips."""
    lines = []
    for name in sorted((*(f"{name}Processor" for name in TINY), *WITHOUT), key=str.lower):
        with tempfile.TemporaryDirectory() as folder:
            lines.append(loss_line(name, Path(folder)))
    return (
        "### Losses\n\nA tiny model of each class, with random weights, is given forebay's batches and the processor's "
        "own: each conversation alone, and all of them together.\n\n| class | alone | together | |\n|---|---|---|---|\n"
        + "\n".join(lines)
        + "\n"
    )


def loss_line(name: str, folder: Path) -> str:
    """Returns the row of a class. folder: an empty one."""
    if name in WITHOUT:
        return f"| `{name}` | no loss | | {WITHOUT[name]} |"
    families = tuple(kind for kind, cls in PROCESSOR_MAPPING_NAMES.items() if cls == name)
    (folder / "model").mkdir()
    outcome = outcome_of(name, families, folder / "model", "audio")
    assert outcome is not None
    assert outcome.encoder is not None, outcome.why
    talks = _talks(folder, outcome.encoder.writer, several=outcome.encoder.text_form.most.get("audio") != 1)
    model = _tiny_model(name.removesuffix("Processor"), outcome.encoder.writer)
    alone, together = (_differs(model, folder, talks, batch_size=size) for size in (1, len(talks)))
    is_own = outcome.sound is not None and outcome.sound[1] is not None
    least, note = (OWN_LEAST, "forebay's own log-mel") if is_own else (0.0, NOTES.get(name, ""))
    return f"| `{name}` | {_said(max(alone, least))} | {_said(max(together, least))} | {note} |"


def _talks(folder: Path, writer: Writer, *, several: bool) -> list[list[dict[str, Any]]]:
    """Returns conversations about clips, which lie in a folder with their list."""
    rate_hz, names = int(writer.parts["audio"].sampling_rate), ["0.flac", "1.flac", "2.flac"]
    for name, clip in zip(names, clips(rate_hz), strict=True):
        soundfile.write(folder / name, clip, rate_hz)
    asked = [["0.flac"], ["1.flac"], *([["2.flac", "0.flac"], []] if several else [["2.flac"]])]
    talks = []
    for each in asked:
        parts = [*({"type": "audio", "audio": name} for name in each), {"type": "text", "text": "What is it?"}]
        answer = [{"type": "text", "text": "A cat."}]
        talks.append([{"role": "user", "content": parts}, {"role": "assistant", "content": answer}])
    rows = (json.dumps({"id": str(number), "messages": talk}) for number, talk in enumerate(talks))
    (folder / "train.jsonl").write_text("\n".join(rows))
    return talks


def _tiny_model(name: str, writer: Writer) -> Any:
    """Returns a model of a class, the same one every time, for the tokenizer of its processor."""
    sections = {f"{section}_config": dict(values) for section, values in TINY[name].items()}
    tokenizer = writer.processor.tokenizer
    token = tokenizer.convert_tokens_to_ids(writer.placeholders["audio"])
    text = {"vocab_size": max(tokenizer.get_vocab().values()) + 1, **_TEXT}
    kind = "ForConditionalGeneration"
    if name == "Phi4Multimodal":  # its own config is that of texts
        kind, settings = "ForCausalLM", {k: v for k, v in text.items() if k != "head_dim"}
        sections["audio_config"]["audio_token_id"] = token
        sections["vision_config"]["image_token_id"] = 0
    else:
        name += "Thinker" if "Omni" in name else ""
        settings = {"audio_token_id": token, "audio_token_index": token, "vision_start_token_id": 0}
        sections["text_config"] = text | sections["text_config"]
    config = getattr(transformers, f"{name}Config")(**settings, **sections)
    torch.manual_seed(0)
    return getattr(transformers, name + kind)(config).eval()


def _differs(model: Any, folder: Path, talks: Sequence[list[dict[str, Any]]], *, batch_size: int) -> float:
    """Returns by how much the losses of forebay's batches and of the processor's differ at most."""
    vocabulary = Vocabulary(folder / "model", digest=tokenizer_digest(folder / "model"))
    writer = Writer(vocabulary, folder / "model", ("audio",))
    config = load_config(
        {
            "name": "talks",
            "source": {"kind": "jsonl", "manifest": str(folder / "train.jsonl")},
            "audio": {
                "features": "extractor",
                "extractor": str(folder / "model"),
                "sample_rate_hz": int(writer.parts["audio"].sampling_rate),
            },
            "text": {"tokenizer": str(folder / "model"), "prompt": "chat"},
            "plan": {"kind": "bucket", "edges_s": [100.0], "batch_size": batch_size},
            "run": {"cache_root": str(folder / "caches"), "num_workers": 1},
        }
    )
    build(config, Options(progress=False))
    tensors = {"return_tensors": "pt"}
    options = {"text_kwargs": {"padding": True, **tensors}, "audio_kwargs": tensors}
    most = 0.0
    loader: Any = make_loader(config, with_ids=True)
    for batch, ids in loader:
        held = [talks[int(number)] for number in ids]
        own = writer.processor.apply_chat_template(
            [_opened(folder, talk) for talk in held], tokenize=True, return_dict=True, processor_kwargs=options
        )
        most = max(most, abs(_loss(model, batch) - _loss(model, {**own, "labels": batch["labels"]})))
    return most


def _opened(folder: Path, talk: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a conversation whose clips are read."""

    def part(each: Mapping[str, Any]) -> Mapping[str, Any]:
        name = each.get("audio")
        return each if name is None else {**each, "audio": soundfile.read(folder / name, dtype="float32")[0]}

    return [{**turn, "content": list(map(part, turn["content"]))} for turn in talk]


def _loss(model: Any, batch: Mapping[str, Any]) -> float:
    torch.manual_seed(1)  # some models add noise to what they hear
    with torch.no_grad():
        return float(model(**batch).loss)


def _said(difference: float) -> str:
    return "the same" if difference == 0 else f"within {10.0 ** math.ceil(math.log10(difference)):g}"
