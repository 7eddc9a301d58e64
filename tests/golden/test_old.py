"""Caches of the formats 1 to 3, never released: refused by name, left alone by lookup, listed and removed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forebay import cli
from forebay.errors import CacheMismatchError
from forebay.steps.recipe import recipe_of
from forebay.store.cache import open_cache
from forebay.store.lookup import find_cache
from forebay.store.metadata import FILE_NAME, write_metadata
from tests.store.sealed import build, config_of, raw_data

FOLDER = Path(__file__).parent / "old"
"""One of images, of format 1, and one of texts, of format 2."""
FORMATS = (1, 2, 3)


def made(root: Path, version: int) -> Path:
    """Makes a copy of an old cache under a root; format 3 is format 2 with fields that may be null."""
    source = FOLDER / f"golden-train-v{min(version, 2)}"
    folder = Path(shutil.copytree(source, root / f"golden-train-v{version}"))
    if version == 3:
        document = json.loads((folder / FILE_NAME).read_bytes())
        del document["checksum"]
        write_metadata(folder, {**document, "format_version": version})
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = cli.DONE) -> dict[str, Any]:
    """Returns what a command of `forebay cache` prints as JSON."""
    assert cli.main(["cache", *map(str, arguments), "--json"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize("version", FORMATS)
def test_it_is_refused_with_the_command_that_rebuilds(
    tmp_path: Path, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path, version)
    wanted = f"format_version is {version}, this forebay reads 4; make it anew: forebay preprocess CONFIG, and remove "
    with pytest.raises(CacheMismatchError, match=wanted) as err:
        open_cache(folder)
    assert err.value.code == "FB407"
    assert cli.main(["inspect", str(folder)]) == cli.FAILED
    printed = capsys.readouterr().err
    assert "FB407" in printed
    assert f"forebay cache rm {folder}" in printed


@pytest.mark.parametrize("version", FORMATS)
def test_lookup_leaves_it_out(tmp_path: Path, version: int) -> None:
    raw_data(tmp_path / "data")
    config = config_of(tmp_path)
    folder = build(config)
    document = json.loads((folder / FILE_NAME).read_bytes())
    del document["checksum"]
    write_metadata(folder, {**document, "format_version": version, "num_shards": 3})
    assert find_cache(config, recipe_of(config)).found is None
    again = build(config)
    assert again == folder
    found = find_cache(config, recipe_of(config)).found
    assert found is not None
    assert found.folder == folder
    assert open_cache(folder).metadata["format_version"] == 4


@pytest.mark.parametrize("version", FORMATS)
def test_it_is_named_counted_and_removed(tmp_path: Path, version: int, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "caches"
    folder = made(root, version)
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    listed = run(capsys, "ls", root)
    assert [row["name"] for row in listed["caches"]] == [folder.name]
    found = run(capsys, "du", root)
    assert found["kinds"]["cache"]["number"] == 1
    assert found["kinds"]["cache"]["size_bytes"] >= size_bytes
    assert run(capsys, "rm", folder, "--force")["items"][0]["did"] == "would go"
    assert folder.exists()
    run(capsys, "rm", folder, "--force", "--yes")
    assert not folder.exists()
    folder = made(root, version)
    run(capsys, "prune", root, "--older-than", "0d", "--yes", "--force")
    assert not folder.exists()
