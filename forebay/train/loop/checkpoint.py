"""Checkpoints of the reference loop: complete or absent, the last one kept, without a pickle that could run code."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from forebay.config.tree import Config
from forebay.errors import ForebayError, ResumeError
from forebay.store.files import fsync_folder, hash_file, write_bytes
from forebay.store.temporary import sweep, temporary_name

_VERSION = 1
_POINTER = "last.json"
_PREFIX = "checkpoint-"
_OPTIMIZER = "optimizer.pt"
_PROCESSOR_SUFFIXES = {".json", ".txt", ".jinja", ".model"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """What a checkpoint knows beside weights and optimizer moments; kept as state.json.

    The learning rate and the random state of a step are functions of (config, step, rank) and need no room here.
    """

    step: int
    """Optimizer steps done."""
    loss_first: float
    loss_last: float
    """Losses of step 1 and of `step`."""
    loader: dict[str, Any]
    """`loader.state_dict()`: where the next batch is."""
    settings: dict[str, Any]
    """The settings that change the arithmetic, and the world size, to tell what differs on resume."""
    scaler: dict[str, Any] | None = None
    """Loss scale of fp16."""
    files: dict[str, str] = field(default_factory=dict)
    """xxh3-128 of the files with weights and moments; `save_checkpoint` fills it in."""
    version: int = _VERSION
    skipped_steps: int = 0
    """Steps that the scaler of fp16 has skipped, of all steps, and of the last ones in a row."""
    skipped_in_a_row: int = 0


def run_folder(config: Config) -> Path:
    """Returns the folder of a config's training runs: `<train.output_dir>/<name>`."""
    return Path(config.train.output_dir) / config.name


def save_checkpoint(
    folder: Path, state: TrainState, *, model: Any, optimizer: Mapping[str, Any], processor_folder: Path
) -> Path:
    """Returns the new checkpoint folder under `folder`; afterwards it is the last one and the others are gone.

    It holds transformers' `save_pretrained` form (safetensors), the tokenizer and processor files of
    `processor_folder`, optimizer.pt (readable with `weights_only=True`) and state.json. Everything is written aside
    and fsynced, then renamed, then named by last.json: a crash at any instant leaves the previous checkpoint in force.
    Raises ForebayError where it cannot be written; the previous checkpoint stays.
    """
    from safetensors import SafetensorError

    sweep(folder)
    target = _free_name(folder, state.step)
    try:
        with _folder_aside(target) as temporary:
            model.save_pretrained(temporary)
            _copy_processor(processor_folder, temporary)
            torch.save(dict(optimizer), temporary / _OPTIMIZER)
            sealed = replace(state, files=_hashes(temporary))
            (temporary / "state.json").write_text(json.dumps(asdict(sealed), indent=1), encoding="utf-8")
        write_bytes(folder / _POINTER, json.dumps({"checkpoint": target.name}).encode())
    except (OSError, RuntimeError, SafetensorError) as err:
        raise ForebayError(
            f"cannot write checkpoint {target} of step {state.step}: {err}; the checkpoint before it is whole: "
            "make room and go on with forebay train --resume"
        ) from err
    for other in folder.glob(f"{_PREFIX}*"):
        if other != target:
            shutil.rmtree(other, ignore_errors=True)
    return target


def find_checkpoint(folder: Path) -> Path | None:
    """Returns the last checkpoint of a run folder, None where there is none yet.

    Raises ResumeError where last.json names a checkpoint that is not there.
    """
    pointer = folder / _POINTER
    try:
        name = json.loads(pointer.read_bytes())["checkpoint"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ResumeError(
            f"cannot read {pointer}: {err!r}; name a checkpoint folder, or train without --resume"
        ) from err
    if not (folder / str(name) / "state.json").is_file():
        raise ResumeError(f"{pointer} names {name}, which is not a checkpoint in {folder}; train without --resume")
    return folder / str(name)


def load_state(checkpoint: Path) -> TrainState:
    """Returns state.json of a checkpoint folder, whose weights and optimizer state are the bytes that were written.

    Raises ResumeError, naming the file and both values, where one is missing or not what it was.
    """
    path = checkpoint / "state.json"
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as err:
        raise ResumeError(f"{checkpoint} is not a checkpoint of forebay: {err}; train without --resume") from err
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        version = document.get("version") if isinstance(document, dict) else None
        raise ResumeError(f"{path} has version {version!r}, this forebay reads {_VERSION}; train without --resume")
    wanted: dict[str, tuple[type, ...]] = {
        "step": (int,),
        "loss_first": (float,),
        "loss_last": (float,),
        "loader": (dict,),
        "settings": (dict,),
        "scaler": (dict, type(None)),
        "files": (dict,),
        "skipped_steps": (int,),
        "skipped_in_a_row": (int,),
    }
    document = {"skipped_steps": 0, "skipped_in_a_row": 0, **document}  # older checkpoints do not count them
    for name, kinds in wanted.items():
        if name not in document or not isinstance(document[name], kinds):
            raise ResumeError(
                f"{path}: {name} is {document.get(name)!r}, wanted a {kinds[0].__name__}; train without --resume"
            )
    _verify(checkpoint, document["files"])
    return TrainState(**{each.name: document[each.name] for each in fields(TrainState)})


def _hashes(folder: Path) -> dict[str, str]:
    paths = sorted([*folder.glob("*.safetensors"), folder / _OPTIMIZER])
    return {path.name: hash_file(path) for path in paths}


def _verify(checkpoint: Path, stored: Mapping[str, str]) -> None:
    # Neither safetensors nor torch.load looks at checksums: a flipped bit would be trained on.
    try:
        computed = _hashes(checkpoint)
    except OSError as err:
        raise ResumeError(f"cannot read {err.filename}: {err.strerror}; train without --resume") from err
    for name in sorted({*stored, *computed}):
        if computed.get(name) != stored.get(name):
            raise ResumeError(
                f"{checkpoint / name} has checksum {computed.get(name)}, state.json says {stored.get(name)}; "
                "restore the file or train without --resume"
            )


def load_optimizer(checkpoint: Path) -> dict[str, Any]:
    """Returns the optimizer's state on the CPU; ResumeError if optimizer.pt is damaged or holds more than tensors."""
    path = checkpoint / _OPTIMIZER
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as err:
        raise ResumeError(f"cannot read {path}: {err}; train without --resume") from err
    if not isinstance(loaded, dict):
        raise ResumeError(f"{path} holds a {type(loaded).__name__}, wanted a dict; train without --resume")
    return loaded


def _free_name(folder: Path, step: int) -> Path:
    # A new run in the folder of an old one reaches the same steps. The old name stays taken until last.json names
    # another.
    target, attempt = folder / f"{_PREFIX}{step:08d}", 1
    while target.exists():
        attempt += 1
        target = folder / f"{_PREFIX}{step:08d}-{attempt}"
    return target


@contextlib.contextmanager
def _folder_aside(target: Path) -> Iterator[Path]:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(target)
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        fsync_folder(temporary)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_folder(target.parent)


def _copy_processor(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        is_weights = ".safetensors" in path.name or ".bin" in path.name
        is_wanted = path.is_file() and path.suffix in _PROCESSOR_SUFFIXES and not is_weights
        if is_wanted and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
