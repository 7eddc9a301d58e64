"""The program beside a server's socket that takes the place of Python: see `tests.warm`.

`python -IS` runs it, so that it starts in 10 ms: it imports nothing but modules that are built in. socket, signal and
json would take as long again.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import marshal
import os
import sys

SIGNALS = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT, _signal.SIGUSR1, _signal.SIGUSR2)
READ_AT_START = ("PYTHON", "HF_", "TRANSFORMERS_", "OMP_", "MKL_", "OPENBLAS_")
"""How the names of variables begin that are read while Python starts or while packages are imported."""
OF_EACH = ("PYTHONPATH", "PYTHON_EXEC", "PYTHONBREAKPOINT", "HF_HUB_DISABLE_PROGRESS_BARS")
"""Variables that begin so and that every process has of its own; the server takes care of them. PYTHONBREAKPOINT is
read when `breakpoint()` is called, and Ray leaves it in the environment of who has used it."""


def read_at_start(environment: dict[str, str]) -> dict[str, str]:
    """Returns the variables that a process which is there already cannot take from another."""
    names = [name for name in environment if name.startswith(READ_AT_START) and name not in OF_EACH]
    return {name: environment[name] for name in names}


def can_be_warm(words: list[str], environment: dict[str, str], servers: dict[str, str]) -> bool:
    """Whether a process with these arguments and variables can come from a server that had these variables."""
    words = words[1:] if words[:1] == ["-u"] else words
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    return (
        bool(words)
        and (words[0] in ("-c", "-m") or not words[0].startswith("-"))
        and read_at_start(environment).items() <= servers.items()
        and not any(os.path.exists(os.path.join(path, "sitecustomize.py")) for path in paths)
    )


def ask(server: _socket.socket, asked: dict[str, object], fds: dict[int, int]) -> None:
    """Sends what is asked for, and open files by the numbers that they have in the new process."""
    data = marshal.dumps(asked | {"fds": list(fds)})
    numbers = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds.values())
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)]
    server.sendmsg([len(data).to_bytes(8, "little")], rights)
    server.sendall(data)


def status_of(server: _socket.socket) -> int:
    """Returns how the process has ended, when it has; a signal is a negative number."""
    return int.from_bytes(server.recv(8) or bytes([70]), "little", signed=True)


def main() -> None:
    """Runs as this process what its arguments say."""
    folder = os.path.dirname(sys.argv[0])
    with open(os.path.join(folder, "environment"), "rb") as file:
        servers = marshal.load(file)
    if not can_be_warm(sys.argv[1:], dict(os.environ), servers):
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    fds = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    server = _socket.socket(_socket.AF_UNIX)
    server.connect(os.path.join(folder, "socket"))
    for number in SIGNALS:
        _signal.signal(number, lambda number, _: server.send(bytes([number])))
    asked = {"words": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "parent": os.getppid()}
    ask(server, asked | {"me": sys.argv[0]}, {fd: fd for fd in fds})
    for fd in fds:
        os.close(fd)
    _end_as(status_of(server))


def _end_as(status: int) -> None:
    if status < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != _signal.SIGKILL:
            _signal.signal(-status, _signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
