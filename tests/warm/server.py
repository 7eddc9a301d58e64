"""The server: it has everything loaded, runs nothing itself, and forks a process for whoever asks. See `tests.warm`.

It has one thread, so that a process inherits no lock. Between it and a process stands a watcher, which hands signals to
the process and says how the process ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

from tests.warm import client, worker

_ROOT = Path(__file__).parents[2]
_LOADED = (
    *("torch", "torch._dynamo", "torch.distributed.run", "torch.utils.data", "torch.distributed.fsdp"),
    *("transformers", "transformers.modeling_utils", "transformers.trainer", "transformers.models.auto"),
    *("transformers.models.whisper.modeling_whisper", "transformers.models.whisper.tokenization_whisper"),
    *("transformers.models.whisper.feature_extraction_whisper", "transformers.models.whisper.processing_whisper"),
    *("transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3"),
    *("transformers.models.qwen2_vl.image_processing_qwen2_vl", "transformers.models.qwen3_vl.modeling_qwen3_vl"),
    *("transformers.models.qwen3_vl.processing_qwen3_vl", "accelerate", "accelerate.commands.launch"),
    *("numpy.random", "pandas", "pyarrow.compute", "pyarrow.pandas_compat", "pyarrow.parquet", "soundfile", "soxr"),
    *("pydantic.dataclasses", "pydantic.type_adapter", "jiwer", "peft", "tensordict", "PIL.Image", "obstore"),
    *("forebay.cli", "forebay.preprocess.pipeline", "forebay.preprocess.worker", "forebay.train.loop.run"),
)


def main(folder: str) -> None:
    """Serves until the standard input ends; in each process that is started: runs what was asked for."""
    _load()
    worker.within.append(Path(folder))
    vars(sys.modules["forebay.preprocess.pool"])["subprocess"] = worker.warm_workers()
    os.fsync = worker.no_fsync  # type: ignore[assignment]
    asked = _serve(Path(folder))
    _become(asked)
    _end_as(asked["words"])


def _load() -> None:
    gc.disable()  # there is no garbage yet, and looking for it takes a fifth of the time
    for name in _LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()


def _serve(folder: Path) -> dict[str, Any]:
    """Returns, in a process of its own each time, what a client asked for; ends with the standard input."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    environment = json.dumps(client.read_at_start(dict(os.environ)))
    (folder / "environment").write_text(environment, encoding="utf-8")
    print("loaded", flush=True)
    while True:
        if 0 in select.select([0, listener.fileno()], [], [])[0]:
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.wait()
            os._exit(0)
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            return _asked(connection)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _asked(connection: socket.socket) -> dict[str, Any]:
    head, fds, _, _ = socket.recv_fds(connection, 8, 253)
    data = b""
    while len(data) < int.from_bytes(head, "little"):
        data += connection.recv(1 << 20)
    asked: dict[str, Any] = json.loads(data)
    if pid := os.fork():
        _watch(connection, pid)
    connection.close()
    _take(dict(zip(asked["fds"], fds, strict=True)))
    return asked


def _watch(connection: socket.socket, pid: int) -> None:
    """Hands signals on until the process has ended, and says how. It dies if its client does."""
    process = os.pidfd_open(pid)
    for fd in (int(name) for name in os.listdir("/proc/self/fd")):
        if fd not in (process, connection.fileno()):
            with contextlib.suppress(OSError):
                os.close(fd)
    while process not in select.select([process, connection.fileno()], [], [])[0]:
        for number in connection.recv(64) or bytes([signal.SIGKILL]):
            signal.pidfd_send_signal(process, number)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.send(os.waitstatus_to_exitcode(status).to_bytes(8, "little", signed=True))
    os._exit(0)


def _take(fds: dict[int, int]) -> None:
    """The client's open files have the numbers that they have there, and there are no others."""
    moved = {number: os.dup2(fd, 1000 + place) for place, (number, fd) in enumerate(fds.items())}
    os.closerange(0, 1000)
    for number, fd in moved.items():
        os.dup2(fd, number)
    os.closerange(1000, 1000 + len(moved))


def _become(asked: dict[str, Any]) -> None:
    words: list[str] = asked["words"]
    unbuffered = words[0] == "-u" or bool(asked["env"].get("PYTHONUNBUFFERED"))
    words = words[words[0] == "-u" :]
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _open(number, name, write_through=unbuffered)
    _have_parent(asked["parent"])
    sys.executable, sys.orig_argv = asked["me"], [asked["me"], *asked["words"]]
    sys.argv = words if words[0][0] != "-" else [words[0], *words[2:]]
    first = {"-m": asked["cwd"], "-c": ""}.get(words[0], str(Path(words[0]).parent))
    mine = [path for path in sys.path if path != str(_ROOT)]
    sys.path[:] = [first, *filter(None, asked["env"].get("PYTHONPATH", "").split(os.pathsep)), *mine]
    if asked["env"].get("HF_HUB_DISABLE_PROGRESS_BARS") == "1":
        vars(sys.modules["huggingface_hub.constants"])["HF_HUB_DISABLE_PROGRESS_BARS"] = True
    random.seed()
    sys.modules["numpy"].random.seed()


def _have_parent(parent: int) -> None:
    """The parent of this process is who asked for it, not the watcher; what it forks has parents of its own."""
    me, real = os.getpid(), os.getppid
    os.getppid = lambda: parent if os.getpid() == me else real()


def _open(number: int, name: str, *, write_through: bool) -> None:
    try:
        os.fstat(number)
    except OSError:
        setattr(sys, name, None)
        return
    mode = "rb" if name == "stdin" else "wb"
    errors = "backslashreplace" if name == "stderr" else "strict"
    raw = open(number, mode, closefd=False, buffering=0 if write_through and number else -1)  # noqa: SIM115
    is_line = name == "stderr" or os.isatty(number)
    stream = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=is_line, write_through=write_through)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _run(words: list[str]) -> None:
    words = words[words[0] == "-u" :]
    if words[0] == "-m":
        warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning, "runpy")
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(words[1], "<string>", "exec"), module.__dict__)
    else:
        runpy.run_path(words[0], run_name="__main__")


def _end_as(words: list[str]) -> None:
    """Ends the process with what the program ends with. Nothing is taken apart first: that would take half a second."""
    code: Any = 0
    try:
        _run(words)
    except SystemExit as err:
        code = err.code
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        code = -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 255)


if __name__ == "__main__":
    from tests.warm import server

    server.main(sys.argv[1])
