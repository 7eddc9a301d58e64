"""Makes demo/speech/model (Whisper) and demo/speech/qwen3_asr_model: tokenizers and configurations, no weights.

python demo/make_models.py

The script reads the transcripts of demo/speech/train.parquet. The same transcripts give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pyarrow.parquet as pq
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AddedToken,
    Qwen2Tokenizer,
    Qwen3ASRFeatureExtractor,
    WhisperFeatureExtractor,
    WhisperTokenizer,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.whisper.tokenization_whisper import LANGUAGES

HERE = Path(__file__).resolve().parent
NUM_TEXT_TOKENS = 700

# Same output as the template that transformers' conversion of Qwen3-ASR writes: one system turn, one user turn that
# holds only audio, assistant turns as given.
QWEN3_ASR_TEMPLATE = """\
{%- macro text_of(message) -%}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif -%}
{%- endmacro -%}
{{- '<|im_start|>system\\n' -}}
{%- for message in messages if message.role == 'system' %}{{ text_of(message) }}{% endfor -%}
{{- '<|im_end|>\\n<|im_start|>user\\n' -}}
{%- for message in messages if message.content is not string -%}
{%- for part in message.content if part.type == 'audio' -%}
{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
{%- endfor -%}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- generation -%}{{- text_of(message) + '<|im_end|>\\n' -}}{%- endgeneration -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


def read_texts() -> list[str]:
    """Returns the demo transcripts with white space normalised."""
    table = pq.read_table(HERE / "speech" / "train.parquet", columns=["transcript"])
    return [re.sub(r"\s+", " ", text) for text in table["transcript"].to_pylist()]


def train_bpe(
    texts: list[str], pre_tokenizer: pre_tokenizers.PreTokenizer, *, vocab_size: int = NUM_TEXT_TOKENS
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns vocabulary and merges of a byte-level BPE over the texts; every byte has a token, so none is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def special(token: str) -> AddedToken:
    return AddedToken(token, normalized=False, special=True)


def make_whisper(folder: Path, texts: list[str]) -> None:
    """Writes Whisper's tokenizer, feature extractor and a tiny configuration; special tokens in Whisper's order."""
    vocab, merges = train_bpe(texts, pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer = WhisperTokenizer(vocab=vocab, merges=merges, pad_token="<|endoftext|>", model_max_length=448)
    tags = [f"<|{code}|>" for code in LANGUAGES]
    tasks = ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    tokens = ["<|startoftranscript|>", *tags, *tasks]
    tokenizer.add_special_tokens({"extra_special_tokens": [special(token) for token in tokens]})
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    write_whisper_config(folder, {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}, tokenizer)


def write_whisper_config(folder: Path, ids: dict[str, int], tokenizer: WhisperTokenizer) -> None:
    """Writes config.json and generation_config.json. Two layers of width 64: a step is fast on a CPU."""
    common = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
    }
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "vocab_size": len(tokenizer),
        **common,
    }
    generation = {
        **common,
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "max_length": 448,
        "return_timestamps": False,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation)


def make_qwen3_asr(folder: Path, texts: list[str]) -> None:
    """Writes Qwen3-ASR's tokenizer, chat template, feature extractor and a tiny configuration."""
    # Part of every sequence, so counted as often: the vocabulary should know the words.
    names = ("English", "Spanish", "French", "Italian", "Russian", "None")
    headers = ["system\n", "user\n", "assistant\n", *(f"language {name}" for name in names)]
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    vocab, merges = train_bpe(
        [*texts, *headers * len(texts)],
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
    )
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        extra_special_tokens={
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
    )
    tokenizer.add_tokens([special("<|im_start|>")], special_tokens=True)
    # Not special: the processor looks for <asr_text> in text decoded without special tokens.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<asr_text>", "<timestamp>")])
    tokenizer.chat_template = QWEN3_ASR_TEMPLATE
    tokenizer.save_pretrained(folder)
    Qwen3ASRFeatureExtractor().save_pretrained(folder)
    write_qwen3_asr_config(folder, tokenizer)


def write_qwen3_asr_config(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    """Writes config.json: two layers of width 64 on either side."""
    config = {
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "model_type": "qwen3_asr",
        "audio_token_id": tokenizer.convert_tokens_to_ids("<|audio_pad|>"),
        "timestamp_token_id": tokenizer.convert_tokens_to_ids("<timestamp>"),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": [tokenizer.pad_token_id, tokenizer.eos_token_id],
        "tie_word_embeddings": True,
        "audio_config": {
            "model_type": "qwen3_asr_encoder",
            "num_mel_bins": 128,
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "downsample_hidden_size": 16,
            "output_dim": 64,
        },
        "text_config": {
            "model_type": "qwen3",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    }
    write_json(folder / "config.json", config)


def write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "speech")
    args = parser.parse_args()
    texts = read_texts()
    make_whisper(args.out / "model", texts)
    make_qwen3_asr(args.out / "qwen3_asr_model", texts)
    print(f"tokenizers and configurations in {args.out}")


if __name__ == "__main__":
    main()
