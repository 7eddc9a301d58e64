"""Messages name what changed: the file or folder that a field of the recipe is the digest of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.config import Config
from forebay.steps.recipe import load_config
from forebay.store.key import content_of, difference, explained

OLD, NEW = "a" * 64, "b" * 64


def config_of(folder: Path, *, features: str = "steps/my.py:Fbank", **audio: Any) -> Config:
    path = folder / "x.toml"
    settings = "".join(f'{name} = "{value}"\n' for name, value in audio.items())
    path.write_text(
        f'name = "x"\n[source]\nkind = "tar"\nmanifest = "x.parquet"\n[audio]\nfeatures = "{features}"\n{settings}'
        '[text]\ntokenizer = "letters"\nprompt = "plain"\n[run]\nallow_code = true\n'
    )
    return load_config(path)


def row(field: str, wanted: object = NEW, stored: object = OLD) -> dict[str, Any]:
    return {"field": field, "wanted": wanted, "stored": stored}


def test_an_edited_step_is_named_by_its_file(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert difference(config, row("audio.digest")) == (
        f"audio.digest differs (the content of steps/my.py changed: sha256 {NEW[:16]} wanted, {OLD[:16]} stored)"
    )
    files = row("audio.files", (("a.npy", NEW), ("b.npy", OLD)), [["a.npy", OLD], ["b.npy", OLD], ["c.npy", OLD]])
    assert difference(config, files) == "audio.files differs (the content of a.npy, c.npy changed)"


def test_folders_and_packages_are_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, features="extractor", extractor="models/parakeet")
    assert content_of(config, row("audio.digest")) == "models/parakeet"
    assert content_of(config, row("text.tokenizer")) == str(tmp_path / "letters")
    assert config.audio is not None
    package = replace(config, audio=replace(config.audio, features="my_fbank"))
    assert content_of(package, row("audio.digest")) == 'the package that brings features = "my_fbank"'


@pytest.mark.parametrize("other", [row("audio.n_mels", 80, 128), row("audio.digest", NEW, "absent"), row("text")])
def test_settings_stay_as_they_are(tmp_path: Path, other: dict[str, Any]) -> None:
    config = config_of(tmp_path)
    assert content_of(config, other) is None
    said = f"{other['wanted']!r} wanted, {other['stored']!r} stored"
    assert difference(config, other) == f"{other['field']} differs ({said})"
    assert explained(other) == f"{other['field']}: {said}"


def test_what_is_printed_escapes_a_stranger_s_name() -> None:
    found = explained({**row("audio.files", (), ()), "content_of": "a\x1b[2J.npy"})
    assert found == "audio.files: the content of a\\x1b[2J.npy changed"
