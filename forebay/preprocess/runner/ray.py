"""Shards made on a Ray cluster: a shard is a task of Ray, and its receipt comes back.

Ray's worker processes start and watch a child of ours, which makes the shards: see `forebay.preprocess.runner.slurm`.
Tasks and answers are bytes for Ray, so that no class and no exception of ours passes through its own wrapping.

What a node must have in common with the driver of a build, looked at on the node before it makes a shard.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from forebay.config.remote import RemoteConfig, parse_url
from forebay.errors import BuildError, ConfigError, MissingExtraError
from forebay.extras import install_line
from forebay.preprocess.groups import Groups
from forebay.preprocess.probes import require_promise
from forebay.preprocess.runner.parts import token_in
from forebay.preprocess.shard_task import ShardTask
from forebay.store.layout import TEXT, Constants, Group
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.raw_sources import place_of
from forebay.store.source_files import SourceFile
from forebay.task_map import WorkerDied, begin, is_second_try
from forebay.version import __version__

logger = logging.getLogger(__name__)
ANSWER_S = 5.0
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray warns at every start
    "RAY_NUM_REDIS_GET_RETRIES": "1",  # a cluster that stops to answer while it is connected to: 50 s and not 204
}
"""What Ray's own processes are started with, where nothing else is set."""
_LOCAL = "local"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of gRPC says first: the words of HTTP/2, and a frame of no settings."""
_FRAME_BYTES, _FRAME_TYPE, _SETTINGS = 9, 3, 4
"""The head of a frame, where its type stands in it, and the type of what a server of gRPC says first."""
T = TypeVar("T")
R = TypeVar("R")
TASKS_PER_CPU = 2
"""Tasks in flight: one that runs, and one that its worker finds when it is done."""
_MAX_RETRIES = 5
"""How often Ray tries a task again whose node or worker was lost. Its own default is 3."""
_LOOK_S = 2.0
"""How often the size of the cluster is asked for: nodes come and go."""
_LOST_S = 40.0
"""The head node may start again within this time. After 60 s without it Ray ends this process, with no word of ours."""
_LATE_S = (0.0, 0.5, 2.0)
"""A network file system may show a new file to another machine a little later."""
GPU = "cuda:0"
"""The device of a task that takes GPUs: Ray shows it no others."""
Stores = tuple[tuple[str, RemoteConfig], ...]
"""The stores that raw data is read from: URL and settings of each."""


def imported() -> Any:
    """Returns ray. Raises MissingExtraError. Some of its settings are read when it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.exceptions")
        importlib.import_module("ray._private.services")
    except ImportError as err:
        raise MissingExtraError(f"--runner ray needs ray ({err}); run: {install_line('ray')}") from err
    return ray


def address_of(ray: Any, given: str | None) -> str:
    """Returns HOST:PORT of the cluster that is meant, or that there is none and Ray starts one: "local".

    given: by --address. Raises ConfigError where no cluster answers there, or where RAY_ADDRESS says.
    """
    said = given or os.environ.get("RAY_ADDRESS")
    if said == _LOCAL:
        return said
    if said and said != "auto":
        named = f"--address {given}" if given else f"RAY_ADDRESS={said}"
        if (why := silence_of(said)) is not None:
            raise ConfigError(
                f"{named}: no Ray cluster there ({why}); start one: ray start --head --port 6379 on its head node, or "
                "name another: forebay preprocess CONFIG --runner ray --address HOST:6379",
                code="FB309",
            )
        return said
    started: str | None = ray._private.services.find_bootstrap_address(None)  # by `ray start` on this machine
    if started is not None and (why := silence_of(started)) is not None:
        logger.warning("the Ray cluster that was started here last, at %s, is gone (%s)", started, why)
        started = None
    return started or _LOCAL


def silence_of(address: str) -> str | None:
    """Returns why no Ray cluster is at an address, None where what answers speaks as one does."""
    place = host_and_port(address)
    if place is None:
        return "wanted is HOST:PORT of the head node, as `ray start` prints it"
    try:
        with socket.create_connection(place, timeout=ANSWER_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return None
            connection.sendall(_PREFACE)
            head = connection.recv(_FRAME_BYTES)
    except (OSError, OverflowError) as err:
        return getattr(err, "strerror", None) or str(err)
    return None if len(head) > _FRAME_TYPE and head[_FRAME_TYPE] == _SETTINGS else "what answers there is not Ray"


def host_and_port(address: str) -> tuple[str, int] | None:
    """Returns both, None for anything but HOST:PORT."""
    host, _, port = address.rpartition(":")
    is_one = bool(host) and "://" not in address and port.isdigit()
    return (host.strip("[]"), int(port)) if is_one else None


def connect(ray: Any, address: str) -> None:
    """Connects this process to a cluster, or starts one. Raises BuildError where it does not take this process."""
    stops = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, SystemExit) as err:
        # SystemExit: Ray ends itself after a while.
        why = " ".join(str(err).split())
        raise BuildError(
            f"the Ray cluster at {address} does not take this process ({why}); a driver runs on a node of its cluster: "
            f"ray start --address {address}, with the same versions of Python and Ray, and the same token "
            "(RAY_AUTH_TOKEN, or ~/.ray/auth_token); then run the command again",
            code="FB309",
        ) from err
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray's own prints a stack, and exits with 15
            signal.signal(signal.SIGTERM, stops)
    cpus = ray.cluster_resources().get("CPU", 0)
    if address == _LOCAL:
        told = (
            "no Ray cluster is named (--address, RAY_ADDRESS) and none runs here: one of this machine alone is started"
        )
        logger.warning("%s, of %d CPUs", told, cpus)
    else:
        logger.info("Ray cluster at %s, of %d CPUs", address, cpus)


class Ray:
    """A Ray cluster as a `Runner`. The connection is there within the `with` block."""

    def __init__(self, address: str | None = None, *, gpus: Mapping[Group, float] | None = None) -> None:
        """address: HOST:PORT of the head node. gpus: how many a task takes, by its group.

        None: what RAY_ADDRESS names, the cluster that `ray start` began on this machine, else one of this machine alone
        that ends with the block. A process that is connected already stays with its cluster.
        """
        self._address, self._gpus = address, gpus or {}
        self._ray: Any = None
        self._is_ours = False
        self._head: tuple[str, int] | None = None
        self._looked_s = self._answered_s = 0.0
        self._is_lost = False
        self._cpus = 0.0
        self._has_warned = False

    def __enter__(self) -> Ray:
        self._ray = imported()
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours or self._address is not None:
            address = address_of(self._ray, self._address)
        if self._is_ours:
            connect(self._ray, address)
        self._head = host_and_port(self._ray.get_runtime_context().gcs_address)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours and not self._is_lost:
            self._ray.shutdown()

    def run(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[tuple[T, R]]:
        """Yields every task with its result, as they are done; as `Pool.run` does, on all nodes of the cluster.

        A task is taken from `tasks` when there is room for it. A task whose node is lost is made on another node.
        What is in flight is cancelled when this ends early.
        """
        call = self._ray.remote(num_cpus=1, max_retries=_MAX_RETRIES, retry_exceptions=False)(_by_value())
        left, running, seen = iter(tasks), dict[Any, T](), list[int]()
        try:
            with _interrupts(seen):
                while not seen:
                    for task in itertools.islice(left, max(0, self._room() - len(running))):
                        gpus = self._gpus.get(getattr(task, "group", ""), 0)
                        sent = call.options(num_gpus=gpus).remote(__version__, pickle.dumps((function, task)))
                        running[sent] = task
                    if not running:
                        return
                    # With a limit: a task may wait for nodes that are still coming, and there is room when these are.
                    ready, _ = self._ray.wait(list(running), timeout=_LOOK_S)
                    for reference in ready:
                        task = running.pop(reference)
                        yield task, self._answer(reference, task)
            raise KeyboardInterrupt
        finally:
            # A generator may be closed after the block has ended: what is asked of Ray then would start it again.
            # Ctrl-C ends the connection, and its tasks with it: Ray dies now and then of a cancelled task that is done.
            is_asked = self._ray.is_initialized() and not self._is_lost and not (seen and self._is_ours)
            for reference in running if is_asked else ():
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.cancel(reference, force=True)

    def _room(self) -> int:
        """Returns how many tasks may be in flight. Without a node that takes any, a few: they make a cluster grow."""
        if time.monotonic() - self._looked_s > _LOOK_S and self._answers():
            found = self._ray.cluster_resources()
            self._cpus = float(found.get("CPU", 0.0))
            wanted = {"CPU": 1.0, "GPU": max(self._gpus.values(), default=0.0)}
            lacks = " or a ".join(kind for kind, least in wanted.items() if found.get(kind, 0.0) < least)
            if lacks and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "no node of the Ray cluster has a %s to give now: shards wait for nodes (ray status)", lacks
                )
        return max(TASKS_PER_CPU, int(TASKS_PER_CPU * self._cpus))

    def _answers(self) -> bool:
        """Whether the head node is there now. Raises BuildError where it has not been for a while."""
        assert self._head is not None
        self._looked_s = now_s = time.monotonic()
        try:
            socket.create_connection(self._head, timeout=ANSWER_S).close()
        except OSError as err:
            if self._answered_s and now_s - self._answered_s > _LOST_S:
                self._is_lost = True
                raise BuildError(
                    f"the head node of the Ray cluster has not answered at {self._head[0]}:{self._head[1]} for "
                    f"{now_s - self._answered_s:.0f} s ({err.strerror or err}); finished shards are kept; start the "
                    "cluster again (ray start --head), then run the command again",
                    code="FB309",
                ) from err
            return False
        self._answered_s = now_s
        return True

    def _answer(self, reference: Any, task: Any) -> Any:
        try:
            host, kind, value = pickle.loads(self._ray.get(reference))  # noqa: S301  of our own workers
        except self._ray.exceptions.RayError as err:
            why = " ".join(str(err).split())
            raise BuildError(
                f"Ray gave up the {task} after {_MAX_RETRIES + 1} tries ({type(err).__name__}: {why}); finished shards "
                "are kept; see what its nodes ran out of (ray status, ray logs), then run the command again",
                code="FB302",
            ) from err
        if kind == "done":
            return value
        failure: Exception = WorkerDied(task, *value) if kind == "died" else value
        if host != socket.gethostname():
            failure.add_note(f"on {host}, a node of the Ray cluster")
        raise failure


@contextlib.contextmanager
def _interrupts(seen: list[int]) -> Iterator[None]:
    """Fills a list at Ctrl-C: inside Ray a KeyboardInterrupt may be raised to nobody."""

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    is_ours = threading.current_thread() is threading.main_thread()
    is_ours = is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _by_value() -> Callable[[str, bytes], bytes]:
    """Returns what Ray runs. Ray sends an inner function by its code, so a node without forebay can say so."""

    def forebay_shard(version: str, payload: bytes) -> bytes:
        import pickle
        import socket
        import sys

        host = socket.gethostname()
        try:
            from forebay.errors import BuildError
            from forebay.preprocess.runner import slurm as child
            from forebay.version import __version__
        except ImportError as err:
            raise RuntimeError(
                f"forebay cannot be imported on node {host} by {sys.executable} ({err}); install forebay {version} "
                "there, in the environment that `ray start` runs in"
            ) from err
        if __version__ != version:
            refused = BuildError(
                f"node {host} has forebay {__version__}, and the driver has {version}: install one version on "
                "all nodes",
                code="FB309",
            )
            return pickle.dumps((host, "raised", refused))
        return child.answer(payload)

    return forebay_shard


@dataclass(frozen=True, kw_only=True)
class OnNode:
    """Calls `function` on a node that sees the folder of the build and the raw data, and computes what the driver does.

    host, probe: of the machine whose values the keys of the shards name. driver: the machine of this build's driver.
    constants: of that machine. device: what models run on, None: the CPU.
    token: what the driver wrote into the folder of the build. stores: see `stores_of`. config: the config file, for
    messages.
    """

    function: Callable[[ShardTask], object]
    host: str
    probe: Mapping[Group, str]
    constants: Constants
    device: str | None
    driver: str
    token: str
    stores: Stores
    config: str

    def __call__(self, task: ShardTask) -> object:
        """Returns `function(task)`. Raises BuildError where this node is not fit for it."""
        begin(is_tried_again=is_second_try(), on=self.device)
        _open_stores(self.stores, self.token)
        if task.stage is None:  # else nothing is shared by that folder
            self._require_folder(task.folder)
        if task.group != TEXT:
            self._require_files(task.files)
        self._require_numerics(task)
        return self.function(task)

    def _require_folder(self, folder: Path) -> None:
        if _appears(lambda: token_in(folder) == self.token):
            return
        raise BuildError(
            f"{folder} on node {socket.gethostname()} is not the folder of that name on {self.driver}, the driver: all "
            "nodes must share run.cache_root; put it on a file system that they all mount at the same path, or build "
            f"in a bucket, which needs no shared folder: forebay preprocess {self.config} --runner ray --cache-root "
            "s3://BUCKET/caches --stage s3://BUCKET/stage",
            code="FB309",
        )

    def _require_files(self, files: Sequence[SourceFile]) -> None:
        for path in [file.path for file in files if file.stat is not None and file.stat[0] >= 0]:  # of no store
            if _appears(functools.partial(os.path.lexists, path)):
                continue
            raise BuildError(
                f"{path} is not there on node {socket.gethostname()}, and {self.driver} has listed it: mount the "
                "raw data on all nodes at the same path, or put it into a store and name it by URL in source.manifest "
                "(if it was removed meanwhile, put it back); finished shards are kept; then run: forebay preprocess "
                f"{self.config} --runner ray",
                code="FB309",
            )

    def _require_numerics(self, task: ShardTask) -> None:
        here, wanted = _probe(task.groups, task.group), self.probe[task.group]
        if here != wanted:
            raise BuildError(
                f"the {task.group} steps give other values on node {socket.gethostname()} (probe {here}) than on "
                f"{self.host} (probe {wanted}): another CPU family, or other libraries; install the same packages on "
                "all nodes, or leave that node out of the cluster; finished shards are kept; then run: forebay "
                f"preprocess {self.config} --runner ray",
                code="FB305",
            )
        if "sample" in (stored := self.constants.of(task.group)):
            found = {task.group: _constants(task.groups, task.group)}
            where = f"on {self.host}" if self.device is None else "on the first node"
            require_promise(self.config, {task.group: stored}, found, where=where)


def stores_of(files: Sequence[SourceFile]) -> Stores:
    """Returns the stores that files are of; a node that has never read from them learns of them so."""
    found = {}
    for file in files:
        place = None if file.stat is None or file.stat[0] >= 0 else place_of(file.path)
        if place is not None:
            found[str(place.origin.url)] = place.origin.mirror.settings
    return tuple(found.items())


@functools.lru_cache(maxsize=1)
def _open_stores(stores: Stores, build: str) -> None:  # noqa: ARG001  once for each build
    """Makes the paths that stand for objects mean these on this node, and forgets what an earlier build was told."""
    for url, settings in stores:
        Mirror.at(parse_url(url), settings)
    forget()


@functools.cache
def _probe(groups: Groups, group: Group) -> str:
    return groups.probe(group)


@functools.cache
def _constants(groups: Groups, group: Group) -> Mapping[str, Any]:
    return groups.constants_of(group)


def _appears(is_so: Callable[[], bool]) -> bool:
    for wait_s in _LATE_S:
        time.sleep(wait_s)
        if is_so():
            return True
    return False
