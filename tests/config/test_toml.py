"""A TOML file of a stranger gets its answer at once; the fault rows count it under a limit of CPU time."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import load_config
from forebay.config.load import MAX_DEPTH, parse_toml
from forebay.errors import ConfigError

MANY = 100_000
"""tomllib needs a quarter of an hour for a key of so many parts."""


@pytest.mark.parametrize(
    "text",
    [
        "a" + ".a" * MANY + " = 1",
        "[a" + ".a" * MANY + "]",
        "[[a" + ".a" * MANY + "]]",
        "a" + ' . "a"' * MANY + " = 1",
        "a" + ".'a'" * MANY + " = 1",
        "x = {a" + ".a" * MANY + " = 1}",
    ],
)
def test_a_key_of_100_000_parts_is_named_at_once(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config.toml is not TOML: a key has more than 16 parts"):
        load_config(path)


@pytest.mark.parametrize("text", ["a = " + "[" * MANY, "a = " + "[" * MANY + "]" * MANY, "a = " + "{a = " * MANY])
def test_values_that_lie_too_deep_are_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config.toml is not TOML: its values lie in one another too deep"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a = " + "[" * 20 + "]" * 20, "a lies more than 16 levels deep"),
        ("a = 0x" + "f" * MANY, "a is an integer of 400000 bits"),
        ("a = " + "9" * MANY, "is not TOML: Exceeds the limit"),
        ("\n".join(f"a{i} = 1" for i in range(100)), "and 82 more"),
    ],
)
def test_other_numbers_and_depths_that_no_setting_has(text: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        load_config(path)


@pytest.mark.parametrize(
    "override",
    [
        "a" + ".a" * MANY + "=1",
        "a=" + "[" * MANY,
        "a={a" + ".a" * MANY + "=1}",
        "a=" + "a." * MANY + "a",
        "a=" + "[" * 20 + "]" * 20,
    ],
)
def test_an_override_gets_its_answer_too(override: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('name = "x"\n')
    with pytest.raises(ConfigError):
        load_config(path, overrides=[override])


@given(
    st.lists(
        st.sampled_from(
            ["a.b", '"c.d"', "'e.f'", '"""g.\nh."""', "'''i.'''", "# j.k.l", "=", "\n", "[", "]", ".", "1.5"]
        ),
        max_size=9,
    )
)
def test_what_is_read_is_what_tomllib_reads(parts: list[str]) -> None:
    text = "".join(parts)
    assert _answer(parse_toml, text) == _answer(tomllib.loads, text)


def _answer(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError as err:
        return "many parts" if "parts" in str(err) else "no TOML"


@given(st.lists(st.integers(0, 40), max_size=6))
def test_dots_in_strings_and_comments_part_no_key(counts: list[int]) -> None:
    dots = [".a" * count for count in counts]
    text = "\n".join(f'k{i} = [\'x{d}\', """y{d}""", "z\\"{d}"] # c{d}' for i, d in enumerate(dots))
    assert list(parse_toml(text)) == [f"k{i}" for i in range(len(dots))]


def test_as_many_parts_as_settings_could_have_are_read() -> None:
    key = ".".join("a" * MAX_DEPTH)
    assert parse_toml(f"{key} = 1") == tomllib.loads(f"{key} = 1")
