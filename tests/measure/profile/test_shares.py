"""The arithmetic of a profile, on traces made by hand: rows add up to the wall time, whatever is nested or missing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.measure.profile import Shares, Stretch, innermost, read_trace, shares_of
from tests.measure.profile.traces import MAIN, event, ours, steps

SECOND = 1e6


def shares(events: list[dict[str, Any]]) -> Shares:
    found = shares_of(read_trace(events))
    assert math.fsum(found.main.values()) == pytest.approx(found.wall_s, rel=1e-12)
    if found.device:
        assert math.fsum(found.device.values()) == pytest.approx(found.wall_s, rel=1e-12)
    return found


def test_every_moment_of_the_main_thread_falls_to_the_innermost_stretch() -> None:
    found = shares(
        [
            *steps(100, 100),
            ours("idle: waiting for data", 1000, 10),
            ours("forward", 1010, 50),
            ours("forward: encoder", 1015, 20),
            ours("forward: encoder.layers.self_attn", 1020, 5),
            ours("forward: decoder", 1040, 10),
            ours("backward", 1060, 30),
            event("aten::mm", 1061, 20, kind="cpu_op"),
            event("Optimizer.step#AdamW.step", 1095, 3),
            ours("optimizer", 1090, 30),  # goes on into the second step
        ]
    )
    assert (found.num_steps, found.wall_s) == (2, 200 / SECOND)
    assert {name: round(seconds * SECOND, 6) for name, seconds in found.main.items()} == {
        "unclaimed": 80,
        "backward": 30,
        "optimizer": 30,
        "forward: encoder": 20,
        "forward: rest": 20,
        "idle: waiting for data": 10,
        "forward: decoder": 10,
    }
    assert {name: round(seconds * SECOND, 6) for name, seconds in found.modules.items()} == {
        "encoder": 15,
        "decoder": 10,
        "encoder.layers.self_attn": 5,
    }
    assert (found.threads, found.num_threads, found.device, found.hidden) == ({}, 0, {}, {})


def test_work_of_other_threads_is_beside_the_main_one_except_where_that_waits() -> None:
    found = shares(
        [
            *steps(100),
            ours("idle: waiting for data", 1000, 20),
            ours("forward", 1020, 60),
            ours("read", 990, 40, thread=7),  # 10 before the steps, 20 in the wait, 10 beside the forward pass
            ours("decode", 1000, 10, thread=7),
            ours("collate", 1030, 30, thread=8),
            ours("collate", 1090, 30, thread=8),  # 10 in the steps, beside what nobody claims
            ours("read", 1200, 30, thread=8),
        ]
    )
    assert found.num_threads == 2
    assert {name: (round(each.seconds * SECOND, 6), each.beside) for name, each in found.threads.items()} == {
        "collate": (40, 1.0),
        "read": (20, 0.5),
        "decode": (10, 0.0),
    }
    assert found.main["idle: waiting for data"] == pytest.approx(20 / SECOND)


def test_all_that_happens_in_an_evaluation_is_evaluation() -> None:
    found = shares(
        [*steps(100), ours("evaluation", 1010, 60), ours("forward: encoder", 1020, 20), ours("forward", 1075, 5)]
    )
    assert found.main == pytest.approx(
        {"evaluation": 60 / SECOND, "unclaimed": 35 / SECOND, "forward: rest": 5 / SECOND}
    )


def test_a_forward_pass_inside_of_a_backward_one_is_made_again() -> None:
    found = shares(
        [
            *steps(100),
            ours("backward", 1000, 60),
            ours("forward: encoder.layers", 1020, 20),
            ours("forward: encoder.layers.fc1", 1025, 5),
            event("c10d::allreduce_", 1050, 5, kind="cpu_op"),
        ]
    )
    assert found.main == pytest.approx(
        {
            "unclaimed": 40 / SECOND,
            "backward": 35 / SECOND,
            "backward: recompute": 20 / SECOND,
            "all-reduce": 5 / SECOND,
        }
    )
    assert found.modules == {}


def test_collectives_are_all_reduce_wherever_they_run() -> None:
    found = shares(
        [
            *steps(100),
            ours("backward", 1000, 50),
            event("c10d::allreduce_", 1040, 5, kind="cpu_op"),
            event("gloo:all_reduce", 1040, 20, thread=9),
        ]
    )
    assert found.main["all-reduce"] == pytest.approx(5 / SECOND)
    assert found.threads["all-reduce"].seconds == pytest.approx(20 / SECOND)


def test_a_device_is_idle_where_nothing_runs_and_copies_hide_under_kernels() -> None:
    """Kernels count for where they were launched; autograd's own thread has no stretch, the main one's counts."""
    launches = [
        event("cudaLaunchKernel", 1005, 1, kind="cuda_runtime", correlation=1),
        event("cudaLaunchKernel", 1031, 1, kind="cuda_runtime", correlation=2, thread=55),
        event("cudaMemcpyAsync", 1001, 1, kind="cuda_runtime", correlation=3),
        event("cudaStreamSynchronize", 1060, 20, kind="cuda_runtime", correlation=9),
    ]
    stream: Any = {"thread": 7}
    found = shares(
        [
            *steps(100),
            ours("copy to device", 1000, 4),
            ours("forward", 1004, 20),
            ours("backward", 1030, 20),
            *launches,
            event("Memcpy HtoD", 1002, 4, kind="gpu_memcpy", correlation=3, **stream),
            event("gemm", 1010, 20, kind="kernel", correlation=1, **stream),
            event("Memcpy HtoD", 1020, 15, kind="gpu_memcpy", correlation=3, thread=8),
            event("gemm_backward", 1040, 20, kind="kernel", correlation=2, **stream),
            event("ncclDevKernel_AllReduce", 1050, 30, kind="kernel", thread=9),
            event("gemm", 1500, 20, kind="kernel", correlation=1, **stream),
        ]
    )
    assert found.device == pytest.approx(
        {
            "forward: rest": 20 / SECOND,
            "backward": 20 / SECOND,
            "all-reduce": 20 / SECOND,  # 10 of its 30 under the backward pass
            "copy to device": 9 / SECOND,  # 4, and 5 of 15
            "idle": 31 / SECOND,
        }
    )
    assert found.hidden == pytest.approx({"all-reduce": 10 / SECOND, "copy to device": 10 / SECOND})
    assert found.main["idle: waiting for the device"] == pytest.approx(20 / SECOND)


def test_a_kernel_that_nobody_launched_is_unclaimed() -> None:
    found = shares([*steps(10), event("gemm", 1002, 4, kind="kernel"), ours("forward", 1008, 1)])
    assert found.device == pytest.approx({"idle": 6 / SECOND, "unclaimed": 4 / SECOND})


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="the trace has no step"):
        read_trace([ours("forward", 0, 10)])


@st.composite
def nested(draw: st.DrawFn) -> list[Stretch]:
    """Stretches as threads make them: two of them are apart, or one is in the other; some reach over the steps."""
    found: list[Stretch] = []

    def fill(low: float, high: float, depth: int) -> None:
        at = low
        while depth and at < high and draw(st.booleans()):
            start = draw(st.floats(at, high))
            end = draw(st.floats(start, high))
            found.append(Stretch(start, end, draw(st.sampled_from(["read", "forward", "evaluation", "log"]))))
            fill(start, end, depth - 1)
            at = end

    fill(900, 1300, 4)
    return found


@given(spans=nested())
def test_rows_add_up_to_the_wall_time_whatever_is_nested(spans: list[Stretch]) -> None:
    events = [*steps(100, 150), *(ours(span.name, span.start, span.end - span.start) for span in spans)]
    found = shares_of(read_trace(events))
    assert math.fsum(found.main.values()) == pytest.approx(found.wall_s, rel=1e-9)
    assert all(seconds >= -1e-12 for seconds in found.main.values())
    segments = innermost(read_trace(events).spans.get(MAIN, []))
    assert all(start < end for start, end, _ in segments)
    assert all(before.end <= after.start for before, after in itertools.pairwise(segments))
