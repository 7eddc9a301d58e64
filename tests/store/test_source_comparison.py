from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.config import Config
from forebay.store import lookup, memo, source_comparison
from forebay.store.source_files import load_sources
from tests.store.sealed import build, config_of, raw_data
from tests.store.test_lookup import find
from tests.store.trees import flip

CHANGES: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda _: None,
    "one more": lambda data: (data / "00002.tar").write_bytes(b"more"),
    "one less": lambda data: (data / "00001.tar").unlink(),
    "renamed": lambda data: os.rename(data / "00000.tar", data / "a.tar"),
    "first of another size": lambda data: (data / "00000.tar").write_bytes(b"longer than before"),
    "first of other bytes": lambda data: flip(data / "00000.tar", 0),
    "last of other bytes": lambda data: flip(data / "00001.tar", 0),
    "all gone": shutil.rmtree,
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A config with caches of its data in several states; every lookup keeps what it reads."""
    monkeypatch.setattr(source_comparison, "_FEW", 0)
    monkeypatch.setattr(memo, "_RACY_NS", -(10**15))
    raw_data(tmp_path / "data")
    config = config_of(tmp_path)
    for seed, name in enumerate(("renamed", "one more", "last of other bytes", "first of other bytes")):
        shutil.copytree(tmp_path / "data", tmp_path / "aside")
        CHANGES[name](tmp_path / "data")
        build(config, seed=seed)
        shutil.rmtree(tmp_path / "data")
        os.rename(tmp_path / "aside", tmp_path / "data")
    build(config, seed=9)
    return config


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("may_hash", [True, False])
@pytest.mark.few
def test_what_is_found_is_the_same_with_an_index_and_without(
    config: Config, tmp_path: Path, change: str, *, may_hash: bool
) -> None:
    CHANGES[change](tmp_path / "data")
    index = config.cache_root / source_comparison.FILE_NAME
    assert not index.exists()
    before = find(config, may_hash=may_hash)
    assert index.exists() == (change != "all gone" or before.state == "absent")
    assert find(config, may_hash=may_hash) == before
    index.write_bytes(b"no index of ours")
    assert find(config, may_hash=may_hash) == before


def test_lists_that_are_ruled_out_are_not_read(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CHANGES["first of another size"](tmp_path / "data")
    find(config)
    read: list[str] = []

    def noted(path: Path) -> Any:
        read.append(path.parent.name)
        return load_sources(path)

    monkeypatch.setattr(lookup, "load_sources", noted)
    assert find(config).found is None
    assert len(set(read)) == 1  # the nearest, whose differences are named
    assert len(list(config.cache_root.glob("made_up-*"))) == 5


def test_a_few_caches_leave_no_index(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_comparison, "_FEW", 16)
    assert find(config).state == "same"
    assert not (config.cache_root / source_comparison.FILE_NAME).exists()
