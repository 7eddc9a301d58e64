"""Kept texts are listed in words, counted, and freed as caches are: by name, by age, by size."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from forebay import cli
from forebay.store.texts import TextStore, digests_of
from tests.caches.roots import age, did, made_root, noted, process_with, run, shape

STEPS = {
    "normalize": [
        {"step": "Nfkc", "version": 1},
        {"step": "Numbers", "version": 2},
        {"step": "Code", "xxh3": "a" * 32},
    ],
    "probe": "0" * 32,
}
LANGUAGE = {"language": {"step": "Detector", "languages": ["de", "hi"], "model": "b" * 64, "version": 1}}


def kept(root: Path, identity: dict[str, Any], count: int = 3, *, days: float = 60.0) -> str:
    """Keeps texts that were not used for so many days; returns their name."""
    values = TextStore(root).of(identity)
    texts = [f"text {number}" for number in range(count)]
    values.add(digests_of(texts), [text.encode() for text in texts])
    values.flush()
    age(values.folder, days)
    return f"texts/{values.folder.name}"


def test_kept_texts_are_listed_in_words_and_nothing_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = made_root(tmp_path, "a").root
    first, second = kept(root, STEPS, 3), kept(root, LANGUAGE, 5)
    noted(root, first, host="here", days=3)
    before = shape(root)
    rows = {row["name"]: row for row in run(capsys, "ls", root)["texts"]}
    assert shape(root) == before
    assert rows[first]["made_of"] == "texts as Nfkc, Numbers, Code aaaaaaaa made them"
    assert rows[second]["made_of"] == "languages of texts among de hi, model bbbbbbbb"
    assert (rows[first]["num_texts"], rows[second]["num_texts"]) == (3, 5)
    assert [use["host"] for use in rows[first]["used_by"]] == ["here"]
    assert rows[first]["size_bytes"] == sum(path.stat().st_size for path in (root / first).iterdir())
    assert cli.main(["cache", "ls", str(root)]) == cli.DONE
    out = capsys.readouterr().out
    assert f"{first}\n  3 texts, " in out
    assert "used 3 d ago\n" in out
    assert "not used yet\n  languages of texts among de hi, model bbbbbbbb; made " in out
    assert run(capsys, "du", root)["kinds"]["texts"]["number"] == 2


def test_they_go_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = made_root(tmp_path, "a").root
    name = kept(root, STEPS)
    noted(root, name, host=os.uname().nodename, days=30)
    before = shape(root)
    assert did(run(capsys, "rm", root / name)) == {name: "would go"}
    assert shape(root) == before
    assert did(run(capsys, "rm", name, "--cache-root", root, "--yes")) == {name: "gone"}
    assert not (root / name).exists()
    assert not (root / ".used" / name).exists()
    assert {path: facts for path, facts in before.items() if not path.startswith((name, f".used/{name}"))}.keys() == (
        shape(root).keys()
    )


def test_they_go_by_age_and_stay_where_configs_are_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = made_root(tmp_path, "a")
    old, young = kept(made.root, STEPS), kept(made.root, LANGUAGE, days=20)
    cache = made.caches["a"].name
    asked = run(capsys, "prune", made.root, "--older-than", "30d", "--unwanted", made.toml("a"))
    assert set(did(asked).values()) == {"stays"}
    assert "by age and by size alone" in next(row["reason"] for row in asked["items"] if row["name"] == old)
    found = run(capsys, "prune", made.root, "--older-than", "30d", "--yes")
    assert did(found) == {cache: "gone", old: "gone", young: "stays"}
    assert (made.root / young).is_dir()


def test_a_bound_takes_what_was_used_longest_ago(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = made_root(tmp_path, "a", days_old=40)
    old, young = kept(made.root, STEPS, days=60), kept(made.root, LANGUAGE, days=20)
    total = run(capsys, "du", made.root)["size_bytes"]
    found = run(capsys, "prune", made.root, "--max-size", f"{total - 1}B", "--yes")
    assert did(found) == {old: "gone", made.caches["a"].name: "stays", young: "stays"}
    assert found["over_bytes"] == 0


def test_what_is_used_or_holds_other_files_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = made_root(tmp_path, "a").root
    name = kept(root, STEPS)
    code = (
        "import sys, json\nfrom pathlib import Path\nfrom forebay.store.texts import TextStore, digests_of\n"
        "values = TextStore(Path(sys.argv[1])).of(json.loads(sys.argv[2]))\n"
        "assert values.find(digests_of(['text 1'])) == [b'text 1']"
    )
    with process_with(code, root, json.dumps(STEPS)):
        found = run(capsys, "rm", root / name, "--yes", "--force", code=cli.FAILED)
        assert "has it open" in found["items"][0]["reason"]
    (root / name / "mine.txt").write_text("mine")
    found = run(capsys, "rm", root / name, "--yes", "--force", code=cli.FAILED)
    assert "mine.txt" in found["items"][0]["reason"]
    (root / name / "mine.txt").unlink()
    assert "within 7 days" in run(capsys, "rm", root / name, code=cli.FAILED)["items"][0]["reason"]
    assert did(run(capsys, "rm", root / name, "--yes", "--force")) == {name: "gone"}
    values = TextStore(root).of(STEPS)
    assert values.find(digests_of(["text 1"])) == [None]


def test_what_else_lies_there_is_named_and_what_a_kill_left_may_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = made_root(tmp_path, "a").root
    name = kept(root, STEPS)
    (root / "texts" / "notes").mkdir()
    (root / "texts" / "0123456789abcdef").mkdir()
    damaged = kept(root, LANGUAGE)
    (root / damaged / "identity.json").write_text("[]")
    (root / name / ("0" * 32 + ".texts")).touch()
    document = run(capsys, "ls", root)
    rows = {row["name"]: row for row in document["texts"]}
    assert rows[name]["num_texts"] == 3
    assert rows["texts/0123456789abcdef"]["made_of"] == "texts of unknown steps"
    problems = {row["name"]: row["problem"] for row in document["foreign"]}
    assert problems.keys() == {"texts/notes", damaged}
    run(capsys, "rm", "texts/0123456789abcdef", "--cache-root", root, "--yes", "--force")
    assert not (root / "texts" / "0123456789abcdef").exists()
