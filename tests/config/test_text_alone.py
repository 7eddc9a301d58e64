"""A config of texts without audio: what has to stand together, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.errors import ConfigError
from forebay.steps.recipe import load_config, recipe_of
from tests.text_corpus import TOKENIZER, text_config

MIXTURE = '[[mixture.source]]\ncache = "a"\n[[mixture.source]]\ncache = "b"\n'


def test_the_recipe_has_no_audio_step(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    recipe = recipe_of(config)
    assert [group.name for group in recipe.groups] == ["text"]
    document = recipe.document
    assert "audio" not in document
    assert document["source"]["kind"] == "text"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['audio.features="log_mel"'], r'source.kind is "text" and audio.features is "log_mel"'),
        (
            ['source.kind="jsonl"'],
            r'source.kind is "jsonl" and audio.features is "none"; text alone needs kind = "text"',
        ),
        (['text.prompt="qwen3_asr"'], r'text.prompt is "qwen3_asr" and audio.features is "none"'),
        (["source.max_duration_s=30.0"], r"source.min_duration_s and max_duration_s are for audio"),
        (["source.min_duration_s=0.5"], r"source.min_duration_s and max_duration_s are for audio"),
        (["audio.keep_waveform=true"], r'audio: keep_waveform is True and features = "none" has no audio'),
        (["audio.sample_rate_hz=8000"], r'audio: sample_rate_hz is 8000 and features = "none" has no audio'),
        (
            ['audio.dtype="float16"'],
            r'audio.dtype: unknown field of features = "none"; it is only for features = "log_mel", .*"waveform"',
        ),
        (["loader.crop_s=1.0"], r'crops need "w2v_bert" or "waveform"'),
        (['plan.kind="window"', "plan.batch_size=2"], r'plan.edges: only for kind = "bucket", not "window"'),
    ],
)
def test_settings_that_text_alone_cannot_have(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        text_config(tmp_path, *overrides)


def test_text_alone_needs_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('name = "t"\n[source]\nkind = "text"\nmanifest = "t.jsonl"\n[audio]\nfeatures = "none"\n')
    with pytest.raises(ConfigError, match=r'no \[text\] section and audio.features is "none"; text alone is tokenised'):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("asr_ratio = 0.8\n", r"asr_ratio needs \[\[mixture.source\]\]"),
        (f"asr_ratio = 0.8\n{MIXTURE}", r'asr_ratio is a share of micro-batches, and batches is "mixed"'),
        (
            f'asr_ratio = 1.0\nbatches = "per_source"\n{MIXTURE}',
            r"asr_ratio is 1.0, wanted more than 0 and less",
        ),
        (
            'asr_ratio = 0.8\nbatches = "per_source"\n' + MIXTURE.replace('"\n', '"\nweight = 1\n'),
            r"give one of asr_ratio and the weights of source",
        ),
        ('asr_ratio = 0.8\ncolumn = "language"\n', r"asr_ratio needs \[\[mixture.source\]\]"),
    ],
)
def test_an_asr_ratio_that_says_nothing(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.toml"
    source = '[source]\nkind = "tar"\nmanifest = "t.parquet"\n'
    path.write_text(f'name = "t"\n{source}[text]\ntokenizer = "{TOKENIZER}"\n[mixture]\n{text}')
    with pytest.raises(ConfigError, match=message):
        load_config(path)
