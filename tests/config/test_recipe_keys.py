"""The recipe keys of the configs in configs/, as recorded: a key that moves by accident orphans every cache."""

from __future__ import annotations

import json
from pathlib import Path

from forebay import load_config
from forebay.steps.recipe import recipe_of

RECORDED = Path(__file__).parent / "recipe_keys.json"
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def present_keys() -> dict[str, str]:
    """Returns the recipe key of every config by its name."""
    return {path.stem: recipe_of(load_config(path)).key for path in sorted(CONFIGS.glob("*.toml"))}


def test_recipe_keys_are_the_recorded_ones() -> None:
    recorded = json.loads(RECORDED.read_bytes())
    assert present_keys() == recorded, (
        "recipe keys moved, so caches of these configs will be built again; if that is meant, bump the version of the "
        "step that changed, and record them: python -m tests.config.test_recipe_keys"
    )


def test_recipe_keys_differ() -> None:
    assert len(set(present_keys().values())) == len(list(CONFIGS.glob("*.toml"))) > 0


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(present_keys(), indent=1) + "\n", encoding="ascii")
