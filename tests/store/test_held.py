"""A folder held open while another one is put at its path."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.errors import CacheNotFoundError, CacheReplacedError
from forebay.store import held
from forebay.store.cache import Cache, open_cache
from forebay.store.held import HeldFolder, readers_of
from forebay.store.metadata import read_metadata
from forebay.store.seal import _exchange
from tests.store_factory import make_cache


@pytest.fixture
def layouts(tmp_path: Path) -> tuple[Path, Path]:
    """One cache of six samples, in three shards a group and in two."""
    one, two = (make_cache(tmp_path / str(n), num_samples=6, rows_per_shard=n, max_duration_s=0.1) for n in (2, 3))
    return one, two


def values(cache: Cache) -> list[dict[str, list[Any]]]:
    return [{name: value.tolist() for name, value in cache.read(index).items()} for index in range(len(cache))]


def test_a_folder_is_held_as_long_as_a_cache_is_open(layouts: tuple[Path, Path]) -> None:
    folder = layouts[0]
    assert readers_of(folder) == "none"
    one, two = open_cache(folder), open_cache(folder)
    assert readers_of(folder) == "some"
    del one
    assert readers_of(folder) == "some"
    del two
    assert readers_of(folder) == "none"


def test_what_is_no_cache_is_not_held(tmp_path: Path) -> None:
    assert readers_of(tmp_path) == "none"
    assert readers_of(tmp_path / "nowhere") == "none"
    with pytest.raises(CacheNotFoundError, match="nowhere is not a folder"):
        HeldFolder(tmp_path / "nowhere")


def at_the_first_call(function: Callable[..., Any], meanwhile: Callable[[], None]) -> Callable[..., Any]:
    """Returns a function that calls `meanwhile` once, before it does its own work."""
    calls: list[int] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            meanwhile()
        return function(*args, **kwargs)

    return called


def test_a_folder_that_is_replaced_before_it_is_locked_is_let_go(
    layouts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = layouts

    def swap() -> None:
        _exchange(other, folder)
        shutil.rmtree(other)

    monkeypatch.setattr("fcntl.flock", at_the_first_call(fcntl.flock, swap))
    cache = open_cache(folder)
    assert cache.num_shards == 2
    assert len(values(cache)) == 6


def test_a_folder_that_is_removed_while_it_is_opened_is_opened_again(
    layouts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system has no locks."""
    folder, other = layouts

    def swap() -> None:
        _exchange(other, folder)
        shutil.rmtree(other)

    monkeypatch.setattr("forebay.store.cache.read_metadata", at_the_first_call(read_metadata, swap))
    assert open_cache(folder).num_shards == 2


def test_metadata_and_arrays_of_one_folder_are_read_together(
    layouts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = layouts
    wanted = values(open_cache(folder))
    read: list[Any] = []

    def then_swap(*args: Any, **kwargs: Any) -> Any:
        document = read_metadata(*args, **kwargs)
        if not read:
            _exchange(other, folder)
        read.append(document)
        return document

    monkeypatch.setattr("forebay.store.cache.read_metadata", then_swap)
    cache = open_cache(folder, verify="open")
    assert (len(read), cache.num_shards) == (1, 3)
    assert values(cache) == wanted
    assert cache.lengths["num_tokens"].tolist() == open_cache(folder).lengths["num_tokens"].tolist()


def test_shards_that_are_gone_with_their_folder_are_a_replaced_cache_and_no_corrupt_one(
    layouts: tuple[Path, Path],
) -> None:
    folder, other = layouts
    cache = open_cache(folder)
    cache.read(0)
    _exchange(other, folder)
    shutil.rmtree(other)
    cache.read(1)  # of a shard that is mapped
    with pytest.raises(CacheReplacedError, match=r"was replaced or removed.*00002.tdz of it is gone; open it again"):
        cache.read(5)


def test_a_removed_cache_is_said_to_be_removed(layouts: tuple[Path, Path]) -> None:
    cache = open_cache(layouts[0])
    shutil.rmtree(layouts[0])
    with pytest.raises(CacheReplacedError, match="removed"):
        cache.read(5)


def test_shards_that_are_gone_are_taken_from_the_new_folder_where_they_are_the_same(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, num_samples=6, rows_per_shard=2, max_duration_s=0.1)
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    wanted = values(open_cache(folder))
    cache = open_cache(folder)
    _exchange(other, folder)
    shutil.rmtree(other)
    assert values(cache) == wanted


def test_a_pickled_cache_with_other_samples_is_refused(tmp_path: Path) -> None:
    folder = make_cache(tmp_path / "one", num_samples=6, rows_per_shard=2, max_duration_s=0.1)
    cache = open_cache(folder)
    pickled = pickle.dumps(cache)
    fewer = make_cache(tmp_path / "two", num_samples=5, max_duration_s=0.1, metadata={"key": cache.key})
    _exchange(fewer, folder)
    with pytest.raises(CacheReplacedError, match="it has 5 samples, the cache that was pickled had 6"):
        pickle.loads(pickled)  # noqa: S301  our own


def test_threads_and_forks_share_what_is_held(layouts: tuple[Path, Path]) -> None:
    folder, other = layouts
    cache = open_cache(folder)
    wanted = values(open_cache(folder))
    _exchange(other, folder)
    child = os.fork()
    if not child:
        os._exit(0 if values(cache) == wanted and readers_of(other) == "some" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(cache.read(5)["input_ids"], np.array(wanted[5]["input_ids"], np.int32))
    assert readers_of(other) == "some"


def test_a_reader_waits_for_who_may_remove_it_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prune holds the exclusive lock for an instant; one that was stopped in it keeps nobody from reading."""
    (tmp_path / "metadata.json").write_text("{}")
    monkeypatch.setattr(held, "_PATIENCE_S", 0.2)
    pauses: list[float] = []
    sleep = time.sleep

    def noted(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", noted)
    with open(tmp_path / "metadata.json") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        folder = HeldFolder(tmp_path)
        assert pauses
    assert (folder / "metadata.json").read_bytes() == b"{}"
    assert readers_of(tmp_path) == "none"  # it went on without a lock
    again = HeldFolder(tmp_path)
    assert readers_of(tmp_path) == "some"
    del folder, again
