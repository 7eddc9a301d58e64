"""`source.confined`: a stranger's manifest reads nothing outside of its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.config import SourceConfig
from forebay.errors import ManifestError
from forebay.preprocess.sources import read_conversations, read_rows
from tests.preprocess.corpus import flac, tone
from tests.preprocess.sources.pictures import picture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a clip and a picture, and the same outside of it."""
    inside = tmp_path / "inside"
    inside.mkdir()
    for place in (inside, tmp_path):
        (place / "a.flac").write_bytes(flac(tone(1, duration_s=0.1)))
        (place / "a.png").write_bytes(picture(1))
    (inside / "link.flac").symlink_to(tmp_path / "a.flac")
    (inside / "link.png").symlink_to(tmp_path / "a.png")
    return inside


def listed(folder: Path, name: str, *, confined: bool) -> Any:
    if name.endswith(".png"):
        row: dict[str, Any] = {"image": name, "question": "q", "answer": "a"}
        read: Any = read_conversations
    else:
        row, read = {"audio": name, "text": "t"}, read_rows
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    source = SourceConfig(kind="jsonl", manifest=str(folder / "train.jsonl"), confined=confined)
    return read(source, cache_root=folder / "caches").rows


@pytest.mark.parametrize("end", ["flac", "png"])
@pytest.mark.parametrize("where", ["../a", "link", "sub/../../a", "ABSOLUTE"])
def test_a_name_that_leads_out_is_refused(folder: Path, where: str, end: str) -> None:
    name = f"{folder.parent}/a.{end}" if where == "ABSOLUTE" else f"{where}.{end}"
    (folder / "sub").mkdir()
    assert len(listed(folder, name, confined=False)) == 1
    with pytest.raises(
        ManifestError, match=r"train\.jsonl names .*a\.(flac|png)' and not below .*inside.*source\.confined"
    ):
        listed(folder, name, confined=True)


@pytest.mark.parametrize("name", ["a.flac", "a.png", "./a.png", "sub/../a.flac"])
def test_what_lies_inside_is_read(folder: Path, name: str) -> None:
    (folder / "sub").mkdir()
    assert len(listed(folder, name, confined=True)) == 1
