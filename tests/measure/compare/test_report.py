"""The arithmetic of a comparison's tables, on made-up measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.config import BucketConfig
from forebay.inspect.picture import write_figure
from forebay.measure.compare_report import ArmComparison, ArmFigures, bucket_labels, draw_arms, flops_of
from forebay.measure.compared_ways import Block, BlockStep, Setup
from forebay.measure.machine import ArmFinish, ArmTurn, Shapes, TimedStep, num_elements, peak_flops, spread_out
from forebay.measure.shown_figures import largest_difference
from forebay.plan.make_buckets import bucket_plan


def shapes(rows: int, frames: int = 10) -> Shapes:
    return (("input_features", (rows, frames)),)


def turn(seconds: float, **changes: Any) -> ArmTurn:
    values: dict[str, Any] = {
        "seconds": seconds,
        "wait_s": 0.1 * seconds,
        "first_batch_s": 0.25,
        "cpu_s": 1.5 * seconds,
        "frames": 60,
        "room": 80,
        "losses": [2.0, 1.0],
        "steps": [TimedStep(bucket=0, seconds=seconds / 4), TimedStep(bucket=1, seconds=3 * seconds / 4)],
        "skipped": 0,
        "ids": ["a", "b", "c", "d"],
        "shapes": [shapes(1), shapes(3)],
    }
    return ArmTurn(**{**values, **changes})


def figures(name: str, turns: list[ArmTurn], *, device: str | None = None, **finish: Any) -> ArmFigures:
    values = {"flops": {shapes(1): 1e12, shapes(3): 3e12}, "compilations": 0, "host_bytes": 5_000_000}
    return ArmFigures(
        arm=name,
        setup=Setup(data_s=2.0, model_s=1.0, device=device, workers={0: 3.0, 2: 4.0} if name == "hf" else {}),
        turns=tuple(turns),
        finish=ArmFinish(**{**values, **finish}),
    )


def comparison(*arms: ArmFigures, folder: Path = Path("out")) -> ArmComparison:
    block = Block((BlockStep(bucket=0, batches=((0, 1),)), BlockStep(bucket=1, batches=((2, 3),))))
    count = len(arms[0].turns)
    return ArmComparison(
        about={"name": "toy", "machine": {"cpu": "a CPU", "cores": 2, "torch": "2", "load_1_min": 0.5}},
        folder=folder,
        blocks=(block,) * count,
        seconds=[36.0] * count,
        buckets={0: "b_0_3", 1: "b_3_5"},
        precision="bf16",
        arms=arms,
    )


def test_ratios_are_of_blocks_and_the_first_of_three_warms_up() -> None:
    own = figures("config", [turn(100.0), turn(1.0), turn(2.0), turn(4.0)])
    other = figures("uncached", [turn(1.0), turn(2.0), turn(2.0), turn(16.0)])
    document = comparison(own, other).to_json()
    found = document["arms"]["uncached"]
    assert found["samples_per_s"] == {"median": 2.0, "low": pytest.approx(1.125), "high": 2.0}
    assert found["ratio"] == {"median": 0.5, "low": 0.375, "high": 0.75}
    assert found["own_ratio"] == {"median": 2.0, "low": 1.5, "high": 3.0}
    assert document["arms"]["config"]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert found["audio_hours_per_h"] == 18.0  # 36 s in 2 s
    assert (document["steps"], document["blocks"], document["samples"]) == (8, 4, 16)
    assert document["audio_hours"] == pytest.approx(144 / 3600)


def test_two_blocks_are_both_measured() -> None:
    own = figures("config", [turn(1.0), turn(2.0)])
    assert own.rates == [4.0, 2.0]


def test_shares_are_of_all_time_and_padding_of_all_frames() -> None:
    turns = [turn(9.0, frames=1), turn(1.0, wait_s=0.5), turn(3.0, wait_s=0.0, frames=30, room=40, skipped=2)]
    found = comparison(figures("config", turns)).to_json()["arms"]["config"]
    assert found["wait_share"] == pytest.approx(0.5 / 4)
    assert found["cpu_percent"] == pytest.approx(150)
    assert found["cpu_s_per_sample"] == pytest.approx(0.75)
    assert found["padding"] == pytest.approx(1 - 90 / 120)
    assert found["first_batch_s"] == 2.25
    assert found["skipped_steps"] == 2
    assert (found["utilisation"], found["device_bytes"], found["mfu"]) == (None, None, None)


def test_steps_memory_and_utilisation_are_told_by_bucket() -> None:
    steps = [
        TimedStep(bucket=0, seconds=0.1, device_bytes=10),
        TimedStep(bucket=0, seconds=0.3, device_bytes=30),
        TimedStep(bucket=7, seconds=0.5, device_bytes=20),
    ]
    looks = [(0, 0.5), (0, 1.0), (7, 0.25)]
    one = figures("config", [turn(1.0, steps=steps, utilisation=looks), turn(1.0, steps=[])])
    found = comparison(one).to_json()["arms"]["config"]
    assert found["buckets"] == {
        "b_0_3": {"steps": 2, "step_s": pytest.approx(0.2), "device_bytes": 30, "utilisation": 0.75},
        "class 7": {"steps": 1, "step_s": 0.5, "device_bytes": 20, "utilisation": 0.25},
    }
    assert found["device_bytes"] == 30
    assert found["utilisation"] == pytest.approx(1.75 / 3)


def test_flops_are_counted_by_shape_and_interpolated_between() -> None:
    counted = {shapes(1): 1e12, shapes(3): 5e12}
    assert flops_of(shapes(3), counted) == 5e12
    assert flops_of(shapes(2), counted) == 3e12
    found = comparison(figures("config", [turn(1.0), turn(2.0)], device="NVIDIA H200")).to_json()["arms"]["config"]
    assert found["tflops"] == pytest.approx(3.0)  # 4e12 in 1 s and in 2 s
    assert found["mfu"] == pytest.approx(3.0 / 989.0)
    unknown = comparison(figures("config", [turn(1.0), turn(2.0)], device="A toy")).to_json()["arms"]["config"]
    assert (unknown["tflops"], unknown["mfu"]) == (pytest.approx(3.0), None)
    nothing = comparison(figures("config", [turn(1.0)], flops={})).to_json()["arms"]["config"]
    assert (nothing["tflops"], nothing["mfu"]) == (None, None)


def test_shapes_to_count_are_spread_from_the_smallest_to_the_largest() -> None:
    seen = [shapes(rows) for rows in range(1, 101)]
    assert spread_out(seen[:3]) == seen[:3]
    found = [num_elements(each) // 10 for each in spread_out(seen)]
    assert (found[0], found[-1], len(found)) == (1, 100, 8)
    assert max(np.diff(found)) - min(np.diff(found)) <= 1
    assert spread_out([]) == []


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "fp16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "no", 19.5e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("GeForce 256", "bf16", None),
    ],
)
def test_peaks_are_of_the_device_and_the_precision(device: str, precision: str, expected: float | None) -> None:
    assert peak_flops(device, precision=precision) == expected


def test_the_largest_difference_of_two_curves_and_its_step() -> None:
    def found(one: list[float], two: list[float]) -> dict[str, Any]:
        return largest_difference(dict(enumerate(one, 1)), dict(enumerate(two, 1)))

    assert found([3.0, 2.0, 1.0], [3.0, 2.5, 1.25]) == {"equal_steps": 3, "step": 2, "difference": 0.5}
    assert found([1.0], []) == {"equal_steps": 0, "step": None, "difference": None}
    assert found([float("nan"), 2.0, 1.0], [1.0, 2.5, 1.0]) == {"equal_steps": 2, "step": 2, "difference": 0.5}


def test_tables_have_a_column_an_arm_and_rows_where_another_arm_is_better_stay(tmp_path: Path) -> None:
    own = figures("config", [turn(2.0), turn(2.0)])
    other = figures("hf", [turn(1.0, losses=[2.0, 1.5]), turn(1.0)])
    found = comparison(own, other, folder=tmp_path / "out")
    found.write()
    printed = "\n".join(found.lines())
    assert "# toy: the config's own way against hf" in printed
    assert "|  | config | hf |" in printed
    assert "| samples/s (quartiles of blocks) | 2.0 (2.0 to 2.0) | 4.0 (4.0 to 4.0) |" in printed
    assert "| samples/s, times the config's own | 1.00 (1.00 to 1.00) | 2.00 (2.00 to 2.00) |" in printed
    assert "| b_3_5 | 1500 ms x 2 | 750 ms x 2 |" in printed
    assert "The config's own way has 0.50 times the samples/s of hf (quartiles 0.50 to 0.50)" in printed
    assert "the largest difference between the losses is 0.5, at step 2." in printed
    assert "DataLoader workers of hf and their samples/s on the first block: 0: 3, 2: 4; the best was taken." in printed
    assert (tmp_path / "out/compare.md").read_text() in printed + "\n"
    assert json.loads((tmp_path / "out/compare.json").read_text())["arms"]["hf"]["workers"] == {"0": 3.0, "2": 4.0}


def test_a_picture_is_drawn_of_the_document(tmp_path: Path) -> None:
    own, other = figures("config", [turn(2.0), turn(2.0)]), figures("hf", [turn(1.0), turn(1.0)])
    write_figure(draw_arms(comparison(own, other).to_json()), tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_shape_classes_have_the_names_of_their_buckets() -> None:
    plan = bucket_plan(np.arange(10, 900), sample_rate_hz=100, settings=BucketConfig(edges_s=(3, 5), batch_size=5))
    assert bucket_labels(plan) == {0: "b_0_3", 1: "b_3_5"}
