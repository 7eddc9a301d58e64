"""Shards made on a Ray cluster: a shard is a task of Ray, and its receipt comes back.

Ray's worker processes start and watch a child of ours, which makes the shards: see `forebay.preprocess.runner.child`.
Tasks and answers are bytes for Ray, so that no class and no exception of ours passes through its own wrapping.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from forebay.errors import BuildError, ConfigError, MissingExtraError
from forebay.preprocess.pool import WorkerDied
from forebay.version import __version__

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

TASKS_PER_CPU = 2
"""Tasks in flight: one that runs, and one that its worker finds when it is done."""
_MAX_RETRIES = 5
"""How often Ray tries a task again whose node or worker was lost. Its own default is 3."""
_ANSWER_S = 5.0
_LOOK_S = 2.0
"""How often the size of the cluster is asked for: nodes come and go."""
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray warns at every start
    "RAY_NUM_REDIS_GET_RETRIES": "1",  # 204 s for an address without an answer become 50
}
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of gRPC says first: the words of HTTP/2, and a frame of no settings."""
_SETTINGS = 4
"""The type of the frame that a server of gRPC says first."""


class Ray:
    """A Ray cluster as a `Runner`. The connection is there within the `with` block."""

    def __init__(self, address: str | None = None) -> None:
        """address: HOST:PORT of the head node.

        None: what RAY_ADDRESS names, the cluster that `ray start` began on this machine, else one of this machine alone
        that ends with the block. A process that is connected already stays with its cluster.
        """
        self._address = address
        self._ray: Any = None
        self._is_ours = False
        self._looked_s = 0.0
        self._cpus = 0.0
        self._has_warned = False

    def __enter__(self) -> Ray:
        self._ray = _imported()
        wanted = self._address or os.environ.get("RAY_ADDRESS") or None
        if wanted not in (None, "auto", "local"):
            _require_cluster(wanted, f"--address {wanted}" if self._address else f"RAY_ADDRESS={wanted}")
        if not self._ray.is_initialized():
            _connect(self._ray, wanted)
            self._is_ours = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            self._ray.shutdown()

    def run(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[tuple[T, R]]:
        """Yields every task with its result, as they are done; as `Pool.run` does, on all nodes of the cluster.

        A task is taken from `tasks` when there is room for it. A task whose node is lost is made on another node.
        What is in flight is cancelled when this ends early.
        """
        call = self._ray.remote(num_cpus=1, max_retries=_MAX_RETRIES, retry_exceptions=False)(_by_value())
        left, running = iter(tasks), dict[Any, T]()
        try:
            while True:
                for task in itertools.islice(left, max(0, self._room() - len(running))):
                    running[call.remote(__version__, pickle.dumps((function, task)))] = task
                if not running:
                    return
                # With a limit: a task may wait for nodes that are still coming, and there is room when they are here.
                ready, _ = self._ray.wait(list(running), timeout=_LOOK_S)
                for reference in ready:
                    task = running.pop(reference)
                    yield task, self._answer(reference, task)
        finally:
            for reference in running:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.cancel(reference, force=True)

    def _room(self) -> int:
        """Returns how many tasks may be in flight. Without a node that takes any, a few: they make a cluster grow."""
        now_s = time.monotonic()
        if not self._looked_s or now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            self._cpus = float(self._ray.cluster_resources().get("CPU", 0.0))
            if self._cpus < 1 and not self._has_warned:
                self._has_warned = True
                logger.warning("no node of the Ray cluster has a CPU to give now: shards wait for nodes (ray status)")
        return max(TASKS_PER_CPU, int(TASKS_PER_CPU * self._cpus))

    def _answer(self, reference: Any, task: Any) -> Any:
        try:
            host, kind, value = pickle.loads(self._ray.get(reference))  # noqa: S301  of our own workers
        except self._ray.exceptions.RayError as err:
            why = " ".join(str(err).split())
            raise BuildError(
                f"Ray gave up the {task} after {_MAX_RETRIES + 1} tries ({type(err).__name__}: {why}); finished shards "
                "are kept; see what its nodes ran out of (ray status, ray logs), then run the command again"
            ) from err
        if kind == "done":
            return value
        failure: Exception = WorkerDied(task, *value) if kind == "died" else value
        if host != socket.gethostname():
            failure.add_note(f"on {host}, a node of the Ray cluster")
        raise failure


def _by_value() -> Callable[[str, bytes], bytes]:
    """Returns what Ray runs. Ray sends an inner function by its code, so a node without forebay can say so."""

    def forebay_shard(version: str, payload: bytes) -> bytes:
        import pickle
        import socket
        import sys

        host = socket.gethostname()
        try:
            from forebay.errors import BuildError
            from forebay.preprocess.runner import child
            from forebay.version import __version__
        except ImportError as err:
            raise RuntimeError(
                f"forebay cannot be imported on node {host} by {sys.executable} ({err}); install forebay {version} "
                "there, in the environment that `ray start` runs in"
            ) from err
        if __version__ != version:
            refused = BuildError(
                f"node {host} has forebay {__version__}, and the driver has {version}: install one version on all nodes"
            )
            return pickle.dumps((host, "raised", refused))
        return child.answer(payload)

    return forebay_shard


def _imported() -> Any:
    """Returns ray. Its settings are of the environment, and it reads some of them when it is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.exceptions")
    except ImportError as err:
        raise MissingExtraError("--runner ray needs ray; run: pip install 'forebay[ray]'") from err
    return ray


def _connect(ray: Any, wanted: str | None) -> None:
    """Connects this process to a cluster, or starts one. Raises BuildError where the cluster does not take it."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    try:
        ray.init(address=wanted, **quiet)
    except (ConnectionError, RuntimeError, ValueError, SystemExit) as err:  # SystemExit: Ray ends itself after a while
        why = " ".join(str(err).split())
        raise BuildError(
            f"no Ray cluster takes this process ({wanted or 'no address is given'}: {why}); start one: "
            "ray start --head on one machine, and ray start --address HOST:6379 on the others and on this one; what "
            "was finished is kept"
        ) from err
    cpus = ray.cluster_resources().get("CPU", 0)
    where = ray.get_runtime_context().gcs_address
    if wanted is None and _is_of_this_process(ray):
        logger.warning(
            "no --address is given, RAY_ADDRESS is not set, and no Ray cluster runs here: one of this machine alone is "
            "started, of %d CPUs",
            cpus,
        )
    else:
        logger.info("Ray cluster at %s, of %d CPUs", where, cpus)


def _is_of_this_process(ray: Any) -> bool:
    node = getattr(ray._private.worker, "_global_node", None)
    return node is not None and bool(node.is_head())


def _require_cluster(address: str, named: str) -> None:
    """Raises ConfigError where an address is not that of a Ray cluster: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdigit():
        raise ConfigError(f"{named}: wanted is HOST:PORT of the head node, as `ray start` prints it (port 6379)")
    why = "nothing of Ray answers there"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            connection.settimeout(_ANSWER_S)
            connection.sendall(_PREFACE)
            head = connection.recv(9, socket.MSG_WAITALL)
            if len(head) == 9 and head[3] == _SETTINGS:
                return
    except (OSError, OverflowError) as err:
        why = getattr(err, "strerror", None) or str(err)
    raise ConfigError(
        f"{named}: no Ray cluster there ({why}); start one on {host}: ray start --head --port {port}, or name another: "
        "forebay preprocess CONFIG --runner ray --address HOST:6379"
    )
