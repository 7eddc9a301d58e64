"""Makes demo/vision/gemma3_model: tokenizer, chat template, processor and configuration of a tiny Gemma 3, no weights.

python demo/make_gemma3_model.py    reads the texts of demo/vision/train.jsonl; the same texts give the same bytes
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from make_models import special, write_json
from make_vision_model import COMMON_WORDS, HERE, read_texts
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer

MOST_TOKENS = 1400
IMAGE_SIDE, PATCH_SIDE, TOKENS_PER_IMAGE = 112, 14, 16
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
MARKS = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")

# Same output as Gemma 3's own template for messages of text and images; its system turn stands before the user's text.
TEMPLATE = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
{%- set first = messages[0]['content'] if messages[0]['content'] is string else messages[0]['content'][0]['text'] -%}
{%- set prefix = first + '\\n\\n' -%}
{%- set rest = messages[1:] -%}
{%- else -%}
{%- set prefix = '' -%}
{%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') -}}
{%- if message['content'] is string -%}
{{- message['content'] | trim -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{ '<start_of_image>' }}
{%- elif part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""


def make_gemma3(folder: Path, texts: list[str]) -> None:
    """Writes the folder."""
    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    trained.decoder = decoders.Replace("▁", " ")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=MOST_TOKENS, show_progress=False, special_tokens=[*SPECIAL, *MARKS, *bytes_], min_frequency=2
    )
    words = [f" {word}" for word in COMMON_WORDS.split()]
    trained.train_from_iterator([*texts, *words, *words, *["user\n", "model\n"] * len(texts)], trainer)
    write_tokenizer(folder, json.loads(trained.to_str())["model"])
    write_processor(folder)
    write_config(folder, num_tokens=trained.get_vocab_size())


def write_tokenizer(folder: Path, model: dict[str, Any]) -> None:
    """Writes the tokenizer of a trained BPE, with Gemma's own class and names."""
    tokenizer = GemmaTokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        extra_special_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        model_max_length=8192,
    )
    tokenizer.add_tokens([special(mark) for mark in MARKS], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def write_processor(folder: Path) -> None:
    """Writes processor_config.json and preprocessor_config.json as Gemma 3 ships them, but for smaller images."""
    write_json(
        folder / "preprocessor_config.json",
        {
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_pan_and_scan": None,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "Gemma3ImageProcessor",
            "image_seq_length": TOKENS_PER_IMAGE,
            "image_std": [0.5, 0.5, 0.5],
            "processor_class": "Gemma3Processor",
            "resample": 2,
            "rescale_factor": 1 / 255,
            "size": {"height": IMAGE_SIDE, "width": IMAGE_SIDE},
        },
    )
    write_json(
        folder / "processor_config.json", {"image_seq_length": TOKENS_PER_IMAGE, "processor_class": "Gemma3Processor"}
    )


def write_config(folder: Path, *, num_tokens: int) -> None:
    """Writes config.json and generation_config.json. Two layers of width 64 on either side."""
    ids = {name: number for number, name in enumerate((*SPECIAL, *MARKS))}
    ends = [ids["<eos>"], ids["<end_of_turn>"]]
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
        "eos_token_id": ends,
        "mm_tokens_per_image": TOKENS_PER_IMAGE,
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": num_tokens,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 1024,
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 16,
            "pad_token_id": ids["<pad>"],
            "bos_token_id": ids["<bos>"],
            "eos_token_id": ends,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": IMAGE_SIDE,
            "patch_size": PATCH_SIDE,
            "vision_use_head": False,
        },
    }
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": ids["<bos>"], "eos_token_id": ends, "pad_token_id": ids["<pad>"]},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "vision" / "gemma3_model")
    args = parser.parse_args()
    make_gemma3(args.out, read_texts())
    print(f"tokenizer and configurations in {args.out}")


if __name__ == "__main__":
    main()
