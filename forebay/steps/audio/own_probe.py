"""Runs a step of the user over the probe clips, as a program: `python -P -m forebay.steps.audio.own_probe`.

The question is `Own.question`, the answer `runs`: what the step gave for each clip, and once more in reverse; and
`unlisted`: the files beside the config that the step read and does not list.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import BuildError, ConfigError, DecodeError
from forebay.steps.audio.own_step import Own
from forebay.steps.run_code import serve
from forebay.store.layout import Array


def probe_clips(rate_hz: int) -> list[Array]:
    """Returns clips of three lengths: noise that grows louder, and silence."""
    made = np.random.default_rng(17)
    lengths = (rate_hz // 5 + 7, rate_hz, 2 * rate_hz + rate_hz // 3)
    noise = [made.uniform(-0.5, 0.5, n).astype(np.float32) * np.linspace(0.1, 1, n, dtype=np.float32) for n in lengths]
    return [*noise, np.zeros(rate_hz, np.float32)]


def probed(question: dict[str, Any]) -> dict[str, Any]:
    """Returns `runs`, or `error` where the step cannot be run at all."""
    own = Own.asked(question)
    unlisted = _unlisted(own)
    try:
        own.opened_class()
        clips = probe_clips(own.rate_hz)
        runs = [list(_answers(own, clips)), list(_answers(own, clips[::-1]))[::-1]]
        return {"runs": runs, "unlisted": sorted(unlisted)}
    except ConfigError as err:
        return {"error": str(err), "unlisted": sorted(unlisted)}


def _unlisted(own: Own) -> set[str]:
    """Returns the files below the config's folder that are opened or imported from now on and that no key knows."""
    if own.path is None:
        return set()
    own_path = Path(os.path.realpath(own.path))
    folder = own_path.parents[len(Path(own.spec.rpartition(":")[0]).parts) - 1]
    return files_read(folder, [own_path, *(own_path.parent / name for name, _ in own.files)])


def files_read(folder: Path, listed: Sequence[Path], is_on: Callable[[], bool] = lambda: True) -> set[str]:
    """Returns a set that gets the files below a folder that are opened or imported from now on and are not listed.

    is_on: whether what is opened now counts.
    """
    found: set[str] = set()
    known = {Path(os.path.realpath(path)) for path in listed}
    others = [Path(os.path.realpath(place)) for place in (sys.prefix, Path(__file__).parents[3])]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and is_on() and isinstance(args[0], str | bytes) and "r" in (args[1] or "r"):
            path = Path(os.path.realpath(os.fsdecode(args[0])))
            if path.is_relative_to(folder) and path not in known and not any(map(path.is_relative_to, others)):
                is_cached = path.parent.name == "__pycache__"
                found.add(str(path.parents[1] / f"{path.stem.partition('.')[0]}.py" if is_cached else path))

    sys.addaudithook(watch)
    return found


def _answers(own: Own, clips: list[Array]) -> Iterator[tuple[str, str]]:
    for clip in clips:
        try:
            [fields] = own.compute([clip])
        except DecodeError as err:
            yield "raised", str(err)
        except BuildError as err:
            yield "differs", str(err)
        else:
            digest = hashlib.sha256()
            for name, array in fields.items():
                digest.update(f"{name} {array.dtype} {array.shape}\n".encode() + np.ascontiguousarray(array).tobytes())
            yield "made", f"values of sha256 {digest.hexdigest()[:16]}"


if __name__ == "__main__":
    serve(probed)
