"""Kept samples of iterators are listed and counted; they go by name or by a rule of their own, never by age or size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay import cli
from tests.caches.roots import age, did, made_root, process_with, run, shape

IMAGE = f"images/ab/{'ab' * 16}.image"


def listed(root: Path, name: str = "0" * 32, *, days: float = 60.0) -> str:
    """Makes what listing an iterator leaves, so many days ago; returns its name under the root."""
    folder = root / "inputs" / name
    for file in ("samples.jsonl", "00000.media", IMAGE):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("{}\n")
    age(folder, days)
    return f"inputs/{name}"


def test_samples_of_iterators_are_listed_counted_and_go_by_their_own_rule_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = made_root(tmp_path, "a").root
    old, young = listed(root), listed(root, "1" * 32, days=2)
    before = shape(root)
    assert [(row["name"], row["size_bytes"]) for row in run(capsys, "ls", root)["inputs"]] == [(old, 9), (young, 9)]
    assert run(capsys, "du", root)["kinds"]["inputs"]["number"] == 2
    assert cli.main(["cache", "ls", str(root)]) == cli.DONE
    assert f"{old}\n  9 B, not used yet\n  samples that an iterator yielded; made " in capsys.readouterr().out
    for rule in (["--older-than", "1d"], ["--max-size", "1G"], ["--leftovers", "--plans", "--listings"]):
        asked = run(capsys, "prune", root, *rule)
        assert not {old, young} & did(asked).keys()
    assert shape(root) == before
    found = run(capsys, "prune", root, "--inputs", "--yes")
    assert did(found) == {old: "gone", young: "stays"}
    assert "within 7 days" in next(row["reason"] for row in found["items"] if row["name"] == young)
    assert sorted(os.listdir(root / "inputs")) == ["1" * 32]
    assert did(run(capsys, "rm", root / young, "--yes", "--force")) == {young: "gone"}


def test_what_is_read_or_holds_other_files_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = made_root(tmp_path, "a").root
    name = listed(root)
    with process_with("import sys\nopened = open(sys.argv[1])", root / name / "00000.media"):
        found = run(capsys, "rm", root / name, "--yes", "--force", code=cli.FAILED)
        assert "has it open" in found["items"][0]["reason"]
    for mine in ("mine.txt", "images/mine.image", "images/ab/mine.image", f"images/cd/{'ab' * 16}.image"):
        (root / name / mine).parent.mkdir(exist_ok=True)
        (root / name / mine).write_text("mine")
        found = run(capsys, "rm", root / name, "--yes", "--force", code=cli.FAILED)
        assert mine in found["items"][0]["reason"]
        (root / name / mine).unlink()
    (root / "inputs" / ("2" * 32)).mkdir()
    (root / "inputs" / "notes.md").write_text("mine")
    problems = {row["name"]: row["problem"] for row in run(capsys, "ls", root)["foreign"]}
    assert problems == {
        f"inputs/{'2' * 32}": "it has no samples.jsonl",
        "inputs/notes.md": "no name of samples of an iterator",
    }
