"""Folders of tiny models, as their `save_pretrained` writes them, below the folder of a case."""

from __future__ import annotations

from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SIDE = {"height": 16, "width": 16}


def extractor(folder: Path, name: str) -> None:
    """Writes a feature extractor."""
    getattr(transformers, name)().save_pretrained(folder)


def vit(folder: Path) -> None:
    """Writes an image processor without a text."""
    transformers.ViTImageProcessorPil(size=SIDE).save_pretrained(folder)


def clip(folder: Path) -> None:
    """Writes CLIP's processor, with a tokenizer of letters."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "th", "the</w>", "<|startoftext|>", "<|endoftext|>"]
    merges, vocab = [("t", "h"), ("th", "e</w>")], {token: number for number, token in enumerate(tokens)}
    tokenizer = transformers.CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=30)
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=SIDE)
    transformers.CLIPProcessor(images, tokenizer).save_pretrained(folder)


def siglip2(folder: Path) -> None:
    """Writes SigLIP 2's processor, whose images differ in their numbers of patches, with a tokenizer of words."""
    words = ("<pad>", "</s>", "<unk>", "a", "photo", "of", "the", "dog", "cat")
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=12, padding_side="left", **names
    )
    images = transformers.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=40)
    transformers.Siglip2Processor(images, tokenizer).save_pretrained(folder)
