"""Fuzzing: hypothesis draws inputs, a confined child reads them; whatever it answers but a typed error is wrong."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import xxhash
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from forebay.errors import ForebayError
from forebay.store.metadata import write_metadata
from tests.faults.children import Children
from tests.faults.row import made
from tests.faults.sandbox import confine

PER_TRIAL = 100
"""Inputs of one trial."""
Read = Callable[[Path, st.DataObject], None]


class Wicked:
    """Unpickled, it would leave a file behind."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("pickle-was-run"),))


WICKED = pickle.dumps(Wicked())

# At its first draws hypothesis reads what it draws from, characters and constants of modules: 2 s in each child.
_drawn = st.tuples(st.text(), st.lists(st.integers(), min_size=200))
hypothesis.find(_drawn, lambda drawn: all(drawn[1]), settings=settings(database=None, phases=[Phase.generate]))


@dataclass(frozen=True)
class Fuzz:
    """One case of fuzzing.

    prepare: makes what is right in a folder. targets: readers, and the part of that folder that each changes.
    """

    prepare: Callable[[Path], None]
    targets: Mapping[Read, str]

    def trial(self, children: Children, number: int, folder: Path, *, count: int = PER_TRIAL) -> str:
        """Reads many inputs of the target that is this number's."""
        read, part = list(self.targets.items())[number % len(self.targets)]
        folders = made(folder / "inside"), made(folder / "outside")
        ended = children.run(_many, read, part, self.prepare, number, count, *folders)
        name = read.__name__
        assert not ended.signal, f"{name}: signal {ended.signal}"
        assert ended.error is None, f"{name}: {ended.error!r} {getattr(ended.error, '__notes__', '')}"
        assert ended.value == [], f"{name}: {ended.value[:3]}"
        return f"{name} x {count}"


def sign(cache: Path, name: str, data: bytes) -> None:
    """Puts other bytes into a file of a cache, and their checksum into its metadata."""
    (cache / name).write_bytes(data)
    document = json.loads((cache / "metadata.json").read_bytes())
    document["files"][name] = {"size_bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    write_metadata(cache, {k: v for k, v in document.items() if k != "checksum"})


def npy(array: np.ndarray[Any, Any]) -> bytes:
    """Returns the file of an array."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def object_arrays() -> st.SearchStrategy[bytes]:
    """Files of arrays that hold a pickle."""
    return st.just(npy(np.array([Wicked()], dtype=object)))


def _many(
    read: Read, part: str, prepare: Callable[[Path], None], number: int, count: int, folder: Path, outside: Path
) -> list[str]:
    """Returns what was done against the rules."""
    logging.disable()
    sys.dont_write_bytecode = True  # a module that a confined read is the first to import is written into its cache
    set_hypothesis_home_dir(folder / "hypothesis")
    prepare(folder / "right")
    confined: list[list[str]] = []

    @hypothesis.seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @hypothesis.given(data=st.data())
    def one(data: st.DataObject) -> None:
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(folder / "right" / part, work / part)
        if not confined:
            confined.append(confine(folder, outside))
        try:
            read(work, data)
        except ForebayError:
            return

    os.chdir(folder)
    one()
    seen = list(confined[0])
    if list(folder.rglob("pickle-was-run")):
        seen.append("a pickle was run")
    return seen
