"""A walk is bounded, in an order, and passes over what is no data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.init import folder_files as tree
from forebay.init.folder_files import Clock, spread, walk


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


def test_names_are_sorted_by_extension(tmp_path: Path) -> None:
    found = walk(write(tmp_path, "b.WAV", "a.wav", "sub/c.flac", "x.txt", "noext", ".hidden", "__MACOSX/z.wav"))
    assert found.by_extension == {"": ["noext"], ".flac": ["sub/c.flac"], ".txt": ["x.txt"], ".wav": ["a.wav", "b.WAV"]}
    assert found.audio == ["a.wav", "b.WAV", "sub/c.flac"]
    assert found.folders == {"", "sub"}
    assert found.is_whole


def test_links_are_followed_and_caches_and_circles_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "data", "a.wav", "caches/x/metadata.json", "caches/x/slots.npy", "caches/x/b.wav")
    os.symlink(tmp_path / "data", tmp_path / "data" / "loop")
    os.symlink(tmp_path / "data" / "a.wav", tmp_path / "data" / "c.wav")
    os.symlink(write(tmp_path / "else", "d.wav"), tmp_path / "data" / "linked")
    os.symlink("circle.png", tmp_path / "data" / "circle.png")  # of itself
    found = walk(tmp_path / "data")
    assert found.audio == ["a.wav", "c.wav", "linked/d.wav"]


def test_a_walk_ends_at_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, *(f"{number}/{number}.wav" for number in range(20)))
    monkeypatch.setattr(tree, "MAX_FILES", 10)
    found = walk(tmp_path)
    assert (len(found.audio), found.is_whole) == (10, False)
    assert not walk(tmp_path, seconds=-1).is_whole
    write(tmp_path / "deep", "/".join("abcdefghijklmnop") + "/x.wav")
    monkeypatch.undo()
    assert not walk(tmp_path / "deep").is_whole


def test_spread_takes_values_from_all_over() -> None:
    assert spread(range(5), 10) == [0, 1, 2, 3, 4]
    assert spread(range(100), 4) == [0, 25, 50, 75]


def test_a_clock_gives_the_first_value_always() -> None:
    assert list(Clock(-1).while_left([1, 2, 3])) == [1]
    assert list(Clock(60).while_left([1, 2, 3])) == [1, 2, 3]
