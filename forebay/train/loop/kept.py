"""The checkpoints of a run: the newest ones and the best one stay; last.json and best.json name one each."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from forebay.config.train import TrainConfig
from forebay.store.files import sweep, write_bytes
from forebay.train.loop.checkpoint import (
    POINTER,
    Best,
    BestRecord,
    TrainState,
    cannot_write,
    change_state,
    checkpoint_name,
    discard,
    is_checkpoint,
    write_checkpoint,
)

_logger = logging.getLogger(__name__)

BEST = "best.json"


class Checkpoints:
    """The checkpoints of one run in its folder. Every rank makes one; only rank 0 calls `begin` and `save`.

    A run's folder holds the checkpoints of one line of training: those of an earlier run, and those later than the one
    that the run goes on from, go when the first new one is in force. Other folders are left alone.
    """

    def __init__(self, folder: Path, settings: TrainConfig) -> None:
        """Reads and writes nothing yet. folder: the run folder."""
        self._folder = folder
        self._limit = settings.save_total_limit
        self._names: list[str] = []
        """Of this line of training, oldest first."""
        self.best = Best(settings)
        self.is_evaluated = True
        """Whether the evaluations after the step of the checkpoint that is gone on from are done."""

    def begin(self) -> None:
        """Warns where the folder has checkpoints of an earlier run, which go with the first one of this run."""
        if found := [path.name for path in self._found()]:
            _logger.warning(
                "%s holds checkpoints of an earlier run (%s); they go when this run writes its first one: stop it and "
                "run forebay train --resume to go on from them, or set another name",
                *(self._folder, ", ".join(found)),
            )

    def go_on(self, checkpoint: Path, state: TrainState, *, writes: bool = True) -> None:
        """Makes the run folder's last.json and best.json what they were when `checkpoint` was written.

        What is later is out of force from now on, and goes when the next checkpoint is written. A best checkpoint that
        is not there any more is forgotten with a warning. writes: False on ranks other than 0.
        """
        is_here = checkpoint.resolve().parent == self._folder.resolve()
        self._names = [name for name in state.kept if is_here and is_checkpoint(self._folder / name)]
        self.best.go_on(state.best, found=self._names)
        self.is_evaluated = state.evaluated or not is_here
        if not writes:
            return
        if not is_here:
            self.begin()
            return
        self._names = [*(name for name in self._names if name != checkpoint.name), checkpoint.name]
        write_bytes(self._folder / POINTER, _as_bytes({"checkpoint": checkpoint.name}))
        self._write_best(self.best.record)

    def save(
        self,
        state: TrainState,
        *,
        model: Any,
        optimizer: Mapping[str, Any],
        processor: Mapping[str, Path],
        weights: Mapping[str, Any] | None = None,
    ) -> Path:
        """Returns the new checkpoint folder, which is the last one afterwards; what the limit leaves out is gone.

        The parameters are those of `write_checkpoint`. Everything is written aside and fsynced, then renamed, then
        named by last.json, then by best.json if it is the best one; only then are older ones removed. A crash at any
        instant leaves the previous checkpoint in force. Raises ForebayError where it cannot be written; the previous
        checkpoint stays.
        """
        sweep(self._folder)
        target = self._target(state.step)
        best = self.best.in_checkpoint(target.name)
        names = _newest([*self._names, target.name], self._limit, best=best)
        state = replace(state, kept=names, best=best)
        write_checkpoint(target, state, model=model, weights=weights, optimizer=optimizer, processor=processor)
        try:
            write_bytes(self._folder / POINTER, _as_bytes({"checkpoint": target.name}))
            self._write_best(best)
        except OSError as err:
            raise cannot_write(target, state.step, err) from err
        self._names = names
        self._drop_others()
        return target

    def evaluated(self) -> None:
        """Makes the checkpoint that was written last one whose evaluations are done: it may be the best one now."""
        target = self._folder / self._names[-1]
        best = self.best.in_checkpoint(target.name)
        self._names = _newest(self._names, self._limit, best=best)
        try:
            change_state(target, kept=self._names, best=best and asdict(best), evaluated=True)
            self._write_best(best)
        except OSError as err:
            raise cannot_write(target, int(target.name.split("-")[1]), err) from err
        self._drop_others()

    def _target(self, step: int) -> Path:
        """Returns the folder of a new checkpoint; its name is not that of one that is in force."""
        # A new run in the folder of an old one reaches the same steps. The old name stays taken until last.json names
        # another.
        in_force = {*self._names, _named(self._folder / POINTER)}
        attempt = 1
        while (target := self._folder / checkpoint_name(step, attempt)).exists():
            if target.name not in in_force and is_checkpoint(target):
                break
            attempt += 1
        return target

    def _write_best(self, record: BestRecord | None) -> None:
        path = self._folder / BEST
        if record is None:
            path.unlink(missing_ok=True)
        elif not path.is_file() or path.read_bytes() != _as_bytes(asdict(record)):
            write_bytes(path, _as_bytes(asdict(record)))

    def _drop_others(self) -> None:
        # Once more from the disk: what these two name is never removed, whatever this process believes.
        staying = {*self._names, _named(self._folder / POINTER), _named(self._folder / BEST)}
        for path in self._found():
            if path.name not in staying:
                discard(path)

    def _found(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if is_checkpoint(path))


def _newest(names: Sequence[str], limit: int, *, best: BestRecord | None) -> list[str]:
    """Returns the last `limit` of names that are oldest first, and the best one, in their order."""
    newest = set(names[-limit:])
    return [name for name in names if name in newest or (best is not None and name == best.checkpoint)]


def _named(path: Path) -> str | None:
    """Returns the checkpoint that last.json or best.json names, None where the file names none."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    name = document.get("checkpoint") if isinstance(document, dict) else None
    return name if isinstance(name, str) else None


def _as_bytes(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode()
