"""The meaning of a source's rows: by its name, as the sections have it, or a class of the user that nobody runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay import load_config
from forebay.config import Config
from forebay.config.code import facts_of, own_meaning
from forebay.config.data import MEANINGS
from forebay.errors import ConfigError
from forebay.steps.recipe import recipe_of

TOKENIZER = str(Path(__file__).resolve().parents[2] / "demo" / "speech" / "model")
PROCESSOR = str(Path(__file__).resolve().parents[2] / "demo" / "vision" / "model")
CLASS = '''raise SystemExit("nobody runs this file for a key")


class Dialogues:
    """Recordings that are asked about."""

    columns = ("audio", "text")
    groups: tuple = ["audio"]
'''


def loaded(folder: Path, meaning: str | None = "rows.py:Dialogues", *, allows: bool = True, **sections: Any) -> Config:
    source: dict[str, Any] = {"kind": "table", "manifest": "t.csv", **({} if meaning is None else {"meaning": meaning})}
    text = {"tokenizer": TOKENIZER, "prompt": "whisper"}
    document = {"name": "x", "source": source, "text": text, **sections}
    (folder / "rows.py").write_text(document.pop("code", CLASS))
    lines = [f"name = {document.pop('name')!r}", f"[run]\nallow_code = {str(allows).lower()}"]
    for section, values in document.items():
        lines += [f"[{section}]", *(f"{name} = {value!r}" for name, value in values.items())]
    (folder / "c.toml").write_text("\n".join(lines).replace("'", '"'))
    return load_config(folder / "c.toml")


@pytest.mark.parametrize(
    ("sections", "meaning"),
    [
        ({}, "recordings"),
        (
            {
                "source": {"kind": "text", "manifest": "t.txt"},
                "audio": {"features": "none"},
                "text": {"tokenizer": TOKENIZER},
            },
            "texts",
        ),
        *(
            (
                {
                    "vision": {"processor": PROCESSOR, "images": "processor"},
                    "text": {"tokenizer": TOKENIZER, "prompt": text},
                },
                name,
            )
            for name, text in {
                "conversations": "chat",
                "labels": "label",
                "captions": "plain",
                "images": "none",
            }.items()
        ),
    ],
)
def test_sections_mean_their_rows_where_no_meaning_is_named(
    tmp_path: Path, sections: dict[str, Any], meaning: str
) -> None:
    config = loaded(tmp_path, None, **sections)
    assert config.meaning == meaning
    assert facts_of(config) == MEANINGS[meaning].of_groups(["image"] if config.vision else ["audio"])
    assert "meaning" not in recipe_of(config).document["source"]


def test_a_named_meaning_moves_the_key_only_where_it_is_another_one(tmp_path: Path) -> None:
    key = recipe_of(loaded(tmp_path, None)).key
    assert recipe_of(loaded(tmp_path, "recordings")).key == key
    own = recipe_of(loaded(tmp_path))
    assert own.key != key
    assert own.document["source"]["meaning"]["class"] == "Dialogues"


def test_a_class_is_in_the_key_by_the_content_of_its_file(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    own = own_meaning(config)
    assert own is not None
    assert (own.facts.columns, own.facts.groups) == (("audio", "text"), ("audio",))
    assert recipe_of(config).key == recipe_of(loaded(tmp_path)).key
    assert recipe_of(loaded(tmp_path, code=CLASS + "# edited\n")).key != recipe_of(loaded(tmp_path)).key
    assert recipe_of(config).document["source"]["text_column"] == "text"
    assert "id_column" not in recipe_of(config).document["source"]


def test_code_needs_the_word_of_its_own_file(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r'source\.meaning has "rows\.py:Dialogues", which is code.*allow_code = true'
    ):
        loaded(tmp_path, allows=False)


@pytest.mark.parametrize(
    ("meaning", "code", "message"),
    [
        (
            "recording",
            CLASS,
            r'source\.meaning is "recording", wanted one of recordings, .*; did you mean recordings\?',
        ),
        ("../rows.py:Dialogues", CLASS, r"leads out of the config's folder"),
        ("rows.txt:Dialogues", CLASS, r'is no "file\.py:class"'),
        ("rows.py:Others", CLASS, r"has no class Others; its classes: Dialogues"),
        (
            "rows.py:Dialogues",
            "class Dialogues:\n    groups = ()\n",
            r"the body of class Dialogues .* says what its rows",
        ),
        (
            "rows.py:Dialogues",
            "class Dialogues:\n    columns = ('sound',)\n    groups = ()\n",
            r"names of \[source\.col",
        ),
        (
            "rows.py:Dialogues",
            "class Dialogues:\n    columns = ()\n    groups = ('video',)\n",
            r'of "audio" and "image"',
        ),
        (
            "rows.py:Dialogues",
            "class Dialogues:\n    columns = names()\n",
            r"line 2: columns and groups are read without",
        ),
        ("rows.py:Dialogues", "class Dialogues\n", r"line 1: .*; correct the file"),
    ],
)
def test_a_meaning_that_is_none_is_refused(tmp_path: Path, meaning: str, code: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_of(loaded(tmp_path, meaning, code=code))


def test_a_link_is_no_class(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    (tmp_path / "rows.py").rename(tmp_path / "other.py")
    (tmp_path / "rows.py").symlink_to("other.py")
    with pytest.raises(ConfigError, match="is a link") as caught:
        own_meaning(config)
    assert caught.value.code == "FB144"
