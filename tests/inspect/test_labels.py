from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.config import Config, SourceConfig, TextConfig
from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ConfigError
from forebay.inspect.inspect_lines import sample_lines
from forebay.inspect.sample import labels_of, read_sample
from forebay.pretrained import from_folder
from forebay.store.cache import open_cache
from tests.store_factory import make_cache

TOKENIZER = Path(__file__).parents[2] / "demo" / "speech" / "model"
PREFIX = ["<|startoftranscript|>"]


def config_with(tokenizer: Path) -> Config:
    return Config(
        name="prompts",
        source=SourceConfig(kind="tar", manifest="train.parquet"),
        text=TextConfig(tokenizer=str(tokenizer)),
    )


def encode(text: str) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer: Any = from_folder(AutoTokenizer, TOKENIZER)
    start, end = tokenizer.convert_tokens_to_ids([*PREFIX, "<|endoftext|>"])
    return [start, *tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids, end]


def test_labels_come_back_as_the_text_with_and_without_special_tokens(tmp_path: Path) -> None:
    texts = ["Please leave your message.", "¿Qué tal , señor ?", "Я не понимаю."]
    folder = make_cache(
        tmp_path,
        num_samples=3,
        texts=texts,
        input_ids=[encode(t) for t in texts],
        tokenizer=tokenizer_digest(TOKENIZER),
    )
    cache = open_cache(folder)
    for index, text in enumerate(texts):
        labels = labels_of(cache, config_with(TOKENIZER), cache.read(index))
        assert labels is not None
        # Spaces before punctuation too: nothing is tidied on the way back.
        assert (labels["text"], labels["note"]) == (text, None)
        assert labels["with_special_tokens"] == f"<|startoftranscript|>{text}<|endoftext|>"
        assert labels["ids"] == cache.read(index)["input_ids"].tolist()
    lines = list(sample_lines(read_sample(cache, 0, config=config_with(TOKENIZER))))
    assert lines[-2:] == [
        f"  text     {texts[0]}",
        f"  special  <|startoftranscript|>{texts[0]}<|endoftext|>",
    ]


def test_without_a_config_the_way_to_the_text_is_told(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path))
    labels = labels_of(cache, None, cache.read(0))
    assert labels == {
        "ids": [1, 3, 4, 2],
        "prefix_len": 1,
        "text": None,
        "with_special_tokens": None,
        "note": "not decoded: a cache does not hold its tokenizer; run: forebay inspect CONFIG --sample I",
    }


def test_another_tokenizer_than_the_caches_decodes_nothing(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, tokenizer="ab" * 32))
    labels = labels_of(cache, config_with(TOKENIZER), cache.read(0))
    assert labels is not None
    assert labels["text"] is None
    assert labels["note"] == (
        f"not decoded: text.tokenizer {TOKENIZER} has digest {tokenizer_digest(TOKENIZER)[:16]}, "
        f"the cache was made with {'ab' * 8}; name the folder that the cache was made with"
    )


def test_a_tokenizer_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path))
    with pytest.raises(ConfigError, match=r"text\.tokenizer: .*nowhere is not a folder"):
        labels_of(cache, config_with(tmp_path / "nowhere"), cache.read(0))


def test_a_tokenizer_that_transformers_cannot_load_is_a_config_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{}")
    (broken / "config.json").write_text('{"model_type": "whisper"}')
    cache = open_cache(make_cache(tmp_path, tokenizer=tokenizer_digest(broken)))
    with pytest.raises(ConfigError, match=r"text\.tokenizer: transformers cannot load .*broken"):
        labels_of(cache, config_with(broken), cache.read(0))


def test_a_recipe_without_text_has_no_labels(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, tokenizer=None))
    assert labels_of(cache, config_with(TOKENIZER), cache.read(0)) is None
