"""A tokenizer of characters as a folder: the smallest table of symbols that models of speech synthesis have."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BLANK = "<blank>"


def character_tokenizer(folder: Path, texts: Iterable[str], *, special: bool = True) -> Path:
    """Returns the folder, which holds a tokenizer of the characters of these texts behind five special tokens.

    special: it names begin, end and padding.
    """
    symbols = [*SPECIAL.values(), BLANK, *sorted(set("".join(texts)))]
    model = models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token=SPECIAL["unk_token"])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    named = SPECIAL if special else {"unk_token": SPECIAL["unk_token"]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=[BLANK], **named)
    fast.save_pretrained(folder)
    return folder
