"""Decisions of a fetch without a store: names, hashes, parts of files. Whatever a store says, nothing leads out."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.remote import RemoteConfig, Url
from forebay.errors import ForebayError, RemoteMissingError
from forebay.store.files import temporary_name
from forebay.store.remote.bucket.bucket import ObjectInfo
from forebay.store.remote.carry import fetch_list as listing
from forebay.store.remote.carry import proof as content
from forebay.store.remote.carry.fetch import fetch
from forebay.store.remote.carry.fetch_folder import FilePart, TargetFolder
from forebay.store.remote.carry.fetch_list import FetchOptions, alike, problem_of, problems
from forebay.store.remote.carry.proof import Expected, judge
from forebay.tar.index import check_members

URL = Url("gs", "bucket", "x")
HOSTILE = ("..", ".", "", "/", "\\", "C:", "\0", "\n", "\x1b[2J", "a", "b.tar", "\u202e", "e\u0301", "\u00e9", " ", "~")
NAMES = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=5), min_size=1, max_size=4).flatmap(
    lambda parts: st.sampled_from(["/".join(parts), "".join(parts)])
)


class Memory:
    """A store that says and gives whatever a test wants, without any check of its own."""

    def __init__(self, objects: list[tuple[str, bytes]]) -> None:
        self.url, self.settings, self._objects = URL, RemoteConfig(max_concurrent=2), objects

    def objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for name, data in self._objects:
            yield ObjectInfo(name=name, size_bytes=len(data), etag="0x1", modified_ns=1)

    def info(self, name: str) -> ObjectInfo:
        for info in self.objects():
            if info.name == name:
                return info
        raise RemoteMissingError(f"{name} is not there")

    def stream(self, name: str, *, start: int = 0, stop: int | None = None, etag: str = "") -> Iterator[bytes]:
        data = dict(self._objects)[name][start:stop]
        return (data[at : at + 5] for at in range(0, len(data), 5))


@given(objects=st.lists(st.tuples(NAMES, st.binary(max_size=40)), min_size=1, max_size=5))
def test_nothing_is_written_outside_and_what_is_written_is_the_object(objects: list[tuple[str, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "Bucket", lambda url, settings: Memory(objects))
        out = Path(root) / "a" / "out"
        options = FetchOptions(max_bytes=1000, max_files=10)
        try:
            report = fetch(URL, out, RemoteConfig(), options, examine=check_members)
        except ForebayError:
            assert not [path for path in Path(root).rglob("*") if not path.is_dir()]
            return
        found = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
        assert found.items() <= dict(sorted(objects, key=lambda one: len(one[1]))).items()
        assert len(found) == report.moved_files
        assert [path for path in Path(root).rglob("*") if path.is_file() and out not in path.parents] == []


@given(name=NAMES | st.text())
def test_a_name_that_passes_is_a_plain_path_below(name: str) -> None:
    if not problem_of(name):
        path = os.path.normpath(os.path.join("/out", name))
        assert path == f"/out/{name}"
        assert name.isascii() or name.encode()
        assert not any(ord(letter) < 32 for letter in name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "is empty"),
        ("/etc/passwd", "is absolute"),
        ("a/../b", "leads out of the folder"),
        ("..", "leads out of the folder"),
        ("./a", "leads out of the folder"),
        ("a//b", "has an empty part"),
        ("a/", "has an empty part"),
        ("a\\..\\b", "holds a backslash"),
        ("c:a", "begins with a drive letter"),
        ("a\0", "holds a control character"),
        ("a\x1b[31m", "holds a control character"),
        ("a\nb", "holds a control character"),
        ("a\ud800", "holds a control character"),
        ("\u0928" * 86, "is longer than the file system takes"),
        ("a/" * 2048 + "a", "is longer than the file system takes"),
        # By a fixed id: it holds a process number, and xdist's workers must collect the same tests.
        pytest.param(f"x/{temporary_name(Path('a')).name}", "is a name of what forebay is writing", id="ours"),
        ("hi_eval.tar", ""),
        ("\u0939\u093f\u0928\u094d\u0926\u0940/a b\u200d.tar", ""),
        ("..a/b..", ""),
        ("x" * 255, ""),
    ],
)
def test_names(name: str, problem: str) -> None:
    assert problem_of(name).startswith(problem)
    assert bool(problem_of(name)) == bool(problem)


def test_a_file_is_no_folder_and_names_may_be_alike() -> None:
    assert problems(["a/b/c", "a/b", "x"]) == ["'a/b' is a file, and a folder of others"]
    assert alike(["A/x", "a/y", "\u00e9", "e\u0301", "b", "stra\u00dfe", "STRASSE"]) == [
        ("A", "a"),
        ("STRASSE", "stra\u00dfe"),
        ("e\u0301", "\u00e9"),
    ]
    assert alike(["a/x", "a/y", "b"]) == []


# Hashes


def expected(data: bytes, **changes: Any) -> Expected:
    return Expected(**{"name": "a", "size_bytes": len(data), **changes})


def etag_of(data: bytes, part: int) -> str:
    """Returns the etag that S3 gives an object that was put in parts."""
    parts = [hashlib.md5(data[at : at + part]).digest() for at in range(0, len(data), part)]
    return f'"{hashlib.md5(b"".join(parts)).hexdigest()}-{len(parts)}"'


@pytest.mark.parametrize("part", [5 << 20, 8 << 20, 10_000_000])
@pytest.mark.few("8388608")
def test_etags_of_parts_prove_where_their_size_is_known(part: int) -> None:
    data = bytes(range(256)) * 70_000
    pieces = [data[at : at + 3_000_001] for at in range(0, len(data), 3_000_001)]
    right = expected(data, etag=etag_of(data, part))
    assert judge(pieces, right, etags_are_md5=True) == content.Verdict("etag")
    wrong = [b"x" + data[1:]]
    assert judge(wrong, right, etags_are_md5=True) == content.Verdict("size"), "parts of another size may have it"
    odd = expected(data, etag=etag_of(data, 7_777_777))
    assert judge(pieces, odd, etags_are_md5=True) == content.Verdict("size")


@pytest.mark.parametrize("etag", ["", "0x8DC", 'W/"abc"', '"5e2f-59c"', f'"{"0" * 64}"'])
def test_etags_that_are_no_md5_prove_nothing(etag: str) -> None:
    assert judge([b"abc"], expected(b"abc", etag=etag), etags_are_md5=True) == content.Verdict("size")


def test_a_plain_etag_refuses_only_where_it_is_known_to_be_an_md5() -> None:
    right, wrong = f'"{hashlib.md5(b"abc").hexdigest().upper()}"', f'"{"0" * 32}"'
    assert judge([b"abc"], expected(b"abc", etag=right), etags_are_md5=False) == content.Verdict("etag")
    assert judge([b"abc"], expected(b"abc", etag=wrong), etags_are_md5=False) == content.Verdict("size")
    found = judge([b"abc"], expected(b"abc", etag=wrong), etags_are_md5=True)
    assert found.problem == f"the MD5 of its bytes is {hashlib.md5(b'abc').hexdigest()}, its etag {'0' * 32}"


@pytest.mark.parametrize("kind", content.HASHES)
def test_a_hash_of_a_manifest_counts_more_than_an_etag(kind: content.CheckedBy) -> None:
    made: dict[str, Any] = {
        "xxh3_128": xxhash.xxh3_128(b"abc"),
        "sha256": hashlib.sha256(b"abc"),
        "md5": hashlib.md5(b"abc"),
    }
    said = expected(b"abc", etag=f'"{"0" * 32}"', hashes=((kind, made[kind].hexdigest()),))
    assert judge([b"abc"], said, etags_are_md5=True) == content.Verdict(kind)
    assert judge([b"abx"], said, etags_are_md5=True).problem.startswith(f"its {kind} is ")


# Parts of files


def part_of(folder: TargetFolder, data: bytes, **changes: Any) -> FilePart:
    return folder.part(expected(data, etag='"1"', **changes), "s3://bucket")


def test_two_writers_have_a_part_each_and_the_next_one_goes_on(tmp_path: Path) -> None:
    data = b"12345" * 10
    with TargetFolder(tmp_path) as folder:
        first, second = part_of(folder, data), part_of(folder, data)
        assert first.name != second.name
        with first:
            first.append(data)
        with part_of(folder, data) as third:
            assert (second.size_bytes, third.size_bytes, third.resumed_bytes) == (0, 50, 50)
            assert part_of(folder, data[1:]).size_bytes == 0, "an object of another size is another one"
            third.publish()
        assert (tmp_path / "a").read_bytes() == data


def test_a_part_that_somebody_took_over_and_finished_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another fetch may take a new part for that of a dead one, and be done with it, before the part is locked."""
    data, real = b"12345" * 10, fcntl.flock
    finished: list[str] = []

    def flock(descriptor: int, how: int) -> None:
        if not finished:
            finished.append("other")
            with TargetFolder(tmp_path) as folder, part_of(folder, data) as other:
                other.append(data)
                other.publish()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with TargetFolder(tmp_path) as folder, part_of(folder, data) as part:
        assert (tmp_path / "a").read_bytes() == data
        assert part.path.exists()
        assert part.size_bytes == 0


def test_room_is_counted_while_another_fetch_gives_a_part_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TargetFolder(tmp_path) as folder, part_of(folder, b"12345") as part:
        part.append(b"12345")

        def named_by_then(name: str) -> bool:
            part.publish()
            return True

        with monkeypatch.context() as patch:
            patch.setattr(f"{TargetFolder.__module__}.is_temporary", named_by_then)
            assert folder.free_bytes() > 0
        assert (tmp_path / "a").read_bytes() == b"12345"


def test_threads_that_look_for_parts_at_once_find_them_all(tmp_path: Path) -> None:
    with TargetFolder(tmp_path) as folder:
        names = []
        for number in range(64):
            with folder.part(expected(b"12345", etag=f'"{number}"'), "s3://bucket") as part:
                names.append(part.name)
        with ThreadPoolExecutor(8) as threads:
            prefixes = [name.partition(".tmp-")[0] for name in names]
            assert list(threads.map(folder._left, prefixes * 20)) == [[name] for name in names] * 20


def test_a_file_system_without_locks_has_the_number_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    data = b"12345" * 10
    with TargetFolder(tmp_path) as folder:
        with part_of(folder, data) as first:
            first.append(data)
        assert part_of(folder, data).size_bytes == 0, "this process lives"
        monkeypatch.setattr("forebay.store.files.is_running", lambda pid: False)
        assert part_of(folder, data).size_bytes == 50


def test_a_part_of_a_machine_that_died_goes_on_only_where_its_bytes_can_be_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"12345" * 10
    md5 = f'"{hashlib.md5(data).hexdigest()}"'
    with TargetFolder(tmp_path) as folder:
        for etag in ('"1"', md5):
            with folder.part(expected(data, etag=etag), "s3://bucket") as part:
                part.append(data[:20])
        monkeypatch.setattr("forebay.store.remote.carry.fetch_folder.this_place", lambda: "00000000")
        sizes = [folder.part(expected(data, etag=etag), "s3://bucket").size_bytes for etag in ('"1"', md5)]
    assert sizes == [0, 20]


@pytest.mark.parametrize("plant", ["link", "hard link", "folder", "long"])
def test_a_planted_part_is_not_gone_on_with(plant: str, tmp_path: Path) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    victim.write_bytes(b"v" * 58)
    with TargetFolder(out) as folder:
        with part_of(folder, b"12345" * 10) as first:
            path = first.path
        path.unlink()
        if plant == "link":
            path.symlink_to(victim)
        elif plant == "hard link":
            os.link(victim, path)
        elif plant == "folder":
            path.mkdir()
        else:
            path.write_bytes(b"12345" * 11)
        second = part_of(folder, b"12345" * 10)
        assert second.size_bytes == 0
        second.append(b"x" * 50)
    assert victim.read_bytes() == b"v" * 58


def test_the_folder_says_whether_it_tells_names_apart(tmp_path: Path) -> None:
    with TargetFolder(tmp_path) as folder:
        (tmp_path / "a").touch()
        assert folder.tells_apart() is not (tmp_path / "A").exists()
        assert os.listdir(tmp_path) == ["a"]
