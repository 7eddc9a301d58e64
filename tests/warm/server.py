"""The server: it has everything loaded, runs nothing itself, and forks a process for whoever asks. See `tests.warm`.

It has one thread, so that a process inherits no lock. It is their parent: it hands signals on to them, and says how
they ended.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import marshal
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
import weakref
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
    *("pydantic.dataclasses", "pydantic.type_adapter", "jiwer", "peft", "tensordict", "PIL.Image", "obstore", "pytest"),
    *("forebay.cli", "forebay.preprocess.pipeline", "forebay.preprocess.worker", "forebay.train.loop.run"),
)

_HUGE = 1 << 21


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
    # pydantic's checkers of a config, and the steps: they are made at the first use, 0.2 s of each process
    tree, table = (importlib.import_module(f"forebay.{name}") for name in ("config.tree", "steps.table"))
    vars(sys.modules["forebay.config.load"])["_adapter"](tree.Config)
    for group, names in table.STEPS.items():
        for name in names:
            table.steps_named(group, name)
    inspect.getmodule(_load)
    inspect.modulesbyfile["<frozen runpy>"] = "runpy"  # torchrun asks often: all modules would be gone through
    for each in vars(weakref.finalize)["_registry"]:  # torch's libraries, taken apart at the end of each process
        each.atexit = False
    gc.enable()
    gc.collect()
    gc.freeze()
    _make_huge()


def _make_huge() -> None:
    """Makes what is loaded huge pages, where the kernel can: a fork, and the end of a process, cost by the page."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        place, rights, *_, name = f"{line} -".split()[:6]
        first, last = (int(end, 16) // _HUGE for end in place.split("-"))
        if rights == "rw-p" and name in ("-", "[heap]") and first + 1 < last:
            start, size = (first + 1) * _HUGE, (last - first - 1) * _HUGE
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), 25)  # MADV_COLLAPSE, of Linux 6.1


def _serve(folder: Path) -> dict[str, Any]:
    """Returns, in a process of its own each time, what a client asked for.

    The server itself hands signals on and says how processes end: a watcher of each would be a second fork of all that
    is loaded. It ends when its standard input and all processes have.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    (folder / "environment").write_bytes(marshal.dumps(client.read_at_start(dict(os.environ))))
    print("loaded", flush=True)
    running: dict[int, _Running] = {}
    is_open = True
    while is_open or running:
        clients = {each.client.fileno(): each for each in running.values() if each.is_asking}
        watched = [0, listener.fileno()] * is_open
        ready = select.select([*watched, *running, *clients], [], [])[0]
        is_open = is_open and 0 not in ready
        for fd in ready:
            if fd in running:
                running.pop(fd).say_status()
                os.close(fd)
            elif fd in clients and clients[fd].is_asking:
                clients[fd].hand_on()
        if is_open and listener.fileno() in ready:
            connection, _ = listener.accept()
            asked, fds = _asked(connection)
            if asked is not None:
                if not (pid := os.fork()):
                    for each in (listener, connection, *(one.client for one in running.values())):
                        each.close()  # by their numbers the process has files of its own
                    _take(dict(zip(asked["fds"], fds, strict=True)))
                    return asked
                process = os.pidfd_open(pid)
                running[process] = _Running(process, pid, connection)
            for received in fds:
                os.close(received)
    os._exit(0)


def _asked(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Returns what a client asks for, None if it has ended, and the files that it has sent."""
    head, fds, _, _ = socket.recv_fds(connection, 8, 253)
    data = b""
    while len(data) < int.from_bytes(head, "little"):
        if not (piece := connection.recv(1 << 20)):
            return None, fds
        data += piece
    return marshal.loads(data) if data else None, fds


class _Running:
    """A process, by its descriptor, and the client that waits for it. is_asking: the client lives."""

    def __init__(self, process: int, pid: int, client: socket.socket) -> None:
        self.process, self.pid, self.client, self.is_asking = process, pid, client, True

    def hand_on(self) -> None:
        """Sends the process the signals that the client got. It dies if its client does."""
        with contextlib.suppress(ConnectionError):
            if numbers := self.client.recv(64):
                for number in numbers:
                    self._send(number)
                return
        self.is_asking = False
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, number)

    def say_status(self) -> None:
        """Tells the client how the process has ended."""
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(OSError):
            self.client.send(os.waitstatus_to_exitcode(status).to_bytes(8, "little", signed=True))
        self.client.close()
        self.is_asking = False


def _take(fds: dict[int, int]) -> None:
    """The client's open files have the numbers that they have there, and there are no others."""
    behind = 1 + max(999, *fds, *fds.values())  # a client may have a thousand open files
    moved = {number: os.dup2(fd, behind + place) for place, (number, fd) in enumerate(fds.items())}
    os.closerange(0, behind)
    for number, fd in moved.items():
        os.dup2(fd, number)
    os.closerange(behind, behind + len(moved))


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
    """The parent of this process is who asked for it, not the server; what it forks has parents of its own."""
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
