from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from forebay import cli
from forebay.caches import guard as guards
from forebay.caches import prune as removal
from forebay.caches.guard import Guard
from forebay.caches.root_items import opened_root
from forebay.caches.survey import survey
from forebay.errors import CacheNotFoundError
from forebay.preprocess import workspace as workspaces
from forebay.preprocess.runner.parts import PartLog
from forebay.preprocess.workspace import Workspace
from forebay.store.cache import open_cache
from forebay.store.files import is_temporary
from forebay.store.memo import note
from forebay.store.metadata import write_metadata
from forebay.store.seal import verify_folder
from tests.caches.roots import Made, age, made_build, made_root, noted, process_with, shape
from tests.preprocess.corpus import speech_corpus
from tests.preprocess.here_pool import build_here

MUTATING = ("utime", "rename", "unlink", "rmdir")


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return made_root(tmp_path, "a b")


def rm(made: Made, *names: object) -> tuple[int, dict[str, str]]:
    """Removes by force what is named, and returns the exit code and the reason of each item that stays."""
    with opened_root(made.root) as root:
        found = survey(root)
        guard = Guard(survey=found, force=True)
        items = {item.name: item for item in found.items}
        stays = {str(name): why for name in names if (why := removal.remove(items[str(name)], guard)) is not None}
    return (1 if stays else 0), stays


HOLDING: dict[str, tuple[str, str]] = {
    "a cache that is open": ("from forebay.store.cache import open_cache\ncache = open_cache({folder!r})", "open"),
    "a file without a lock": ("file = open({folder!r} + '/slots.npy')", "has it open"),
    "a mapping alone": (
        "import mmap, os\nfile = os.open({folder!r} + '/audio/00000.tdz', os.O_RDONLY)\n"
        "held = mmap.mmap(file, 0, prot=mmap.PROT_READ)\nos.close(file)",
        "has it open",
    ),
    "a folder to stand in": ("import os\nos.chdir({folder!r} + '/text')", "has it open"),
}


@pytest.mark.parametrize("what", HOLDING)
def test_what_a_process_has_open_stays_whatever_is_forced(what: str, made: Made) -> None:
    folder = made.caches["a"]
    code, words = HOLDING[what]
    before = shape(made.root)
    with process_with(code.format(folder=str(folder))) as child:
        _, stays = rm(made, folder.name)
        assert words in stays[folder.name]
        if words == "has it open":
            assert f"process {child.pid} " in stays[folder.name]
        assert shape(made.root) == before
    assert rm(made, folder.name) == (0, {})
    assert not folder.exists()


def test_a_shard_that_another_cache_links_to_is_no_use_of_this_one(made: Made) -> None:
    shard = "audio/00000.tdz"
    (made.caches["b"] / shard).unlink()
    os.link(made.caches["a"] / shard, made.caches["b"] / shard)
    with process_with(f"file = open({str(made.caches['b'] / shard)!r})"):
        assert rm(made, made.caches["a"].name) == (0, {})
    assert (made.caches["b"] / shard).is_file()


def test_a_build_stays_while_a_builder_is_in_it(made: Made) -> None:
    folder = made_build(made.root)
    name = f".building/{folder.name}"
    with Workspace(folder).occupied():
        assert rm(made, name)[1] == {name: "a builder is in it"}
    with PartLog(folder, part=(0, 4)):
        assert "builds" in rm(made, name)[1][name]
    assert rm(made, name) == (0, {})
    assert not folder.exists()


def test_a_prepared_build_stays_while_its_parts_work_and_while_jobs_may_come(made: Made) -> None:
    build = made_build(made.root)
    folder = made.root / ".building" / f"prepared-{'5' * 16}"
    folder.mkdir()
    (folder / "rows.arrow").write_bytes(b"rows")
    (folder / "prepared.json").write_text(json.dumps({"format": 1, "key": build.name * 4, "files": {"rows.arrow": {}}}))
    lock, submitted = folder.with_suffix(".lock"), folder.with_suffix(".submitted.json")
    lock.touch()
    submitted.write_text("{}")
    for path in (folder, lock, submitted):
        age(path, 30)
    name = f".building/{folder.name}"
    with Workspace(build).occupied():
        assert rm(made, name)[1] == {name: f"of its build .building/{build.name}: a builder is in it"}
    age(build, 30)
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert rm(made, name)[1] == {name: "a builder is in it"}
    with opened_root(made.root) as root:
        found = survey(root)
        (item,) = found.of("prepared")
        assert Guard(survey=found).reason(item) == "jobs of a cluster were submitted for it: --force"
        os.utime(build / "origin")
        found = survey(root)
        assert "within 7 days" in (Guard(survey=found).reason(item) or "")
    assert rm(made, name) == (0, {})
    assert [path.exists() for path in (folder, lock, submitted, build)] == [False, False, False, True]


def test_what_real_builds_leave_is_known_as_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = speech_corpus(tmp_path)
    arguments = [str(corpus.folder / "config.toml"), "--no-progress", "--workers", "1"]
    corpus.config()
    assert cli.main(["preprocess", *arguments, "--prepare"]) == cli.DONE
    assert cli.main(["preprocess", *arguments, "--shards", "0::2"]) == cli.DONE
    made = Made(corpus.root, {}, {})
    with opened_root(corpus.root) as root:
        found = survey(root)
    assert [item.problem for item in found.of("foreign")] == []
    kinds = {item.kind: item.name for item in found.items}
    assert set(kinds) == {"build", "prepared", "hashes", "tar index"}
    assert rm(made, kinds["prepared"], kinds["build"], kinds["tar index"]) == (0, {})
    monkeypatch.setattr("forebay.preprocess.workspace.seal", _full)
    with pytest.raises(OSError, match="full"):
        build_here(corpus.config())
    with opened_root(corpus.root) as root:
        (left,) = survey(root).of("build")
    assert rm(made, left.name) == (0, {})


def _full(*_: Any, **__: Any) -> bool:
    raise OSError(28, "full")


def plant_link(folder: Path, outside: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    folder.symlink_to(outside)


def plant_group_link(folder: Path, outside: Path) -> None:
    (folder / "audio").rename(outside / "audio")
    (folder / "audio").symlink_to(outside / "audio")


def plant_metadata_link(folder: Path, outside: Path) -> None:
    (folder / "metadata.json").rename(outside / "metadata.json")
    (folder / "metadata.json").symlink_to(outside / "metadata.json")


def plant_signed_names(folder: Path, outside: Path) -> None:
    document = json.loads((folder / "metadata.json").read_text())
    document["files"]["../../outside/mine.txt"] = {"size_bytes": 4, "xxh3_128": "0" * 32}
    write_metadata(folder, document)


def plant_file(folder: Path, outside: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def plant_deep_file(folder: Path, outside: Path) -> None:
    (folder / "audio" / "notes").mkdir()
    (folder / "audio" / "notes" / "mine.txt").write_text("mine")


def plant_empty_folder(folder: Path, outside: Path) -> None:
    (folder / "mine").mkdir()


def plant_pipe(folder: Path, outside: Path) -> None:
    os.mkfifo(folder / "pipe")


def plant_shard_link(folder: Path, outside: Path) -> None:
    (folder / "text" / "00000.tdz").unlink()
    (folder / "text" / "00000.tdz").symlink_to(outside / "mine.txt")


PLANTS: list[Callable[[Path, Path], None]] = [
    plant_link,
    plant_group_link,
    plant_metadata_link,
    plant_signed_names,
    plant_file,
    plant_deep_file,
    plant_empty_folder,
    plant_pipe,
    plant_shard_link,
]


@pytest.mark.parametrize("plant", PLANTS)
def test_what_a_stranger_planted_is_refused_and_nothing_goes(
    plant: Callable[[Path, Path], None], made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = made.root.parent / "outside"
    outside.mkdir()
    (outside / "mine.txt").write_text("mine")
    plant(made.caches["a"], outside)
    before = shape(made.root.parent)
    for arguments in (["rm", str(made.caches["a"])], ["prune", str(made.root), "--older-than", "0d"]):
        code = cli.main(["cache", *arguments, "--yes", "--force", "--json"])
        printed = capsys.readouterr()
        if arguments[0] == "rm":
            assert code in (cli.FAILED, cli.BAD_CONFIG)
            assert "not removed by forebay" in printed.err or json.loads(printed.out)["items"][0]["did"] == "stays"
    after = shape(made.root.parent)
    kept = {name for name in before if name.split("/")[1:2] != [made.caches["b"].name] and ".used" not in name}
    assert {name: after.get(name) for name in kept - {"caches"}} == {name: before[name] for name in kept - {"caches"}}


def test_what_is_mounted_inside_is_refused(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    name = made.caches["a"].name
    monkeypatch.setattr(guards, "is_mount_within", lambda folder: folder.name == name)
    assert rm(made, name)[1] == {name: "another disk is mounted in it"}
    assert made.caches["a"].is_dir()


def steps_until_killed(action: Callable[[], Any], at: int) -> bool:
    """Runs an action in a forked process that is killed before its call number `at` that changes a name or file.

    Returns whether it was killed.
    """
    child = os.fork()
    if child == 0:
        left = at

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*arguments: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)

            return wrapper

        for name in MUTATING:
            setattr(os, name, counted(getattr(os, name)))
        status = 1
        with suppress(BaseException):
            action()
            status = 0
        os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def test_a_kill_at_every_step_leaves_the_cache_or_a_leftover_that_goes(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (guards, removal):  # looking through all processes changes nothing
        monkeypatch.setattr(module, "Processes", lambda root: root)
        monkeypatch.setattr(module, "in_use", lambda *_: None)
    folder, other = made.caches["a"], shape(made.caches["b"])
    outcomes, at = [], 0
    content = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    while steps_until_killed(lambda: rm(made, folder.name), at):
        leftovers = [path for path in made.root.iterdir() if is_temporary(path.name)]
        if folder.is_dir():
            outcomes.append("cache")
            assert (verify_folder(folder).problems, leftovers) == ([], [])
        else:
            outcomes.append("leftover")
            assert [path.name.startswith(folder.name) for path in leftovers] == [True]
            assert rm(made, leftovers[0].name) == (0, {})
            assert not [path for path in made.root.iterdir() if is_temporary(path.name)]
            for path, data in content.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data)
        at += 1
    assert outcomes[:2] == ["cache", "cache"]
    assert outcomes.count("leftover") >= len(content)
    assert not folder.exists()
    assert shape(made.caches["b"]) == other


def _remove_all(root: str, names: list[str], start: Any) -> int:
    start.wait()
    return cli.main(["cache", "rm", *names, "--cache-root", root, "--yes", "--force"])


@pytest.mark.wide
def test_two_at_once_leave_a_cache_whole_or_gone_and_neither_fails(tmp_path: Path) -> None:
    made = made_root(tmp_path, "a b c d")
    names = [folder.name for folder in made.caches.values()]
    context = get_context("fork")
    start = context.Barrier(2)
    children = [context.Process(target=_remove_all, args=(str(made.root), names, start)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    # One that finds a cache gone, or in the other's hands, says so and ends with 1; with 2 where no name is left.
    assert {child.exitcode for child in children} <= {cli.DONE, cli.FAILED, cli.BAD_CONFIG}
    assert not [path for path in made.root.iterdir() if is_temporary(path.name)]
    left = [folder.name for folder in made.caches.values() if folder.exists()]
    assert all(verify_folder(made.root / name).ok for name in left)
    assert rm(made, *left) == (0, {})


def test_a_reader_that_opens_in_between_waits_and_finds_it_gone(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made.caches["a"]
    rename, found = os.rename, []

    def opening() -> None:
        try:
            open_cache(folder)
        except CacheNotFoundError as err:
            found.append(str(err))

    reader = threading.Thread(target=opening)

    def slow(*arguments: Any, **options: Any) -> None:
        if not reader.ident:
            reader.start()
            reader.join(0.2)
            assert reader.is_alive(), "it went on without the lock"
        rename(*arguments, **options)

    monkeypatch.setattr(os, "rename", slow)
    assert rm(made, folder.name) == (0, {})
    reader.join(10)
    assert found == [f"{folder} is not a folder; run: forebay preprocess CONFIG"]


def test_who_opened_it_without_a_lock_gets_it_back(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made.caches["a"]
    before = shape(folder)
    monkeypatch.setattr(guards, "in_use", lambda *_: None)  # the first look is before it was opened
    with process_with(f"import os\nheld = os.open({str(folder)!r}, os.O_PATH)"):
        assert "has it open" in rm(made, folder.name)[1][folder.name]
    assert shape(folder) == before
    with closing(os.scandir(made.root)) as entries:
        assert not [entry for entry in entries if is_temporary(entry.name)]


def test_a_use_in_between_brings_it_back(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made.caches["a"]
    utime = os.utime

    def used(*arguments: Any, **options: Any) -> None:
        note(folder)
        utime(*arguments, **options)

    monkeypatch.setattr(os, "utime", used)
    with opened_root(made.root) as root:
        found = survey(root)
        item = next(item for item in found.caches if item.name == folder.name)
        assert removal.remove(item, Guard(survey=found)) == "it was used just now"
    assert verify_folder(folder).ok


def test_another_cache_of_its_name_stays(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuild swaps in another folder between the last look and the rename."""
    folder, mine = made.caches["a"], made.root / "mine"
    utime = os.utime

    def swapped(*arguments: Any, **options: Any) -> None:
        folder.rename(mine)
        made.caches["b"].rename(folder)
        utime(*arguments, **options)

    before = shape(made.caches["b"])
    monkeypatch.setattr(os, "utime", swapped)
    assert rm(made, folder.name)[1] == {folder.name: "another folder has its name by now"}
    assert shape(folder) == before
    assert verify_folder(mine).ok


def test_a_name_that_was_taken_meanwhile_is_not_overwritten(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, name = made.caches["a"], made.caches["a"].name
    looks = []

    def look(*_: Any) -> str | None:
        looks.append(1)
        made.caches["b"].rename(folder)
        return "process 7 (python) has it open"

    monkeypatch.setattr(removal, "in_use", look)
    _, stays = rm(made, name)
    assert "something else has its name" in stays[name]
    assert len(looks) == 1
    (aside,) = [path for path in made.root.iterdir() if is_temporary(path.name)]
    assert verify_folder(aside).ok
    assert verify_folder(folder).ok


def test_a_build_makes_the_shard_whose_cache_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(tmp_path / "build")
    gone: Any = (tmp_path / "cache" / "audio" / "00000.tdz", object())
    monkeypatch.setattr(workspaces, "first_whole", lambda copies: gone)
    with workspace.occupied():
        assert not workspace.adopt("audio", "ab" * 32, {})
        assert not list((tmp_path / "build" / "audio").iterdir())


def test_files_that_are_written_while_it_goes_are_not_deleted(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made.caches["a"]
    unlink = os.unlink
    late: list[Path] = []

    def writing(name: Any, *arguments: Any, **options: Any) -> None:
        if not late:
            (aside,) = [path for path in made.root.iterdir() if is_temporary(path.name)]
            late.append(aside / "audio" / "late.txt")
            late[0].write_text("mine")
        unlink(name, *arguments, **options)

    monkeypatch.setattr(os, "unlink", writing)
    assert "it cannot be removed" in rm(made, folder.name)[1][folder.name]
    assert late[0].read_text() == "mine"


def test_notes_of_an_item_go_with_it_and_of_others_stay(made: Made) -> None:
    for cache in made.caches.values():
        noted(made.root, cache.name, host="h", days=20)
    rm(made, made.caches["a"].name)
    assert [path.name for path in (made.root / ".used").iterdir()] == [made.caches["b"].name]


def test_a_link_in_the_place_of_the_notes_is_not_followed(made: Made) -> None:
    outside = made.root.parent / "outside"
    (outside / made.caches["a"].name).mkdir(parents=True)
    (outside / made.caches["a"].name / "mine").write_text("mine")
    (made.root / ".used").symlink_to(outside)
    note(made.caches["a"])
    assert rm(made, made.caches["a"].name) == (0, {})
    assert [path.name for path in outside.rglob("*")] == [made.caches["a"].name, "mine"]
    age(outside, 1)
