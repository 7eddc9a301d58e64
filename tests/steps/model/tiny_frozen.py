"""Tiny random models of the families that `[[model]]` knows, saved as their users have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as T

RATE_HZ = 16_000
_TOKENIZER = Path(__file__).parents[3] / "demo" / "speech" / "model"
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_CONVS: dict[str, Any] = {
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 4, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}


def _mimi() -> tuple[Any, Any]:
    config = T.MimiConfig(
        **{**_SIZES, "num_key_value_heads": 2, "head_dim": 16},
        sampling_rate=RATE_HZ,
        num_filters=4,
        num_quantizers=4,
        codebook_size=64,
        codebook_dim=16,
        vector_quantization_hidden_dimension=16,
        upsample_groups=32,
    )
    return T.MimiModel(config), T.EncodecFeatureExtractor(feature_size=1, sampling_rate=RATE_HZ)


def _encodec() -> tuple[Any, Any]:
    config = T.EncodecConfig(
        sampling_rate=RATE_HZ, hidden_size=16, num_filters=4, codebook_size=512, codebook_dim=16, num_lstm_layers=1
    )
    return T.EncodecModel(config), T.EncodecFeatureExtractor(feature_size=1, sampling_rate=RATE_HZ)


def _dac() -> tuple[Any, Any]:
    config = T.DacConfig(encoder_hidden_size=8, decoder_hidden_size=64, n_codebooks=3, codebook_size=64, codebook_dim=4)
    return T.DacModel(config), T.DacFeatureExtractor(sampling_rate=RATE_HZ, hop_length=512)


def _xcodec() -> tuple[Any, Any]:
    config = T.XcodecConfig(
        acoustic_model_config=T.DacConfig(
            encoder_hidden_size=8,
            decoder_hidden_size=64,
            codebook_size=64,
            downsampling_ratios=[4, 5, 8, 2],
            upsampling_ratios=[4, 5, 8, 2],
            hidden_size=16,
        ),
        semantic_model_config=T.HubertConfig(**_SIZES, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2),
        codebook_size=64,
        codebook_dim=48,
    )
    return T.XcodecModel(config), T.DacFeatureExtractor(sampling_rate=RATE_HZ, hop_length=320)


def _hubert() -> tuple[Any, Any]:
    return T.HubertModel(T.HubertConfig(**_SIZES, **_CONVS)), T.Wav2Vec2FeatureExtractor(return_attention_mask=False)


def _w2v_bert() -> tuple[Any, Any]:
    config = T.Wav2Vec2BertConfig(**_SIZES, feature_projection_input_dim=160, conv_depthwise_kernel_size=7)
    return T.Wav2Vec2BertModel(config), T.SeamlessM4TFeatureExtractor()


def _whisper() -> tuple[Any, Any]:
    config = T.WhisperConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=808,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )
    return T.WhisperModel(config), T.WhisperFeatureExtractor()


def _t5() -> tuple[Any, Any]:
    config = T.T5Config(vocab_size=808, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return T.T5EncoderModel(config), _tokenizer()


def _clip_text() -> tuple[Any, Any]:
    config = T.CLIPTextConfig(**_SIZES, vocab_size=808, max_position_embeddings=128, bos_token_id=1, eos_token_id=2)
    return T.CLIPTextModel(config), _tokenizer()


def _qwen3() -> tuple[Any, Any]:
    config = T.Qwen3Config(**_SIZES, num_key_value_heads=1, head_dim=16, vocab_size=808)
    return T.Qwen3ForCausalLM(config), _tokenizer()


def _bert() -> tuple[Any, Any]:
    return T.BertModel(T.BertConfig(**_SIZES, vocab_size=808)), _tokenizer()


def _llama() -> tuple[Any, Any]:
    return T.LlamaForCausalLM(T.LlamaConfig(**_SIZES, num_key_value_heads=1, vocab_size=808)), _tokenizer()


def _gpt2() -> tuple[Any, Any]:
    tokenizer = _tokenizer()
    tokenizer.pad_token = None  # as that of GPT-2
    return T.GPT2LMHeadModel(T.GPT2Config(vocab_size=808, n_embd=32, n_layer=2, n_head=2)), tokenizer


def _judge() -> tuple[Any, Any]:
    labels = {"id2label": {0: "bad", 1: "good", 2: "best"}, "label2id": {"bad": 0, "good": 1, "best": 2}}
    return T.BertForSequenceClassification(T.BertConfig(**_SIZES, vocab_size=808, **labels)), _tokenizer()


def _listener() -> tuple[Any, Any]:
    config = T.HubertConfig(**_SIZES, **_CONVS, num_labels=1)
    return T.HubertForSequenceClassification(config), T.Wav2Vec2FeatureExtractor(return_attention_mask=False)


def _viewer() -> tuple[Any, Any]:
    config = T.ViTConfig(**_SIZES, image_size=32, patch_size=8, num_labels=3)
    return T.ViTForImageClassification(config), T.ViTImageProcessorPil(size={"height": 32, "width": 32})


def _clip() -> tuple[Any, Any]:
    text = {**_SIZES, "vocab_size": 808, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2}
    config = T.CLIPConfig(text_config=text, vision_config={**_SIZES, "image_size": 32, "patch_size": 8})
    images = T.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return T.CLIPModel(config), T.CLIPProcessor(images, _tokenizer())


def _siglip() -> tuple[Any, Any]:
    config = T.SiglipVisionConfig(**_SIZES, image_size=32, patch_size=8)
    return T.SiglipVisionModel(config), T.SiglipImageProcessorPil(size={"height": 32, "width": 32})


def _dinov2() -> tuple[Any, Any]:
    config = T.Dinov2Config(
        **{n: v for n, v in _SIZES.items() if n != "intermediate_size"}, image_size=28, patch_size=14
    )
    return T.Dinov2Model(config), T.BitImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )


def _clip_vision() -> tuple[Any, Any]:
    config = T.CLIPVisionConfig(**_SIZES, image_size=32, patch_size=8)
    return T.CLIPVisionModel(config), T.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )


def _tokenizer() -> Any:
    return T.AutoTokenizer.from_pretrained(_TOKENIZER)


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    name[1:]: make
    for name, make in globals().items()
    if name.startswith("_") and callable(make) and name not in ("_tokenizer",) and not name.startswith("__")
}


def save_tiny(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Returns a folder with the model of a family, its random weights, and what prepares its input."""
    torch.manual_seed(seed)
    model, processor = MODELS[name]()
    for each, buffer in model.named_buffers():  # codebooks are buffers, and zeros until they are trained
        if each.endswith("embed") or each.endswith("embed_sum"):
            buffer.normal_()
        elif each.endswith(("cluster_usage", "cluster_size")):
            buffer.fill_(1.0)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def save_vae(folder: Path, *, seed: int = 0, scale: float = 1.0) -> Path:
    """Returns a folder with a random `AutoencoderKL` of diffusers: a place of a latent is 4 pixels wide and high.

    scale: of its last weights.
    """
    import diffusers

    torch.manual_seed(seed)
    blocks: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "block_out_channels": (8, 8, 8),
    }
    kl: Any = diffusers.AutoencoderKL
    model = kl(**blocks, layers_per_block=1, norm_num_groups=4, scaling_factor=0.25, shift_factor=0.5)
    model.quant_conv.weight.data *= scale
    model.save_pretrained(folder)
    return folder
