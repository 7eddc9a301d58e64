"""Model folders with weights and the tokenizers that they are put on: small, trained here on the demo's texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from forebay.train.models.model_folder import load_model
from tests.text_corpus import ROOT, demo_texts

Family = Literal["whisper", "qwen3_asr", "qwen3_vl"]
FAMILIES: tuple[Family, ...] = ("whisper", "qwen3_asr", "qwen3_vl")
DEMO: dict[Family, Path] = {
    "whisper": ROOT / "demo" / "speech" / "model",
    "qwen3_asr": ROOT / "demo" / "speech" / "qwen3_asr_model",
    "qwen3_vl": ROOT / "demo" / "vision" / "model",
}
NUM_NEW_TEXT_TOKENS = 450


def model_folder(folder: Path, family: Family, *, tied: bool = True, rows: int | None = None, **changes: Any) -> Path:
    """Makes `folder` the demo model of a family with random weights.

    rows: of its embedding, by default as many as the tokenizer has tokens. changes: entries of config.json.
    """
    shutil.copytree(DEMO[family], folder)
    config = json.loads((folder / "config.json").read_bytes()) | changes
    for document in (config, config.get("text_config")):
        if document is not None:
            document["tie_word_embeddings"] = tied
            if "vocab_size" in document and rows is not None:
                document["vocab_size"] = rows
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    load_model(folder, seed=1, init="random").save_pretrained(folder)
    return folder


def document_of(folder: Path, name: str = "tokenizer.json") -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / name).read_bytes())
    return document


def new_tokenizer(folder: Path, family: Family, *, without: tuple[str, ...] = (), bare: bool = False) -> Path:
    """Makes `folder` a byte-level BPE of half of the demo's texts, with the control tokens of the demo model behind it.

    without: control tokens that it lacks. bare: tokenizer.json alone, as `tokenizers` writes it.
    """
    old = document_of(DEMO[family])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _splits(family)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=NUM_NEW_TEXT_TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([row["text"] for row in demo_texts()[::2]], trainer)
    document = json.loads(tokenizer.to_str())
    kept = [entry for entry in old["added_tokens"] if entry["content"] not in without]
    document["added_tokens"] = [entry | {"id": NUM_NEW_TEXT_TOKENS + i} for i, entry in enumerate(kept)]
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    if not bare:
        config = document_of(DEMO[family], "tokenizer_config.json")
        names = config.get("extra_special_tokens", [])
        config["extra_special_tokens"] = [name for name in names if name not in without]
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _splits(family: Family) -> Any:
    if family == "whisper":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
