"""Token ids of configurations and generation configurations, moved by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig, WhisperConfig

from forebay.errors import ConfigError
from forebay.train.vocabulary_ids import IdMover, missing_message

OLD = ["a", "b", "c", "<s>", "</s>", "<|en|>", "<|hi|>", "<|go|>", "<|nospeech|>", "<|notimestamps|>"]
NEW = {token: 9 - number for number, token in enumerate(OLD)}


def mover(new: dict[str, int] = NEW, old: list[str] = OLD) -> IdMover:
    return IdMover(old_tokens=dict(enumerate(old)), new_ids=new)


def test_every_kind_of_field_moves() -> None:
    config = GenerationConfig(
        bos_token_id=3,
        eos_token_id=[4, 0],
        pad_token_id=None,
        suppress_tokens=[0, 1, 99],
        begin_suppress_tokens=[2],
        bad_words_ids=[[0, 1], [2, 99]],
        forced_decoder_ids=[(1, 5), (2, None), [3, 7]],
        lang_to_id={"<|en|>": 5, "<|hi|>": 6, "<|xx|>": 77},
        task_to_id={"transcribe": 7},
        max_length=17,
        num_beams=1,
    )
    ids = mover()
    ids.move_generation(config)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (6, [5, 9], None)
    assert (config.suppress_tokens, config.begin_suppress_tokens) == ([9, 8], [7])
    assert (config.bad_words_ids, config.forced_decoder_ids) == ([[9, 8]], [[1, 4], [3, 2]])
    assert (config.lang_to_id, config.task_to_id) == ({"<|en|>": 4, "<|hi|>": 3}, {"transcribe": 2})
    assert (config.max_length, ids.num_dropped, ids.missing) == (17, 3, {})


def test_a_list_of_which_nothing_is_left_is_none() -> None:
    config = GenerationConfig(suppress_tokens=[77], begin_suppress_tokens=[])
    ids = mover()
    ids.move_generation(config)
    assert (config.suppress_tokens, config.begin_suppress_tokens, ids.num_dropped) == (None, None, 1)


def test_nested_configurations_move_too() -> None:
    inner = WhisperConfig(vocab_size=10, bos_token_id=3, eos_token_id=4, pad_token_id=0, decoder_start_token_id=7)
    inner.begin_suppress_tokens = [1]
    outer = SimpleNamespace(sub_configs={"text_config": object, "none": object}, text_config=inner, audio_token_id=5)
    outer.to_dict = lambda: {"audio_token_id": 5, "text_config": {}, "none": None}
    ids = mover(NEW | {"new": 10})
    ids.move_config(outer)
    assert outer.audio_token_id == 4
    assert (inner.vocab_size, inner.bos_token_id, inner.eos_token_id, inner.decoder_start_token_id) == (11, 6, 5, 2)
    assert inner.begin_suppress_tokens == [8]


def test_what_the_model_needs_is_named_with_its_fields_and_the_remedy() -> None:
    new = {token: number for number, token in enumerate(["a", "b", "c", "<s>"])}
    ids = mover(new)
    ids.move_generation(GenerationConfig(eos_token_id=[4], pad_token_id=4, decoder_start_token_id=7))
    assert ids.missing == {
        "</s>": ["generation_config.pad_token_id", "generation_config.eos_token_id"],
        "<|go|>": ["generation_config.decoder_start_token_id"],
    }
    message = missing_message(ids.missing, "folder")
    assert "lacks tokens that the model needs: </s> (generation_config.pad_token_id, generation_config.eos_" in message
    assert "tokenizer.add_special_tokens({'extra_special_tokens': ['</s>', '<|go|>']})" in message


def test_a_map_of_which_nothing_is_left_is_needed() -> None:
    ids = mover({"a": 0})
    ids.move_generation(GenerationConfig(lang_to_id={"<|en|>": 5, "<|hi|>": 6}))
    assert ids.missing == {tag: ["generation_config.lang_to_id"] for tag in ("<|en|>", "<|hi|>")}


def test_an_id_that_names_no_old_token() -> None:
    """transformers' defaults are ids of the published models: 151,705 in a small one is nothing, 5 would be a token."""
    ids = mover(NEW, OLD[:5])
    config = GenerationConfig(bos_token_id=151_705)
    ids.move_generation(config)
    assert config.bos_token_id == 151_705
    with pytest.raises(ConfigError, match=r"generation_config.eos_token_id is 5, which is no token .* '</s>' of the"):
        ids.move_generation(GenerationConfig(eos_token_id=5))


STAMPS = ["<|0.00|>", "<|0.02|>", "<|0.04|>"]


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (["x", "<|nospeech|>", "<|notimestamps|>", *STAMPS], None),
        (["<|nospeech|>", "x", "<|notimestamps|>", *STAMPS], r"<\|nospeech\|> has id 0, wanted 1: Whisper counts from"),
        (["<|nospeech|>", "<|notimestamps|>", "x", *STAMPS], r"<\|0.00\|> has id 3, wanted 2"),
        (["<|nospeech|>", "<|notimestamps|>", *STAMPS[:2]], r"<\|0.04\|> has id None, wanted 4"),
    ],
)
def test_whispers_timestamps_stand_where_transformers_counts_them(new: list[str], message: str | None) -> None:
    old = [*OLD, *STAMPS, "text"]
    config: Any = GenerationConfig(no_timestamps_token_id=9)
    ids = mover({token: number for number, token in enumerate(new)}, old)
    if message is None:
        ids.move_generation(config)
        assert config.no_timestamps_token_id == 2
        return
    with pytest.raises(ConfigError, match=message):
        ids.move_generation(config)
