"""Tokens of a text against those of the tokenizer called on it alone: kinds of tokenizer, trained on the demo texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ConfigError
from forebay.pretrained import from_folder
from forebay.steps.text.symbols import _QWEN2_RULE
from forebay.steps.text.vocabulary import Vocabulary
from tests.steps.text.test_encoder import QWEN3_ASR, step_of

TEXTS = [
    json.loads(line)["text"]
    for line in (Path(__file__).parents[3] / "demo" / "text" / "sentences.jsonl").read_text("utf-8").splitlines()
]
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
SPECIAL = list(NAMED.values())
LLAMA3 = _QWEN2_RULE.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
WORDS = ["forebay", "the ", "C++", "\n", "  ", "<b>", "ing", "é"]
GEMMA = "{% for m in messages %}<start_of_turn>{{ m.role }}\n<think>{{ m.content }}\n{% endfor %}"


def trained(
    model: Any, rules: Any, *, normalizer: Any = None, byte_level: bool = True, vocab_size: int = 900, **more: Any
) -> Tokenizer:
    made = Tokenizer(model)
    made.normalizer, made.pre_tokenizer = normalizer, rules
    kinds = {models.BPE: trainers.BpeTrainer, models.Unigram: trainers.UnigramTrainer}
    trainer = kinds.get(type(model), trainers.WordPieceTrainer)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    unk = {"unk_token": "<unk>"} if trainer is trainers.UnigramTrainer else {}
    # A third of the texts, so that the others have characters and words which it does not know.
    made.train_from_iterator(
        TEXTS[::3],
        trainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL,
            initial_alphabet=alphabet,
            show_progress=False,
            **unk,
            **more,
        ),
    )
    return made


def split(rule: str) -> Any:
    parts = pre_tokenizers.Split(Regex(rule), behavior="isolated")
    return pre_tokenizers.Sequence([parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_bpe(rules: Any = None, *, normalizer: Any = None, **settings: Any) -> Tokenizer:
    rules = rules or pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = trained(models.BPE(**settings), rules, normalizer=normalizer)
    made.decoder = decoders.ByteLevel()
    return made


def with_words(made: Tokenizer, *, special: bool = False, **how: Any) -> Tokenizer:
    (made.add_special_tokens if special else made.add_tokens)([AddedToken(word, **how) for word in WORDS])
    return made


def with_pieces(made: Tokenizer, more: list[str]) -> Tokenizer:
    document = json.loads(made.to_str())
    vocab = document["model"]["vocab"]
    vocab.update((token, len(vocab) + i) for i, token in enumerate(sorted(set(more) - set(vocab))))
    return Tokenizer.from_str(json.dumps(document))


def metaspace() -> Tokenizer:
    rules = pre_tokenizers.Metaspace(prepend_scheme="first")
    return trained(models.BPE(unk_token="<unk>", fuse_unk=True), rules, byte_level=False)


def unigram() -> Tokenizer:
    made = trained(models.Unigram(), pre_tokenizers.Metaspace(), byte_level=False)
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return made


def word_pieces() -> Tokenizer:
    rules = pre_tokenizers.BertPreTokenizer()
    return trained(
        models.WordPiece(unk_token="<unk>"), rules, normalizer=normalizers.BertNormalizer(), byte_level=False
    )


def clip() -> Tokenizer:
    rule = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    parts = pre_tokenizers.Split(Regex(rule), behavior="removed", invert=True)
    rules = pre_tokenizers.Sequence([parts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    lower = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()])
    model = models.BPE(end_of_word_suffix="</w>", continuing_subword_prefix="", unk_token="</s>")
    made = trained(model, rules, normalizer=lower, end_of_word_suffix="</w>")
    return with_pieces(made, [f"{letter}</w>" for letter in pre_tokenizers.ByteLevel.alphabet()])


def gemma() -> Tokenizer:
    """Spaces as letters, new lines and marks in the model's own pieces, bytes for what it lacks."""
    model = models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    more = ["\n", "\n\n", "▁▁", "<table>", "<start_of_turn>", "<think>", *(f"<0x{i:02X}>" for i in range(256))]
    made = with_pieces(trained(model, None, byte_level=False), more)
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    made.add_tokens([AddedToken(token, normalized=False) for token in more[:6]])
    return made


def truncating() -> Tokenizer:
    made = byte_bpe()
    made.enable_truncation(7)
    made.enable_padding(length=7)
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": byte_bpe,
    "qwen": lambda: byte_bpe(split(_QWEN2_RULE), normalizer=normalizers.NFC()),
    "llama3": lambda: byte_bpe(split(LLAMA3), ignore_merges=True),
    "lower": lambda: byte_bpe(normalizer=normalizers.Lowercase()),
    "prefix space": lambda: byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "ignore_merges": lambda: byte_bpe(ignore_merges=True),
    "stored truncation": truncating,
    "metaspace": metaspace,
    "unigram": unigram,
    "unigram with added": lambda: with_words(unigram()),
    "wordpiece": word_pieces,
    "clip": clip,
    "added": lambda: with_words(byte_bpe()),
    "added, qwen": lambda: with_words(byte_bpe(split(_QWEN2_RULE), normalizer=normalizers.NFKC())),
    "added, as words": lambda: with_words(byte_bpe(), single_word=True, lstrip=True, rstrip=True),
    "added, lower": lambda: with_words(byte_bpe(normalizer=normalizers.Lowercase()), normalized=True),
    "dropout": lambda: byte_bpe(dropout=0.3),
    "gemma": gemma,
}


def saved(made: Tokenizer, folder: Path, template: str | None = None) -> Vocabulary:
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Vocabulary(folder, digest=tokenizer_digest(folder))


def mixed(texts: list[str]) -> list[str]:
    """1,000 texts; words that tokenizers may have added stand in some, also in words and beside spaces."""
    put = [*WORDS, " the ", "<table>", "\n\n", "   ", "Thé C++ing", "①", "\U0001f9ff"]
    made = [text if i % 3 else text[: i % 29] + put[i // 3 % len(put)] + text[i % 29 :] for i, text in enumerate(texts)]
    return made[:1000]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few("gpt2", "llama3", "metaspace", "unigram", "clip", "gemma", "wordpiece", "added", "stored truncation")
def test_tokens_are_those_of_the_tokenizer_called_on_the_text_alone(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind]()
    vocabulary = saved(made, tmp_path / "model", GEMMA if kind == "gemma" else None)
    if kind == "dropout":
        made.model.dropout = None
        made.save(str(tmp_path / "model" / "tokenizer.json"))
    wanted = from_folder(AutoTokenizer, tmp_path / "model")
    texts = mixed(TEXTS[1:])
    with vocabulary.together(texts):
        together = [vocabulary.encode(text, sample_id="s") for text in texts]
    assert together == [wanted(text, add_special_tokens=False).input_ids for text in texts]
    assert [vocabulary.encode(text, sample_id="s") for text in texts[::5]] == together[::5]
    assert len(set(map(tuple, together))) > 700


def test_special_tokens_and_marks_of_the_template_stay_text(tmp_path: Path) -> None:
    made = byte_bpe()
    made.add_tokens(["<think>", "<|12.34|>", "<b>", "user"])
    made.add_special_tokens(["<|im_end|>"])
    vocabulary = saved(made, tmp_path / "model", "user <think>")
    text = "a <think> b <|12.34|> c <|im_end|> d <b> e user f"
    ids = vocabulary.encode(text, sample_id="s")
    assert [made.id_to_token(i) for i in ids if i >= made.get_vocab_size(with_added_tokens=False)] == ["<b>", "user"]
    assert vocabulary.decode(ids) == text
    assert vocabulary.find("<think>") in vocabulary.control_ids


@pytest.mark.parametrize("what", ["strftime_now('%d %b %Y')", "['a', 'b'] | random"])
def test_a_prompt_whose_template_asks_for_the_day_or_for_chance_is_refused(what: str, tmp_path: Path) -> None:
    folder = shutil.copytree(QWEN3_ASR, tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text("{{ " + what + " }}" + template.read_text())
    with pytest.raises(ConfigError, match=r"text\.tokenizer: .*asks for the date of the day or for chance"):
        step_of("qwen3_asr", folder).opened(folder)
    assert step_of("plain", folder).opened(folder).encode("a", None, None, sample_id="s")["input_ids"].size
