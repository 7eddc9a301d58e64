"""Conversations about clips: the same words about another clip, or another stretch of one, are another content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.inspect.checks.limits import Limits
from forebay.inspect.checks.lint import LintOptions, Target, lint
from tests.inspect.checks.planted import found, linted
from tests.sound_families import listed
from tests.sound_talks import Talks, built, row


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni"])
def test_a_talk_is_a_duplicate_if_its_clips_are_too(tmp_path: Path, family: str) -> None:
    talks = Talks.made(tmp_path, family)
    first, second = ({"type": "audio", "audio": f"clip{number}.flac"} for number in range(2))
    cut: dict[str, Any] = {**first, "start": 0.1, "end": 0.4}
    parts: dict[str, list[dict[str, Any]]] = {
        "one": [first],
        "other": [second],
        "cut": [cut],
        "two": [first, second],
        "turned": [second, first],
    }
    rows = [row(*clips, id=name) for name, clips in parts.items()]
    listed(tmp_path / "data", [*rows, row(first, id="again"), row(cut, id="cut again")])
    config = talks.config()
    wanted = {("duplicate", "again"), ("duplicate", "cut again")}
    assert found(linted(config)) == wanted
    cache, _ = built(config)
    sealed, options = Target(place=str(cache.folder)), LintOptions(limits=Limits(), progress=False)
    assert found(lint([sealed], [], options)) == wanted
    listed(tmp_path / "data", [row(cut, id="new"), row(first, second, first, id="longer")], name="held.jsonl")
    held = talks.config(manifest="data/held.jsonl")
    assert found(lint([Target(config=held)], [sealed], options)) == {("leak", "new")}
