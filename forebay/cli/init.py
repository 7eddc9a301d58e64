"""`forebay init`: from a folder of data to a config."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from forebay.cli.options import command, completes, on_disk, printed
from forebay.errors import ConfigError

_ROLES = ("audio", "text", "language", "id", "image", "question", "answer", "messages", "label", "features")


def add_init(commands: Any) -> None:
    """Adds `forebay init`."""
    parser = command(commands, "init", _init, "look at data and write a config that builds", has_caches=False)
    data = parser.add_argument(
        "data",
        metavar="DATA",
        nargs="+",
        help="folders of recordings or images, tables, save_to_disk sets, tars, texts",
    )
    completes(data)
    model = parser.add_argument(
        "--model", metavar="DIR", help="folder of the model to train: it says features and prompt"
    )
    completes(model)
    parser.add_argument("--out", metavar="FILE", type=on_disk, help="the config to write; default: NAME.toml here")
    parser.add_argument("--yes", action="store_true", help="ask nothing: take the likelier reading, and say so")
    parser.add_argument("--force", action="store_true", help="replace a config that is there already")
    answers = parser.add_argument_group("answers to what may be asked")
    answers.add_argument("--kind", metavar="KIND", help="how the data is read: table, folder, webdataset, hf, ...")
    answers.add_argument(
        "--column",
        metavar="ROLE=NAME",
        action="append",
        default=[],
        type=_column,
        help=f"which column holds what: {', '.join(_ROLES)}",
    )
    answers.add_argument(
        "--prompt",
        choices=("chat", "label", "plain", "none"),
        help="what is read beside images: conversations, classes, texts, nothing",
    )
    answers.add_argument("--split", metavar="NAME", help="which split of a data set is read")
    answers.add_argument(
        "--audio-dir",
        "--image-dir",
        metavar="DIR",
        help="folder that the names in a table are relative to, where that is not found",
    )
    answers.add_argument(
        "--languages-from-folders", choices=("true", "false"), help="whether folders are named after languages"
    )
    answers.add_argument(
        "--weights", choices=("random", "pretrained"), help="what training begins with, where DIR holds no weights"
    )


def _column(text: str) -> tuple[str, str]:
    role, equals, name = text.partition("=")
    if not equals or not name or role not in _ROLES:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROLE=NAME with ROLE one of {', '.join(_ROLES)}")
    return role, name


def _given(options: argparse.Namespace) -> dict[str, str]:
    """Returns the answers of the command line, as a `Chooser` takes them."""
    plain = {
        "kind": options.kind,
        "prompt": options.prompt,
        "split": options.split,
        "audio-dir": options.audio_dir,
        "languages-from-folders": options.languages_from_folders,
        "weights": options.weights,
    }
    return {name: value for name, value in plain.items() if value is not None} | _columns(options.column)


def _columns(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    if len({role for role, _ in pairs}) < len(pairs):
        raise ConfigError(f"--column names {pairs[-1][0]} twice; name it once")
    return {f"column {role}": name for role, name in pairs}


def _init(options: argparse.Namespace) -> int:
    from forebay.init.questions import Chooser, ask_on_terminal, has_terminal
    from forebay.init.write_config import Options, init

    chooser = Chooser(given=_given(options), takes_first=options.yes, ask=ask_on_terminal if has_terminal() else None)
    out = None if options.out is None else options.out.absolute()
    report = init(Options(data=tuple(options.data), model=options.model, out=out, force=options.force), chooser)
    for said in report.decided:
        print(said, file=sys.stderr)
    return printed(options, report)
