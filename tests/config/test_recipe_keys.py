"""The recipe keys of the configs in configs/, and of sources that none of them has, as recorded.

A key that moves by accident orphans every cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forebay import load_config
from forebay.steps.recipe import recipe_of

RECORDED = Path(__file__).parent / "recipe_keys.json"
ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
_TOKENIZER = str(ROOT / "demo" / "speech" / "model")
_QWEN = str(ROOT / "demo" / "speech" / "qwen3_asr_model")
_GIVEN = {"features": "input_features", "labels": "labels"}

OTHERS: dict[str, dict[str, Any]] = {
    "hf_audio": {
        "source": {"kind": "hf", "manifest": "set"},
        "text": {"tokenizer": _TOKENIZER, "prompt": "whisper"},
    },
    "hf_given": {
        "source": {"kind": "hf", "manifest": "set", "columns": _GIVEN},
        "audio": {"features": "given"},
        "text": {"tokenizer": _TOKENIZER, "prompt": "given"},
    },
    "hf_given_features": {
        "source": {"kind": "hf", "manifest": "set", "columns": {"features": "mel"}},
        "audio": {"features": "given", "n_mels": 128, "dtype": "float16"},
    },
    "table": {
        "source": {
            **{"kind": "table", "manifest": "t.csv", "audio_dir": "clips", "keep_columns": ["snr", "client_id"]},
            "columns": {"audio": "path", "text": "sentence", "language": "locale", "duration": "seconds"},
        },
        "text": {"tokenizer": _TOKENIZER, "prompt": "whisper"},
    },
    "folder": {
        "source": {"kind": "folder", "manifest": "wavs", "languages_from_folders": True},
        "text": {"tokenizer": _TOKENIZER, "prompt": "whisper"},
    },
    "text": {
        "source": {"kind": "text", "manifest": "texts.txt", "max_samples": 500_000},
        "audio": {"features": "none"},
        "text": {"tokenizer": _QWEN, "prompt": "plain"},
    },
}
"""Configs by name; their sources need not be there."""


def present_keys() -> dict[str, str]:
    """Returns the recipe key of every config by its name."""
    files: dict[str, Any] = {path.stem: path for path in sorted(CONFIGS.glob("*.toml"))}
    others = {name: {"name": name, **values} for name, values in OTHERS.items()}
    return {name: recipe_of(load_config(config)).key for name, config in {**files, **others}.items()}


def test_recipe_keys_are_the_recorded_ones() -> None:
    recorded = json.loads(RECORDED.read_bytes())
    assert present_keys() == recorded, (
        "recipe keys moved, so caches of these configs will be built again; if that is meant, bump the version of the "
        "step that changed, and record them: python -m tests.config.test_recipe_keys"
    )


def test_recipe_keys_differ() -> None:
    assert len(set(present_keys().values())) == len(list(CONFIGS.glob("*.toml"))) + len(OTHERS) > len(OTHERS)


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(present_keys(), indent=1) + "\n", encoding="ascii")
