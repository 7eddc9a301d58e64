"""`forebay completion`: what a shell reads to complete commands, options and file names."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from forebay.cli.options import DONE
from forebay.extras import require_module

SHELLS = ("bash", "zsh", "tcsh")


def add_completion(commands: Any, *, program: Callable[[], argparse.ArgumentParser]) -> None:
    """Adds `forebay completion`. program: makes the parser of all commands."""
    summary = "print what makes a shell complete forebay's commands and options"
    parser = commands.add_parser(
        "completion", help=summary, description=f'{summary}; in ~/.bashrc: eval "$(forebay completion bash)"'
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=lambda options: _completion(program(), options.shell), verbose=0)


def _completion(parser: argparse.ArgumentParser, shell: str) -> int:
    # Written for all parsers: a shell that asked the program itself would wait for Python at every key.
    require_module("shtab", "completion", what="forebay completion")
    import shtab

    for action in parser._actions:  # the list of commands is hidden, since `--help` has them in groups
        action.help = None if action.help is argparse.SUPPRESS else action.help
    print(shtab.complete(parser, shell))
    return DONE
