"""The process of a device, which runs the models of a build for its share of the workers.

A worker prepares a batch, sends it, and waits for the answer. Arrays lie in memory that both processes map, one region
each way, as large as the largest message so far: a worker has one batch with its device at a time, and this bounds the
memory. The rest of a message is pickled. If the device's process dies, the pool starts another one, and the batch is
sent once more. If that one dies too, the worker ends itself, and the pool names the sample as for any other death.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import pickle
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Client, Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from forebay.config.frozen_models import KeptOutput
from forebay.errors import ConfigError
from forebay.steps.form import FieldForm
from forebay.steps.model.model_step import CPU, ModelStep
from forebay.steps.model.own_model import OwnModel, opened_own
from forebay.steps.step import Batch
from forebay.store.layout import Array
from forebay.task_map import Map, device, is_second_try

if TYPE_CHECKING:
    from forebay.steps.model.open_model import OpenModel

_ALIGNED = 64
_PATIENCE_S = 60.0
"""A device's process that has died is there again within this time."""


class ArrayChannel:
    """Sends objects to another process: their arrays through shared memory, without a pickle of them."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._own = os.memfd_create("forebay-arrays")
        send_handle(connection, self._own, 0)
        self._theirs = recv_handle(connection)
        self._out = self._in = memoryview(bytearray())

    def fileno(self) -> int:
        """Returns what `wait` looks at."""
        return self.connection.fileno()

    def send(self, value: Any) -> None:
        """Sends an object; the memory of the one before is used again."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        parts = [buffer.raw() for buffer in buffers]
        starts = [*itertools.accumulate((-(-part.nbytes // _ALIGNED) * _ALIGNED for part in parts), initial=0)]
        if starts[-1] > len(self._out):
            os.ftruncate(self._own, starts[-1])
            self._out = memoryview(mmap.mmap(self._own, starts[-1]))
        spans = [(start, start + part.nbytes) for start, part in zip(starts, parts, strict=False)]
        for (start, stop), part in zip(spans, parts, strict=True):
            self._out[start:stop] = part
        self.connection.send((spans, data))

    def recv(self) -> Any:
        """Returns the next object; its arrays are views, which the sender's next message overwrites."""
        spans, data = self.connection.recv()
        if spans and spans[-1][1] > len(self._in):
            self._in = memoryview(mmap.mmap(self._theirs, os.fstat(self._theirs).st_size))
        return pickle.loads(data, buffers=[self._in[start:stop] for start, stop in spans])  # noqa: S301  of our own

    def close(self) -> None:
        """Closes the connection; memory goes with the last view of it."""
        self.connection.close()
        os.close(self._own)
        os.close(self._theirs)


def serve_device(place: tuple[str, str]) -> None:
    """Answers the workers that connect, one call after the other. place: the device, and the path of a socket."""
    name, address = place
    Path(address).unlink(missing_ok=True)  # of a process that died
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
        channels: list[ArrayChannel] = []
        while True:
            for ready in wait([listener, *cast(Sequence[Any], channels)]):
                if isinstance(ready, ArrayChannel):
                    if not _answer(ready, name):
                        channels.remove(ready)
                        ready.close()
                else:
                    with contextlib.suppress(OSError, EOFError):  # a worker that died meanwhile
                        channels.append(ArrayChannel(Connection(listener.accept()[0].detach())))


def _answer(channel: ArrayChannel, name: str) -> bool:
    """Answers one call. False: the worker is gone."""
    try:
        function, args = channel.recv()
    except (EOFError, ConnectionResetError):
        return False
    try:
        reply = (False, function(name, *args))
    except Exception as err:  # noqa: BLE001  it is raised in the worker
        reply = (True, err)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.send(reply)
    return True


def on_device(function: Any, *args: Any) -> Any:
    """Returns `function(device, *args)`, of this process or of the one that runs the device; arrays may be views."""
    place = device() or CPU
    if "/" not in place:
        return function(place, *args)
    for _ in range(1 if is_second_try() else 2):
        try:
            channel = _channel_to(place)
            channel.send((function, args))
            failed, value = channel.recv()
        except (EOFError, OSError):
            _channel_to.cache_clear()
            continue
        if failed:
            raise value
        return value
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the line above has ended this process")


@functools.cache
def _channel_to(address: str) -> ArrayChannel:
    stop_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return ArrayChannel(Client(address, family="AF_UNIX"))
        except (ConnectionError, FileNotFoundError, EOFError):
            if time.monotonic() > stop_s:
                raise
            time.sleep(0.02)


def _copied(made: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    return [{name: array.copy() for name, array in of_one.items()} for of_one in made]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the process of a device runs; used as an `OpenModel` is."""

    step: ModelStep
    batch_size: int
    kept: Mapping[str, KeptOutput]

    @property
    def made_by(self) -> str:
        """The model's class."""
        return str(on_device(_asked, self.step, "made_by"))

    @property
    def machine(self) -> dict[str, str]:
        """See `OpenModel`."""
        return dict(on_device(_asked, self.step, "machine"))

    def made(self, batch: Batch, rows: Sequence[int]) -> list[dict[str, Array]]:
        """See `OpenModel`."""
        given = {name: np.ascontiguousarray(value.numpy()) for name, value in batch.items()}
        return _copied(on_device(_asked, self.step, "made", given, rows))

    def declared(self, first: Mapping[str, Array]) -> tuple[tuple[FieldForm, ...], Mapping[str, str]]:
        """See `OpenModel`."""
        forms, numbers = on_device(_asked, self.step, "declared", first)
        return tuple(forms), dict(numbers)


def _asked(name: str, step: ModelStep, what: str, *args: Any) -> Any:
    from forebay.steps.model.open_model import opened_model  # not at import: most builds have no model

    found = getattr(opened_own(step, name) if step.is_code else opened_model(step, name), what)
    return found(*args) if callable(found) else found


@dataclass(frozen=True, slots=True)
class ServedOwn(OwnModel):
    """A class of the user that asks for its device: this process prepares, and that of the device does the rest."""

    @property
    def machine(self) -> dict[str, str]:
        """See `OpenModel`."""
        return dict(on_device(_asked, self.step, "machine"))

    def made(self, prepared: Sequence[Mapping[str, Any]]) -> list[dict[str, Array]]:
        """See `OwnModel`."""
        return _copied(on_device(_made_of_packed, self.step, *self.packed(prepared)))


def _made_of_packed(name: str, step: ModelStep, data: bytes, arrays: Sequence[Any]) -> list[dict[str, Array]]:
    own = opened_own(step, name)  # first: the batch may hold objects of classes in its file
    return own.made(pickle.loads(data, buffers=arrays))  # noqa: S301  of our own


Model: TypeAlias = "OpenModel | ServedModel | OwnModel"


def model_at_hand(step: ModelStep) -> Model:
    """Returns the model of a step where this process is to run it: here, or on a device."""
    from forebay.steps.model.open_model import opened_model

    place = device() or CPU
    if step.is_code:
        return _served_own(step) if "/" in place else opened_own(step, place)
    return _served(step) if "/" in place else opened_model(step, place)


@functools.lru_cache(maxsize=16)
def _served(step: ModelStep) -> ServedModel:
    family = step.family()
    return ServedModel(step, step.batch_of(family), step.outputs(family))


@functools.lru_cache(maxsize=4)
def _served_own(step: ModelStep) -> OwnModel:
    here = opened_own(step)
    return here if here.device is None else ServedOwn(**{each.name: getattr(here, each.name) for each in fields(here)})


def devices_of(wanted: str | Sequence[str], map_: Map) -> tuple[str, ...]:
    """Returns the devices that get a process each; none where each worker runs models by itself.

    wanted: `run.devices`. map_: over worker processes: one that has looked for devices is never forked from.
    Raises ConfigError for a device that is not here.
    """
    if wanted == CPU or (wanted == "auto" and not _may_have_devices()):
        return ()
    if not isinstance(wanted, str) and set(wanted) == {CPU}:
        return tuple(wanted)
    (found,) = map_(_visible, [None])
    if wanted == "auto":
        return tuple(found)
    if missing := [name for name in wanted if name not in (*found, CPU)]:
        raise ConfigError(
            f"run.devices names {missing[0]}, and torch sees {', '.join(found) or 'no CUDA device'} here; set devices "
            'to "cpu", or leave it out for all that it sees',
            code="FB312",
        )
    return tuple(wanted)


def _may_have_devices() -> bool:
    """Whether the kernel shows a device; torch is not asked where it does not."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _visible(_: None) -> list[str]:
    import torch

    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
