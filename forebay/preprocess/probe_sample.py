"""Some of the numbers that a model gave for built-in inputs, and what it promises: another machine is held to both.

Numbers of devices differ, so they are in no key. A part of a build, a node or a later machine computes the same inputs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import BuildError
from forebay.store.files import write_bytes
from forebay.store.layout import Array

logger = logging.getLogger(__name__)
_NOTED = "numerics.json"
"""File in the folder of a build."""
_KEPT = 64
"""Numbers of a field that are kept."""
Outputs = Mapping[str, Array]
_ByGroup = Mapping[str, Mapping[str, Any]]
"""Constants by group."""


def promise_of(*runs: Sequence[Outputs]) -> dict[str, Any]:
    """Returns how far runs are from the first one: `within` of floats, `flips` of so many `codes`."""
    flips = codes = 0
    largest = 0.0
    for run in runs[1:]:
        for one, other in zip(runs[0], run, strict=True):
            for name, values in one.items():
                if values.dtype.kind == "f":
                    largest = max(largest, float(np.max(np.abs(values - other[name]), initial=0.0)))
                else:
                    flips, codes = flips + int((values != other[name]).sum()), codes + values.size
    return {"within": largest, "flips": flips, "codes": codes}


def in_words(promise: Mapping[str, Any]) -> str:
    """Returns `equal`, or `flips n of m` and `within X`."""
    flips = [f"flips {promise['flips']} of {promise['codes']}"] if promise["flips"] else []
    return ", ".join([*flips, *([f"within {promise['within']:.1g}"] if promise["within"] else [])]) or "equal"


def sample_of(outputs: Sequence[Outputs]) -> dict[str, list[float]]:
    """Returns up to 64 numbers of each field, evenly over all of its values."""
    found = {}
    for name in outputs[0] if outputs else ():
        flat = np.concatenate([made[name].reshape(-1) for made in outputs])
        places = np.linspace(0, len(flat) - 1, min(_KEPT, len(flat))).astype(np.int64)
        found[name] = np.nan_to_num(flat[places]).tolist()
    return found


def beyond_promise(stored: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Returns by how much the numbers of a group differ, and what was promised; None where they are within it.

    stored, here: constants of the group, of the machine that began, and of this one. Other groups have no numbers.
    """
    promise: Mapping[str, Any] = stored.get("promise", {})
    for name, wanted in stored.get("sample", {}).items():
        found = np.asarray(here["sample"].get(name, ()))
        if len(found) != len(wanted):
            return f"{name} has {len(found)} numbers, and there it had {len(wanted)}"
        if found.dtype.kind == "f":
            # In float32, as the promise was measured.
            between = np.abs(found.astype(np.float32) - np.asarray(wanted, np.float32))
            differs, allowed = float(between.max(initial=0.0)), promise["within"]
            what = f"differs by {differs:.3g}, and {allowed:.3g} is promised"
        else:
            differs, allowed = int((found != np.asarray(wanted)).sum()), promise["flips"]
            what = f"has {differs} other codes of {len(found)}, and {allowed} of {promise['codes']} are promised"
        if differs > allowed:
            return f"{name} {what}"
    return None


def is_promised(name: str, stored: Mapping[str, Any], here: Mapping[str, Any], *, where: Path) -> bool:
    """Whether shards of another cache or build may stand beside those of this machine; logs why not.

    stored, here: constants of the group, as in `beyond_promise`. where: these shards are.
    """
    has_none = "sample" in here and "sample" not in stored
    what = "it has no numbers of its model" if has_none else beyond_promise(stored, here)
    if what is not None:
        machines = f"{_machine(stored) or 'nothing'} there, {_machine(here)} here"
        logger.warning("no shard of model.%s is linked from %s: %s: %s", name, where, what, machines)
    return what is None


def numbers_of(folder: Path) -> _ByGroup:
    """Returns the numbers that `require_same_machine` noted in the folder of a build."""
    with contextlib.suppress(OSError, ValueError):
        found: _ByGroup = json.loads((folder / _NOTED).read_bytes())
        return found
    return {}


def require_promise(config: str, stored: _ByGroup, here: _ByGroup, *, where: str) -> None:
    """Raises BuildError where this machine does not keep what a model promised. where: the numbers were stored."""
    for name, constants in here.items():
        if (what := beyond_promise(stored.get(name, {}), constants)) is not None:
            raise BuildError(
                f"model.{name}: {what}: {_machine(stored[name])} {where}, {_machine(constants)} on "
                f"{socket.gethostname()}; make all of it on machines of one kind, or begin again here with another "
                f"run.cache_root, or forebay preprocess {config} --rebuild; what was finished is kept",
                code="FB305",
            )


def require_same_machine(config: str, folder: Path, here: _ByGroup) -> None:
    """Notes the numbers of this machine in the folder of a build. Raises BuildError where another one began it."""
    path = folder / _NOTED
    kept = {name: values for name, values in here.items() if "sample" in values}
    if path.exists():
        require_promise(config, json.loads(path.read_bytes()), kept, where="where the build began")
    elif kept:
        write_bytes(path, json.dumps(kept).encode("ascii"))


def _machine(constants: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in constants.get("made_with", {}).items())
