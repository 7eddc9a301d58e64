from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError, ForebayError
from forebay.init.candidate import value_of
from forebay.measure.doctor import apply, check_target, edited, settings_of
from forebay.measure.doctor_report import Advice
from forebay.steps.recipe import load_config, recipe_of

TEXT = """# mine
name = "x"      # [loader] is below

[plan]
k = 16          # my buckets
batch_seconds = 40

[loader]
seed = 17       # num_threads = 3

  [ run ]
num_workers = 2
"""


def of(name: str, value: Any, *, needs: Any = "nothing", rank: float = 0.5) -> Advice:
    return Advice(text="t", line="l", gain="g", sure="rule", rank=rank, settings={name: value}, needs=needs)


def test_comments_stay_and_the_old_value_stands_above() -> None:
    made = edited(TEXT, {"plan.k": 64, "loader.num_threads": 4, "run.num_workers": 8, "train.seed": 1})
    assert "# forebay doctor: was k = 16\nk = 64  # my buckets\n" in made
    assert "[loader]\nnum_threads = 4  # forebay doctor\nseed = 17       # num_threads = 3\n" in made
    assert "  [ run ]\n# forebay doctor: was num_workers = 2\nnum_workers = 8\n" in made
    assert made.endswith("\n[train]\nseed = 1  # forebay doctor\n")
    document = tomllib.loads(made)
    assert document["plan"] == {"k": 64, "batch_seconds": 40}


def test_a_setting_over_several_lines_is_taken_out_as_a_whole() -> None:
    text = '[plan]\nedges_s = [3, 5, # "short]"\n  7,\n]  # mine\nbatch_seconds = 40\n'
    made = edited(text, {"plan.k": 8, "plan.edges_s": None})
    assert tomllib.loads(made) == {"plan": {"k": 8, "batch_seconds": 40}}
    assert "# forebay doctor: was edges_s = [3, 5," in made


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]))
VALUES = st.one_of(st.integers(-(2**40), 2**40), st.booleans(), TEXTS)


@given(value=VALUES, section=st.sampled_from(["plan", "loader", "run", "new"]), key=st.sampled_from(["k", "seed", "z"]))
def test_whatever_is_set_is_what_the_file_says(value: Any, section: str, key: str) -> None:
    before = tomllib.loads(TEXT)
    made = tomllib.loads(edited(TEXT, {f"{section}.{key}": value}))
    assert made.pop(section) == {**before.pop(section, {}), key: value}
    assert made == before


@given(text=st.text(max_size=200))
def test_every_line_of_any_text_stays_where_none_is_of_the_setting(text: str) -> None:
    left = iter(edited(f"[plan]\n{text}", {"plan.of_no_text_here": 8, "plan.nor_this": None}).split("\n"))
    assert all(line in left for line in ["[plan]", *text.removesuffix("\n").split("\n")]), "in their order"


def test_a_line_end_of_unicode_in_a_value_is_none_of_the_file() -> None:
    made = edited('name = "a\u2028b\x85c"\n[plan]\nk = 2\n', {"plan.k": 8})
    assert tomllib.loads(made) == {"name": "a\u2028b\x85c", "plan": {"k": 8}}


def test_values_are_written_as_toml_reads_them() -> None:
    text = 'a"b\\c'
    assert tomllib.loads(f"x = {value_of(text)}")["x"] == text
    assert value_of(True) == "true"  # noqa: FBT003  the value is what is tested


def test_settings_that_need_a_build_come_when_they_are_asked_for() -> None:
    found = [of("loader.num_threads", 4), of("loader.num_threads", 8), of("vision.codec", "webp", needs="build")]
    assert settings_of(found, with_rebuild=False) == {"loader.num_threads": 4}
    assert settings_of(found, with_rebuild=True) == {"loader.num_threads": 4, "vision.codec": "webp"}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """The demo's config, in a folder from which its paths still lead to the demo."""
    text = Path("configs/demo_speech.toml").read_text(encoding="utf-8")
    file = tmp_path / "mine.toml"
    file.write_text(text.replace('"../demo', f'"{Path("demo").absolute()}'), encoding="utf-8")
    return file


def test_the_new_file_is_a_config_with_the_same_key(config_file: Path) -> None:
    config, target = load_config(str(config_file)), config_file.parent / "tuned.toml"
    apply(config, target, {"plan.k": 4, "plan.edges_s": None, "loader.prefetch": 16})
    made = load_config(str(target))
    assert made.plan is not None
    assert made.plan.k == 4  # type: ignore[union-attr]
    assert made.loader.prefetch == 16
    assert recipe_of(made).key == recipe_of(config).key
    assert "# the cache if there is one, else on the fly with a warning" in target.read_text(encoding="utf-8")
    assert sorted(path.name for path in config_file.parent.iterdir()) == ["mine.toml", "tuned.toml"]


def test_nothing_is_overwritten(config_file: Path) -> None:
    config = load_config(str(config_file))
    with pytest.raises(ConfigError, match="it is there already"):
        apply(config, config_file, {"loader.prefetch": 16})
    (config_file.parent / "broken").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="it is there already"):
        check_target(config, config_file.parent / "broken")


def test_another_folder_would_move_the_paths(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    with pytest.raises(ConfigError, match=r"paths in .* are relative to its folder"):
        check_target(load_config(str(config_file)), tmp_path / "below" / "tuned.toml")


def test_a_file_that_cannot_be_edited_so_is_refused(config_file: Path) -> None:
    text = config_file.read_text(encoding="utf-8")
    before, rest = text.split("\n[loader]\n", maxsplit=1)
    dotted = before.replace('name = "prompts"', 'loader.seed = 1\nname = "prompts"')
    config_file.write_text(f"{dotted}\n[train]{rest.split('[train]', maxsplit=1)[1]}", encoding="utf-8")
    config = load_config(str(config_file))
    with pytest.raises(ForebayError, match=r"cannot be edited here; set loader\.prefetch = 16 by hand"):
        apply(config, config_file.parent / "tuned.toml", {"loader.prefetch": 16})
    assert sorted(path.name for path in config_file.parent.iterdir()) == ["mine.toml"]
