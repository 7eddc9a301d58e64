"""The command that shows what becomes of texts: `text`."""

from __future__ import annotations

import argparse
from typing import Any

from forebay.cli.options import DONE, FAILED, add_config, command, load, printed
from forebay.errors import ConfigError
from forebay.visible import json_text


def add_text(commands: Any) -> None:
    """Adds `forebay text`."""
    parser = command(
        commands, "text", _text, "show what becomes of texts: every step, tokens; without a text, a report over all"
    )
    add_config(parser)
    parser.add_argument(
        "--sample", metavar="I", help="a sample by its row of the listing, or its id where it is no row"
    )
    parser.add_argument("--text", metavar="TEXT", help="a text that is given here")
    parser.add_argument("--language", metavar="CODE", help="with --text: its language, as a manifest has it")
    parser.add_argument("--diff", action="store_true", help="with --sample or --text: mark what each step changes")
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _text(options: argparse.Namespace) -> int:
    from forebay.transcripts.command import print_view, report_texts, view_sample, view_text

    _check(options)
    config, progress = load(options), not options.no_progress
    if options.text is not None:
        view = view_text(config, options.text, language=options.language or "", is_diff=options.diff)
    elif options.sample is not None:
        view = view_sample(config, options.sample, is_diff=options.diff, progress=progress)
    else:
        return printed(options, report_texts(config, progress=progress))
    if options.json:
        print(json_text(view.to_json()))
    else:
        print_view(view)
    return DONE if view.look.failure is None else FAILED


def _check(options: argparse.Namespace) -> None:
    if options.text is not None and options.sample is not None:
        raise ConfigError(f"--text and --sample {options.sample} are two texts; name one")
    if options.language is not None and options.text is None:
        raise ConfigError(f"--language {options.language} is of --text; a sample's language stands in its manifest")
    if options.diff and options.text is None and options.sample is None:
        raise ConfigError("--diff shows one text; name it with --sample or --text")
