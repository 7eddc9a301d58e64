"""DDP and FSDP2, each through accelerate's own configuration file, on two CPU ranks: the losses of one process."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from forebay.errors import ConfigError, ForebayError
from forebay.train.loop.checkpoint import load_optimizer
from forebay.train.loop.launch import held_whole, prepare
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import train
from tests.processes import python
from tests.train.sharded_worker import NUM_STEPS, RESUME_AT, config_for, loader_of, losses_with_adapters
from tests.train.tiny import ListLoader

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

COMMON = """
compute_environment: LOCAL_MACHINE
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: false
"""
DDP = COMMON + "distributed_type: MULTI_GPU\n"
FSDP2 = (
    COMMON
    + """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_cpu_ram_efficient_loading: false
  fsdp_state_dict_type: FULL_STATE_DICT
"""
)


def launched(folder: Path, way: str, **environment: str) -> list[dict[str, Any]]:
    """Returns what the ranks wrote. accelerate starts its two processes where it sees no GPU, too."""
    folder.mkdir(exist_ok=True)
    (folder / "accelerate.yaml").write_text(way, encoding="utf-8")
    launch = (
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        folder / "accelerate.yaml",
        "--main_process_port",
        "0",
    )
    outcome = python(*launch, "-m", "tests.train.sharded_worker", folder)
    assert outcome.returncode == 0, outcome.stderr[-6000:]
    return [json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def one_process(folder: Path, **kwargs: Any) -> dict[str, Any]:
    lines: list[StepLog] = []
    config = config_for(folder, grad_acc=4, **kwargs.pop("changes", {}))
    report = train(config, loader=loader_of(), source_kind="cache", log=lines.append, **kwargs)
    return {
        "losses": [line.loss for line in lines],
        "norms": [line.grad_norm for line in lines],
        "checkpoint": report.checkpoint,
    }


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Both launches at once, since starting the processes is most of the time: 20 s or more.

    FSDP2 also goes on from the checkpoint of one process.
    """
    folder = tmp_path_factory.mktemp("ways")
    alone = one_process(folder / "alone", changes={"max_steps": RESUME_AT})
    AcceleratorState._reset_state(reset_partial_state=True)
    shutil.copytree(str(alone["checkpoint"]), folder / "fsdp2" / "go_on")
    with ThreadPoolExecutor() as pool:
        started = {
            name: pool.submit(launched, folder / name, way, CUDA_VISIBLE_DEVICES="")
            for name, way in (("ddp", DDP), ("fsdp2", FSDP2))
        }
    return {name: future.result() for name, future in started.items()}


@pytest.mark.wide  # beside test_two_ranks, which holds DDP to one process
def test_ddp_fsdp2_and_one_process_have_the_same_losses(tmp_path: Path, ways: dict[str, list[dict[str, Any]]]) -> None:
    """Two micro-batches a step on each rank, the last step of an epoch with one; stopped and resumed on the way."""
    alone = one_process(tmp_path)
    assert len(alone["losses"]) == NUM_STEPS
    for name, (first, second) in ways.items():
        assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5), name
        assert first["norms"] == pytest.approx(alone["norms"], rel=1e-4), name
        assert second["losses"] == []
        assert second["last"] == first["last"]


def test_adapters_have_the_same_losses_on_two_ranks(tmp_path: Path, ways: dict[str, list[dict[str, Any]]]) -> None:
    """Stopped and resumed on the way, from a checkpoint that gathered adapters and the weights under them."""
    alone = losses_with_adapters(tmp_path)
    assert len(alone) == 4
    for name, (first, second) in ways.items():
        assert first["adapters"] == pytest.approx(alone, rel=1e-5), name
        assert second["adapters"] == []


def test_fsdp2_holds_a_part_of_the_model_on_each_rank(ways: dict[str, list[dict[str, Any]]]) -> None:
    whole = {each["held"] for rank in ways["ddp"] for each in rank["seen"]}
    assert len(whole) == 1
    for each in ways["ddp"][0]["seen"]:
        assert not each["is_fsdp"]
    for each in [each for rank in ways["fsdp2"] for each in rank["seen"]]:
        assert each["is_fsdp"]
        assert each["held"] < 0.6 * max(whole)


def test_a_checkpoint_of_fsdp2_has_the_form_of_any_other(tmp_path: Path, ways: dict[str, list[dict[str, Any]]]) -> None:
    ddp, fsdp2 = (Path(ways[name][0]["checkpoint"]) for name in ("ddp", "fsdp2"))
    assert sorted(path.name for path in fsdp2.iterdir()) == sorted(path.name for path in ddp.iterdir())
    for name in ("config.json", "generation_config.json"):
        assert (fsdp2 / name).read_text() == (ddp / name).read_text().replace(str(ddp), str(fsdp2))
    theirs, ours = load_file(ddp / "model.safetensors"), load_file(fsdp2 / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)
    moments = [load_optimizer(folder)["state"] for folder in (ddp, fsdp2)]
    assert moments[0].keys() == moments[1].keys()
    for index, values in moments[0].items():
        assert {name: tuple(value.shape) for name, value in values.items()} == {
            name: tuple(value.shape) for name, value in moments[1][index].items()
        }


def test_a_checkpoint_goes_on_under_the_other_way(tmp_path: Path, ways: dict[str, list[dict[str, Any]]]) -> None:
    """One process goes on from FSDP2's; FSDP2 on two ranks goes on from that of one process."""
    checkpoint = Path(ways["fsdp2"][0]["checkpoint"])
    more = {"max_steps": NUM_STEPS + 1}
    expected = one_process(tmp_path / "whole", changes=more)["losses"][-1]
    got = one_process(tmp_path / "on", changes=more, resume=checkpoint)["losses"]
    assert got == pytest.approx([expected], rel=1e-4)
    first, second = ways["fsdp2"]
    assert first["other"] == second["other"]
    assert first["other"] == pytest.approx(ways["fsdp2"][0]["losses"][RESUME_AT], rel=1e-5)


def test_ranks_that_hold_the_whole_model_use_it_apart(ways: dict[str, list[dict[str, Any]]]) -> None:
    for name, (first, second) in ways.items():
        assert len(first["passes"]) == len(second["passes"]) + 1
        both = first["passes"] + second["passes"]
        assert both == pytest.approx([both[0]] * len(both), rel=1e-6), name
        assert both[0] == pytest.approx(ways["ddp"][0]["passes"][0], rel=1e-5)


class OfAnOldTorch(torch.nn.Linear, FSDPModule):
    """A module as an older torch makes it: it cannot be begun anew."""

    def __new__(cls, *args: Any, **kwargs: Any) -> OfAnOldTorch:
        return object.__new__(cls)

    reset_iter_state = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        return (
            (lambda *_, **__: None)
            if name in ("set_reshard_after_forward", "unshard", "reshard")
            else super().__getattribute__(name)
        )


def test_an_older_torch_does_not_go_on_behind_a_pass_that_failed() -> None:
    said = r"FSDP \(no memory\), and torch .* cannot go on .* forebay train --resume"
    with pytest.raises(ForebayError, match=said), held_whole(OfAnOldTorch(1, 1)):
        raise RuntimeError("no memory")


def test_first_version_of_fsdp_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    config = config_for(tmp_path, grad_acc=1)
    with pytest.raises(ConfigError, match=r"FSDP in its first version, .* set fsdp_version: 2 there"):
        prepare(None, None, config.train)
    with pytest.raises(ConfigError, match=r"FSDP in its first version, .* set fsdp_version: 2 there"):
        train(config, loader=ListLoader([]), source_kind="cache")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_accelerates_own_fsdp2_on_two_gpus_has_the_losses_of_one(tmp_path: Path) -> None:
    alone = one_process(tmp_path / "alone")
    (tmp_path / "fsdp2").mkdir()
    first, second = launched(tmp_path / "fsdp2", FSDP2)
    assert all(each["is_fsdp"] for each in first["seen"] + second["seen"])
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    weights = [load_file(Path(each["checkpoint"]) / "model.safetensors") for each in (alone, first)]
    assert weights[0].keys() == weights[1].keys()


def test_a_precision_that_the_launcher_names_and_the_config_does_not_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train(config_for(tmp_path, grad_acc=1, max_steps=1), loader=loader_of(), source_kind="cache")
    assert 'configuration says mixed_precision bf16; train.mixed_precision = "no" holds' in caplog.text
