"""The program: parses the commands, runs one, says what went wrong. Results go to standard output, everything else to
standard error; exit codes 0 done, 1 failed, 2 bad config or usage, 3 no cache under `require`, 130 interrupted, 141
nobody reads the output any more (`| head`).

`forebay completion`: what a shell reads to complete commands, options and file names.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import copy
import difflib
import errno
import functools
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from forebay.cli import build_and_look, caches, housekeeping, training  # noqa: F401  their commands are in `COMMANDS`
from forebay.cli.options import BAD_CONFIG, CLOSED, DONE, FAILED, INTERRUPTED, NO_CACHE, add_command, command_of
from forebay.errors import CacheNotFoundError, ConfigError, ForebayError
from forebay.extras import require_module
from forebay.face import own_process
from forebay.store.files import is_refusal, refusal
from forebay.version import __version__
from forebay.visible import one_message, visible_output

SHELLS = ("bash", "zsh", "tcsh")


def _add_completion(commands: Any, asked: Collection[str]) -> None:  # noqa: ARG001  as `_add_cache`
    summary = "print what makes a shell complete forebay's commands and options"
    parser = commands.add_parser(
        "completion", help=summary, description=f'{summary}; in ~/.bashrc: eval "$(forebay completion bash)"'
    )
    parser.add_argument("shell", choices=SHELLS)


def _add_cache(commands: Any, asked: Collection[str]) -> None:
    summary = "list, compare, verify and remove caches; bring them to a store and back; make caches of caches"
    actions = commands.add_parser("cache", help=summary, description=summary)
    actions = actions.add_subparsers(required=True, metavar="ACTION")
    for name in _ACTIONS.split():
        add_command(actions, f"cache {name}", has_options=name in asked)


def _completion(parser: argparse.ArgumentParser, shell: str) -> int:
    # Written for all parsers: a shell that asked the program itself would wait for Python at every key.
    require_module("shtab", "completion", what="forebay completion")
    import shtab

    parser = copy.deepcopy(parser)
    for action in parser._actions:  # the list of commands is hidden, since `--help` has them in groups
        action.help = None if action.help is argparse.SUPPRESS else action.help
    print(shtab.complete(parser, shell))
    return DONE


_STOPS_WITHIN_S = 1.5
_INTERRUPTED = "interrupted; what was finished is kept, run the command again to go on"
_ABOUT = """From recordings, texts and images to a cache once, and from a cache to batches many times.
A folder of data becomes a config by `forebay init DATA`; what a command takes: forebay COMMAND --help"""
_CODES = """exit codes: 0 done, 1 failed, 2 bad config or usage, 3 no cache under `require`, 130 interrupted, 141 nobody
reads the output any more (`| head`); what an error means: forebay explain CODE"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `forebay COMMAND ...` and returns its exit code."""
    if arguments is None:  # a process of its own
        own_process()
        atexit.register(gc.freeze)  # looking through all that there is at its end takes a tenth of a small command
    given = sys.argv[1:] if arguments is None else arguments
    # Without --resume a run begins anew, and the checkpoints of the one before it go.
    interrupted = _INTERRUPTED + ", with --resume" * (list(given[:1]) == ["train"])
    with visible_output(), _prompt_interrupt(interrupted):
        try:
            try:
                return _run(given)
            except KeyboardInterrupt:
                if arguments is None:  # it is over: a second Ctrl-C would only show where
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                return _fail(interrupted, INTERRUPTED)
            finally:
                sys.stdout.flush()  # a reader that has gone is met here, not when the interpreter ends
        except BrokenPipeError as err:
            if not _reader_is_gone():
                return _fail(err, FAILED)
            _discard_output()
            return CLOSED


@contextlib.contextmanager
def _prompt_interrupt(said: str) -> Iterator[None]:
    """Ends the process soon after Ctrl-C, whatever it waits for: a native call (a GET that hangs) sees no signal.

    All that is written is right after a crash at any instant, so nothing is lost. The process ends also where the
    command has returned and a thread of it still waits.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    told, tells = socket.socketpair()
    tells.settimeout(0)
    before, is_over = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False), threading.Event()
    threading.Thread(
        target=_end_after_interrupt, args=(told, is_over, said), name="forebay-interrupt", daemon=True
    ).start()
    try:
        yield
    finally:
        is_over.set()
        signal.set_wakeup_fd(before)
        tells.close()


def _end_after_interrupt(told: socket.socket, is_over: threading.Event, said: str) -> None:
    with told:
        while signal.SIGINT not in (numbers := told.recv(64)):
            if not numbers:
                return
        time.sleep(_STOPS_WITHIN_S)  # open: the interpreter would complain of a second Ctrl-C that is told nobody
    if not is_over.is_set():
        os.write(2, f"forebay: {said}\n".encode())
    elif all(thread.daemon or thread is threading.main_thread() for thread in threading.enumerate()):
        return  # the interpreter waits for none of these; perhaps `main` was called from Python, which goes on
    os._exit(INTERRUPTED)


def _run(given: Sequence[str]) -> int:
    options = make_parser(_NAMES & {*given}).parse_args(given)
    if "shell" in options:
        return _guarded(lambda: _completion(make_parser(), options.shell))
    asked = command_of(options)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneMessage("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=asked.log_level, handlers=[handler])
    # transformers' bars of loading and saving would stand among the lines.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return _guarded(asked.run)


class _OneMessage(logging.Formatter):
    """Keeps a record one message, whatever line ends the names in it hold."""

    def format(self, record: logging.LogRecord) -> str:
        return one_message(super().format(record))


def _reader_is_gone() -> bool:
    """Whether standard output or error is a pipe that nobody reads any more."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
            poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _discard_output() -> None:
    """Sends what is still buffered nowhere: the interpreter would complain of it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def inspect_cache(arguments: Sequence[str] | None = None) -> int:
    """Runs `inspect_cache [--cache-dir] DIR ...`, which is `forebay inspect DIR ...`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # argparse has no positional that is also an option.
    given = [part for part in given if part != "--cache-dir"]
    given = [part.removeprefix("--cache-dir=") for part in given]
    return main(["inspect", *given])


def _guarded(action: Callable[[], int]) -> int:
    try:
        return action()
    except ConfigError as err:
        return _fail(err, BAD_CONFIG)
    except CacheNotFoundError as err:
        return _fail(err, NO_CACHE)
    except ForebayError as err:
        return _fail(err, FAILED)
    except BrokenPipeError:
        raise
    except OSError as err:
        if is_refusal(err):
            return _fail(refusal(err), FAILED, code="FB306")
        where = f": {err.filename}" if err.filename else ""
        code = "FB307" if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "FB001"
        bound = " (the bound of this shell, ulimit -f, or of the file system)" if err.errno == errno.EFBIG else ""
        said = f"{err.strerror or err}{where}{bound}; what was finished is kept, run the command again"
        return _fail(said, FAILED, code=code)


def _fail(message: object, status: int, *, code: str | None = None) -> int:
    """Prints a message with its notes, and what explains it: the reason of a sample, or the code of an error."""
    notes = getattr(message, "__notes__", [])
    lines = [one_message(str(part)) for part in (f"forebay: {message}", *notes)]
    if topic := getattr(message, "reason", None) or getattr(message, "code", code):
        lines.append(f"  {topic}: forebay explain {topic}")
    print("\n".join(lines), file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """Says the nearest command where there is none of a name; options may stand between the places of a command."""

    _is_inside = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as ArgumentParser, which alone would refuse `push CACHE --form zarr DIR`."""
        if self._is_inside or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._is_inside, usage = True, self.usage
        self.usage = usage or self.format_usage().removeprefix("usage: ").replace("%", "%%")
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_inside, self.usage = False, usage

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if not isinstance(action, argparse._SubParsersAction) or value in action.choices:
            super()._check_value(action, value)
            return
        near = difflib.get_close_matches(value, action.choices, n=1) or ["init " + value] * os.path.exists(value)
        advice = f"did you mean {self.prog} {near[0]}?" if near else f"all of them: {self.prog} --help"
        self.error(f"there is no command {value!r}; {advice}")


_GROUPS = {
    "first day": "init preprocess inspect train explain",
    "data": "lint text symbols index fetch evalset",
    "training": "calibrate compare eval warm-start",
    "caches": "key cache export",
    "machines": "status doctor completion",
}
"""The commands as `forebay --help` lists them."""
_ACTIONS = "push pull warm merge subset ls du rm prune diff verify"
"""The commands `forebay cache ACTION`."""
_NAMES = frozenset(" ".join([*_GROUPS.values(), _ACTIONS]).split())


@functools.cache
def make_parser(asked: frozenset[str] = _NAMES) -> argparse.ArgumentParser:
    """Returns the parser of all commands, made once a process; nobody changes it. asked: those that have options."""
    usage = "forebay [-h] [--version] COMMAND ..."
    parser = _Parser(prog="forebay", usage=usage, description=_ABOUT, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--version", action="version", version=f"forebay {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", prog="forebay", help=argparse.SUPPRESS)
    listed = commands._choices_actions
    lines: list[str] = []
    others = {"cache": _add_cache, "completion": _add_completion}
    for title, names in _GROUPS.items():
        first = len(listed)
        for name in names.split():
            others[name](commands, asked) if name in others else add_command(commands, name, has_options=name in asked)
        lines += [f"\n{title}:", *(f"  {each.dest:<12}{each.help}" for each in listed[first:])]
    parser.epilog = "\n".join([*lines, "", _CODES])[1:]
    return parser
