"""Tiny models of several families that see and speak: folders with tokenizer, template and processor, and configs.

Templates are our own, in each family's format; sizes are as small as the classes allow; weights are random.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.zoo.conversations import TURNS

DEMO = Path(__file__).resolve().parents[1] / "demo" / "vision"

_TEXTS = [
    "What is it? A cat. A dog. Still a cat, and two dogs: what do they do?",
    "user assistant system model User: Assistant: Assistant: A cat. Assistant: A dog.",
]

# Images first, a space behind the role, and an answer that brings its own newline.
_ONEVISION = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + ' ' }}
{%- for p in m.content if p.type == 'image' -%}{{ '<image>' }}{%- endfor -%}
{%- for p in m.content if p.type == 'text' -%}{{ '\\n' + p.text }}{%- endfor -%}
{{ '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

# Roles in words alone; what closes a turn is a control token.
_IDEFICS = """\
{{ '<|im_start|>' }}
{%- for m in messages -%}
{{ m.role | capitalize + (':' if m.content[0].type == 'image' else ': ') }}
{%- for p in m.content -%}{%- if p.type == 'image' %}{{ '<image>' }}{%- else %}{{ p.text }}{% endif -%}{%- endfor -%}
{{ '<end_of_utterance>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif -%}
"""

# Nothing closes a turn.
LLAVA = """\
{%- for m in messages -%}
{{ m.role | upper + ': ' }}
{%- for p in m.content if p.type == 'image' -%}{{ '<image>\\n' }}{%- endfor -%}
{%- for p in m.content if p.type == 'text' -%}{{ p.text + ' ' }}{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif -%}
"""

# A message of the user between control tokens; an answer has no header of its own.
_MISTRAL = """\
{{ '<s>' }}
{%- for m in messages -%}
{%- if m.role == 'user' %}{{ '[INST]' }}{% endif -%}
{%- for p in m.content -%}{%- if p.type == 'image' %}{{ '[IMG]' }}{%- else %}{{ p.text }}{% endif -%}{%- endfor -%}
{{ '[/INST]' if m.role == 'user' else '</s>' }}
{%- endfor -%}
"""

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 28,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family. answer: what is learnt of an answer in the middle. config: of the folder's tokens.

    together: whether a conversation may have several images.
    """

    processor: str
    image_processor: str
    template: str
    special: tuple[str, ...]
    eos: str
    config: Callable[[Callable[[str], int], int], Any]
    model: str
    image_settings: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    answer: str = "{}"
    together: bool = True


def _onevision(ids: Callable[[str], int], size: int) -> Any:
    from transformers import LlavaOnevisionConfig

    return LlavaOnevisionConfig(
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **_VISION},
        text_config={"model_type": "qwen2", "vocab_size": size, **_TEXT},
        image_token_index=ids("<image>"),
        video_token_index=ids("<video>"),
        image_grid_pinpoints=_PINPOINTS,
    )


def _idefics(config: str) -> Callable[[Callable[[str], int], int], Any]:
    """Returns what makes a config of this class, of Idefics3's shape."""

    def made(ids: Callable[[str], int], size: int) -> Any:
        import transformers

        return getattr(transformers, config)(
            vision_config=_VISION,
            text_config={"model_type": "llama", "vocab_size": size, "pad_token_id": ids("<pad>"), **_TEXT},
            image_token_id=ids("<image>"),
            pad_token_id=ids("<pad>"),
            scale_factor=2,
        )

    return made


def _internvl(ids: Callable[[str], int], size: int) -> Any:
    from transformers import InternVLConfig

    return InternVLConfig(
        vision_config={**_VISION, "image_size": (28, 28), "patch_size": (14, 14)},
        text_config={"model_type": "qwen2", "vocab_size": size, **_TEXT},
        image_token_id=ids("<IMG_CONTEXT>"),
        image_seq_length=1,
    )


def _pixtral(ids: Callable[[str], int], size: int) -> Any:
    from transformers import LlavaConfig

    return LlavaConfig(
        vision_config={"model_type": "pixtral", "head_dim": 8, **_VISION, "image_size": 56},
        text_config={"model_type": "mistral", "vocab_size": size, "head_dim": 16, **_TEXT},
        image_token_index=ids("[IMG]"),
        image_seq_length=1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )


def _qwen2_vl(ids: Callable[[str], int], size: int) -> Any:
    from transformers import Qwen2VLConfig

    return Qwen2VLConfig(
        text_config={"vocab_size": size, "rope_parameters": _MROPE, **_TEXT},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
        **_qwen_ids(ids),
    )


def _qwen2_5_vl(ids: Callable[[str], int], size: int) -> Any:
    from transformers import Qwen2_5_VLConfig

    return Qwen2_5_VLConfig(
        text_config={"vocab_size": size, "rope_parameters": _MROPE, **_TEXT},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "fullatt_block_indexes": [0],
        },
        **_qwen_ids(ids),
    )


def _qwen_ids(ids: Callable[[str], int]) -> dict[str, int]:
    return {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }


_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_PINPOINTS = [[28, 28], [28, 56], [56, 28], [56, 56]]
_SQUARE = {"height": 28, "width": 28}
_ROWS = tuple(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7))
_IDEFICS_TOKENS = (
    "<pad>",
    "<|im_start|>",
    "<end_of_utterance>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
)
_QWEN: dict[str, Any] = {
    "image_processor": "Qwen2VLImageProcessorPil",
    "template": TURNS.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
    "special": (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
    "eos": "<|im_end|>",
    "answer": "{}<|im_end|>",
    "image_settings": {"size": {"shortest_edge": 784, "longest_edge": 3136}},
}


def _idefics_family(name: str) -> Family:
    """Idefics3, or SmolVLM, which differs in the names of its classes alone."""
    return Family(
        processor=f"{name}Processor",
        image_processor=f"{name}ImageProcessorPil",
        template=_IDEFICS,
        special=(*_IDEFICS_TOKENS, *_ROWS),
        eos="<end_of_utterance>",
        config=_idefics(f"{name}Config"),
        model=f"{name}ForConditionalGeneration",
        image_settings={"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
        settings={"image_seq_len": 1},
        answer=" {}<end_of_utterance>",
    )


FAMILIES: dict[str, Family] = {
    "llava_onevision": Family(
        processor="LlavaOnevisionProcessor",
        image_processor="LlavaOnevisionImageProcessorPil",
        template=_ONEVISION,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"),
        eos="<|im_end|>",
        config=_onevision,
        model="LlavaOnevisionForConditionalGeneration",
        image_settings={"size": _SQUARE, "image_grid_pinpoints": _PINPOINTS},
        settings={"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
        answer="{}<|im_end|>",
        together=False,
    ),
    "idefics3": _idefics_family("Idefics3"),
    "smolvlm": _idefics_family("SmolVLM"),
    "internvl": Family(
        processor="InternVLProcessor",
        image_processor="GotOcr2ImageProcessorPil",
        template=TURNS.replace("IMAGE", "<IMG_CONTEXT>\\n"),
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        eos="<|im_end|>",
        config=_internvl,
        model="InternVLForConditionalGeneration",
        image_settings={"size": _SQUARE, "crop_to_patches": False, "min_patches": 1, "max_patches": 4},
        settings={"image_seq_length": 1},
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        answer="{}<|im_end|>",
    ),
    "pixtral": Family(
        processor="PixtralProcessor",
        image_processor="PixtralImageProcessorPil",
        template=_MISTRAL,
        special=("<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        eos="</s>",
        config=_pixtral,
        model="LlavaForConditionalGeneration",
        image_settings={"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}},
        settings={"patch_size": 14},
        answer="{}</s>",
    ),
    "qwen2_vl": Family(
        processor="Qwen2VLProcessor", config=_qwen2_vl, model="Qwen2VLForConditionalGeneration", **_QWEN
    ),
    "qwen2_5_vl": Family(
        processor="Qwen2_5_VLProcessor", config=_qwen2_5_vl, model="Qwen2_5_VLForConditionalGeneration", **_QWEN
    ),
}
"""By model type. Gemma 3 and Qwen3-VL have folders of the demo."""

FOLDERS = {"gemma3": DEMO / "gemma3_model", "qwen3_vl": DEMO / "model"}
ANSWERS = {"gemma3": "{}<end_of_turn>", "qwen3_vl": "{}<|im_end|>"}
NAMES = (*FAMILIES, *FOLDERS)


def model_folder(name: str, root: Path) -> Path:
    """Returns the folder of a family, written once below a root."""
    if name in FOLDERS:
        return FOLDERS[name]
    folder = root / name
    if not folder.exists():
        write_family(FAMILIES[name], folder)
    return folder


def write_family(family: Family, folder: Path) -> None:
    """Writes tokenizer, chat template, processors and config of a family into a folder."""
    import transformers

    tokenizer = _tokenizer(family)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(family.template, encoding="utf-8")
    getattr(transformers, family.image_processor)(**family.image_settings).save_pretrained(folder)
    settings = {"processor_class": family.processor, **family.settings}
    (folder / "processor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    family.config(tokenizer.convert_tokens_to_ids, len(tokenizer)).save_pretrained(folder)


def random_model(folder: Path) -> Any:
    """Returns a model of a folder's config with random weights, the same ones every time."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from forebay.pretrained import from_folder

    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(from_folder(AutoConfig, folder)).eval()


def picture(seed: int, *, width: int = 64, height: int = 48) -> Any:
    """Returns an RGB image of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def talk(*answers: str, images: Sequence[Any] = (), question: str = "What is it?") -> list[dict[str, Any]]:
    """Returns a conversation whose first question has the images."""
    made: list[dict[str, Any]] = []
    for turn, answer in enumerate(answers):
        shown = [{"type": "image", "image": image} for image in images] if turn == 0 else []
        made.append({"role": "user", "content": [*shown, {"type": "text", "text": question}]})
        made.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return made


def _tokenizer(family: Family) -> Any:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        show_progress=False,
        special_tokens=list(family.special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    trained.train_from_iterator(_TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained,
        eos_token=family.eos,
        pad_token=family.special[0],
        extra_special_tokens=family.tokens or {},
        padding_side="right",
    )
