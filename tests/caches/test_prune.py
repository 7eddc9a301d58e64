from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from forebay import cli
from forebay.caches.prune import parse_age, parse_size
from forebay.errors import ConfigError
from forebay.rows.readers.line_blocks import index_path, line_index
from tests.caches.roots import DAY_S, Made, age, did, made_build, made_plan, made_root, noted, run, shape


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return made_root(tmp_path)


def reason(document: dict[str, Any], name: str) -> str:
    return next(str(row["reason"]) for row in document["items"] if row["name"] == name)


def test_without_yes_nothing_changes_and_with_it_exactly_that_goes(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    name = made.caches["b"].name
    before = shape(made.root)
    dry = run(capsys, "rm", made.caches["b"])
    assert shape(made.root) == before
    assert did(dry) == {name: "would go"}
    wet = run(capsys, "rm", name, "--cache-root", made.root, "--yes")
    assert did(wet) == {name: "gone"}
    assert wet["freed_bytes"] == dry["freed_bytes"] > 0
    left = {path: facts for path, facts in before.items() if path.split("/")[0] != name}
    assert shape(made.root) == left


def test_prune_without_a_rule_is_wrong_use_and_lists_the_rules(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    before = shape(made.root)
    assert cli.main(["cache", "prune", str(made.root), "--yes", "--force"]) == cli.BAD_CONFIG
    err = capsys.readouterr().err
    kinds = ("inputs", "plan", "tar-index", "text-index", "listing", "build", "prepared", "leftover")
    for rule in ("--older-than", "--unwanted", "--max-size", "--leftovers", "--kind", *kinds):
        assert rule in err
    assert shape(made.root) == before


def test_age_is_that_of_the_last_use(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    noted(made.root, made.caches["a"].name, host=os.uname().nodename, days=20)
    document = run(capsys, "prune", made.root, "--older-than", "30d", "--yes")
    assert did(document) == {
        made.caches["a"].name: "stays",
        made.caches["b"].name: "gone",
        made.caches["c"].name: "gone",
    }
    assert reason(document, made.caches["a"].name) == "used 20 d ago"
    assert made.caches["a"].is_dir()


def test_what_a_config_wants_stays(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(capsys, "prune", made.root, "--unwanted", made.toml("a"), "--yes")
    assert did(document)[made.caches["a"].name] == "stays"
    assert reason(document, made.caches["a"].name) == f"wanted by {made.toml('a')}"
    assert [folder.is_dir() for folder in made.caches.values()] == [True, False, False]


def test_conditions_on_caches_narrow_each_other_down(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    noted(made.root, made.caches["b"].name, host=os.uname().nodename, days=20)
    document = run(capsys, "prune", made.root, "--unwanted", made.toml("a"), "--older-than", "30d")
    assert [name for name, what in did(document).items() if what == "would go"] == [made.caches["c"].name]


def test_a_cache_of_changed_data_stays_while_its_config_has_no_other(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    (made.root.parent / "data" / "00002.tar").write_bytes(b"more")
    document = run(capsys, "prune", made.root, "--unwanted", made.toml("a"))
    assert "a build links its shards" in reason(document, made.caches["a"].name)


def test_a_folder_among_the_configs_is_named(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "prune", "--unwanted", str(made.toml("a")), str(made.root)]) == cli.BAD_CONFIG
    assert f"--unwanted {made.root} is a folder" in capsys.readouterr().err


def test_a_config_that_cannot_be_read_stops_the_rule(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    (made.root.parent / "d.toml").write_text("name = 3")
    before = shape(made.root)
    arguments = ["cache", "prune", str(made.root), "--unwanted", "--configs", str(made.root.parent), "--yes"]
    assert cli.main(arguments) == cli.BAD_CONFIG
    assert "is not known, so nothing is removed" in capsys.readouterr().err
    assert shape(made.root) == before


def test_configs_that_are_named_by_configs_want_caches_too(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    text = made.toml("a").read_text()
    made.toml("a").write_text(f'{text}[[mixture.source]]\nconfig = "b.toml"\n[[mixture.source]]\nconfig = "a2.toml"\n')
    (made.root.parent / "a2.toml").write_text(text)
    assert set(did(run(capsys, "prune", made.root, "--unwanted", made.toml("a"))).values()) == {"stays", "would go"}
    text += f'[loader]\ncache_dir = "caches/{made.caches["b"].name}"\n'
    made.toml("a").write_text(text)
    document = run(capsys, "prune", made.root, "--unwanted", made.toml("a"))
    assert [name for name, what in did(document).items() if what == "stays"] == [made.caches["b"].name]
    noise = f'[[augment]]\nkind = "reverb"\ncache = "caches/{made.caches["c"].name}"\n'
    made.toml("a").write_text(text + noise)
    document = run(capsys, "prune", made.root, "--unwanted", made.toml("a"))
    assert reason(document, made.caches["c"].name) == f"wanted by {made.toml('a')}"


def test_a_bound_takes_what_was_used_longest_ago_until_it_holds(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    for name, days in (("a", 10), ("b", 30), ("c", 20)):
        noted(made.root, made.caches[name].name, host=os.uname().nodename, days=days)
    total = run(capsys, "du", made.root)["size_bytes"]
    document = run(capsys, "prune", made.root, "--max-size", f"{total - 1}B", "--yes")
    assert [name for name, what in did(document).items() if what == "gone"] == [made.caches["b"].name]
    assert "holds already" in reason(document, made.caches["a"].name)
    noted(made.root, made.caches["a"].name, host=os.uname().nodename, days=1)
    noted(made.root, made.caches["c"].name, host=os.uname().nodename, days=1)
    blocked = run(capsys, "prune", made.root, "--max-size", "1B", code=cli.FAILED)
    assert blocked["over_bytes"] > 0
    assert set(did(blocked).values()) == {"stays"}


def test_a_shared_shard_is_freed_with_its_last_link_alone(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    shard = "audio/00000.tdz"
    size = (made.caches["a"] / shard).stat().st_size
    (made.caches["b"] / shard).unlink()
    os.link(made.caches["a"] / shard, made.caches["b"] / shard)
    one = run(capsys, "rm", made.caches["a"])["freed_bytes"]
    both = run(capsys, "rm", made.caches["a"], made.caches["b"])["freed_bytes"]
    other = run(capsys, "rm", made.caches["b"])["freed_bytes"]
    assert both == one + other + size
    run(capsys, "rm", made.caches["a"], "--yes")
    assert (made.caches["b"] / shard).stat().st_nlink == 1


def test_what_was_used_within_a_week_or_on_another_host_needs_force(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    noted(made.root, made.caches["a"].name, host=os.uname().nodename, days=6)
    noted(made.root, made.caches["b"].name, host="other-host", days=20)
    document = run(capsys, "rm", *made.caches.values(), "--yes", code=cli.FAILED)
    assert "within 7 days: --force" in reason(document, made.caches["a"].name)
    assert reason(document, made.caches["b"].name) == "it was used on the host other-host: --force"
    assert did(document)[made.caches["c"].name] == "gone"
    assert made.caches["a"].is_dir()
    run(capsys, "rm", made.caches["a"], made.caches["b"], "--yes", "--force")
    assert not made.caches["a"].exists()
    assert not list((made.root / ".used").iterdir())


def test_plans_go_when_their_cache_goes(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {name: json.loads((folder / "metadata.json").read_text())["key"] for name, folder in made.caches.items()}
    plans = {name: made_plan(made.root, key) for name, key in keys.items()}
    orphan = made_plan(made.root, "ef" * 32)
    document = run(capsys, "prune", made.root, "--unwanted", made.toml("a"), "--plans", "--yes")
    assert did(document)[f"plans/{orphan.name}"] == "gone"
    assert [plans[name].is_dir() for name in "abc"] == [True, False, False]


def test_leftovers_are_what_dead_processes_left(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    folder, young = made_build(made.root), made_build(made.root, key="fedcba9876543210", days=2)
    dead = made.root / "a.tmp-00000000-1-00000000"
    dead.mkdir()
    (dead / "anything").touch()
    age(dead, 3)
    alive = made.root / f"a.tmp-{_place()}-{os.getpid():x}-00000000"
    alive.mkdir()
    document = run(capsys, "prune", made.root, "--leftovers", "--yes")
    assert did(document) == {
        f".building/{folder.name}": "gone",
        f".building/{young.name}": "stays",
        dead.name: "gone",
        alive.name: "stays",
    }
    assert reason(document, alive.name) == "a process writes it"
    assert "within 7 days" in reason(document, f".building/{young.name}")
    assert [path.exists() for path in (folder, young, dead, alive)] == [False, True, False, True]


def _place() -> str:
    from forebay.store.files import this_place

    return this_place()


@pytest.mark.parametrize("name", ["..", ".", "../data", "nothing", "hashes.memo", "/etc", ".used", "plans"])
def test_only_what_is_listed_can_be_named(name: str, made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    before = shape(made.root.parent)
    assert cli.main(["cache", "rm", "--cache-root", str(made.root), "--yes", "--force", name]) == cli.BAD_CONFIG
    assert "forebay: " in capsys.readouterr().err
    assert shape(made.root.parent) == before


@pytest.mark.parametrize(("text", "value"), [("500G", 500 * 10**9), ("1.5TB", 1.5e12), ("800 MB", 8e8), ("7", 7)])
def test_sizes_are_read(text: str, value: float) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(("text", "value"), [("30d", 30 * DAY_S), ("12h", DAY_S / 2), ("2w", 14 * DAY_S)])
def test_ages_are_read(text: str, value: float) -> None:
    assert parse_age(text) == value


@pytest.mark.parametrize("text", ["", "d", "-3d", "3", "1e3d", "nan d", "3 days", "\u0663d", "3y"])
def test_wrong_ages_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no age"):
        parse_age(text)


@pytest.mark.parametrize("text", ["", "G", "-3G", "inf", "1e3", "3 gigs", "\u0663G", "3GiB"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(text)


def test_the_index_of_a_text_that_is_gone_goes(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for name in ("here", "grown", "gone"):
        path = made.root.parent / f"{name}.txt"
        path.write_text("a line\n" * 5000)
        line_index(path, max_bytes=99, cache_root=made.root)
        texts[name] = str(index_path(path, cache_root=made.root).relative_to(made.root))
    (made.root.parent / "gone.txt").unlink()
    with open(made.root.parent / "grown.txt", "a") as file:
        file.write("more\n")
    (made.root / "text_index" / "notes.md").write_text("mine")
    assert cli.main(["cache", "du", str(made.root), "--json"]) == cli.DONE
    assert json.loads(capsys.readouterr().out)["kinds"]["text index"]["number"] == 3
    document = run(capsys, "prune", made.root, "--text-indexes", "--yes", "--force")
    assert {name: did(document)[path] for name, path in texts.items()} == {
        "here": "stays",
        "grown": "gone",
        "gone": "gone",
    }
    assert reason(document, texts["here"]) == f"of {made.root.parent / 'here.txt'}"
    assert [(made.root / path).exists() for path in texts.values()] == [True, False, False]
    assert cli.main(["cache", "rm", str(made.root / texts["here"]), "--yes", "--force"]) == cli.DONE
    assert [path.name for path in (made.root / "text_index").iterdir()] == ["notes.md"]
