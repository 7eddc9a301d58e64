from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from forebay.store.memo import note, this_host, uses_of
from tests.caches.roots import age
from tests.store.trees import set_writable, tree


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "root" / "cache").mkdir(parents=True)
    return tmp_path / "root" / "cache"


def uses(folder: Path, name: str = "cache") -> list[tuple[str, float]]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return [(use.host, use.used_ns / 1e9) for use in uses_of(descriptor, name)]
    finally:
        os.close(descriptor)


def test_a_note_says_host_process_and_time_outside_of_the_folder(cache: Path) -> None:
    before = tree(cache)
    note(cache)
    assert tree(cache) == before
    path = cache.parent / ".used" / "cache" / this_host()
    document = json.loads(path.read_text())
    assert (document["host"], document["pid"]) == (os.uname().nodename, os.getpid())
    assert abs(document["time"] - time.time()) < 60
    ((host, used),) = uses(cache.parent)
    assert host == this_host()
    assert abs(used - time.time()) < 60


def test_it_is_written_once_an_hour_and_every_host_has_its_own(cache: Path) -> None:
    note(cache)
    path = cache.parent / ".used" / "cache" / this_host()
    first = path.stat()
    note(cache)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    age(path, 0.5)
    other = path.with_name("other")
    other.write_text("{}")
    age(other, 3)
    note(cache)
    assert path.stat().st_mtime_ns >= first.st_mtime_ns  # in its place: a kill leaves nothing under another name
    assert [host for host, _ in uses(cache.parent)] == [this_host(), "other"]
    assert sorted(entry.name for entry in path.parent.iterdir()) == sorted([this_host(), "other"])


def test_hosts_of_long_ago_are_forgotten_when_a_new_one_comes(cache: Path) -> None:
    notes = cache.parent / ".used" / "cache"
    notes.mkdir(parents=True)
    for name, days in (("old", 40), ("new", 3)):
        (notes / name).write_text("{}")
        age(notes / name, days)
    note(cache)
    assert sorted(host for host, _ in uses(cache.parent)) == sorted(["new", this_host()])


def test_a_pipe_in_the_place_of_a_note_is_not_waited_for(cache: Path) -> None:
    path = cache.parent / ".used" / "cache" / this_host()
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    age(path, 1)
    note(cache)
    assert uses(cache.parent) == []


def test_a_plan_has_its_notes_in_the_same_place(cache: Path) -> None:
    plan = cache.parent / "plans" / "p"
    plan.mkdir(parents=True)
    note(plan)
    assert [host for host, _ in uses(cache.parent, "plans/p")] == [this_host()]
    assert [path.name for path in plan.parent.iterdir()] == ["p"]


def test_kept_texts_have_their_notes_in_the_same_place_and_a_root_may_be_called_so(tmp_path: Path) -> None:
    folder = tmp_path / "texts" / "0123456789abcdef"
    folder.mkdir(parents=True)
    note(folder)  # a cache in a root of that name
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob(this_host())] == [
        f"texts/.used/0123456789abcdef/{this_host()}"
    ]
    note(folder, below="texts")
    assert (tmp_path / ".used" / "texts" / folder.name / this_host()).is_file()
    note(folder, below="plans")
    assert len(list(tmp_path.rglob(this_host()))) == 2


def test_a_link_to_a_cache_is_noted_where_the_cache_lies(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(cache)
    note(tmp_path / "link")
    assert [host for host, _ in uses(cache.parent)] == [this_host()]
    assert not (tmp_path / ".used").exists()


def test_what_this_node_keeps_of_stores_gets_no_note(tmp_path: Path) -> None:
    (tmp_path / "mirrors" / "cache").mkdir(parents=True)
    note(tmp_path / "mirrors" / "cache")
    assert not (tmp_path / "mirrors" / ".used").exists()


@pytest.mark.parametrize("where", ["nowhere", "file", "/proc/self", "/"])
def test_it_never_fails(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    note(tmp_path / where)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_root_that_cannot_be_written_is_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(30, "Read-only file system")

    before = tree(cache.parent)
    set_writable(cache.parent, is_writable=False)
    monkeypatch.setattr(os, "mkdir", refuse)
    note(cache)
    set_writable(cache.parent, is_writable=True)
    assert tree(cache.parent) == before


def test_a_host_name_is_a_file_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Name:
        nodename = "../../etc/p\x1b\u00e9"

    monkeypatch.setattr(os, "uname", Name)
    assert "/" not in this_host()
    assert this_host().isascii()
    assert not this_host().startswith(".")


def test_a_loader_s_opening_is_noted_and_a_look_is_not(tmp_path: Path) -> None:
    from forebay.store.cache import open_cache
    from forebay.train.select import open_by_config
    from tests.caches.roots import made_root

    made = made_root(tmp_path, "a")
    open_cache(made.caches["a"])
    assert not (made.root / ".used").exists()
    open_by_config(str(made.caches["a"]), made.configs["a"])
    assert [host for host, _ in uses(made.root, made.caches["a"].name)] == [this_host()]
