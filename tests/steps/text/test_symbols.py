"""Symbol tables: folders that transformers loads, and texts that they cannot write."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ConfigError, TextError
from forebay.steps.text.symbols import Special, Split, SymbolTable, is_symbol_table, symbols_of
from forebay.steps.text.vocabulary import Vocabulary

NONE = Special()
PHONES = ["h ə l ˈo͡ʊ | w ˈɜː l d .", "n ə m ˈʌ s t eː ।"]


def _folder(folder: Path, texts: list[str], *, split: Split, special: Special = NONE) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in SymbolTable.of(texts, split=split, special=special).files().items():
        (folder / name).write_bytes(content)
    return folder


def _vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary(folder, digest=tokenizer_digest(folder))


@pytest.mark.parametrize("split", ["spaces", "characters"])
def test_transformers_loads_a_table_and_gives_its_texts_back(tmp_path: Path, split: Split) -> None:
    from transformers import AutoTokenizer

    special = Special(bos="<s>", eos="</s>")
    folder = _folder(tmp_path / "symbols", PHONES, split=split, special=special)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    table = SymbolTable.of(PHONES, split=split, special=special)
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) == table.tokens
    ids = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert ids == [0, 1, 2, 3]
    for text in PHONES:
        found = tokenizer(text).input_ids
        assert found == [table.tokens.index(symbol) for symbol in symbols_of(text, split)]
        assert tokenizer.decode(found) == text
    assert is_symbol_table(folder)


def test_the_same_symbols_give_the_same_folder_and_key(tmp_path: Path) -> None:
    one = _folder(tmp_path / "one", PHONES, split="spaces")
    other = _folder(tmp_path / "other", [*reversed(PHONES), *PHONES, "w"], split="spaces")
    assert tokenizer_digest(one) == tokenizer_digest(other)
    assert tokenizer_digest(one) != tokenizer_digest(_folder(tmp_path / "third", [*PHONES, "x"], split="spaces"))
    assert tokenizer_digest(one) != tokenizer_digest(_folder(tmp_path / "fourth", PHONES, split="characters"))


@pytest.mark.parametrize(("split", "text", "named"), [("spaces", "h ə ʒ l", "'ʒ'"), ("characters", "həʒ", "'ʒ'")])
def test_a_symbol_that_the_table_lacks_costs_the_text(tmp_path: Path, split: Split, text: str, named: str) -> None:
    vocabulary = _vocabulary(_folder(tmp_path / "symbols", PHONES, split=split))
    with pytest.raises(
        TextError, match=rf"^s1: the symbol table in .*symbols has no {named}; .*forebay symbols"
    ) as caught:
        vocabulary.encode(text, sample_id="s1")
    assert caught.value.reason == "unknown_symbol"
    assert vocabulary.decode(vocabulary.encode(PHONES[0], sample_id="s1")) == PHONES[0]


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20))
def test_a_table_of_a_text_writes_it(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "symbols"
    vocabulary = _vocabulary(_folder(folder, [text], split="characters"))
    ids = vocabulary.encode(text, sample_id="s")
    assert vocabulary.decode(ids) == text
    assert len(ids) == len(text)


@pytest.mark.parametrize(
    ("texts", "special"),
    [
        (["a <pad> b"], Special()),
        (["a"], Special(bos="<s>", eos="<s>")),
        (["a"], Special(eos="a")),
        (["a"], Special(pad="")),
    ],
)
def test_a_special_token_is_no_symbol(texts: list[str], special: Special) -> None:
    with pytest.raises(ConfigError, match=r"is a special token and a symbol too; choose another one") as caught:
        SymbolTable.of(texts, split="spaces", special=special)
    assert caught.value.code == "FB119"


def test_other_tokenizers_are_no_tables(tmp_path: Path) -> None:
    assert not is_symbol_table(tmp_path)
    for content in ("{", "[]", '{"tokenizer_class": "x"}'):
        (tmp_path / "tokenizer_config.json").write_text(content)
        assert not is_symbol_table(tmp_path)
