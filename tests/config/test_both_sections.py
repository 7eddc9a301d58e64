"""`[audio]` beside `[vision]`: rows that have a recording and images, by a meaning that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay import load_config
from forebay.config import Config
from forebay.errors import ConfigError
from forebay.preprocess.groups import Groups
from forebay.steps.recipe import contradictions, plan_example, recipe_of
from forebay.steps.text.caption import Caption
from forebay.steps.text.plain import Plain
from tests.config.test_meaning import PROCESSOR, TOKENIZER

CLASS = 'class Dialogues:\n    columns = ("audio", "image", "text")\n    groups = {groups}\n'
VISION = {"processor": PROCESSOR, "images": "processor"}
PLAIN = {"tokenizer": TOKENIZER, "prompt": "plain"}


def loaded(
    folder: Path, *, groups: str = '("audio", "image")', meaning: str | None = "rows.py:Dialogues", **sections: Any
) -> Config:
    (folder / "rows.py").write_text(CLASS.format(groups=groups))
    source = {"kind": "jsonl", "manifest": "m.jsonl", **sections.pop("source", {})}
    document: dict[str, Any] = {
        "source": source | ({} if meaning is None else {"meaning": meaning}),
        "audio": {},
        "vision": VISION,
    }
    document |= {"text": PLAIN, "run": {"allow_code": True}} | sections
    lines = ['name = "x"']
    for section, values in document.items():
        if values is not None:
            lines += [f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in values.items())]
    (folder / "c.toml").write_text("\n".join(lines))
    return load_config(folder / "c.toml")


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


def test_a_recipe_has_a_group_each_and_the_steps_of_either_section_alone(tmp_path: Path) -> None:
    both = recipe_of(loaded(tmp_path, audio={"features": "waveform"}))
    assert list(both.by_name) == ["audio", "image", "text"]
    assert list(both.document) == ["source", "audio", "vision", "text"]
    heard = recipe_of(loaded(tmp_path, groups='("audio",)', vision=None, audio={"features": "waveform"}))
    seen = recipe_of(loaded(tmp_path, groups='("image",)', audio=None))
    assert (both.document["audio"], both.document["vision"]) == (heard.document["audio"], seen.document["vision"])
    assert len({both.key, heard.key, seen.key}) == 3


def test_the_text_beside_both_is_that_of_the_recording(tmp_path: Path) -> None:
    assert isinstance(recipe_of(loaded(tmp_path)).text.step, Plain)
    seen = recipe_of(loaded(tmp_path, groups='("image",)', audio=None))
    assert isinstance(seen.text.step, Caption)
    label = recipe_of(loaded(tmp_path, text={"prompt": "label"}))
    assert label.text.step.name == "label"


def test_a_config_takes_the_items_that_it_has_a_section_for(tmp_path: Path) -> None:
    assert list(recipe_of(loaded(tmp_path, vision=None)).by_name) == ["audio", "text"]
    assert list(recipe_of(loaded(tmp_path, audio=None)).by_name) == ["image", "text"]


def test_a_plan_is_that_of_the_recording(tmp_path: Path) -> None:
    config = loaded(tmp_path, plan={"batch_seconds": 20})
    assert plan_example(config) == "[plan] with batch_seconds = 120"


def test_durations_and_slices_of_rows_are_both_settings(tmp_path: Path) -> None:
    config = loaded(tmp_path, source={"max_duration_s": 8, "rows": "0:10", "max_pixels": 4096})
    assert recipe_of(config).document["source"]["rows"] == "0:10"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"meaning": None},
            r'give one of \[audio\] and \[vision\]: source.meaning is "captions", .* items of \[vision\]',
        ),
        (
            {"meaning": "recordings"},
            r'give one of \[audio\] and \[vision\]: source.meaning is "recordings", .* \[audio\]',
        ),
        ({"groups": "()"}, r"give one of \[audio\] and \[vision\]: .* have items of no group"),
        ({"vision": None, "groups": '("image",)'}, r"have items of \[vision\]; add \[vision\]"),
        ({"audio": None, "groups": '("audio",)'}, r"have items of \[audio\]; add \[audio\]"),
        ({"vision": None, "groups": "()"}, r"have items of no group; leave out \[audio\]"),
        (
            {"vision": {**VISION, "images": "patches"}},
            r"patches stand in packs, .* leave \[audio\] out",
        ),
        ({"plan": {"kind": "pack", "seq_len": 64}}, r'plan.kind is "pack", wanted "bucket" or "window"'),
        ({"loader": {"crop_s": 1.0}}, r"loader.crop_s is only for audio, not for a config with \[vision\]"),
        ({"source": {"kind": "text"}}, r'source.kind is "text", for speech and vision wanted one of tar, webdataset'),
        ({"text": {"tokenizer": TOKENIZER, "prompt": "plainn"}}, r'unknown step "plainn"; did you mean "plain"'),
        ({"audio": {"features": "mel", "clip": 0.1}}, r"audio.clip: unknown field"),
    ],
)
def test_what_cannot_stand_together_is_said(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, **changes)


def test_an_audio_section_is_one_though_it_is_empty(tmp_path: Path) -> None:
    assert loaded(tmp_path).audio is not None
    assert loaded(tmp_path, groups='("image",)', audio=None).audio is None
    assert contradictions(loaded(tmp_path)) == []


def test_texts_beside_both_have_the_columns_of_both(tmp_path: Path) -> None:
    config = loaded(tmp_path, audio={"features": "waveform"})
    groups = Groups.of(config, recipe_of(config))
    assert groups.names == ("audio", "image", "text")
    assert [field.name for field in groups.text.fields()][-6:] == [
        *("sample_id", "text", "images", "language", "prompt", "source")
    ]
    assert groups.length_names[:4] == ("num_audio_samples", "num_frames", "num_tokens", "num_images")
    assert groups.probe("text") == Groups.of(config, recipe_of(config)).probe("text")
    assert groups.constants_of("text")["prompt"] == "plain"
    seen = loaded(tmp_path, groups='("image",)', audio=None)
    assert "language" not in {field.name for field in Groups.of(seen, recipe_of(seen)).text.fields()}
