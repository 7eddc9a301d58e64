from __future__ import annotations

import hashlib
import io
import json
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import xxhash

from forebay.errors import ConfigError
from forebay.store.files import temporary_name
from forebay.store.output import Filling, Summed, filling, journal_of

IDENTITY = {"key": "k" * 64, "seed": 17}


def begin(folder: Path, identity: Mapping[str, Any] = IDENTITY) -> AbstractContextManager[Filling]:
    return filling(folder, "done.json", identity=identity, option="--out")


def put(folder: Filling, name: str, data: bytes = b"data") -> None:
    (folder.folder / name).write_bytes(data)
    folder.add({"name": name, "size_bytes": len(data)})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_is_filled_and_then_whole(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with begin(out) as folder:
        assert (folder.finished, folder.document) == ([], None)
        put(folder, "a")
        folder.seal({"files": folder.finished})
    assert names(out) == ["a", "done.json"]
    assert json.loads((out / "done.json").read_bytes())["identity"] == IDENTITY
    with begin(out) as folder:
        assert folder.document is not None
        assert folder.document["files"] == [{"name": "a", "size_bytes": 4}]


def test_an_interrupted_one_goes_on_with_what_is_whole(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), begin(tmp_path) as folder:  # noqa: PT012  what is finished before it counts
        put(folder, "a")
        put(folder, "b")
        raise KeyboardInterrupt
    (tmp_path / "b").write_bytes(b"dat")  # on a disk that lost its end
    with open(journal_of(tmp_path, "done.json"), "ab") as journal:
        journal.write(b'{"name": "c", "siz')  # the process was killed in the middle of a line
    with begin(tmp_path) as folder:
        assert [entry["name"] for entry in folder.finished] == ["a"]
        put(folder, "b")
    with begin(tmp_path) as folder:
        assert [entry["name"] for entry in folder.finished] == ["a", "b"]


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_bytes(b"\\begin")
    (tmp_path / "x").mkdir()
    with pytest.raises(ConfigError, match=r"is not empty: it holds 'thesis.tex' and 1 more, .* new or empty folder"):
        begin(tmp_path).__enter__()
    assert names(tmp_path) == ["thesis.tex", "x"]
    with pytest.raises(ConfigError, match=r"thesis.tex is a file; name a folder"):
        begin(tmp_path / "thesis.tex").__enter__()


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_another_command_began_is_refused_with_both_values(tmp_path: Path, *, is_whole: bool) -> None:
    with begin(tmp_path) as folder:
        put(folder, "a")
        if is_whole:
            folder.seal({"files": folder.finished})
    before = names(tmp_path)
    with pytest.raises(ConfigError, match="seed is 17 there, 18 is wanted; name another folder"):
        begin(tmp_path, {**IDENTITY, "seed": 18}).__enter__()
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda out: (out / "a").unlink(), "a is not there"),
        (lambda out: (out / "a").write_bytes(b"longer"), "a has 6 bytes, not 4"),
        (lambda out: (out / "done.json").write_bytes(b"{}"), "its done.json is none that forebay writes"),
        (lambda out: (out / "done.json").write_bytes(b"\xff"), "none that forebay writes; name a new folder"),
    ],
)
def test_a_whole_folder_that_is_not_is_told(tmp_path: Path, change: Any, why: str) -> None:
    with begin(tmp_path) as folder:
        put(folder, "a")
        folder.seal({"files": folder.finished})
    change(tmp_path)
    with pytest.raises(ConfigError, match=why):
        begin(tmp_path).__enter__()


@pytest.mark.parametrize("line", [b"{}", b"nonsense", b"[1]", b'{"name": "a"}'])
def test_a_journal_of_somebody_else_is_refused(tmp_path: Path, line: bytes) -> None:
    with begin(tmp_path) as folder:
        put(folder, "a")
    with open(journal_of(tmp_path, "done.json"), "ab") as journal:
        journal.write(line + b"\n")
    with pytest.raises(ConfigError, match="is none that forebay writes; name another folder"):
        begin(tmp_path).__enter__()


def test_two_processes_do_not_fill_one_folder(tmp_path: Path) -> None:
    with begin(tmp_path), pytest.raises(ConfigError, match="another process is filling it; wait for its end"):
        begin(tmp_path).__enter__()


def test_a_file_is_counted_and_hashed_while_it_is_written() -> None:
    raw = io.BytesIO()
    file = Summed(raw, with_sha256=True)
    assert file.write(b"ab") == 2
    file.write(memoryview(b"cd"))
    assert (raw.getvalue(), file.tell()) == (b"abcd", 4)
    hashes = {"xxh3_128": xxhash.xxh3_128_hexdigest(b"abcd"), "sha256": hashlib.sha256(b"abcd").hexdigest()}
    assert file.sums() == {"size_bytes": 4, **hashes}


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    place, _, number = temporary_name(tmp_path / "a").name.rsplit("-", 2)
    dead = tmp_path / f"{place}-{child.pid:x}-{number}"
    dead.write_bytes(b"half")
    with begin(tmp_path) as folder:
        assert not dead.exists()
        put(folder, "a")
