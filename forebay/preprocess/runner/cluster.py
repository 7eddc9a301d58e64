"""The way to a Ray cluster: which one is meant, whether it is there, and the connection of this process to it.

Ray itself tries for minutes where nothing answers, so that is looked at first.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import threading
from typing import Any

from forebay.errors import BuildError, ConfigError, MissingExtraError
from forebay.extras import install_line

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
