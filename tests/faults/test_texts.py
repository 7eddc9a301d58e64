"""kill -9 of one or both of two processes that keep texts in one store, at any call that changes a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay.store.files import TEMPORARY_MARK
from forebay.store.texts import SEGMENT, Segment, TextStore, TextValues, digests_of
from tests.faults.children import Children
from tests.faults.row import Row, dice, made
from tests.faults.shim import Fault, Shim

_ROUNDS = 40
_STEPS = {"normalize": [{"step": "Numbers", "version": 1}]}


@dataclass(frozen=True)
class _Site:
    children: Children
    num_calls: int


def words(who: str, number: int) -> list[str]:
    return [f"{who} {number}", f"both {number}", "every time"]


def values_of(root: Path) -> TextValues:
    return TextStore(root).of(_STEPS)


def keep(root: Path, who: str, fault: Fault) -> int:
    """Keeps texts, and notes how far it is; returns how many calls it made."""
    progress = os.open(root.parent / who, os.O_WRONLY | os.O_CREAT)
    with pytest.MonkeyPatch.context() as patch:
        shim = Shim(patch, fault)
        values = values_of(root)
        for number in range(_ROUNDS):
            new = words(who, number)
            values.add(digests_of(new), [word.encode() for word in new])
            values.flush()
            os.pwrite(progress, (number + 1).to_bytes(4, "little"), 0)
    return len(shim.seen)


@contextmanager
def two(folder: Path) -> Iterator[_Site]:
    with Children() as children:
        ended = children.run(keep, made(folder / "caches"), "first", Fault())
        assert ended.error is None, ended.error
        yield _Site(children, ended.value)


def killed(site: _Site, number: int, folder: Path) -> str:
    chance = dice("texts", number)
    root = made(folder / "caches")
    both = chance.random() < 0.3
    faults = [Fault(at=chance.randrange(site.num_calls), what="SIGKILL"), Fault()]
    if both:
        faults[1] = Fault(at=chance.randrange(site.num_calls), what="SIGKILL")
    names = ("first", "second")
    ended = site.children.run_all([(keep, root, name, fault) for name, fault in zip(names, faults, strict=True)])
    assert [end.error for end in ended] == [None, None]
    for name in names:
        data = (folder / name).read_bytes()
        kept = [word for at in range(int.from_bytes(data, "little")) for word in words(name, at)]
        assert values_of(root).find(digests_of(kept)) == [word.encode() for word in kept]
    again = site.children.run(keep, root, "third", Fault())
    assert again.error is None, again.error
    values = values_of(root)
    kept = [word for at in range(_ROUNDS) for word in words("third", at)]
    assert values.find(digests_of(kept)) == [word.encode() for word in kept]
    for path in values.folder.iterdir():
        assert TEMPORARY_MARK not in path.name
        if SEGMENT.fullmatch(path.name):
            assert len(Segment(path, values._owner).table)
    return f"{sum(end.signal > 0 for end in ended)} killed, nothing lost"


ROW = Row(
    name="texts",
    fault="kill -9 of one or both of two processes that keep texts in one store, at any call",
    outcome="what was kept is found; no value is wrong; nothing unfinished stays",
    prepared=two,
    trial=killed,
    short=6,
    long=500,
)


def test_killed_processes_leave_the_store_right(tmp_path: Path) -> None:
    assert sum(ROW.check(tmp_path).values()) == ROW.short
