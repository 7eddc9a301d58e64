"""The table of kinds: `prune --kind` takes each by its rule, whatever name of `du` a person gives it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forebay import cli
from forebay.caches.kinds import HOLDERS, KINDS, kind_named
from forebay.errors import ConfigError
from tests.caches.roots import age, did, made_build, made_plan, made_root, run, shape
from tests.caches.test_inputs import listed

EARLIER = {
    "--plans": "plan",
    "--tar-indexes": "tar-index",
    "--text-indexes": "text-index",
    "--listings": "listing",
    "--inputs": "inputs",
}
TAKEN = [kind for kind, kept in KINDS.items() if kept.verdict is not None]


def described(folder: Path, name: str, document: dict[str, object]) -> str:
    """Makes a folder that describes itself; returns its name under its root."""
    folder.mkdir(parents=True)
    (folder / name).write_text(json.dumps(document))
    age(folder, 60)
    return f"{folder.parent.name}/{folder.name}"


def damaged(path: Path) -> str:
    """Makes an index that is damaged; returns its name under its root."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"no index")
    age(path, 60)
    return f"{path.parent.name}/{path.name}"


def one_of_each(folder: Path) -> tuple[Path, dict[str, str]]:
    """Makes a root with a cache and one thing of every kind that has a rule; returns it, and names by kind."""
    root = made_root(folder, "a").root
    left = root / "a.tmp-00000000-1-00000000"
    left.mkdir()
    age(left, 3)
    prepared = root / ".building" / f"prepared-{'ab' * 8}"
    return root, {
        "inputs": listed(root),
        "plan": f"plans/{made_plan(root, 'ef' * 32).name}",
        "tar index": damaged(root / "tar_index" / f"{'ab' * 16}.parquet"),
        "text index": damaged(root / "text_index" / f"{'ab' * 16}.lines"),
        "listing": described(root / ".listings" / ("ab" * 8), "listing.json", {"files": {}, "sums": {}}),
        "build": f".building/{made_build(root).name}",
        "prepared": described(prepared, "prepared.json", {"key": "cd" * 32, "files": {}}),
        "leftover": left.name,
    }


@pytest.mark.parametrize("kind", TAKEN)
def test_a_kind_goes_by_its_rule_and_nothing_else_with_it(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, names = one_of_each(tmp_path)
    assert sorted(names) == sorted(TAKEN)
    before = shape(root)
    assert did(run(capsys, "prune", root, "--kind", kind)) == {names[kind]: "would go"}
    assert shape(root) == before
    assert did(run(capsys, "prune", root, "--kind", kind, "--yes")) == {names[kind]: "gone"}
    assert {other for other, name in names.items() if not (root / name).exists()} == {kind}


def test_leftovers_are_three_kinds_and_kinds_add_to_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, names = one_of_each(tmp_path)
    left = {names[kind] for kind in ("build", "prepared", "leftover")}
    assert set(did(run(capsys, "prune", root, "--leftovers"))) == left
    asked = run(capsys, "prune", root, "--leftovers", "--kind", "plan", "--kind", "listings")
    assert set(did(asked)) == left | {names["plan"], names["listing"]}


@pytest.mark.parametrize(("option", "kind"), EARLIER.items())
@pytest.mark.few("--plans-plan", "--tar-indexes-tar-index")
def test_an_option_of_before_does_the_same_and_says_the_new_one(
    option: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = one_of_each(tmp_path)
    new = run(capsys, "prune", root, "--kind", kind)
    assert cli.main(["cache", "prune", str(root), option, "--json"]) == cli.DONE
    found = capsys.readouterr()
    assert json.loads(found.out) == new
    assert found.err == f"{option} is --kind {kind} now, and goes in 0.3\n"


def test_kinds_are_named_as_du_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, names = one_of_each(tmp_path)
    assert cli.main(["cache", "du", str(root)]) == cli.DONE
    printed = capsys.readouterr().out
    for kind in names:
        assert f"{KINDS[kind].words}, 1" in printed
        spelled = (kind, KINDS[kind].words, kind.replace(" ", "-"), KINDS[kind].words.replace(" ", "_").upper())
        assert {kind_named(name) for name in spelled} == {kind}
    assert set(run(capsys, "du", root)["kinds"]) == {"cache", "hashes", *names}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plns", "no such kind; the kinds are inputs, plan, .*; did you mean plan?"),
        ("foreign", "no such kind; the kinds are inputs, plan, tar-index"),
        ("caches", "caches go by --older-than and --max-size, and caches by --unwanted"),
        ("kept texts", "kept texts go by --older-than and --max-size"),
        ("hashes", "no rule takes remembered hashes; the kinds are inputs, plan"),
    ],
)
def test_what_has_no_rule_of_its_own_is_refused_and_the_nearest_is_named(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=said):
        kind_named(name)
    assert cli.main(["cache", "prune", str(tmp_path), "--kind", name, "--yes"]) == cli.BAD_CONFIG
    assert f"--kind {name}: " in capsys.readouterr().err


def test_every_holder_is_a_folder_of_kinds_and_every_rule_has_what_it_needs() -> None:
    assert sorted({".building", ".listings", "inputs", "plans", "tar_index", "text_index", "texts"}) == HOLDERS
    assert [kind for kind, kept in KINDS.items() if kept.rule == "caches"] == ["cache", "texts"]
    assert [kind for kind, kept in KINDS.items() if kept.rule == "leftovers"] == ["build", "prepared", "leftover"]
