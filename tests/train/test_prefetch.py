from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.train.prefetch import THREAD_NAME, Prefetch
from tests.processes import python


def threads_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


def square(number: int) -> int:
    time.sleep(0.001 * (number * 7 % 3))  # later ones overtake earlier ones
    return number * number


def start(function: Callable[[int], int], count: int, *, num_threads: int = 2, prefetch: int = 3) -> Prefetch[int, int]:
    return Prefetch(function, iter(range(count)), num_threads=num_threads, prefetch=prefetch)


@given(count=st.integers(0, 12), num_threads=st.integers(0, 3), prefetch=st.integers(1, 5))
def test_results_come_in_the_order_of_the_arguments(count: int, num_threads: int, prefetch: int) -> None:
    results = list(Prefetch(lambda n: n * n, iter(range(count)), num_threads=num_threads, prefetch=prefetch))
    assert results == [n * n for n in range(count)]
    assert threads_alive() == []


def test_slow_results_keep_their_place() -> None:
    assert list(start(square, 20, num_threads=3)) == [n * n for n in range(20)]


def noted(seen: list[int]) -> Callable[[int], int]:
    """Returns a function that notes what it is given and returns that."""

    def make(number: int) -> int:
        seen.append(number)
        return number

    return make


def test_no_more_than_prefetch_is_made_ahead() -> None:
    seen: list[int] = []
    results = start(noted(seen), 50, num_threads=3, prefetch=4)
    for _ in range(5):
        next(results)
    results.close()
    assert max(seen) <= 4 + 4  # the fifth result is out, four more may have been begun
    assert 4 in seen


def test_inline_makes_nothing_ahead() -> None:
    seen: list[int] = []
    results = start(noted(seen), 50, num_threads=0)
    assert seen == []
    assert next(results) == 0
    assert seen == [0]


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_an_error_stands_where_its_result_would_have_stood(num_threads: int) -> None:
    def function(number: int) -> int:
        if number == 3:
            raise ZeroDivisionError("argument 3")
        return number

    results = start(function, 10, num_threads=num_threads)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError, match="argument 3"):
        next(results)
    assert threads_alive() == []
    assert list(results) == []


def test_an_error_of_the_arguments_ends_the_threads() -> None:
    def arguments() -> Iterator[int]:
        yield from range(3)
        raise LookupError("no fourth")

    results = Prefetch(square, arguments(), num_threads=2, prefetch=2)
    assert next(results) == 0
    with pytest.raises(LookupError, match="no fourth"):
        list(results)
    assert threads_alive() == []


def test_threads_end_when_closed_twice() -> None:
    results = start(square, 100)
    next(results)
    assert threads_alive() != []
    results.close()
    results.close()
    assert threads_alive() == []
    assert list(results) == []


def test_threads_end_when_collected() -> None:
    results = start(square, 100)
    next(results)
    assert threads_alive() != []
    del results
    gc.collect()
    assert threads_alive() == []


def test_threads_end_when_collected_in_a_cycle() -> None:
    results = start(square, 100)
    cycle: list[object] = [results]
    cycle.append(cycle)
    del results, cycle
    gc.collect()
    assert threads_alive() == []


def test_threads_end_when_collected_in_one_of_themselves() -> None:
    release, collected = threading.Event(), threading.Event()

    def function(number: int) -> int:
        if number == 1:
            release.wait(10)
            gc.collect()
            collected.set()
        return number

    results = start(function, 100, num_threads=1, prefetch=2)
    cycle: list[object] = [results]
    cycle.append(cycle)
    workers = [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]
    gc.disable()
    try:
        del results, cycle
        release.set()
        assert collected.wait(10)
    finally:
        gc.enable()
    for worker in workers:
        worker.join(10)
    assert threads_alive() == []


def test_a_result_is_not_held_after_it_was_taken() -> None:
    class Result:
        deleted = 0

        def __del__(self) -> None:
            Result.deleted += 1

    results: Prefetch[int, Result] = Prefetch(lambda _: Result(), iter(range(5)), num_threads=1, prefetch=1)
    for count in range(5):
        assert Result.deleted == count
        next(results)


def in_child(check: Callable[[], bool]) -> int:
    """Returns the exit status of a forked child: 0 where `check` is true there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_forked_child_goes_on_with_threads_of_its_own(num_threads: int) -> None:
    results = start(square, 12, num_threads=num_threads)
    begun = [next(results) for _ in range(4)]
    rest = [n * n for n in range(4, 12)]
    assert in_child(lambda: list(results) == rest and threads_alive() == []) == 0
    assert begun + list(results) == [n * n for n in range(12)]  # the parent misses and repeats nothing either


def test_a_forked_child_may_drop_or_close_what_it_inherited() -> None:
    results = start(square, 12)
    next(results)

    def close() -> bool:
        results.close()
        return list(results) == []

    assert in_child(close) == 0
    assert list(results) == [n * n for n in range(1, 12)]


def test_an_interpreter_exits_with_an_iterator_alive() -> None:
    code = (
        "from forebay.train.prefetch import Prefetch\n"
        "results = Prefetch(lambda n: n, iter(range(10**9)), num_threads=2, prefetch=3)\n"
        "print(next(results), next(results))\n"
    )
    run = python("-c", code)
    assert (run.returncode, run.stdout, run.stderr) == (0, "0 1\n", "")
