"""The store of texts: what is kept is found, by everybody; what is damaged, refused or killed costs work alone."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forebay.store import texts
from forebay.store.texts import (
    IDENTITY,
    SEGMENT,
    VERSION,
    Segment,
    TextStore,
    TextValues,
    digests_of,
    table_of,
    write_segment,
)
from tests.processes import ROOT
from tests.store.faults import Faults, Killed
from tests.store.trees import flip

STEPS = {"normalize": [{"step": "Numbers", "version": 1}]}
WORDS = [f"text {number}" for number in range(40)]


def value_of(text: str) -> bytes:
    """The value that is kept of a text: some are empty, some are longer than a piece."""
    is_long = text.startswith(("text", "long")) and text.endswith("13")
    return text.encode() * (9000 if is_long else 0 if text.endswith("7") else 1)


def add(values: TextValues, words: list[str], *, flush: bool = True) -> None:
    values.add(digests_of(words), [value_of(word) for word in words])
    if flush:
        values.flush()


def found(values: TextValues, words: list[str]) -> dict[str, bytes]:
    """Returns what is kept of texts; what is kept is right."""
    result = dict(zip(words, values.find(digests_of(words)), strict=True))
    kept = {word: value for word, value in result.items() if value is not None}
    assert kept == {word: value_of(word) for word in kept}
    return kept


def opened(root: Path, identity: dict[str, Any] | None = None) -> TextValues:
    return TextStore(root).of(STEPS if identity is None else identity)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("texts/*/*") if SEGMENT.fullmatch(path.name))


def test_what_is_kept_is_found_by_this_process_at_once_and_by_others_when_it_is_written(tmp_path: Path) -> None:
    values = opened(tmp_path)
    add(values, WORDS[:20], flush=False)
    assert len(found(values, WORDS)) == 20
    assert not found(opened(tmp_path), WORDS)
    assert not list(tmp_path.iterdir())
    values.flush()
    assert len(found(values, WORDS)) == len(found(opened(tmp_path), WORDS)) == 20
    add(opened(tmp_path), WORDS[10:])
    assert len(found(values, WORDS)) == 40  # it looks again for what it does not know


def test_nothing_is_written_where_nothing_is_new(tmp_path: Path) -> None:
    values = opened(tmp_path)
    add(values, [])
    values.flush()
    assert not list(tmp_path.iterdir())
    assert values.find(digests_of([])) == []


def test_identities_share_nothing(tmp_path: Path) -> None:
    add(opened(tmp_path), WORDS)
    assert not found(opened(tmp_path, {"normalize": [{"step": "Numbers", "version": 2}]}), WORDS)
    (folder,) = (tmp_path / "texts").iterdir()
    assert json.loads((folder / IDENTITY).read_text()) == {"identity": STEPS}
    assert not (tmp_path / ".used").exists()
    assert len(found(opened(tmp_path), WORDS)) == 40
    assert len(list((tmp_path / ".used" / "texts" / folder.name).iterdir())) == 1


def test_digests_tell_languages_and_texts_apart() -> None:
    pairs = [("a", ""), ("a", "en"), ("na", "e"), ("ena", ""), ("2 ena", ""), ("a\0en", ""), ("\ud800", "en")]
    digests = digests_of([text for text, _ in pairs], [language for _, language in pairs])
    assert len({bytes(digest) for digest in digests}) == len(pairs)
    assert digests.dtype == np.uint64
    assert digests_of(["a"]).tolist() == digests_of(iter(["a"])).tolist()
    assert digests_of([]).shape == (0, 2)


def test_digests_of_one_upper_half_are_told_apart(tmp_path: Path) -> None:
    digests = np.array([[5, low] for low in range(0, 40, 2)] + [[4, 3], [2**64 - 1, 0]], np.uint64)
    values = opened(tmp_path)
    values.add(digests, [str(low).encode() for _, low in digests.tolist()])
    values.flush()
    fresh = opened(tmp_path)
    assert fresh.find(digests) == [str(low).encode() for _, low in digests.tolist()]
    assert fresh.find(np.array([[5, 1], [5, 39], [5, 50], [4, 0], [6, 0], [2**64 - 1, 1]], np.uint64)) == [None] * 6


def test_many_segments_become_few_and_each_text_is_there_once(tmp_path: Path) -> None:
    for number in range(20):
        add(opened(tmp_path), [*WORDS[:2], f"own {number}"])
    assert len(files(tmp_path)) <= texts._MOST_SEGMENTS
    merged = max(files(tmp_path), key=lambda path: path.stat().st_size)
    segment = Segment(merged, opened(tmp_path)._owner)
    digests = set(zip(segment.table["high"].to_pylist(), segment.table["low"].to_pylist(), strict=True))
    assert len(digests) == len(segment.table) < 3 * 9
    assert len(found(opened(tmp_path), [*WORDS[:2], *(f"own {number}" for number in range(20))])) == 22


def test_large_segments_are_left_and_bytes_are_written_again_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_LARGEST_BYTES", 20_000)
    written = []

    def counted(folder: Path, owner: bytes, *arguments: Any) -> str:
        written.append(write_segment(folder, owner, *arguments))
        return written[-1]

    monkeypatch.setattr(texts, "write_segment", counted)
    for number in range(100):
        add(opened(tmp_path), [f"{number} {word}" for word in WORDS[:2]])
    small = [path for path in files(tmp_path) if path.stat().st_size < 10_000]
    assert len(small) <= texts._MOST_SEGMENTS + 1
    assert max(path.stat().st_size for path in files(tmp_path)) <= 20_000
    assert len(written) <= 120
    wanted = [f"{number} {word}" for number in range(100) for word in WORDS[:2]]
    assert len(found(opened(tmp_path), wanted)) == 200


def test_a_reader_goes_on_when_its_segments_are_merged_away(tmp_path: Path) -> None:
    reader = opened(tmp_path)
    add(opened(tmp_path), WORDS[:5])
    assert len(found(reader, WORDS[:5])) == 5
    for number in range(17):
        add(opened(tmp_path), [f"own {number}"])
    gone = [name for name in reader._segments if not (reader.folder / name).exists()]
    assert gone
    assert len(found(reader, WORDS[:5])) == 5
    assert len(found(reader, [*WORDS[:5], *(f"own {number}" for number in range(17))])) == 22
    assert not [name for name in reader._segments if not (reader.folder / name).exists()]


def test_a_listed_segment_that_goes_before_it_is_opened_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(opened(tmp_path), WORDS)
    reader = opened(tmp_path)
    monkeypatch.setattr(reader, "_names", lambda: ["0" * 32 + ".texts", *(path.name for path in files(tmp_path))])
    assert len(found(reader, WORDS)) == 40


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.999, -1])
def test_a_flipped_byte_costs_the_texts_of_its_file_until_they_are_kept_again(
    tmp_path: Path, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    add(opened(tmp_path), [*WORDS, *(f"long {number} 13" for number in range(20))])
    (path,) = files(tmp_path)
    flip(path, path.stat().st_size - 9 if share < 0 else int(share * path.stat().st_size))
    values = opened(tmp_path)
    every = [*WORDS, *(f"long {number} 13" for number in range(20))]
    assert not found(values, every)
    assert not found(values, every)
    assert len(caplog.messages) == 1
    assert f"{path} is passed over: its hash is not its name" in caplog.text
    add(values, every)
    assert files(tmp_path) == [path]  # as it was
    caplog.clear()
    assert len(found(opened(tmp_path), every)) == len(found(values, every)) == len(every)
    assert not caplog.messages


@given(data=st.data())
def test_no_damage_gives_a_wrong_value_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("damage")
    add(opened(root), WORDS)
    (path,) = files(root)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    start = data.draw(st.integers(0, len(content)))
    content[start : start + data.draw(st.sampled_from([0, 0, 1, 8, 1000]))] = data.draw(st.binary(max_size=9))
    path.write_bytes(content)
    values = opened(root)
    kept = found(values, WORDS)
    add(values, [word for word in WORDS if word not in kept])
    assert len(found(opened(root), WORDS)) == 40


@pytest.mark.parametrize("what", ["empty", "pipe", "link", "folder", "foreign", "newer"])
def test_what_is_no_segment_of_these_steps_is_passed_over_and_left(tmp_path: Path, what: str) -> None:
    add(opened(tmp_path), WORDS[:3])
    add(opened(tmp_path, {"other": 1}), WORDS[3:6])
    values = opened(tmp_path)
    path = values.folder / ("f" * 32 + ".texts")
    other = next(file for file in files(tmp_path) if file.parent != values.folder)
    if what in ("foreign", "newer"):
        path = values.folder / other.name
    if what == "empty":
        path.touch()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to(other)
    elif what == "folder":
        path.mkdir()
    elif what == "foreign":
        path.write_bytes(other.read_bytes())
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("forebay.store.texts.VERSION", VERSION + 1)
            path = values.folder / write_segment(values.folder, values._owner, [table_of(digests_of(["x"]), [b"x"])])
    assert len(found(values, WORDS)) == 3
    add(values, WORDS[6:])
    assert len(found(opened(tmp_path), WORDS)) == 37
    assert os.path.lexists(path) == (what not in ("empty", "pipe"))


def test_a_folder_of_another_document_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add(opened(tmp_path), WORDS)
    folder = opened(tmp_path).folder
    before = (folder / IDENTITY).read_text()
    (folder / IDENTITY).write_text(before.replace("Numbers", "Lumbers"))
    values = opened(tmp_path)
    assert not found(values, WORDS)
    add(values, ["more"])
    assert len(files(tmp_path)) == 1
    assert "is of other steps" in caplog.text
    for damaged in ("", "{", "[" * 100_000):
        (folder / IDENTITY).write_text(damaged)
        assert len(found(opened(tmp_path), WORDS)) == 40
        assert (folder / IDENTITY).read_text() == before


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_root_that_cannot_be_written_is_passed_over_with_one_line(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts._say_once.cache_clear()
    add(opened(tmp_path), WORDS[:10])
    values = [opened(tmp_path), opened(tmp_path, {"other": 1})]
    with monkeypatch.context() as patch:
        real = open

        def refused(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if "x" in mode:
                raise OSError(code, os.strerror(code), file)
            return real(file, mode, *arguments, **options)

        patch.setattr("builtins.open", refused)
        for each in values:
            add(each, WORDS[10:])
            add(each, WORDS[10:])
    assert len(caplog.messages) == 1
    assert os.strerror(code) in caplog.text
    assert len(found(values[0], WORDS)) == 10


def test_a_root_is_made_and_what_it_lies_in_is_not(tmp_path: Path) -> None:
    add(opened(tmp_path / "no" / "such"), WORDS)
    assert not list(tmp_path.iterdir())
    add(opened(tmp_path / "caches"), WORDS)
    assert len(found(opened(tmp_path / "caches"), WORDS)) == 40


def test_much_and_what_took_long_is_written_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = opened(tmp_path)
    monkeypatch.setattr(texts, "_HELD_TEXTS", 20)
    add(values, WORDS[:19], flush=False)
    assert not files(tmp_path)
    add(values, WORDS[19:20], flush=False)
    assert len(files(tmp_path)) == 1
    monkeypatch.setattr(texts, "_HELD_S", -1.0)
    add(values, WORDS[20:21], flush=False)
    assert len(files(tmp_path)) == 2
    assert len(found(opened(tmp_path), WORDS)) == 21


def test_where_other_machines_may_have_it_mapped_a_merged_segment_stays_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "is_late", lambda _: True)
    for number in range(9):
        add(opened(tmp_path), [f"own {number}"])
    (folder,) = (tmp_path / "texts").iterdir()
    old = [path for path in folder.iterdir() if texts.OLD.fullmatch(path.name)]
    assert len(old) == 9
    os.utime(old[0], (0, 0))
    for number in range(9, 18):
        add(opened(tmp_path), [f"own {number}"])
    assert not old[0].exists()
    assert old[1].exists()
    assert len(found(opened(tmp_path), [f"own {number}" for number in range(18)])) == 18


def test_what_cannot_be_removed_is_not_merged_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        values = opened(tmp_path)
        for number in range(20):
            add(values, [f"own {number}"])
        assert len(files(tmp_path)) == 21
    assert len(found(opened(tmp_path), [f"own {number}" for number in range(20)])) == 20
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        add(opened(tmp_path), ["more"])
        assert len(files(tmp_path)) == 22  # they are another user's
    add(opened(tmp_path), ["and more"])
    assert len(files(tmp_path)) < 10


def test_without_the_lock_it_is_merged_when_there_are_very_many(tmp_path: Path) -> None:
    add(opened(tmp_path), ["first"])
    (folder,) = (tmp_path / "texts").iterdir()
    with open(folder / texts.LOCK, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for number in range(4 * texts._MOST_SEGMENTS):
            add(opened(tmp_path), [f"own {number}"])
            if number == 2 * texts._MOST_SEGMENTS:
                assert len(files(tmp_path)) == number + 2
    assert len(files(tmp_path)) < texts._MOST_SEGMENTS


_TWO = """
import sys
from pathlib import Path
from forebay.store.texts import TextStore, digests_of
values = TextStore(Path(sys.argv[1])).of({"normalize": [{"step": "Numbers", "version": 1}]})
print("ready", flush=True)
sys.stdin.read(1)
for number in range(30):
    words = [f"both {number} {i}" for i in range(20)] + [f"{sys.argv[2]} {number}"]
    values.find(digests_of(words))
    values.add(digests_of(words), [word.encode() for word in words])
    values.flush()
"""


def test_two_processes_that_add_at_once_lose_nothing(tmp_path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _TWO, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        for name in ("own", "mine")
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
    for child in children:
        out, err = child.communicate(b"\n", timeout=60)
        assert (child.returncode, out, err) == (0, b"", b"")
    words = [f"both {number} {i}" for number in range(30) for i in range(20)]
    words += [f"{name} {number}" for number in range(30) for name in ("own", "mine")]
    assert opened(tmp_path).find(digests_of(words)) == [word.encode() for word in words]
    assert len(files(tmp_path)) <= 2 * texts._MOST_SEGMENTS


def _filled(root: Path) -> TextValues:
    for number in range(8):
        add(opened(root), [f"own {number}"])
    return opened(root)


def _calls(root: Path) -> int:
    """Returns how many calls that change files an adding with its merging has."""
    values = _filled(root)
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch)
        add(values, WORDS[:5])
    assert len(files(root)) == 1
    return len(faults.seen)


@pytest.mark.parametrize("code", [0, errno.ENOSPC, errno.EIO], ids=["killed", "full", "broken"])
def test_a_fault_at_any_call_of_adding_and_merging_loses_nothing_that_was_kept(tmp_path: Path, code: int) -> None:
    (tmp_path / "counted").mkdir()
    number = _calls(tmp_path / "counted")
    assert number > 10
    for at in range(number):
        root = tmp_path / str(at)
        root.mkdir()
        values = _filled(root)
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, fail_at=at, code=code)
            if code:
                add(values, WORDS[:5])
            else:
                with pytest.raises(Killed, match="killed"):
                    add(values, WORDS[:5])
        assert len(faults.seen) > at
        fresh = opened(root)
        assert len(found(fresh, [f"own {i}" for i in range(8)])) == 8
        assert len(found(fresh, WORDS[:5])) in (0, 5)
        add(fresh, WORDS[:5])
        assert len(found(opened(root), [*WORDS[:5], *(f"own {i}" for i in range(8))])) == 13
        assert all(len(Segment(path, fresh._owner).table) for path in files(root))


class Store(RuleBasedStateMachine):
    """Two openings of one store and a dict; what the store has is what the dict has."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.openings = [opened(self.root), opened(self.root)]
        self.kept: set[str] = set()
        self.held: list[set[str]] = [set(), set()]

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(who=st.sampled_from([0, 1]), words=st.lists(st.sampled_from(WORDS), max_size=12))
    def add(self, who: int, words: list[str]) -> None:
        add(self.openings[who], words, flush=False)
        self.held[who] |= set(words)

    @rule(who=st.sampled_from([0, 1]))
    def flush(self, who: int) -> None:
        self.openings[who].flush()
        self.kept |= self.held[who]
        self.held[who] = set()

    @rule(who=st.sampled_from([0, 1]))
    def open_again(self, who: int) -> None:
        self.openings[who] = opened(self.root)
        self.held[who] = set()

    @rule(who=st.sampled_from([0, 1]), count=st.integers(1, 18))
    def many(self, who: int, count: int) -> None:
        for number in range(count):
            add(self.openings[who], [f"many {number}"])
        self.kept |= self.held[who] | {f"many {number}" for number in range(count)}
        self.held[who] = set()

    @invariant()
    def what_is_kept_is_found(self) -> None:
        every = [*WORDS, *(f"many {number}" for number in range(18))]
        for values, held in zip(self.openings, self.held, strict=True):
            assert set(found(values, every)) == self.kept | held


Store.TestCase.settings = settings(max_examples=12, stateful_step_count=10)
TestStore = Store.TestCase


def test_a_large_value_and_an_empty_one(tmp_path: Path) -> None:
    values = opened(tmp_path)
    data = [b"", os.urandom(400_017), b"x"]
    values.add(digests_of(["a", "b", "c"]), data)
    values.flush()
    assert opened(tmp_path).find(digests_of(["c", "b", "a"])) == data[::-1]
    empty = opened(tmp_path, {"other": 1})
    empty.add(digests_of(["a"]), [b""])
    empty.flush()
    assert opened(tmp_path, {"other": 1}).find(digests_of(["a", "b"])) == [b"", None]


def test_segments_are_not_kept_mapped_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = opened(tmp_path)
    add(values, WORDS)
    found(values, WORDS)
    (first,) = values._segments.values()
    monkeypatch.setattr(texts, "_LOOK_AGAIN_S", -1.0)
    assert len(found(values, WORDS)) == 40
    assert list(values._segments.values()) != [first]


def test_the_log_says_nothing_where_all_is_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for number in range(20):
        add(opened(tmp_path), [f"own {number}"])
    assert not caplog.messages
