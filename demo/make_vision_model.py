"""Makes demo/vision/model: tokenizer, chat template, image processor and configuration of a tiny Qwen3-VL, no weights.

python demo/make_vision_model.py    reads the texts of demo/vision/train.jsonl; the same texts give the same bytes
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from make_models import special, train_bpe, write_json
from tokenizers import Regex, pre_tokenizers
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

HERE = Path(__file__).resolve().parent
NUM_TEXT_TOKENS = 1000
# So few questions know few words; these are the ones that any English text is full of.
COMMON_WORDS = """
    the be to of and a in that have it for not on with he as you do at this but his by from they we say her she or an
    will my one all would there their what so up out if about who get which go me when make can like time no just him
    know take people into year your good some could them see other than then now look only come its over think also
    back after use two how our work first well way even new want because any these give day most us is are was were
    been has had did does said made where why many much more very such here through between under again same another
    while before left right top bottom image picture photo colour color number small large black white red green blue
    yellow brown man woman street water sky tree house car table hand yes three four five number behind front near
"""

# Same output as Qwen3-VL's own template for messages of text and images, and of its form for videos, tools and calls.
TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string %}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' %}{{ show(messages[0].content) + '\\n\\n' }}{% endif -%}
{{- 'These functions can be called, by JSON of name and arguments in <tool_call></tool_call>:\\n<tools>' -}}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor -%}
{{- '\\n</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{- '\\n<tool_response>\\n' + show(message.content) + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- elif message.role != 'system' or not tools -%}
{{- '<|im_start|>' + message.role + '\\n' + show(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n' -}}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson -}}
{{- '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


def read_texts() -> list[str]:
    """Returns questions and answers of demo/vision/train.jsonl, in its order."""
    lines = (HERE / "vision" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [text for line in lines for text in texts_of(json.loads(line))]


def texts_of(row: dict[str, Any]) -> Iterator[str]:
    """Yields the texts of a row of either form."""
    if "messages" not in row:
        yield from (row["question"], row["answer"])
    for message in row.get("messages", []):
        yield from (part["text"] for part in message["content"] if part["type"] == "text")


def make_qwen3_vl(folder: Path, texts: list[str]) -> None:
    """Writes the folder; special tokens in Qwen's order, as far as texts and images need them."""
    headers = ["system\n", "user\n", "assistant\n"]
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    vocab, merges = train_bpe(
        [*texts, *(f" {word}" for word in COMMON_WORDS.split()), *headers * len(texts)],
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        vocab_size=NUM_TEXT_TOKENS,
    )
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=merges, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=8192
    )
    names = ["im_start", "im_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"]
    tokenizer.add_tokens([special(f"<|{name}|>") for name in names], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    write_processor(folder)
    write_config(folder, tokenizer)


def write_processor(folder: Path) -> None:
    """Writes preprocessor_config.json as Qwen3-VL ships it, but for smaller images: at most 128 tokens each."""
    processor = {
        "size": {"longest_edge": 131_072, "shortest_edge": 16_384},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    write_json(folder / "preprocessor_config.json", processor)


def write_config(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    """Writes config.json and generation_config.json. Two layers of width 64 on either side."""
    end = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": [tokenizer.eos_token_id, tokenizer.pad_token_id]}
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in {
            "image": "image_pad",
            "video": "video_pad",
            "vision_start": "vision_start",
            "vision_end": "vision_end",
        }.items()
    }
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        **ids,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5_000_000,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            **end,
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "vision" / "model")
    args = parser.parse_args()
    make_qwen3_vl(args.out, read_texts())
    print(f"tokenizer and configurations in {args.out}")


if __name__ == "__main__":
    main()
