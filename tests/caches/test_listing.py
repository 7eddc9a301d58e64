from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from forebay import cli
from forebay.caches.kinds import made_of
from forebay.caches.root_items import opened_root, sizes_of
from forebay.caches.survey import survey
from tests.caches.roots import age, made_build, made_plan, made_root, noted, shape


def ls(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert cli.main(["cache", "ls", "--json", *map(str, arguments)]) == cli.DONE
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_ls_says_what_each_cache_was_made_of_and_which_configs_want_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_root(tmp_path)
    noted(made.root, made.caches["a"].name, host="here", days=3)
    before = shape(made.root)
    document = ls(capsys, made.root, made.toml("a"), made.toml("b"))
    assert shape(made.root) == before
    rows = {row["name"]: row for row in document["caches"]}  # type: ignore[attr-defined]
    first = rows[made.caches["a"].name]
    assert first["num_samples"] == 5
    assert first["made_of"] == "waveform, 16 kHz, int16; webdataset train"
    assert first["configs"] == [str(made.toml("a"))]
    assert rows[made.caches["c"].name]["configs"] == []
    assert abs(time.time() - first["used"] - 3 * 86400) < 60
    assert [use["host"] for use in first["used_by"]] == ["here"]
    assert first["size_bytes"] == sum(path.stat().st_size for path in made.caches["a"].rglob("*") if path.is_file())
    assert document["foreign"] == []


def test_lines_are_plain_and_no_name_speaks_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = made_root(tmp_path, "a")
    (made.root / "evil\x1b[31m\nforebay: gone").mkdir()
    assert cli.main(["cache", "ls", str(made.root), "--configs", str(tmp_path)]) == cli.DONE
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "not a cache: evil\\x1b[31m\\nforebay: gone: it has no metadata.json" in out
    assert f"{made.caches['a'].name}\n  5 samples" in out
    assert "not used yet" in out
    assert f"config: {made.toml('a')}" in out


def test_what_is_no_cache_is_listed_with_its_reason_and_never_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_root(tmp_path, "a b")
    elsewhere = tmp_path / "elsewhere"
    made.caches["b"].rename(elsewhere)
    (made.root / "link").symlink_to(elsewhere)
    (made.root / "note.txt").write_text("mine")
    os.mkfifo(made.root / "pipe")
    (made.root / "deep").mkdir()
    (made.root / "deep" / "metadata.json").write_text("[" * 100_000)
    (made.root / "signed").mkdir()
    (made.root / "signed" / "metadata.json").write_text('{"recipe": {}, "checksum": "00"}')
    (made.root / "fifo").mkdir()
    os.mkfifo(made.root / "fifo" / "metadata.json")
    for name, inside in (("cold", "zarr.json"), ("mirror", "origin.json")):
        shutil.copytree(made.caches["a"], made.root / name)
        (made.root / name / inside).write_text("{}")
    document = ls(capsys, made.root)
    assert [row["name"] for row in document["caches"]] == [made.caches["a"].name]  # type: ignore[attr-defined]
    problems = {row["name"]: row["problem"] for row in document["foreign"]}  # type: ignore[attr-defined]
    assert problems["link"] == "a link, which is never followed"
    assert problems["note.txt"] == problems["pipe"] == "nothing that forebay writes"
    assert "maximum recursion" in problems["deep"]
    assert "damaged, or none that forebay writes" in problems["signed"]
    assert "no regular file" in problems["fifo"]
    assert "cold form" in problems["cold"]
    assert "keeps of a store" in problems["mirror"]


def test_sorting_is_by_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = made_root(tmp_path)
    for name, days in (("a", 5), ("b", 1), ("c", 9)):
        noted(made.root, made.caches[name].name, host="here", days=days)
    by_use = [row["name"] for row in ls(capsys, made.root, "--sort", "used")["caches"]]  # type: ignore[attr-defined]
    assert by_use == [made.caches[name].name for name in "bac"]
    by_name = [row["name"] for row in ls(capsys, made.root)["caches"]]  # type: ignore[attr-defined]
    assert by_name == sorted(by_name)


def test_a_broken_config_is_named_and_the_rest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = made_root(tmp_path, "a")
    (tmp_path / "broken.toml").write_text("name = 3")
    document = ls(capsys, made.root, "--configs", tmp_path / "*.toml")
    assert list(document["problems"]) == [str(tmp_path / "broken.toml")]  # type: ignore[call-overload]
    assert document["caches"][0]["configs"] == [str(made.toml("a"))]  # type: ignore[index]


def test_the_root_is_that_of_the_configs_where_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_root(tmp_path, "a")
    assert ls(capsys, made.toml("a"))["root"] == str(made.root)
    assert cli.main(["cache", "ls", str(tmp_path / "nothing")]) == cli.BAD_CONFIG
    assert "no such cache root or config" in capsys.readouterr().err
    assert cli.main(["cache", "ls", "--cache-root", str(tmp_path / "nothing")]) == cli.NO_CACHE
    assert "is no folder" in capsys.readouterr().err


def test_du_counts_a_file_of_several_links_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = made_root(tmp_path, "a b")
    shard = "audio/00000.tdz"
    size = (made.caches["a"] / shard).stat().st_size
    (made.caches["b"] / shard).unlink()
    os.link(made.caches["a"] / shard, made.caches["b"] / shard)
    key = json.loads((made.caches["a"] / "metadata.json").read_text())["key"]
    plan, unfinished = made_plan(made.root, key), made_build(made.root)
    assert cli.main(["cache", "du", "--json", str(made.root)]) == cli.DONE
    document = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in document["items"]}
    assert rows[made.caches["a"].name]["shared_bytes"] == size
    assert document["kinds"]["cache"]["shared_bytes"] == 0
    assert document["kinds"]["plan"] | {"number": 1} == document["kinds"]["plan"]
    assert {rows[f"plans/{plan.name}"]["kind"], rows[f".building/{unfinished.name}"]["kind"]} == {"plan", "build"}
    inodes = {path.stat().st_ino: path.stat().st_size for path in made.root.rglob("*") if path.is_file()}
    assert document["size_bytes"] == document["exclusive_bytes"] == sum(inodes.values())
    assert cli.main(["cache", "du", str(made.root)]) == cli.DONE
    assert "  caches, 2 " in capsys.readouterr().out


def test_a_link_from_outside_of_the_root_is_never_freed(tmp_path: Path) -> None:
    made = made_root(tmp_path, "a")
    os.link(made.caches["a"] / "audio/00000.tdz", tmp_path / "mine")
    with opened_root(made.root) as root:
        (item,) = survey(root).caches
    assert item.sizes.shared_bytes == (tmp_path / "mine").stat().st_size
    assert sizes_of(item.files).exclusive_bytes == item.sizes.exclusive_bytes


def test_a_read_shard_counts_as_a_use(tmp_path: Path) -> None:
    made = made_root(tmp_path, "a")
    shard = made.caches["a"] / "audio/00000.tdz"
    os.utime(shard, (time.time() - 86400, shard.stat().st_mtime))
    with opened_root(made.root) as root:
        (item,) = survey(root).caches
    assert abs(time.time() - item.used_ns / 1e9 - 86400) < 60
    age(shard, 60)


@pytest.mark.parametrize("place", ["/", "~", "~/.."])
def test_a_home_or_everything_is_no_root(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "ls", "--cache-root", os.path.expanduser(place)]) == cli.BAD_CONFIG
    assert "no cache root" in capsys.readouterr().err


def test_a_long_name_in_a_recipe_is_shown_as_far_as_it_goes() -> None:
    recipe = {"audio": {"features": "f" * 200}, "source": {"kind": "tar"}}
    assert made_of({"recipe": recipe}, tokenizers={}) == f"{'f' * 77}...; tar"
