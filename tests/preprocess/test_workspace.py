"""Finished shards are hashed once each, by workers where they are large, and not at all where others are missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import BuildError
from forebay.preprocess import workspace as module
from forebay.preprocess.pool import Pool
from forebay.preprocess.workspace import Receipt, Workspace, finished_keys, save_receipt
from forebay.store.files import hash_file
from forebay.store.seal import is_whole
from forebay.store.shard import ShardEntry
from tests.preprocess.corpus import speech_corpus
from tests.preprocess.here_pool import build_here

KEYS = [f"{number:032x}" for number in range(3)]


@pytest.fixture
def space(tmp_path: Path) -> Workspace:
    """Three finished shards; the second is damaged without a change of its size."""
    made = Workspace(tmp_path)
    (tmp_path / "audio").mkdir()
    for key in KEYS:
        path = made.path("audio", key)
        path.write_bytes(key.encode())
        digest = hash_file(path)
        entry = ShardEntry(key=key, size_bytes=32, xxh3_128=digest, rows=1, hash_offset=0, spans=())
        save_receipt(path, Receipt(entry=entry, failures=()))
    made.path("audio", KEYS[1]).write_bytes(b"x" * 32)
    return made


def named(keys: Sequence[str] = KEYS) -> Any:
    return [("audio", key) for key in keys]


@pytest.mark.parametrize("is_much", [False, True])
def test_a_damaged_shard_is_not_loaded(space: Workspace, monkeypatch: pytest.MonkeyPatch, is_much: bool) -> None:  # noqa: FBT001
    calls: list[int] = []

    def mapped(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        calls.append(len(items))
        return [function(item) for item in items]

    monkeypatch.setattr(module, "_MUCH", 96 if is_much else 97)
    assert not space.has_all(named(), mapped)
    assert sorted(space.receipts) == [KEYS[0], KEYS[2]]
    assert calls == ([3] if is_much else [])
    # What is known to be whole is not hashed again.
    monkeypatch.setattr(module, "is_whole", lambda *_: pytest.fail("hashed"))
    assert space.has_all(named([KEYS[0], KEYS[2]]), mapped)


def test_nothing_is_hashed_where_a_shard_is_missing(space: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_whole", lambda *_: pytest.fail("hashed"))
    space.path("audio", KEYS[2]).unlink()
    assert not space.has_all(named())
    assert space.receipts == {}
    assert space.absent(named()) == named(KEYS[2:])
    assert finished_keys(space.folder / "audio") == set(KEYS[:2])
    assert finished_keys(space.folder / "text") == set()


def test_a_shard_of_another_size_is_not_hashed(space: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_whole", lambda *_: pytest.fail("hashed"))
    space.path("audio", KEYS[0]).write_bytes(b"x" * 31)
    assert space.load(named(KEYS[:1])) == [None]


def test_workers_hash(space: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MUCH", 0)
    with Pool(1) as pool:
        assert not space.has_all(named(), pool.map)
    assert sorted(space.receipts) == [KEYS[0], KEYS[2]]


def test_a_part_hashes_the_shards_of_others_only_when_all_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = speech_corpus(tmp_path).config()
    hashed: list[str] = []

    def noting(path: Path, entry: ShardEntry) -> bool:
        hashed.append(path.stem)
        return is_whole(path, entry)

    monkeypatch.setattr(module, "is_whole", noting)
    build_here(config, part=(0, 3))
    build_here(config, part=(1, 3))
    assert hashed == []
    with pytest.raises(BuildError, match=r"--seal: 1 of 5 shards .* not finished \(2\)"):
        build_here(config, seal_only=True)
    assert hashed == []
    assert build_here(config, part=(2, 3)).sealed
    assert len(hashed) == len(set(hashed)) == 8
